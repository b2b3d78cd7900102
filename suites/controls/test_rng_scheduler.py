"""Generators, scheduler and all other state (COMP): nothing that steers the training is left out.

One component each, compared at the first training step after a resume into a job of another seed.
A component that is not held (see `holds`) is not asked for.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import DEFAULT_KIND, Feature
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown, Violation, control_failed
from ckpt_conformance.harness.messages import (
    Close,
    ExitKind,
    ProbeResult,
    RunResult,
    whole,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import controls, features, oracle, resumption
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import AFTER, OTHER_SEED, SAVES
from ckpt_conformance.suites.controls.test_bit_exact_resume import OPTIMIZER_CAST

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject


# -- the optimizer -------------------------------------------------------------------------------


def _owner_of(path: str) -> str:
    """Return the parameter that a leaf of an optimizer's state belongs to, or nothing."""
    parts = path.split(".")
    return parts[1].removesuffix("()") if parts[0] == "state" and len(parts) > 1 else ""


def _with_state(leaves: dict[str, str]) -> set[str]:
    """Return the parameters that have state in an optimizer."""
    return {_owner_of(path) for path in leaves} - {""}


def _is_step(path: str) -> bool:
    return path.startswith("state.") and path.endswith(".step")


def is_moment(path: str) -> bool:
    """Tell whether a leaf of an optimizer is state of a parameter, and no step counter."""
    return path.startswith("state.") and not path.endswith((".step", "()"))


@check("CKC-COMP-001")
def test_moments_reach_a_fresh_optimizer(subject: Subject) -> None:
    """The moments of the optimizer arrive in an optimizer that had none.

    Why: a load that fills what is there finds nothing in a fresh optimizer and says nothing (G03,
    G18); a constructor after the load erases the state (R07, M023).
    How: compare every tensor of the optimizer's state but the step counters.
    """
    saved, arrived = resumption.arrive(subject)
    known = _with_state(saved["optimizer"])
    lost = resumption.differing(
        saved, arrived, "optimizer", lambda path: is_moment(path) and _owner_of(path) in known
    )
    if lost:
        raise Violation("the optimizer's moments are lost", evidence={"arrived != saved": lost})


@check("CKC-COMP-002")
def test_step_counters_are_exact(subject: Subject) -> None:
    """The optimizer's step counters arrive with value and dtype.

    Why: a counter that is cast to the dtype of its parameter cannot count past 256 in bf16 (K06,
    G11), and the bias correction is wrong from then on.
    How: compare the counters of a job with bf16 parameters, and of one that stands beyond 100,000.
    """
    saved, arrived = resumption.arrive(subject)
    known = _with_state(saved["optimizer"])
    lost = resumption.differing(
        saved, arrived, "optimizer", lambda path: _is_step(path) and _owner_of(path) in known
    )
    if lost:
        raise Violation("a step counter changed", evidence={"arrived != saved": lost})
    resumption.identity(subject, "optimizer", "a step counter changed", _is_step, "masters")


@check("CKC-COMP-002")
def test_counters_that_are_no_tensors_come_back(subject: Subject) -> None:
    """What an optimizer keeps of a parameter as a number, a list or None comes back as that.

    Why: a loader that takes the tensors of an optimizer's state, and makes the rest anew, begins
    its counters at zero; older optimizers count in Python, and LBFGS keeps lists (G18).
    How: a job whose optimizer keeps a count, a list of sizes and None beside its momentum; compare
    them with their types.
    """
    controls.require(test_moments_reach_a_fresh_optimizer, subject)
    controls.require(test_step_counters_are_exact, subject)
    resumption.arrive(subject, "counters", owner=True)
    message = "state of the optimizer that is no tensor changed"
    resumption.identity(subject, "optimizer", message, _is_no_tensor, "counters")


@check("CKC-COMP-019")
def test_what_is_no_parameters_comes_back(subject: Subject) -> None:
    """What an optimizer keeps in its state under a name, for all parameters, comes back.

    Why: a saver that goes by the parameters leaves out what belongs to none: a step counter of all,
    or all state of an optimizer that keys it in a way of its own (G18). torch's own
    `load_state_dict` keeps it.
    How: a job whose optimizer keeps a count and a mean for all parameters. Who refuses to save it,
    in words, loses nothing.
    """
    controls.require(test_moments_reach_a_fresh_optimizer, subject)
    controls.require(test_step_counters_are_exact, subject)
    _require_no_refusal(subject, "nested")
    resumption.arrive(subject, "nested", owner=True)
    message = "state of the optimizer that is no parameter's changed"
    resumption.identity(subject, "optimizer", message, _is_shared, "nested")


def _is_shared(path: str) -> bool:
    return _owner_of(path) == "all"


def _require_no_refusal(subject: Subject, kind: str) -> None:
    """Raise NotApplicable where a job of a kind is refused by the save, in words."""
    resumption.arrive(subject)
    subject.reset()
    saved = subject.run(SAVES[-1], SAVES, then=[Close()], kind=kind)
    refused = set(saved.steps_of("failed")) & set(SAVES)
    if refused and saved.error and saved.error.message.strip():
        raise NotApplicable(f"such an optimizer is refused by the save: {subject.tell(saved)}")


def _is_no_tensor(path: str) -> bool:
    return path.startswith("state.") and path.split(".")[2:3] in (["step"], ["sizes"], ["skipped"])


@check("CKC-COMP-003")
def test_optimizer_state_keeps_its_own_dtype(subject: Subject) -> None:
    """Optimizer state keeps dtype and bits, also where its dtype is not the parameter's.

    Why: fp32 masters and moments of bf16 parameters are cast to bf16 on load and lose their low
    bits at every resume (K01, K03); bf16 moments of fp32 parameters are promoted, take twice the
    memory and make other updates (K02).
    How: a job with fp32 masters and momentum of bf16 parameters, and bf16 momentum of fp32 ones;
    the same in an optimizer of two groups. Where it is violated, load once more with a torch that
    does not cast: if that is right, the violation is torch's. Lists and dicts of fp32 tensors of
    bf16 parameters, unless the save refuses them in words.
    """
    controls.require(test_moments_reach_a_fresh_optimizer, subject)
    message = "optimizer state lost its dtype or its bits"
    suspect = resumption.Suspect(OPTIMIZER_CAST, (fault_injectors.spec("torch-cast"),))
    resumption.identity(subject, "optimizer", message, is_moment, "masters", suspect)
    resumption.identity(subject, "optimizer", message, _is_of_master, "layouts", suspect)
    with contextlib.suppress(NotApplicable):
        controls.require(test_counters_that_are_no_tensors_come_back, subject)
        _require_no_refusal(subject, "nested")
        resumption.identity(subject, "optimizer", message, _is_nested, "nested", suspect)


def _is_nested(path: str) -> bool:
    return path.startswith("state.") and not _is_shared(path)


def _is_of_master(path: str) -> bool:
    return path.startswith("state.") and path.endswith((".master", ".momentum"))


@check("CKC-RTRP-004")
def test_views_of_one_memory_stay_what_each_is(subject: Subject) -> None:
    """State of an optimizer that is a view of other state arrives with its own shape and bits.

    Why: a writer that keeps what is tied once tells tensors by address, size or dtype. A matrix
    and the same matrix turned are alike in all of these (O05).
    How: a job whose optimizer keeps a copy of each parameter, and a view of it that is turned. The
    job that is loaded into has neither yet.
    """
    subject.need(holds=["optimizer"])
    controls.require(test_moments_reach_a_fresh_optimizer, subject)
    features.arrive(subject, "layouts")
    message = "a view of other state is not what was saved"
    resumption.identity(subject, "optimizer", message, _is_view, "layouts")


def _is_view(path: str) -> bool:
    return path.startswith("state.") and path.endswith((".rows", ".turned"))


@check("CKC-COMP-004")
def test_hyper_parameters_are_the_saved_ones(subject: Subject) -> None:
    """Every key of every parameter group is the saved one, also where the constructor drifted.

    Why: a load that restores the learning rate and not the weight decay, or only the keys that it
    knows, gives a mixture of two configurations (F04, F05). A setting that is a tensor, and comes
    back as a number, is not the one that a compiled step was made for.
    How: resume into the same job, then into one whose constructor got other values; the second may
    be refused. A job whose momentum's factor is a tensor; types are compared.
    """
    saved, _ = resumption.arrive(subject)
    message = "a hyper-parameter is not the saved one"
    resumption.identity(subject, "optimizer", message, _is_group)
    subject.materialize(subject.golden())
    result = subject.resume(variant="drift")
    step, arrived = oracle.arrival(result)
    if step is None and result.exit_kind is not ExitKind.ENDED:
        raise Violation(message, evidence=subject.evidence(result))
    lost = step is not None and resumption.differing(saved, arrived, "optimizer", _is_group)
    if lost:
        raise Violation(message, evidence={"variant": "drift", "arrived != saved": lost})
    resumption.identity(subject, "optimizer", message, _is_group, "counters")


def _is_group(path: str) -> bool:
    return path.startswith("param_groups")


@check("CKC-COMP-004")
def test_a_rate_that_the_schedule_does_not_say_is_the_saved_one(subject: Subject) -> None:
    """The rate of a parameter group is the saved one where more than the schedule has set it.

    Why: a load that writes the scheduler's rates into the groups is right until a phase of the
    training, or a warm start, scales them (F02, K011).
    How: a job whose rates a phase halves after each step of the schedule, saved in that phase.
    """
    message = "a rate that the schedule does not say is not the saved one"
    resumption.identity(subject, "optimizer", message, _is_group, "phases")


@check("CKC-COMP-004")
def test_keys_of_groups_that_torch_does_not_know_are_the_saved_ones(subject: Subject) -> None:
    """What a run keeps in its parameter groups beside torch's own keys is the saved one.

    Why: a list of the keys of AdamW leaves out the factor of a layer's rate, which schedules read
    there: from the resume on all layers learn alike (F05).
    How: groups with a name, and with a factor that each step of the optimizer changes.
    """
    resumption.arrive(subject, "scaled", owner=True)
    message = "a key of a parameter group that torch does not know is not the saved one"
    resumption.identity(subject, "optimizer", message, _is_group, "scaled")


@check("CKC-COMP-014")
def test_every_one_of_several_optimizers_comes_back(subject: Subject) -> None:
    """Each of several optimizers, and each of their schedulers, comes back.

    Why: a loop that saves `optimizer`, or a count of keys that happens to fit, leaves the second
    one cold (G18, M043).
    How: a job with AdamW and SGD on different parameters, each with a scheduler.
    """
    controls.require(test_moments_reach_a_fresh_optimizer, subject)
    controls.require(test_step_counters_are_exact, subject)
    controls.require(test_hyper_parameters_are_the_saved_ones, subject)
    saved, arrived = resumption.arrive(subject, "two-optimizers", owner=True)
    for part in (name for name in saved if name.partition(".")[0] == "optimizer"):
        lost = _lost(saved[part], arrived.get(part, {}))
        if lost:
            raise Violation(f"{part} is not what was saved", evidence={"arrived != saved": lost})
    if "scheduler" in subject.holds:
        controls.require(test_the_scheduler_comes_back, subject)
        message = "the scheduler of one of several optimizers is not what was saved"
        resumption.identity(subject, "scheduler", message, kind="two-optimizers")


def _lost(saved: dict[str, str], arrived: dict[str, str]) -> list[str]:
    """Name what differs, but for state of parameters that had none: see CKC-COMP-015."""
    nobodys = _with_state(arrived) - _with_state(saved)
    return resumption.differing(
        {"optimizer": saved},
        {"optimizer": arrived},
        "optimizer",
        lambda path: _owner_of(path) not in nobodys,
    )


@check("CKC-COMP-015")
def test_a_parameter_without_state_gets_none(subject: Subject) -> None:
    """A parameter that never got a gradient has no optimizer state after the load either.

    Why: state that is made for every parameter, by a dummy step or a template, is state that the
    unbroken run has not; a template that wants it for each refuses its own save (G02, G04).
    How: a job whose optimizer lists a frozen parameter and one that is never used; list who has
    state.
    """
    saved, arrived = resumption.arrive(subject, "unused")
    more = sorted(_with_state(arrived["optimizer"]) - _with_state(saved["optimizer"]))
    if more:
        raise Violation(
            "parameters that never got a gradient have optimizer state", evidence={"indices": more}
        )


@check("CKC-COMP-016")
def test_moments_follow_the_name(subject: Subject) -> None:
    """In a reordered parameter group moments follow the name, or the load refuses.

    Why: state is mapped by position; between parameters of one shape it changes hands without an
    error (G05).
    How: resume into a job whose first group is reversed, and into one in which two parameters of
    one shape and dtype have changed places, which no comparison of shapes shows; train on and
    compare with the unbroken run, in which the order of a group means nothing.
    """
    resumption.needs_mid_epoch(subject)
    golden = subject.golden()
    until, message = SAVES[-1] + AFTER, "moments went to other parameters"
    for variant in ("reordered", "swapped"):
        subject.materialize(golden)
        result = subject.run(until, resume=True, seed=OTHER_SEED, variant=variant)
        step, _ = oracle.arrival(result)
        if step is not None or result.exit_kind is not ExitKind.ENDED:
            resumption.follow(subject, golden, result, AFTER, message)


@check("CKC-COMP-017")
def test_what_an_optimizer_adds_comes_back(subject: Subject) -> None:
    """What an optimizer has in its state_dict beside state and param_groups comes back.

    Why: a manager that takes an optimizer's state apart by the two keys that torch knows leaves the
    others behind: a scale, a running mean, masters of a whole group begin anew (J02).
    How: a job whose optimizer keeps the mean size of all gradients; compare it bit for bit.
    """
    controls.require(test_moments_reach_a_fresh_optimizer, subject)
    message = "what the optimizer keeps beside state and param_groups is not what was saved"
    resumption.identity(subject, "optimizer", message, _is_own, "steady")


def _is_own(path: str) -> bool:
    return not path.startswith(("state", "param_groups"))


# -- scheduler, generators, scaler, EMA, loader, extra, gradients ---------------------------------


@check("CKC-COMP-005")
def test_the_scheduler_comes_back(subject: Subject) -> None:
    """The whole state of the scheduler comes back.

    Why: two layers each think that the other saves it, and warm-up begins anew (F03).
    How: compare every entry of its state, container types included.
    """
    resumption.identity(subject, "scheduler", "the scheduler is not what was saved")


@check("CKC-COMP-020")
def test_a_scheduler_that_was_loaded_can_name_any_rate(subject: Subject) -> None:
    """After a load a scheduler does what one that was never saved does.

    Why: `MultiStepLR` has a `Counter` in its state. Where a plain dict comes back, values are equal
    and the first call of a method of a Counter ends the job (F09).
    How: of a job with `MultiStepLR` ask for the rates of epoch 4 by `step(4)`; load a step into
    another such job, and ask it. The control is that each value that was saved is there again, with
    or without others beside it.
    """
    subject.need(holds=("scheduler",))
    resumption.arrive(subject, "steps")
    subject.materialize(subject.golden(kind="steps"))
    ask = probe("rate_at", epoch=4)
    fresh = subject.execute(ask, kind="steps", seed=OTHER_SEED)
    if not fresh.went_well or not isinstance(wanted := fresh.of(ProbeResult).value, list):
        raise Unknown(f"a scheduler that was never saved names no rate: {subject.tell(fresh)}")
    saved, _ = resumption.arrive(subject, "steps")
    message = "a value of its state is another one"
    try:  # what comes back beside what was saved does no more than that call shows
        resumption.identity(
            subject, "scheduler", message, saved["scheduler"].__contains__, kind="steps"
        )
    except Violation as other:
        raise control_failed(str(other), "CKC-COMP-005") from other
    subject.materialize(subject.golden(kind="steps"))
    loaded = subject.resume(kind="steps", then=[ask])
    if not loaded.went_well:
        raise Unknown(f"a job that loads and steps its scheduler: {subject.tell(loaded)}")
    if (gave := loaded.of(ProbeResult).value) != wanted:
        message = "a scheduler that was loaded does not do what one that was never saved does"
        raise Violation(message, evidence=subject.evidence(loaded, wanted=wanted, gave=gave))


def _generator(subject: Subject, name: str, kind: str = DEFAULT_KIND) -> None:
    resumption.identity(
        subject,
        "rng",
        f"the {name.partition('_')[0]} generator is not where it was",
        lambda path: path.startswith(name),
        kind,
    )


@check("CKC-COMP-006")
def test_the_python_generator_comes_back(subject: Subject) -> None:
    """At the first training step the generator of `random` stands where it stood at the save.

    Why: several generators are saved and the chain of elif on load restores one (E05); an error on
    one of them is swallowed, and those after it are never reached (E06).
    How: compare its whole state, which differs by seed.
    """
    _generator(subject, "python")


@check("CKC-COMP-007")
def test_the_numpy_generator_comes_back(subject: Subject) -> None:
    """At the first training step NumPy's global generator stands where it stood at the save.

    Why: augmentation draws from it; a safe load refuses its state as NumPy gives it, and the
    refusal is logged and forgotten (E05, E06, M01).
    How: compare its whole state, which differs by seed.
    """
    _generator(subject, "numpy")


@check("CKC-COMP-006")
def test_a_normal_draw_that_python_holds_back_comes_back(subject: Subject) -> None:
    """The second of two normal draws, which `random` holds back, is there after the resume.

    Why: normal numbers are made in pairs; who saves the words of the generator alone loses the one
    that is held back, and all that follows is off by one (E05).
    How: save between two calls of `random.gauss`; compare the whole state.
    """
    resumption.arrive(subject, "normal", owner=True)
    _generator(subject, "python", "normal")


@check("CKC-COMP-007")
def test_a_normal_draw_that_numpy_holds_back_comes_back(subject: Subject) -> None:
    """The second of two normal draws, which NumPy holds back, is there after the resume.

    Why: as with `random`: `get_state()[1:3]` is not the whole state (E05).
    How: save between two calls of `numpy.random.standard_normal`; compare the whole state.
    """
    _generator(subject, "numpy", "normal")


@check("CKC-COMP-008")
def test_the_torch_generator_comes_back(subject: Subject) -> None:
    """At the first training step torch's generators stand where they stood at the save.

    Why: dropout draws from them; what is set up after the load seeds them again (E01, E08).
    How: compare their whole state, which differs by seed.
    """
    _generator(subject, "torch")


@check("CKC-COMP-018")
def test_generators_are_restored_after_parts_that_draw(subject: Subject) -> None:
    """A part that draws numbers while it takes its state leaves the generators as they were saved.

    Why: a sampler draws its seed; generators that were restored before it are off by one (E03). So
    does a manager that restores its parts in the order of their names.
    How: model, optimizer, scheduler, scaler, average and loader of this job take a number of each
    generator while they take their state. Compare the whole state of each. Control: with parts that
    draw nothing they come back.
    """
    controls.require(test_the_python_generator_comes_back, subject)
    controls.require(test_the_numpy_generator_comes_back, subject)
    controls.require(test_the_torch_generator_comes_back, subject)
    resumption.arrive(subject, "drawing", owner=True)
    message = "a part that drew while it was loaded moved the generators, which came back before it"
    resumption.identity(subject, "rng", message, resumption.every_leaf, "drawing")


@check("CKC-COMP-009")
def test_the_gradient_scaler_comes_back(subject: Subject) -> None:
    """The scale of the gradient scaler and its growth counter come back.

    Why: a scaler that was left out, or is built after the load, begins at its first scale and
    overflows or underflows for many steps (G12, G13).
    How: compare every entry of its state; the scale differs by seed.
    """
    resumption.identity(subject, "scaler", "the gradient scaler is not what was saved")


@check("CKC-COMP-010")
def test_the_moving_average_comes_back(subject: Subject) -> None:
    """The moving average of the weights and its count of updates come back.

    Why: one of two sets of weights is saved, or the counter is a plain attribute and the warm-up of
    the decay wipes the average (G14, G16).
    How: compare the shadow of each parameter and the count.
    """
    resumption.identity(subject, "ema", "the moving average is not what was saved")


@check("CKC-COMP-010")
def test_what_is_computed_at_the_call_is_not_another_components(subject: Subject) -> None:
    """State that a component computes when it is asked for is its own after the load.

    Why: who remembers tensors by their addresses, so as to write each once, lets them go meanwhile;
    those of the next component lie there, and are taken for the ones before (G14).
    How: an average and held gradients, both copies of equal shapes at each call, are compared.
    """
    subject.need(holds=("gradients",))
    resumption.arrive(subject, "computed", owner=True)
    message = "state that was computed at the call is not what was saved"
    resumption.identity(subject, "ema", message, kind="computed")
    try:
        resumption.identity(subject, "gradients", message, kind="computed")
    except Violation:
        controls.require(test_held_gradients_come_back, subject)
        raise


@check("CKC-COMP-011")
def test_the_data_position_comes_back(subject: Subject) -> None:
    """Seed, epoch and position of the data loader come back.

    Why: a loader that is not in the checkpoint replays the same permutation from its start at every
    restart, and the tail of the data is never seen (H12, K012).
    How: compare the loader's state in the middle of an epoch.
    """
    resumption.identity(subject, "loader", "the data position is not what was saved")


@check("CKC-COMP-012")
def test_extra_comes_back_with_its_types(subject: Subject) -> None:
    """The user's own dict comes back with the types of its keys and values.

    Why: values that are no tensors stay what they were in the destination (J02); a detour over
    another format makes strings of integer keys and lists of tuples (K017, M024).
    How: a nested dict with integer keys, a tuple, infinity, None and text beyond ASCII.
    """
    resumption.identity(subject, "extra", "the extra dict is not what was saved")


@check("CKC-COMP-012")
def test_a_key_that_came_after_the_first_save_comes_back(subject: Subject) -> None:
    """A key that the user's dict got after the first save comes back, though a new job lacks it.

    Why: what is saved or loaded by the keys of the first save, or of the destination, leaves out
    what a run learns on its way: its phase, the id of its tracker (J02, K014).
    How: a phase of the training begins between two saves, and adds its id at a tracker to the dict.
    """
    resumption.arrive(subject, "phases", owner=True)
    message = "a key that came after the first save is not what was saved"
    resumption.identity(subject, "extra", message, kind="phases")


@check("CKC-COMP-012")
def test_unusual_values_come_back(subject: Subject) -> None:
    """Values that a careless format rounds, and names that it joins or renames, come back.

    Why: JSON makes an integer beyond 53 bits a float in many readers, and knows no NaN; a tree that
    is flattened with dots cannot tell `a.b` from `a` with a `b` (K017, M024).
    How: a dict with both, a NaN of other bits, keys of digits, -0.0, the smallest float, integers
    of 62 and of 64 bits, empty containers and names of five countries.
    Where the adapter declares that it cannot hold dotted keys, they must be refused in words.
    """
    features.refusal(subject, Feature.DOTTED, "values")
    features.arrive(subject, "values")
    message = "an unusual value of the extra dict is not what was saved"
    resumption.identity(subject, "extra", message, kind="values")


@check("CKC-COMP-012")
def test_scalars_of_numpy_stay_what_they_are_or_are_refused(subject: Subject) -> None:
    """Scalars of NumPy in the user's dict come back with their types, or are refused in words.

    Why: `np.float64` is a kind of `float`; who asks whether a value is one writes that, and gives
    back another type (M01). A safe load of torch refuses such a value: that is said, and is right.
    How: a dict with four of them; where that is refused, with np.float64 alone, for the others may
    have been the reason. Who refuses to save it, or to load it, keeps the promise.
    """
    if _are_refused(subject, "scalars"):
        _are_refused(subject, "double")


def _are_refused(subject: Subject, kind: str) -> bool:
    """Return whether scalars are refused in words; raises Violation if they come back changed."""
    subject.reset()
    step = SAVES[0]
    saved = subject.run(step + 1, (step,), watch=True, then=[Close()], kind=kind)
    if saved.error and saved.error.message.strip():
        return True
    wanted = whole(saved.of(RunResult).states.get(step, {})).get("extra", {})
    result = subject.resume(kind=kind) if saved.went_well else saved
    if result.exit_kind is ExitKind.ENDED and result.error and result.error.message.strip():
        return True
    arrived, state = oracle.arrival(result)
    got = {"extra": state.get("extra", {})}
    lost = resumption.differing({"extra": wanted}, got, "extra", lambda path: "unusual" in path)
    if arrived != step or lost:
        evidence = {**subject.evidence(result), "arrived != saved": lost}
        raise Violation("a scalar of NumPy is not what was saved, unsaid", evidence=evidence)
    return False


@check("CKC-COMP-013")
def test_held_gradients_come_back(subject: Subject) -> None:
    """Gradients that are held between two micro-batches, and their count, come back.

    Why: a save inside an accumulation without them makes the next update from a part of its data
    (H08).
    How: a job that accumulates three micro-batches, saved after the first.
    """
    resumption.arrive(subject, "accumulate", owner=True)
    message = "held gradients are not what was saved"
    resumption.identity(subject, "gradients", message, kind="accumulate")
