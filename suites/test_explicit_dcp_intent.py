"""Explicit intent (INTN): what was asked for is served, or the load refuses; never another."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import (
    NotApplicable,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import at_rest, payload
from ckpt_conformance.harness.messages import (
    Call,
    CallResult,
    Close,
    ExitKind,
    Fresh,
    LeavesResult,
    Load,
    LoadResult,
    Options,
    Perturb,
    ReadLeaves,
    Run,
    RunResult,
    Save,
    Steps,
    Train,
    whole,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED
from ckpt_conformance.suites.controls import test_bit_exact_resume as bit_exact
from ckpt_conformance.suites.controls import test_damage as damage
from ckpt_conformance.suites.controls import test_discovery as discovery
from ckpt_conformance.suites.controls import test_explicit_step as explicit_step
from ckpt_conformance.suites.controls import test_rng_scheduler as rng_scheduler
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Leaves
    from ckpt_conformance.subject.subject import Golden, Subject

KINDS = ("model", "dcp")
ARRIVE = Run(stop_after=0)


def _call(method: str, *args: int | str) -> Call:
    return Call(method=method, args=("$job", *args))


@dataclass(frozen=True)
class _Saved:
    """What one kind of a step holds: the state by component, the names in the directory."""

    state: Leaves
    names: set[str]


@dataclass(frozen=True)
class _Loaded:
    """What a path gave: the step, and the digests of the model by leaf."""

    step: int | None
    model: Mapping[str, object]


def _refused(result: ProcessResult) -> bool:
    return result.exit_kind is ExitKind.ENDED and result.error is not None


# -- an explicit step ----------------------------------------------------------------------------


@check("CKC-INTN-002")
def test_a_step_that_does_not_exist_is_refused(subject: Subject) -> None:
    """A request for a step that is not there raises; nothing else is served.

    Why: a typing error in a path became a warning, and the run began from scratch (B09).
    How: save steps 2 and 4; ask for one between them and one after them.
    """
    golden = subject.golden()
    for step in (3, 9):
        subject.materialize(golden)
        result = subject.resume(step)
        if not _refused(result):
            raise Violation(
                f"step {step} does not exist and is not refused", evidence=subject.evidence(result)
            )


@check("CKC-INTN-003")
def test_an_explicit_step_that_is_damaged_is_not_replaced(subject: Subject) -> None:
    """A request for a step that cannot be read raises; no other step is served in its place.

    Why: an evaluation or a rollback that was given another step reports numbers of the wrong model;
    a load that fell back in silence did that (R03, M031).
    How: cut every file of the newest step in half, ask for that step by its number. Where it shares
    its files with other steps, zero the first bytes of its tensors in them.
    """
    what, about = _damage_newest(subject)
    result = subject.resume(4)
    step, _ = oracle.arrival(result)
    if step == 4:  # noqa: PLR2004  the damaged one
        raise controls.blame(subject, f"{what} are served", about)
    if not _refused(result):
        raise Violation(
            "step 4 was asked for by number and is damaged; it is not refused",
            evidence=subject.evidence(result),
        )


def _damage_newest(subject: Subject) -> tuple[str, Callable[[Subject], None]]:
    """Damage step 4 beside step 2; return what was damaged, and who says that this is not served.

    Raises Unknown if nothing of step 4 was found.
    """
    golden = subject.golden()
    subject.materialize(golden)
    before = set(payload.names(golden.snapshot(2)))
    new = [subject.root / name for name in payload.names(subject.root) if name not in before]
    for path in new:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if new:
        return "files cut in half", damage.test_a_file_cut_short_is_never_served
    older = {sample.bytes for sample in golden.payload_samples[2]}
    own = [sample for sample in golden.payload_samples[4] if sample.bytes not in older]
    places = payload.find(subject.root, own)
    for place in places:
        at_rest.zero_block(subject.root, place)
    if not places:
        raise Unknown("nothing of the newest step was found to damage: no file, no tensor's bytes")
    return "tensors with zeros in them", damage.test_damaged_payload_is_never_served


@check("CKC-INTN-001")
def test_steps_asked_for_in_turn_are_served_whole(subject: Subject) -> None:
    """A request gives every component of its step, whatever the same manager has loaded before.

    Why: what was read for the first request was kept, and given again with the second one (R09).
    How: with one manager load step 2, step 4 and step 2 again, each into a new job; compare each
    with what that step gives alone.
    """
    if subject.info.shape != "manager":
        raise NotApplicable("a trainer resumes once in its process")
    golden = subject.golden()
    legal = subject.legal(golden)
    subject.materialize(golden)
    steps = (2, 4, 2)
    ops = [op for step in steps for op in (Fresh(), Run(resume=step, stop_after=0))]
    result = subject.execute(*ops, seed=OTHER_SEED)
    for turn, step in enumerate(steps):
        one = replace(result, results=tuple(result.all_of(RunResult)[turn : turn + 1]))
        arrived, state = oracle.arrival(one)
        if arrived != step or not oracle.same(state, legal[step], subject.holds):
            controls.require(explicit_step.test_an_explicit_step_is_served_whole, subject)
            message = f"step {step} is asked for after {steps[:turn]}: another state is served"
            raise Violation(message, evidence=subject.evidence(one, legal[step]))


@check("CKC-INTN-001")
def test_step_0_is_a_step(subject: Subject) -> None:
    """A request for step 0 gives the checkpoint of step 0, although a newer one is there.

    Why: who asks whether a step is true, and not whether it is None, takes step 0 for no request
    and serves the latest (R06).
    How: save before the first training step, then at step 2; ask for step 0 by its number.
    """
    if subject.info.shape != "manager" or (subject.info.max_keep or 2) < 2:  # noqa: PLR2004  both
        raise NotApplicable("no step 0 can be there beside another one")
    begun = (ReadLeaves(), Save(step=0), Run(until=2, save_at=(2,)), Close())
    saved = subject.execute(*begun)
    if saved.steps_of("failed") == [0]:
        raise NotApplicable(f"it refuses to save step 0: {subject.tell(saved)}")
    if not saved.went_well:
        raise smoke.trouble(subject, saved)
    wanted = whole(saved.of(LeavesResult).leaves or {})
    result = subject.resume(0)
    arrived, state = oracle.arrival(result)
    if arrived != 0 or state.get("model") != wanted["model"]:
        controls.require(explicit_step.test_an_explicit_step_is_served_whole, subject)
        told = {None: "nothing", 0: "another model"}.get(arrived, f"step {arrived}")
        message = f"step 0 was asked for, {told} is served"
        evidence = subject.evidence(result, wanted)
        doubt = bit_exact.model_trouble(subject) if arrived == 0 else None
        raise doubt if doubt and doubt.see else Violation(message, evidence=evidence)


# -- an explicit kind ------------------------------------------------------------------------------


def _save_two_kinds(subject: Subject, order: Sequence[str]) -> dict[str, _Saved]:
    """Put step 4 there in two kinds, with other bits in each; the second is saved last.

    Each is saved alone and then put beside the other: a manager may rightly remove the stale
    sibling when it saves the second.
    """
    saved: dict[str, _Saved] = {}
    for kind in order:
        trees.clear(subject.root)
        change = [Perturb()] if saved else []
        save = _call("save_kind", 4, kind)
        result = subject.execute(Train(n=4), *change, save, ReadLeaves(), Close())
        if not result.went_well:
            raise control_failed(f"kind {kind} does not save: {subject.tell(result)}")
        names = {path.name for path in subject.root.iterdir()}
        saved[kind] = _Saved(whole(result.of(LeavesResult).leaves or {}), names)
        trees.copy(subject.root, subject.scratch / kind)
    for name in saved[order[0]].names - saved[order[1]].names:
        _copy(subject.scratch / order[0] / name, subject.root / name)
    return saved


def _copy(source: Path, target: Path) -> None:
    copy = trees.copy if source.is_dir() else shutil.copy2
    copy(source, target)


def _taken_from(state: Leaves, other: Leaves, wanted: Leaves) -> list[str]:
    """Name the components that are the sibling's and not those that were wanted."""
    return [
        name
        for name, leaves in state.items()
        if leaves == other.get(name) and leaves != wanted.get(name)
    ]


@check("CKC-INTN-008")
def test_an_explicit_kind_is_honoured_beside_its_sibling(subject: Subject) -> None:
    """A request for a kind gives that kind, although the same step is there in another one.

    Why: a loader that prefers one format served weights of an older save beside the new one (R01);
    an explicit request for the DCP directory was answered with the model file (M031).
    How: save a step in both kinds with different content, in both orders; ask for each by name.
    """
    for order in subject.sample([KINDS, KINDS[::-1]], quick=1):
        subject.reset()
        saved = _save_two_kinds(subject, order)
        for kind in KINDS:
            result = subject.execute(_call("load_kind", 4, kind), ARRIVE, seed=OTHER_SEED)
            _, state = oracle.arrival(result)
            other = saved[KINDS[1 - KINDS.index(kind)]].state
            wrong = _taken_from(state, other, saved[kind].state)
            if wrong or (not state and kind == order[-1] and _loads_alone(subject, kind)):
                raise Violation(
                    f"kind {kind} was asked for; the sibling is served, or nothing",
                    evidence=subject.evidence(result, saved=order, from_the_sibling=wrong),
                )
            if state and state["model"] != saved[kind].state["model"]:
                raise bit_exact.model_trouble(subject)


def _loads_alone(subject: Subject, kind: str) -> bool:
    """Verify that a kind loads where it is the only one; Unknown if it does not."""
    trees.materialize(subject.scratch / kind, subject.root)
    result = subject.execute(_call("load_kind", 4, kind), seed=OTHER_SEED)
    if not result.went_well:
        raise control_failed(f"kind {kind} does not load: {subject.tell(result)}")
    return True


@check("CKC-INTN-009")
def test_a_kind_that_is_absent_is_refused_although_a_sibling_exists(subject: Subject) -> None:
    """A request for a kind that is not there raises, whatever else is there of the same step.

    Why: a request for the safe format was quietly served from a pickle (R03).
    How: save a step in one kind only and ask for the other; both ways round.
    """
    for kind in KINDS:
        subject.reset()
        saved = subject.execute(Train(n=4), _call("save_kind", 4, kind), Close())
        if saved.error:
            raise control_failed(f"kind {kind} does not save: {subject.tell(saved)}")
        other = KINDS[1 - KINDS.index(kind)]
        result = subject.execute(_call("load_kind", 4, other), ARRIVE, seed=OTHER_SEED)
        if not _refused(result):
            raise Violation(
                f"kind {other} was asked for, only {kind} is there, and the load does not refuse",
                evidence=subject.evidence(result),
            )


# -- a path --------------------------------------------------------------------------------------


def _load_paths(subject: Subject, paths: Sequence[Path]) -> dict[str, _Loaded | None]:
    """Load each path into a fresh job, in one child; give by name what came, None if refused."""
    ops: list[AnyOp] = []
    for path in paths:
        ops += [Fresh(), Load(step=str(path), go_on=True), ReadLeaves()]
    result = subject.execute(*ops, seed=OTHER_SEED)
    if result.exit_kind is not ExitKind.ENDED:
        raise Violation("a load of a path does not end", evidence=subject.evidence(result))
    loads, states = result.all_of(LoadResult), result.all_of(LeavesResult)
    return {
        path.name: None if load.error else _Loaded(load.step, (state.leaves or {})["model"])
        for path, load, state in zip(paths, loads, states, strict=True)
    }


def _all_are(
    by_path: Mapping[str, _Loaded | None], step: int, model: Mapping[str, object], message: str
) -> None:
    """Raise Violation unless some path resolves and every one that does gives this step."""
    wrong = [
        f"{name}: step {loaded.step}, {'other' if loaded.model != model else 'same'} weights"
        for name, loaded in by_path.items()
        if loaded is not None and loaded != _Loaded(step, model)
    ]
    if wrong or not any(by_path.values()):
        raise Violation(message, evidence={"wrong": wrong, "paths": sorted(by_path)})


@check("CKC-INTN-010")
def test_a_path_means_what_it_names(subject: Subject) -> None:
    """A file or a directory of a checkpoint gives its step; their parent gives the newest.

    Why: a second entry point with a rule of its own took the newest directory instead of the named
    one (B04); a folder that happened to exist won over the explicit source (R05); the model file
    won over the directory that was named (M028, M029, M030, M031).
    How: save steps 2, 4 and 6; load every name that step 4 brought, then the parent, then a copy of
    an older state of the directory that lies elsewhere.
    """
    golden = subject.golden((2, 4, 6))
    wanted = subject.loaded(golden, 4)["model"]
    elsewhere = subject.scratch / "elsewhere"
    trees.copy(golden.snapshot(2), elsewhere)
    subject.materialize(golden)
    of_four = [subject.root / name for name in sorted(_of_four(golden))]
    by_path = _load_paths(subject, [*of_four, subject.root, elsewhere])
    parent, moved = by_path.pop(subject.root.name), by_path.pop(elsewhere.name)
    _all_are(by_path, 4, wanted, "a path of step 4 gives another checkpoint, or none does")
    if parent is None or parent.step != 6:  # noqa: PLR2004  the newest step
        raise Violation("the parent directory does not give its newest step")
    if moved is not None and moved.step != 2:  # noqa: PLR2004  the only step of the copy
        raise Violation(f"a directory with step 2 was named, the own one is served: {moved.step}")
    if "kinds" in subject.info.capabilities:
        _paths_of_kinds(subject)


@check("CKC-INTN-010")
def test_a_path_that_cannot_be_read_is_not_replaced(subject: Subject) -> None:
    """A path of a checkpoint that is damaged gives no other checkpoint.

    Why: a load that fell back in silence served another step than the one that was named (R03,
    M031).
    How: cut every file of step 4 in half, beside step 2; load every name that step 4 brought.
    """
    names = sorted(_of_four(subject.golden()))
    what, about = _damage_newest(subject)
    by_path = _load_paths(subject, [subject.root / name for name in names])
    served = {name: loaded.step for name, loaded in by_path.items() if loaded is not None}
    if served and set(served.values()) <= {0, 4}:  # a cold start, or what is damaged
        cold = damage.test_where_nothing_is_whole_the_load_refuses
        raise controls.blame(subject, f"{what} are served", about, cold)
    if served:
        message = "a path of step 4 was named and is damaged; another step is served"
        raise Violation(message, evidence={"served": served})


@check("CKC-INTN-010")
def test_a_path_means_the_same_however_it_is_written(subject: Subject) -> None:
    """A path gives its step as text, with a slash at its end, and relative to where the job is.

    Why: text is taken apart where a path is not: what stands before the last slash, or a name below
    the own root, was served instead (B04, B13).
    How: load each name of step 4 as a text and with a slash at its end; from a directory with
    another run's checkpoints load its names of step 4 by themselves. Who refuses such a text serves
    nothing wrong.
    """
    golden = subject.golden((2, 4, 6))
    wanted = {"own": subject.loaded(golden, 4)["model"]}
    subject.materialize(golden)
    paths = [subject.root / name for name in sorted(_of_four(golden))]
    asked = [("own", str(path) + end) for path in paths for end in ("", "/")]
    result = _load_texts(subject, [text for _, text in asked])
    other = subject.golden((2, 4, 6), seed=OTHER_SEED)
    wanted["other"] = subject.loaded(other, 4)["model"]
    elsewhere = subject.scratch / "another run"
    trees.copy(other.snapshot(6), elsewhere)
    subject.materialize(golden)
    here = [name for name in sorted(_of_four(other)) if name in _of_four(golden)]
    asked += [("other", name) for name in here]
    result += _load_texts(subject, here, enter=elsewhere)
    wrong = [
        f"{text}: {'another step' if loaded.step != 4 else 'other weights'}"  # noqa: PLR2004  theirs
        for (whose, text), loaded in zip(asked, result, strict=True)
        if loaded is not None and loaded != _Loaded(4, wanted[whose])
    ]
    if wrong:
        message = "a path gives another checkpoint when it is written in another way"
        doubt = controls.blame(subject, message, discovery.test_a_tree_resumes_from_another_place)
        evidence = {"wrong": wrong, "paths": [text for _, text in asked]}
        raise doubt if doubt.see else Violation(message, evidence=evidence)


@check("CKC-INTN-017")
def test_a_copy_under_a_name_of_ones_own_loads_from_its_path(subject: Subject) -> None:
    """A checkpoint that was copied under a name of one's own loads from its path, as its step.

    Why: who keeps the best step copies it to a name that says so; a load that knows its own names
    alone takes the copy for an empty parent, and refuses or starts anew (B04, R05).
    How: copy the one file or directory of step 4 to the name `best`, with its suffix, beside it and
    into another directory; load both paths. Where a step has several names, none is a checkpoint.
    """
    golden = subject.golden((2, 4, 6))
    wanted = subject.loaded(golden, 4)["model"]
    subject.materialize(golden)
    names = _of_four(golden)
    if len(names) != 1:
        raise NotApplicable(f"a step has several names: {', '.join(sorted(names)) or 'none'}")
    own = subject.root / names.pop()
    original = _load_paths(subject, [own])[own.name]
    if original != _Loaded(4, wanted):
        raise controls.blame(
            subject, f"{own.name} does not load by path", test_a_path_means_what_it_names
        )
    kept = subject.scratch / "kept"
    kept.mkdir()
    for folder in (kept, subject.root):
        path = folder / f"best{own.suffix}"
        copy = shutil.copytree if own.is_dir() else shutil.copy2
        copy(own, path)
        loaded = _load_paths(subject, [path])[path.name]
        if loaded != original:
            what = "is refused" if loaded is None else f"gives step {loaded.step}, or other weights"
            message = f"a copy of {own.name} under the name {path.name} {what}"
            raise Violation(message, evidence={"copy": path.name, "elsewhere": folder is kept})


def _of_four(golden: Golden) -> set[str]:
    """Return the names that the save of step 4 brought."""
    return _top_names(golden.snapshot(4)) - _top_names(golden.snapshot(2))


def _top_names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def _load_texts(
    subject: Subject, texts: Sequence[str], enter: Path | None = None
) -> list[_Loaded | None]:
    """Load paths that are given as text, in one child; None for each that is refused.

    The manager is open when the child enters a directory, before each load.
    """
    move = probe("enter", folder=str(enter))
    ops: list[AnyOp] = [Steps(go_on=True)]
    for text in texts:
        load = Call(method="load_path", args=("$job", text), go_on=True)
        ops += [Fresh(), *([move] if enter else []), load, ReadLeaves()]
    result = subject.execute(*ops, seed=OTHER_SEED)
    if result.exit_kind is not ExitKind.ENDED:
        raise Violation("a load of a path does not end", evidence=subject.evidence(result))
    loads, states = result.all_of(CallResult), result.all_of(LeavesResult)
    return [
        None if load.error else _Loaded(load.value, (state.leaves or {})["model"])
        for load, state in zip(loads, states, strict=True)
    ]


def _paths_of_kinds(subject: Subject) -> None:
    """Load each name of one step that is there in two kinds: it gives the kind it belongs to."""
    subject.reset()
    saved = _save_two_kinds(subject, KINDS)
    both = subject.scratch / "both"
    trees.copy(subject.root, both)
    for kind, of_kind in saved.items():
        trees.materialize(subject.scratch / kind, subject.root)
        alone = _load_paths(subject, [subject.root])[subject.root.name]
        if alone is None:
            raise control_failed(f"kind {kind} does not load where it is the only one")
        trees.materialize(both, subject.root)
        own = of_kind.names - saved[KINDS[1 - KINDS.index(kind)]].names
        by_path = _load_paths(subject, [subject.root / name for name in sorted(own)])
        message = f"a path of kind {kind} gives the sibling, or none resolves"
        _all_are(by_path, 4, alone.model, message)


# -- options of a load --------------------------------------------------------------------------


@check("CKC-INTN-012")
def test_what_is_left_cold_on_request_is_the_only_thing(subject: Subject) -> None:
    """A load without the optimizer gives every other component of the step that was named.

    Why: with the tag of an earlier step and without optimizer states, the weights came from the
    step that the pointer named (R09); a partial load counted as success (MX6, M027).
    How: with a newer step there, load the older one without its optimizer.
    """
    subject.need(holds=["optimizer"])
    golden = subject.golden()
    wanted = subject.loaded(golden, 2)
    subject.materialize(golden)
    load = _call("load_without", 2, "optimizer")
    result = subject.execute(ReadLeaves(), load, ARRIVE, seed=OTHER_SEED)
    step, state = oracle.arrival(result)
    cold = (result.of(LeavesResult).leaves or {}).get("optimizer")
    moments = {name for name in state.get("optimizer", {}) if name.startswith("state.")}
    others = oracle.held(state, subject.holds - {"optimizer"})
    whole = {part for part in others if wanted[part] == golden.at[2][part]}
    wrong = sorted(part for part in whole if others[part] != wanted[part])
    if step != 2 or wrong:  # noqa: PLR2004  the step asked for
        raise Violation(
            "a load without the optimizer changes what else is served",
            evidence=subject.evidence(result, {**wanted, "optimizer": {}}, wrong=wrong),
        )
    if moments and cold is not None:
        raise Violation(
            "a load without the optimizer gives optimizer state", evidence=subject.evidence(result)
        )


@check("CKC-INTN-012")
def test_another_optimizer_is_not_left_cold_with_the_one_named(subject: Subject) -> None:
    """A load without one of two optimizers gives the other one as it was saved.

    Why: components are told by how their names begin, or all optimizers are one thing (MX6, R09).
    How: of a job with two optimizers load the older step without the one named `optimizer`; compare
    the other. Control: a load of the whole step gives each of them.
    """
    subject.need(holds=["optimizer"])
    controls.require(rng_scheduler.test_every_one_of_several_optimizers_comes_back, subject)
    kind, other = "two-optimizers", "optimizer.second"
    golden = subject.golden(kind=kind)
    subject.materialize(golden)
    load = _call("load_without", 2, "optimizer")
    result = subject.execute(load, ARRIVE, seed=OTHER_SEED, kind=kind)
    step, state = oracle.arrival(result)
    wanted = {other: golden.at[2][other]}
    lost = oracle.differences({other: state.get(other, {})}, wanted, {"optimizer"})
    if step != 2 or lost:  # noqa: PLR2004  the step asked for
        evidence = {**subject.evidence(result), "arrived != saved": lost}
        raise Violation(f"a load without `optimizer` does not give {other}", evidence=evidence)


@check("CKC-INTN-013")
def test_loading_does_not_depend_on_how_saving_is_set_up(subject: Subject) -> None:
    """A manager that is set up to save one kind loads a directory of the other kind.

    Why: an option of the new run's saves also switched off what was loaded (E10); a loader that
    knew one format only called a valid checkpoint invalid (R04).
    How: save with each kind, resume with a manager that was opened for the other; every component
    is as a manager that was opened for the same kind loads it.
    """
    for kind in KINDS:
        subject.reset()
        saved = subject.run(4, (4,), options=Options(kind=kind), then=[Close()])
        if saved.error:
            raise control_failed(f"kind {kind} does not save: {subject.tell(saved)}")
        other = KINDS[1 - KINDS.index(kind)]
        result = subject.resume(options=Options(kind=other))
        step, state = oracle.arrival(result)
        alone, wanted = oracle.arrival(subject.resume(options=Options(kind=kind)))
        if alone != 4:  # noqa: PLR2004  the step that was saved
            raise control_failed(f"kind {kind} does not load where it is the only one")
        if step != alone or not oracle.same(state, wanted, subject.holds):
            raise Violation(
                f"saved as {kind}; a manager opened for {other} does not load it, or not whole",
                evidence=subject.evidence(result, wanted),
            )
