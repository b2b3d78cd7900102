"""A job that does not fit (INTN): nothing is cast, cut, left as initialised, or dropped unsaid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import DEFAULT_KIND, Feature, trees
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown, Violation
from ckpt_conformance.harness.messages import ExitKind, Probe, ProbeResult, Run
from ckpt_conformance.subject import controls, features, oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED
from ckpt_conformance.suites.controls import test_bit_exact_resume as bit_exact
from ckpt_conformance.suites.controls import test_rng_scheduler as rng_scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Fault, Leaves
    from ckpt_conformance.subject.subject import Golden, Subject

MODULE_CAST = "torch-module-cast"  # an origin in the catalogue
MODULE_TIE = "torch-module-tie"  # and another one
HOLE = "ckpt_conformance.fault_injectors.dcp_metadata:punch_hole"
SMALL = ("gain", "lift")  # buffers of one element
ARRIVE = Run(resume=True, stop_after=0)


_SECOND = re.compile(r"(?<![a-zA-Z])second(?![a-zA-Z])")  # a component, and no seconds


def _refused(result: ProcessResult) -> bool:
    return result.exit_kind is ExitKind.ENDED and result.error is not None


@dataclass(frozen=True)
class _Destination:
    """A job that is altered, so that these entries of its model do not fit the checkpoint."""

    variant: str
    entries: tuple[str, ...]
    kind: str = DEFAULT_KIND


def _misfit(subject: Subject, into: _Destination, *faults: Fault) -> ProcessResult:
    """Load the newest step into a job whose model was altered; any refusal is right."""
    golden = subject.golden(kind=into.kind)
    subject.loaded(golden, 4)
    subject.materialize(golden)
    return subject.resume(kind=into.kind, variant=into.variant, faults=faults)


def _altered(
    subject: Subject, result: ProcessResult, entries: Sequence[str], kind: str = DEFAULT_KIND
) -> dict[str, str]:
    """Return the named model entries that arrived otherwise than they were saved."""
    _, state = oracle.arrival(result)
    saved = subject.golden(kind=kind).at[4]["model"]
    loaded = subject.golden(kind=kind).loaded[4]["model"]
    arrived = state.get("model", {})
    if any(loaded.get(name) != saved.get(name) for name in entries):
        raise bit_exact.model_trouble(subject)
    return {
        name: f"{saved.get(name, 'absent')} was saved, {arrived.get(name, 'absent')} arrived"
        for name in entries
        if arrived.get(name) != saved.get(name)
    }


def _no_misfit(subject: Subject, destinations: Sequence[_Destination], message: str) -> None:
    """Raise Violation if an altered destination is filled in another way than it was saved.

    One that the manager fills by itself before one that torch fills.
    """
    of_torch: Violation | None = None
    for into in destinations:
        result = _misfit(subject, into)
        if wrong := _wrong(subject, result, into):
            evidence = subject.evidence(result, destination=into.variant, entries=wrong)
            violation = Violation(message, evidence=evidence)
            if not _is_cast_by_torch(subject, into):
                raise violation
            violation.origin = MODULE_CAST
            of_torch = of_torch or violation
    if of_torch:
        raise of_torch


def _wrong(subject: Subject, result: ProcessResult, into: _Destination) -> dict[str, str]:
    """Return the entries that arrived otherwise than they were saved; empty if it refused."""
    if result.exit_kind is not ExitKind.ENDED:
        return {"the load": subject.tell(result)}
    return {} if _refused(result) else _altered(subject, result, into.entries, into.kind)


def _is_cast_by_torch(subject: Subject, into: _Destination) -> bool:
    """Whether the same load is right with a torch that does not cast."""
    again = _misfit(subject, into, fault_injectors.spec("torch-cast"))
    return again.has_fired and not _wrong(subject, again, into)


@check("CKC-INTN-004")
def test_another_dtype_is_refused_never_cast(subject: Subject) -> None:
    """A destination of another dtype is refused, or takes the saved dtype; nothing is cast unsaid.

    Why: float32 weights were read into a bfloat16 template and lost their low bits without a word;
    shapes were checked, dtypes were not (J04). Where only the size of an element is compared, bits
    of one dtype are read as another.
    How: load into a model with a bfloat16 buffer, and into one with a float64 layer; into one with
    an int32 buffer for float32, and one with a float16 layer for bfloat16. What is cast
    is loaded once more with a torch that does not cast: if that is right, the violation is torch's.
    """
    destinations = (
        _Destination("dtype-buffer", ("constant",)),
        _Destination("dtype", ("inner.weight", "inner.bias")),
        _Destination("width-buffer", ("constant",)),
        _Destination("width", ("narrow.weight", "narrow.bias")),
    )
    _no_misfit(subject, destinations, "an entry was cast to the dtype of its destination, silently")


@check("CKC-INTN-005")
def test_another_shape_is_refused_never_cut(subject: Subject) -> None:
    """A destination of another shape is refused; no part of an entry is copied.

    Why: where the overlap of two shapes is copied, the rest stays as it was initialised (J05);
    where only the number of elements is compared, each goes to another place.
    How: load into a model with a longer buffer, and into one with a larger layer; into one with a
    column for a row, and one with a matrix that is transposed.
    """
    destinations = (
        _Destination("shape-buffer", ("constant",)),
        _Destination("shape", ("inner.weight",)),
        _Destination("count-buffer", ("constant",)),
        _Destination("turned-buffer", ("grid",), "pairs"),
    )
    _no_misfit(subject, destinations, "an entry of another shape was filled in part, silently")


@check("CKC-INTN-006")
def test_an_entry_that_the_checkpoint_lacks_is_refused(subject: Subject) -> None:
    """What the destination needs and the checkpoint lacks, whole or in part, is refused.

    Why: a load that is not strict leaves random weights: a file whose keys all had a foreign prefix
    loaded nothing and said nothing (M05); strict was accepted and ignored (J06); tensors of a hole
    in the list of chunks stay as they were (J07, MX3).
    How: load into a model with a buffer more, with a counter of batches more, as a norm has, with a
    parameter more; and, where a checkpoint lists chunks, load one in which half of a tensor has no
    chunk.
    """
    message = "an entry that the checkpoint lacks is left as it was initialised"
    destinations = (
        _Destination("missing-buffer", ("newcomer",)),
        _Destination("counter-buffer", ("norm.num_batches_tracked",)),
        _Destination("missing", ("newcomer",)),
    )
    _no_misfit(subject, destinations, message)
    _no_hole(subject, message)


@check("CKC-INTN-006")
def test_a_component_that_the_checkpoint_lacks_is_refused_or_told(subject: Subject) -> None:
    """A component that the destination has and the checkpoint lacks is refused or told.

    Why: a load that goes over what was saved leaves the rest as it was built, and nobody hears of
    it: an optimizer that was added begins cold beside trained ones (M05, J06).
    How: load into the same job with one optimizer and its scheduler more. Who takes it says so: the
    process prints a line that speaks of an optimizer or a scheduler.
    """
    subject.need(holds=["optimizer", "scheduler"])
    golden = subject.golden()
    subject.loaded(golden, 4)
    subject.materialize(golden)
    result = subject.resume(variant="another")
    said = result.output.lower()
    if _refused(result) or "optimizer" in said or "scheduler" in said:
        return
    message = (
        "an optimizer and a scheduler that the checkpoint lacks begin cold, and nothing is said"
    )
    raise Violation(message, evidence=subject.evidence(result, destination="another"))


@check("CKC-INTN-006")
def test_an_optimizer_whose_groups_do_not_fit_is_never_cold_in_silence(subject: Subject) -> None:
    """An optimizer with other groups than were saved is refused or told, or gets its state.

    Why: torch refuses other groups; who catches that goes on with trained weights and moments of
    nobody, and nothing is said (J06).
    How: save an optimizer of two groups, and load it into one that has the same parameters, in the
    same order, in one group. Right is a refusal, a line that speaks of an optimizer, and the state
    of each parameter as it was saved.
    """
    subject.need(holds=["optimizer"])
    golden = subject.golden()
    wanted = _moments(subject.loaded(golden, 4))
    if not wanted:
        raise Unknown("the state of the optimizer has no moment of a parameter")
    subject.materialize(golden)
    result = subject.resume(variant="regrouped")
    if _refused(result) or "optimizer" in result.output.lower():
        return
    arrived = _moments(oracle.arrival(result)[1])
    if lost := sorted(path for path, bits in wanted.items() if arrived.get(path) != bits):
        message = "an optimizer whose groups are not those that were saved begins cold, unsaid"
        raise Violation(message, evidence=subject.evidence(result, lost=lost))


def _moments(state: Leaves) -> dict[str, str]:
    """Return what the optimizer keeps of each parameter."""
    leaves = state.get("optimizer", {})
    return {path: bits for path, bits in leaves.items() if path.endswith("exp_avg")}


def _no_hole(subject: Subject, message: str) -> None:
    """Load a checkpoint in whose list of chunks half of a matrix is missing, where there is one."""
    golden = subject.golden()
    for name in [name for name in _changed_files(golden) if name.endswith(".metadata")]:
        subject.materialize(golden)
        args = {"file": name, "tensor": "model.inner.weight"}
        result = subject.execute(Probe(probe=HOLE, args=args), ARRIVE, seed=OTHER_SEED)
        hole: dict[str, object] = result.of(ProbeResult).value or {}
        fired = hole.get("before") != hole.get("after")
        if fired and oracle.arrival(result)[0] == 4:  # noqa: PLR2004  the newest step
            wrong = _altered(subject, result, ["inner.weight"])
            if wrong:
                evidence = subject.evidence(result, hole=hole["detail"], entries=wrong)
                raise Violation(message, evidence=evidence)


def _changed_files(golden: Golden) -> list[str]:
    """Name the files that the newest step brought or changed."""
    old, new = golden.snapshot(2), golden.snapshot(4)
    files = [path.relative_to(new).as_posix() for path in trees.files(new)]
    return [
        name
        for name in files
        if not (old / name).exists() or (old / name).read_bytes() != (new / name).read_bytes()
    ]


@check("CKC-INTN-007")
def test_an_entry_that_the_job_lacks_is_refused_or_reported(subject: Subject) -> None:
    """What the checkpoint holds and the destination lacks is refused or named in a message.

    Why: a plan that is made from the destination alone skips the optimizer that is not yet built,
    or half of a renamed model, and reports success (J01).
    How: load into a model with a buffer less, and with a parameter less; look for the entry's name
    in what the process printed.
    """
    for variant, entry in (("unexpected-buffer", "constant"), ("unexpected", "twin.bias")):
        result = _misfit(subject, _Destination(variant, (entry,)))
        if not _refused(result) and entry not in result.output:
            raise Violation(
                f"the saved entry {entry!r} has no destination and is dropped in silence",
                evidence=subject.evidence(result, destination=variant),
            )


@check("CKC-INTN-018")
def test_a_component_that_the_job_lacks_is_refused_or_reported(subject: Subject) -> None:
    """A whole component of the checkpoint that the job does not have is refused or named.

    Why: a script that builds one optimizer where there were two goes on with half of the state, and
    reports success (J01).
    How: save a job with two optimizers and their schedulers; load it into one that has the first of
    them alone. The load refuses, or names the second one in what the process prints.
    """
    subject.need(holds=("optimizer",))
    golden = subject.golden(kind="two-optimizers")
    subject.loaded(golden, 4)
    subject.materialize(golden)
    result = subject.resume(kind="two-optimizers", variant="fewer")
    if result.exit_kind is not ExitKind.ENDED:
        raise Unknown(f"a load into a job with one optimizer less: {subject.tell(result)}")
    if not _refused(result) and not _SECOND.search(result.output):
        message = "the second optimizer of the checkpoint has no destination, and nothing is said"
        raise Violation(message, evidence=subject.evidence(result))


@check("CKC-INTN-016")
def test_what_was_saved_apart_is_not_one_in_the_job(subject: Subject) -> None:
    """Two tensors that were saved apart never fill one place; a destination that ties them refuses.

    Why: where two names of a job share memory, the last one that is read wins; the other value is
    gone, and nothing is said (S04).
    How: save a model with two pairs of buffers of one shape, of 8 elements and of one; load it into
    models in which a pair is one. What is lost is loaded once more with a torch that refuses this:
    if that refuses, the violation is torch's.
    """
    if words := features.refusal(subject, Feature.TIED, DEFAULT_KIND):
        raise NotApplicable(words)
    golden = subject.golden(kind="pairs")
    wanted, pairs = golden.at[4]["model"], {"tied": ("left", "right"), "tied-small": SMALL}
    loaded = subject.loaded(golden, 4)["model"]
    if any(loaded.get(name) != wanted[name] for pair in pairs.values() for name in pair):
        raise bit_exact.model_trouble(subject)
    for variant, pair in pairs.items():
        subject.materialize(golden)
        result = subject.resume(kind="pairs", variant=variant)
        arrived = oracle.arrival(result)[1].get("model", {})
        lost = [name for name in pair if arrived.get(name) != wanted[name]]
        if not _refused(result) and (lost or result.exit_kind is not ExitKind.ENDED):
            message = f"{' and '.join(pair)} were saved apart and are one in the job, unsaid"
            evidence = subject.evidence(result, destination=variant, lost=lost)
            subject.materialize(golden)
            tie = fault_injectors.spec("torch-tie")
            again = subject.resume(kind="pairs", variant=variant, faults=(tie,))
            violation = Violation(message, evidence=evidence)
            violation.origin = MODULE_TIE if again.has_fired and _refused(again) else ""
            raise violation


@check("CKC-INTN-016")
def test_optimizer_state_that_was_saved_apart_is_not_one(subject: Subject) -> None:
    """State of two parameters that was saved apart never fills one place of the job's optimizer.

    Why: to fill the tensors that are there saves an allocation; an optimizer may begin with one
    zero for all of its parameters, and then the last value that is read is that of each (S04).
    How: save a job whose optimizer begins so and has trained; load it into a new one, in which that
    state of all parameters is one tensor. An optimizer that has a tensor for each is the control.
    """
    subject.need(holds=("optimizer",))
    control, lost = _sums_lost(subject, "apart")
    if lost or _refused(control):
        reason = f"optimizer state that is not shared does not come back: {subject.tell(control)}"
        raise controls.blame(subject, reason, rng_scheduler.test_moments_reach_a_fresh_optimizer)
    result, lost = _sums_lost(subject, "")
    if not _refused(result) and (lost or result.exit_kind is not ExitKind.ENDED):
        message = "optimizer state that was saved apart is one in the job, unsaid"
        raise Violation(message, evidence=subject.evidence(result, lost=lost))


def _sums_lost(subject: Subject, variant: str) -> tuple[ProcessResult, list[str]]:
    """Load a job of kind `sharing`; return the child, and which sums are not those saved."""
    golden = subject.golden(kind="sharing")
    subject.materialize(golden)
    result = subject.resume(kind="sharing", variant=variant)
    arrived = oracle.arrival(result)[1].get("optimizer", {})
    sums = {path: of for path, of in golden.at[4]["optimizer"].items() if path.endswith("norms")}
    if len(set(sums.values())) < 2:  # noqa: PLR2004  two that differ
        raise Unknown(f"no two parameters have sums of their own: {sums}")
    return result, [path for path, of in sums.items() if arrived.get(path) != of]


@check("CKC-INTN-011")
def test_nothing_is_cold_in_silence(subject: Subject) -> None:
    """A missing file never leaves a part of the state as it was initialised without a word.

    Why: without its optimizer file a run resumed with trained weights and a cold optimizer, without
    its train state at step 0 with trained weights; nothing was said (M027, KX5).
    How: remove each file of the newest step in turn; the load refuses, falls back, or names what it
    did not find.
    """
    golden = subject.golden()
    wanted = subject.loaded(golden, 4)
    for name in subject.sample(_changed_files(golden), quick=4):
        subject.materialize(golden)
        (subject.root / name).unlink()
        result = subject.resume()
        step, state = oracle.arrival(result)
        if step is None or state.get("model") != wanted["model"]:
            continue
        cold = [
            part
            for part, leaves in oracle.held(wanted, subject.holds).items()
            if state.get(part) != leaves
        ]
        is_reported = name.rpartition("/")[2] in result.output or all(
            part in result.output for part in cold
        )
        if cold and not is_reported:
            raise Violation(
                f"{name} is missing: trained weights with cold {', '.join(cold)}, in silence",
                evidence=subject.evidence(result, wanted),
            )
