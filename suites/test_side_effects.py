"""Side effects (SIDE): saving and loading change what they say they change, and nothing else."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import DEFAULT_KIND, Capability, trees
from ckpt_conformance.contract.kept_trees import fingerprint
from ckpt_conformance.contract.verdicts import (
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
    joined,
)
from ckpt_conformance.fault_injectors import payload
from ckpt_conformance.fault_injectors.injected_save import SaveKind, entry_points_of
from ckpt_conformance.harness.messages import (
    BeginSave,
    Close,
    CloseResult,
    EndSaves,
    ExitKind,
    Fresh,
    LeavesResult,
    Load,
    Perturb,
    Probe,
    ProbeResult,
    ReadLeaves,
    Run,
    RunResult,
    Save,
    SaveResult,
    Train,
    whole,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.batched_recovery import Case, resume_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED
from ckpt_conformance.suites.background_saves import (
    DEADLINE,
    begun_by,
    error_of,
    require_held,
    without_faults,
)
from ckpt_conformance.suites.controls import test_bit_exact_resume as bit_exact
from ckpt_conformance.suites.controls import test_explicit_step as explicit_step
from ckpt_conformance.suites.controls import test_sigkill_truncation as kills
from ckpt_conformance.suites.controls import test_undisturbed_run as undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Fault, Leaves
    from ckpt_conformance.subject.subject import Subject

CTRL_C = "KeyboardInterrupt"
ARRIVE = Run(resume=True, stop_after=0)
LEAKS = 6  # saves, or loads, that each may leave a descriptor open
SLACK = 256 << 10  # bytes; the storage behind the view is 4 MiB


# -- a save changes nothing of the run -----------------------------------------------------------


@check("CKC-SIDE-009")
def test_a_save_before_the_first_step_changes_nothing(subject: Subject) -> None:
    """A save before training began leaves the optimizers as lazy as they were.

    Why: to read the state of an optimizer that has none, a step with zero gradients is made: the
    step counters are at 1 before the first real step, which then differs (G02).
    How: train the same job with and without a save at step 0; compare as above.
    """
    around = undisturbed.probe("surroundings")
    run = Run(until=2, final=True)
    plain = undisturbed.ended(subject, subject.execute(run, around), "a run without saves")
    saved = subject.execute(Save(step=0, go_on=True), run, around)
    if refusal := saved.of(SaveResult).error:
        raise NotApplicable(f"it refuses to save step 0: {refusal.message}")
    evidence = undisturbed.difference(
        plain, undisturbed.ended(subject, saved, "a run with a save at step 0")
    )
    if evidence:
        controls.require(undisturbed.test_a_run_with_saves_is_the_run_without, subject)
        raise Violation("a save at step 0 changes the first training steps", evidence=evidence)


@check("CKC-SIDE-008")
def test_a_changed_job_is_saved_as_it_is(subject: Subject) -> None:
    """An entry that was added, removed or resized between two saves is so in the second.

    Why: a plan of the save that is kept from the first one drops the new entry: the job ended as
    if saved, and no rank could load (J14, J09).
    How: save, change a buffer of the model, and of a manager keys of the user's dict and the groups
    of the optimizer, save again; resume into a job that was changed alike.
    """
    for how in ["added", *subject.sample(["removed", "resized"], quick=1)]:
        every = changes(subject, how)
        if _second_save(subject, every) is None:
            continue
        for change in every:
            evidence = _second_save(subject, [change])
            if evidence is not None and _is_saved_alone(subject, change):
                what = f"{change.what} was {how} between two saves"
                raise Violation(f"{what}, and the second save does not show it", evidence=evidence)


@dataclass(frozen=True)
class Change:
    """What is changed of a job between two saves: in words, its component, and how."""

    what: str
    part: str
    by: Probe

    def shown(self, state: Leaves) -> object:
        """What a change of a component shows in: of the model all, else the names of leaves."""
        leaves = state.get(self.part, {})
        return leaves if self.part == "model" else sorted(leaves)


def changes(subject: Subject, how: str) -> list[Change]:
    """Return what is added, removed or resized.

    A trainer's own loop keeps groups and keys; a manager that wraps the job may have an optimizer
    of its own by now, to which a group of the job's says nothing.
    """
    made = [Change("an entry", "model", undisturbed.probe("change_entry", how=how))]
    if subject.info.shape == "manager" and "extra" in subject.holds and how != "resized":
        by = undisturbed.probe("change_keys", how=how)
        made.append(Change("a key of the user's dict", "extra", by))
    is_its_own = subject.info.shape == "manager" and not subject.info.prepares
    if is_its_own and "optimizer" in subject.holds and how == "added":
        made.append(Change("a parameter group", "optimizer", undisturbed.probe("add_group")))
    return made


def _second_save(subject: Subject, made: list[Change]) -> dict[str, object] | None:
    """Save, change the job, save again, load; None if the load gives the changed job."""
    runs = [Run(until=step, save_at=(step,)) for step in (2, 3)]
    return _not_as_saved(subject, made, [runs[0], *(one.by for one in made), runs[1]])


def _not_as_saved(
    subject: Subject, made: list[Change], saving: list[AnyOp]
) -> dict[str, object] | None:
    """Save step 3, load it into a job that was changed alike; None if that gives what was saved."""
    trees.clear(subject.root)
    result = subject.execute(*saving, ReadLeaves(), Close())
    resumed = subject.execute(*(one.by for one in made), ARRIVE, seed=OTHER_SEED)
    wanted = whole(result.of(LeavesResult).leaves or {})
    step, state = oracle.arrival(resumed)
    is_there = wanted and step == 3  # noqa: PLR2004  the second save
    if is_there and all(one.shown(state) == one.shown(wanted) for one in made):
        return None
    return subject.evidence(resumed, saved=subject.tell(result))


def _is_saved_alone(subject: Subject, change: Change) -> bool:
    """Whether the changed job comes back when it is the only one that is saved.

    Raises Unknown if not even an entry of the model does.
    """
    evidence = _not_as_saved(subject, [change], [change.by, Run(until=3, save_at=(3,))])
    if evidence is not None and change.part == "model":
        raise control_failed(f"the changed job does not load: {evidence['child']}")
    return evidence is None


@check("CKC-SIDE-017")
def test_a_save_after_one_that_was_interrupted_saves_or_raises(subject: Subject) -> None:
    """After a save that Ctrl-C ended the next one saves, or raises; it never returns in vain.

    Why: KeyboardInterrupt, and SystemExit of a handler, are no Exception: a mark that a save is
    under way stayed, and every later save said so in the log, and returned (O03).
    How: raise KeyboardInterrupt as the save of step 4 collects its state, and at one of the calls
    by which it writes; then save step 4 once more. If that returns, a new process must get step 4.
    It has to end: the control makes both saves without the interrupt.
    """
    subject.need(shape="manager")
    legal = subject.legal(subject.golden())
    hits = [fault_injectors.spec("collecting", at=2, error=CTRL_C)]
    with suppress(NotApplicable):
        every = entry_points_of(subject, SaveKind.NEW)
        hits.append(every[len(every) // 2].spec("raise", error=CTRL_C))
    fired = [_saves_again(subject, hit, legal) for hit in hits]
    if not any(fired):
        raise Unknown("no call of the save was interrupted")


def _saves_again(subject: Subject, hit: Fault, legal: Mapping[int, Leaves]) -> bool:
    """Interrupt a save, save once more, load; return whether the first one was interrupted."""
    subject.reset()
    twice = (Save(faults=(hit,), go_on=True), Save(go_on=True), Close(go_on=True))
    ops = (Run(until=2, save_at=(2,)), Train(n=2), *twice)
    saving = subject.execute(*ops, deadline=DEADLINE)
    if saving.exit_kind is ExitKind.HANG:
        without_faults(subject, saving)
        message = "a save after one that Ctrl-C ended does not end"
        raise Violation(message, evidence=subject.evidence(saving))
    saves = saving.all_of(SaveResult)
    if not saving.has_fired or len(saves) != 2:  # noqa: PLR2004  both
        return False
    if not saves[1].error:
        message = "a save after one that Ctrl-C ended returns, and has not saved"
        told = {"the first save": saves[0].error.message if saves[0].error else "returned"}
        given: dict[str, Any] = {"newest": 4, "acknowledged": (2, 4), **told}
        subject.judge(subject.resume(), legal, {Outcome.NEW}, message, **given)
    return True


# -- a load changes nothing but the job ----------------------------------------------------------


@check("CKC-SIDE-002")
def test_loading_changes_no_file(subject: Subject) -> None:
    """A load, and the training that follows it, leave every file as it was.

    Why: memory that is mapped from the file is the file: the optimizer's next step writes into the
    checkpoint, or into what replaced it (O06, O08).
    How: resume from a copy of a good directory and train on without saving; compare every name and
    every byte. What changed by that may have been a recovery from a log, or what a database has
    beside its file while it is open: then a second resume must change nothing, and each step load
    as before. The same from the older step by its number: the newer one is not deleted before
    anything is saved (C14).
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    by_step = "explicit_step" in subject.info.capabilities
    for step in (None, 2) if by_step else (None,):
        subject.materialize(golden)
        which = "a load" if step is None else "a load of an older step"
        files = _changed_by_a_resume(subject, step)
        if files and (again := _changed_by_a_resume(subject, step)):
            evidence = {"files": again, "at first": files}
            raise Violation(f"{which} changes files", evidence=evidence)
        if files:
            _require_as_before(subject, legal, files, which)


def _require_as_before(
    subject: Subject, legal: Mapping[int, Leaves], files: list[str], which: str
) -> None:
    """Raise Violation unless each step loads as before a load changed files."""
    by_step = "explicit_step" in subject.info.capabilities
    for step in (2, 4) if by_step else (4,):
        result = subject.resume(step if by_step else None)
        arrived, state = oracle.arrival(result)
        if arrived != step or not oracle.same(state, legal[step], subject.holds):
            message = f"{which} changes files, and then step {step} does not load as before"
            raise Violation(message, evidence=subject.evidence(result, legal[step], files=files))


def _changed_by_a_resume(subject: Subject, step: int | None = None) -> list[str]:
    """Resume and train on without a save; say which names were changed by that, and how."""
    before = fingerprint(subject.root)
    resume = True if step is None else step
    result = subject.run(6, resume=resume, seed=OTHER_SEED, then=[Close()])
    undisturbed.ended(subject, result, "a resume without faults")
    return _changed(before, fingerprint(subject.root))


@check("CKC-SIDE-004")
def test_loading_leaves_the_parameters_of_a_live_job_as_saved(subject: Subject) -> None:
    """Right after a load into a job that has trained, the parameters are exactly the saved ones.

    Why: optimizer state was made, or taken, by a step with zero gradients and the real learning
    rate, and weight decay shrank the weights that had just been loaded (G01).
    How: save, change every tensor of the live job, load into it; digest the model at once, before
    any training step; then load into a fresh job of that process. The control is a new process.
    """
    load: list[AnyOp] = [Load(), ReadLeaves()]
    then: list[AnyOp] = [ReadLeaves(), Perturb(), *load, Fresh(seed=OTHER_SEED), *load]
    process_result = subject.run(3, (3,), then=then)
    undisturbed.ended(subject, process_result, "a load without faults")
    states = [(result.leaves or {})["model"] for result in process_result.all_of(LeavesResult)]
    places = ("the live job", "a new job of the process that saved")
    for where, state in zip(places, states[1:], strict=True):
        wrong = [name for name, digest in states[0].items() if state.get(name) != digest]
        if wrong:
            _require_in_a_new_process(subject, states[0])
            message = f"right after a load into {where} the model is not what was saved"
            raise Violation(message, evidence={"entries": wrong})


def _require_in_a_new_process(subject: Subject, model: Mapping[str, object]) -> None:
    """Raise Unknown if a new process does not load the model that was saved either."""
    result = subject.execute(Load(), ReadLeaves(), seed=OTHER_SEED)
    if (result.of(LeavesResult).leaves or {}).get("model") != model:
        raise bit_exact.model_trouble(subject)


@check("CKC-SIDE-010")
def test_a_load_leaves_what_surrounds_it(subject: Subject) -> None:
    """A load leaves modes, hooks, working directory, signal handlers and settings as they were.

    Why: a model that stays in evaluation mode, a handler that is replaced, or a relative path that
    means another file from then on show long after the load, and nowhere near it (G02, P02, B13).
    How: with a manager that is open, note what surrounds the job, load, look again; the handler of
    SIGTERM is the job's own. The same where the newest step is damaged, so that a load passes over
    it or refuses, and where nothing is whole.
    """
    golden = subject.golden()
    subject.materialize(golden)
    around = undisturbed.probe("around_a_load")
    result = subject.execute(
        undisturbed.probe("get_ready"), around, Load(), around, seed=OTHER_SEED
    )
    undisturbed.ended(subject, result, "a load without faults")
    before: Mapping[str, object] = result.of(ProbeResult, 1).value
    after: Mapping[str, object] = result.of(ProbeResult, 2).value
    _require_unchanged(before, after, "a load")
    _require_after_damage(subject, around)


def _require_unchanged(
    before: Mapping[str, object], after: Mapping[str, object], what: str
) -> None:
    """Raise Violation if something around a job is not as it was."""
    changed = [name for name, value in before.items() if after.get(name) != value]
    if changed:
        shown = {name: f"{before[name]} -> {after.get(name)}"[:300] for name in changed}
        raise Violation(f"{what} changes what surrounds the job", evidence={"changed": shown})


def _require_after_damage(subject: Subject, around: Probe) -> None:
    """Look around loads of which the newest step is damaged, then of which all is.

    What they give is not judged here, nor whether the process lives.
    """
    load = (around, Load(go_on=True), around)
    ways = {
        "a load beside a damaged newest step": spoil(subject),
        "a load of damaged steps": probe("scribble"),
    }
    for what, damage in ways.items():
        subject.materialize(subject.golden())
        ready = undisturbed.probe("get_ready")
        result = subject.execute(ready, damage, *load, seed=OTHER_SEED)
        seen = [one.value for one in result.all_of(ProbeResult)]
        if len(seen) == 4:  # noqa: PLR2004  both looks were reached
            _require_unchanged(seen[-2], seen[-1], what)


def spoil(subject: Subject) -> Probe:
    """Flip a bit in the middle of the largest file that the save of the newest step changed."""
    golden = subject.golden()
    old, folder = (golden.snapshot(step) for step in golden.saves)
    sizes = {name: (folder / name).stat().st_size for name in payload.changed(old, folder)}
    file = max(sizes, key=lambda name: sizes[name])
    return probe("flip", file=file, offset=sizes[file] // 2)


@check("CKC-SIDE-011")
def test_saves_and_loads_leak_no_descriptor(subject: Subject) -> None:
    """However often a job saves and loads, it has no more files open than after the first times.

    Why: a process may have some thousand files open; a job that leaks one in each save ends after
    days, in whatever opens the next one (O09).
    How: save twice, count the open descriptors, save six times more, count; do the same with loads.
    Garbage is collected before; one more for each time is a leak. Then with loads beside a damaged
    newest step, which pass over it or refuse.
    """
    count = undisturbed.probe("descriptors")
    saves: list[AnyOp] = [Save(step=step) for step in range(1, LEAKS + 3)]
    loads: list[AnyOp] = [Load()] * (LEAKS + 2)
    ops = [op for each in (saves, loads) for op in (*each[:2], count, *each[2:], count)]
    result = undisturbed.ended(
        subject, subject.execute(*ops), "one save after the other, then loads"
    )
    _require_none_left(result, 0, "saves")
    _require_none_left(result, 2, "loads")
    damage = spoil(subject)
    subject.materialize(subject.golden())
    beside: list[AnyOp] = [Load(go_on=True)] * (LEAKS + 2)
    result = subject.execute(damage, *beside[:2], count, *beside[2:], count, seed=OTHER_SEED)
    if len(result.all_of(ProbeResult)) == 3:  # noqa: PLR2004  it lived to the last count
        _require_none_left(result, 1, "loads beside a damaged step")


def _require_none_left(result: ProcessResult, at: int, what: str) -> None:
    """Raise Violation if more descriptors are open at a probe than at the one before it."""
    before, after = (Counter(result.of(ProbeResult, one).value) for one in (at, at + 1))
    grown = after.total() - before.total()
    if grown >= LEAKS:
        new = dict((after - before).most_common(4))
        raise Violation(f"{LEAKS} {what} leave {grown} descriptors open", evidence=new)


@check("CKC-SIDE-020")
def test_saves_leave_no_state_in_memory(subject: Subject) -> None:
    """However often a job saves, its tensors take as much memory as after the first saves.

    Why: each snapshot of a save in the background stayed in a list, or in the handle that the
    manager kept; the job was ended by the kernel after some hundred saves.
    How: save twice, add up the memory of all tensors, save six times more, add up again; where
    saves in the background are declared, the same with these. Garbage is collected before; a
    quarter more of what the job holds, for each save, is a leak.
    """
    ways: dict[str, Callable[[int], list[AnyOp]]] = {"saves": lambda step: [Save(step=step)]}
    if Capability.ASYNC in subject.info.capabilities:
        ways["saves in the background"] = lambda step: [BeginSave(step=step), EndSaves()]
    for what, save in ways.items():
        ops = [save(step) for step in range(1, LEAKS + 3)]
        for _ in range(2):  # a thread that is about to end may still hold what it has written
            before, after = _memory_of(subject, ops, what)
            if after - before < LEAKS * before // 4:
                break
        else:
            evidence = {"bytes of tensors after two": before, "after eight": after}
            raise Violation(f"{LEAKS} {what} leave their tensors in memory", evidence=evidence)


def _memory_of(subject: Subject, saves: Sequence[Sequence[AnyOp]], what: str) -> tuple[int, int]:
    """Return the bytes of all tensors of a process after two saves, and after all."""
    subject.reset()
    count = probe("tensor_bytes")
    ops = [*chain(*saves[:2]), count, *chain(*saves[2:]), count]
    result = undisturbed.ended(subject, subject.execute(*ops), f"{what}, one after the other")
    before, after = (int(str(one.value)) for one in result.all_of(ProbeResult))
    return before, after


@check("CKC-SIDE-019")
def test_others_may_read_what_was_saved_as_the_umask_lets_them(subject: Subject) -> None:
    """Files and directories of a step may be read by whom the umask of the job lets read new ones.

    Why: `tempfile` makes files of mode 0600 and directories of 0700, whatever the umask is; renamed
    to a step they stay so, and an evaluation of another user cannot open them.
    How: save with umask 022; every file that is not empty, and the directories that it is in, are
    to be readable by all.
    """
    subject.reset()
    result = subject.execute(probe("mask", bits=0o022), Train(n=2), Save(), Close())
    undisturbed.ended(subject, result, "a save")
    if hidden := _unreadable(subject.root):
        message = "what was saved is readable by its owner alone, and the umask was 022"
        raise Violation(message, evidence={"modes": dict(list(hidden.items())[:8])})


def _unreadable(root: Path) -> dict[str, str]:
    """Return files that are not empty, and folders that they are in, which others may not read."""
    files = [path for path in trees.files(root) if path.stat().st_size]
    folders = {above for path in files for above in path.parents if above.is_relative_to(root)}
    wanted = dict.fromkeys(files, 4) | dict.fromkeys(folders - {root}, 5)
    modes = {path: path.stat().st_mode & 0o777 for path in wanted}
    return {
        path.relative_to(root).as_posix(): f"{modes[path]:04o}"
        for path, bits in wanted.items()
        if modes[path] & bits != bits
    }


# -- files ---------------------------------------------------------------------------------------


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Name what was changed, removed or added, and say which."""
    names = [n for n in sorted(before.keys() | after.keys()) if before.get(n) != after.get(n)]
    how = (
        "removed" if n not in after else "added" if n not in before else "changed" for n in names
    )
    return [f"{name} ({one})" for name, one in zip(names, how, strict=True)]


@check("CKC-SIDE-003")
def test_an_acknowledged_step_stays_as_it_was_saved(subject: Subject) -> None:
    """Neither later training nor a later save, nor a kill in it, changes what a step loads.

    Why: a snapshot that is a reference changes with the live state (D03); a step that is written
    again for the next one is lost with it (VX8, LX10; A10). How steps share files is the manager's
    own affair: what counts is what loads.
    How: save, train on, close, load in a new process. Where a save goes on after it has returned,
    let no other thread run, or no call of another process be made, until the job has trained on and
    changed every tensor in place, and what is in lists of the optimizer's state; two controls let
    the save end first, in the background and not. Where steps are kept, load the first step after
    the second save, and after kills in that save; compare bit for bit.
    """
    golden = subject.golden()
    state = subject.loaded(golden, 2)
    trees.clear(subject.root)
    result = subject.run(5, (2,), snapshots=str(_folder(subject)), then=[Close()])
    undisturbed.ended(subject, result, "a run with one save")
    resumed = subject.resume()
    changed = _differing(_folder(subject) / "2", subject.root)
    parts: list[Callable[[], None]] = [partial(_is_given, subject, resumed, state, changed)]
    if result.of(RunResult).in_background:  # first: how soon a save has written is by chance there
        parts.insert(0, partial(_is_kept_while_it_is_written, subject))
    if "explicit_step" in subject.info.capabilities:
        parts.append(partial(_is_kept_by_saves, subject, state))
    _require_all(parts)


def _is_given(subject: Subject, resumed: ProcessResult, state: Leaves, changed: list[str]) -> None:
    """Raise Violation unless a load gives step 2 as it was saved."""
    if not _gives(subject, resumed, state):
        message = "training on changes what a step loads"
        raise Violation(message, evidence=_evidence(subject, resumed, state, changed))


def _require_all(parts: Sequence[Callable[[], None]]) -> None:
    """Run each part of a check: what one cannot tell hides no violation that another one sees."""
    doubts: list[Unknown] = []
    for part in parts:
        try:
            part()
        except Unknown as doubt:
            doubts.append(doubt)
    if doubts:
        raise joined(doubts)


def _is_kept_while_it_is_written(subject: Subject) -> None:
    """Raise Violation if what the job changes before a save has written is in the step.

    The control lets the save end first. Who keeps no lists in an optimizer's state, or refuses
    them, is asked without. Raises Unknown where no save was held, or none is the control of it.
    """
    lists = (undisturbed.probe("keep_lists"), undisturbed.probe("change_lists"))
    for keep, change in (([lists[0]], [lists[1]]), ([], [])):
        plain = _changed_after(subject, [*keep, Save()], change)
        if plain.state:
            _require_kept(subject, keep, change, plain.state)
            if plain.loading.went_well:
                return
    raise control_failed(f"a job that was changed after its save: {plain.told(subject)}")


def _require_kept(
    subject: Subject, keep: Sequence[Probe], change: Sequence[Probe], wanted: Leaves
) -> None:
    """Raise Violation unless a save that stands while the job changes is what was wanted."""
    late = BeginSave(faults=(begun_by(subject).late,))
    held = _changed_after(subject, [*keep, late], change)
    if held.state and oracle.same(held.state, wanted, subject.holds):
        require_held(subject, held.saving)
        return
    evidence = subject.evidence(held.loading, wanted, saved=held.told(subject))
    ended = _changed_after(subject, [*keep, BeginSave(), EndSaves()], change)
    if not ended.state or not oracle.same(ended.state, wanted, subject.holds):
        reason = "a save in the background that had ended before the job was changed"
        raise control_failed(f"{reason}: {ended.told(subject)}")
    what = "is in the step" if held.state else "makes it fail"
    message = f"what the job changes while a save goes on {what}"
    raise Violation(message, evidence=evidence)


@dataclass(frozen=True)
class Kept:
    """A save of step 2 by a job that goes on and changes, and a load in a new process."""

    saving: ProcessResult
    loading: ProcessResult

    @property
    def state(self) -> Leaves:
        """What was loaded; nothing, unless the save went well."""
        went_well = self.saving.went_well and not error_of(self.saving)
        return oracle.arrival(self.loading)[1] if went_well else {}

    def told(self, subject: Subject) -> str:
        """Say how the save ended, and the load."""
        saved = error_of(self.saving) or subject.tell(self.saving)
        return f"{saved}; a load gives {subject.tell(self.loading)}"


def _changed_after(subject: Subject, saving: Sequence[AnyOp], change: Sequence[AnyOp]) -> Kept:
    """Save step 2, change the job while that may go on, and resume in a new process."""
    trees.clear(subject.root)
    ops: list[AnyOp] = [Train(n=2), *saving, *change, Train(n=1), Perturb(), EndSaves(), Close()]
    return Kept(subject.execute(*ops), subject.resume())


def _is_kept_by_saves(subject: Subject, state: Leaves) -> None:
    """Raise Violation unless step 2 loads by its number after the save of step 4, and after kills.

    Raises Unknown where a number is not what decides which step is served, and where nothing loads
    after a kill, by its number or not: CKC-INTN-001 and CKC-ATOM-001 tell of that.
    """
    newest = subject.golden().snapshot(4)
    crashes = kills.crashes(subject, SaveKind.NEW)
    left = [(newest, "the save of step 4")]
    left += [
        (crash.folder, f"a kill {crash.point.name} in the save of step 4") for crash in crashes
    ]
    cases = [Case(folder, step=2) for folder, _ in left]
    results = resume_each(subject, cases, lambda result: _gives(subject, result, state))
    for (folder, what), resumed in zip(left, results, strict=True):
        if not _gives(subject, resumed, state):
            controls.require(explicit_step.test_an_explicit_step_is_served_whole, subject)
            if folder != newest:
                controls.require(kills.test_a_kill_during_a_save_costs_at_most_that_step, subject)
            trees.materialize(folder, subject.root)  # where a bundle takes it from
            changed = _differing(subject.golden().snapshot(2), folder)
            evidence = _evidence(subject, resumed, state, changed)
            raise Violation(f"{what} costs step 2", evidence=evidence)


def _folder(subject: Subject) -> Path:
    folder = subject.scratch / "snapshots"
    folder.mkdir(exist_ok=True)
    return folder


def _differing(before: Path, after: Path) -> list[str]:
    """Name files that are not any more what they were: a hint, where a step does not load."""
    old, new = fingerprint(before), fingerprint(after)
    return [name for name, digest in old.items() if new.get(name) != digest]


def _gives(subject: Subject, resumed: ProcessResult, state: Leaves) -> bool:
    step, arrived = oracle.arrival(resumed)
    return step == 2 and oracle.same(arrived, state, subject.holds)  # noqa: PLR2004  the first save


def _evidence(
    subject: Subject, resumed: ProcessResult, state: Leaves, changed: list[str]
) -> dict[str, object]:
    files = {"files that changed": changed[:8]} if changed else {}
    return {**subject.evidence(resumed, state), **files}


@check("CKC-SIDE-005")
def test_files_are_as_large_as_the_state(subject: Subject) -> None:
    """A view is saved as what it shows, not as the storage behind it.

    Why: each of many files held the whole buffer that its views were cut from (O05).
    How: save a job with a buffer of 8 elements that is cut from 4 MiB; compare with the size of a
    save without it.
    """
    golden = subject.golden()
    plain = _size(golden.snapshot(2))
    result = subject.execute(undisturbed.probe("add_view"), Run(until=2, save_at=(2,)), Close())
    undisturbed.ended(subject, result, "a save of a view")
    hidden: int = result.of(ProbeResult).value
    grown = _size(subject.root) - plain
    if grown > SLACK:
        raise Violation(
            f"32 bytes more of state make {grown} bytes more of files",
            evidence={"storage behind the view": hidden},
        )


def _size(root: Path) -> int:
    return sum(path.stat().st_size for path in trees.files(root))


@check("CKC-SIDE-006")
def test_nothing_is_written_elsewhere(subject: Subject) -> None:
    """Nothing is left outside of the manager's directory, neither by a save nor by a load.

    Why: a pointer that was written relative to the working directory is found from there only
    (B13); what is left in a temporary directory of the node fills it, step by step.
    How: point working directory, home and temporary directory of the child to empty folders; save,
    restart, load; list the folders and the parent of the root.
    """
    folder = subject.scratch / "elsewhere"
    folder.mkdir()
    move = undisturbed.probe("move_in", folder=str(folder))
    result = subject.execute(move, Run(until=2, save_at=(2,)), Close())
    undisturbed.ended(subject, result, "a save from another working directory")
    resumed = subject.execute(move, ARRIVE, Close(), seed=OTHER_SEED)
    left = [path.relative_to(folder).as_posix() for path in folder.glob("*/**/*")]
    left += [path.name for path in subject.root.parent.iterdir() if path != subject.root]
    if left:
        raise Violation(
            "files are left outside of the directory",
            evidence=subject.evidence(resumed, left=sorted(left)[:8]),
        )


@check("CKC-SIDE-007")
def test_two_managers_in_one_process_do_not_mix(subject: Subject) -> None:
    """Two live managers on two directories save two jobs as if each were alone.

    Why: a plan that is cached for the whole process made the second manager write the layout, or
    the contents, of the first one (J09).
    How: open two managers in one child, save different jobs in turn; resume each in a new child.
    """
    other = subject.scratch / "other"
    other.mkdir()
    result = subject.execute(undisturbed.probe("two_managers", other=str(other), kind="conv"))
    states: dict[str, Leaves] | None = result.of(ProbeResult).value
    if states is None:
        _control_of_two(subject)
        raise Violation("two managers do not save", evidence=subject.evidence(result))
    here = subject.resume()
    there = subject.resume(kind="conv", root=str(other), seed=OTHER_SEED + 1)
    for name, step, resumed in (("here", 4, here), ("there", 3, there)):
        arrived, state = oracle.arrival(resumed)
        if arrived != step or state["model"] != states[name]["model"]:
            _control_of_two(subject)
            raise Violation(
                "a directory does not hold the job that its own manager saved",
                evidence=subject.evidence(resumed, manager=name, saved=step),
            )


@check("CKC-SIDE-007")
def test_a_failed_save_of_another_manager_is_its_own(subject: Subject) -> None:
    """A save of another manager of the same process that fails costs this one nothing.

    Why: what had failed and was not told yet was kept for the process, not by the manager: the job
    ended with the error of another one (J09).
    How: open a second manager on another directory, and save there while no file may grow, in the
    background where that is declared; nobody asks how that ended. Then the first manager saves, and
    closes, without an error, and a new process gets what it saved.
    """
    subject.need(shape="manager")
    legal = subject.legal(subject.golden())
    subject.reset()
    other = subject.scratch / "other"
    other.mkdir()
    fail = undisturbed.probe("failing_neighbour", other=str(other))
    run = (Run(until=2, save_at=(2,)), Train(n=2), fail)
    saving = subject.execute(*run, Save(go_on=True), Close(go_on=True))
    if not saving.reached(ProbeResult) or saving.of(ProbeResult).error:
        raise control_failed(f"another manager is not opened: {subject.tell(saving)}")
    if not (told := saving.of(ProbeResult).value):
        raise NotApplicable("a save of another manager, while no file may grow, does not fail")
    message = "after a failed save of another manager this one does not save"
    is_ended = saving.exit_kind is ExitKind.ENDED and saving.reached(CloseResult)
    error = is_ended and (saving.of(SaveResult).error or saving.of(CloseResult).error)
    if error or not is_ended:
        given = {"the other one": told, "this one": error.message if error else "does not end"}
        raise Violation(message, evidence=subject.evidence(saving, **given))
    subject.judge(subject.resume(), legal, {Outcome.NEW}, message, newest=4, acknowledged=(2, 4))


def _control_of_two(subject: Subject) -> None:
    """Verify that the model comes back, in both kinds of job, when there is one manager only."""
    for kind in (DEFAULT_KIND, "conv"):
        golden = subject.golden(kind=kind)
        if subject.loaded(golden, 4)["model"] != golden.at[4]["model"]:
            raise bit_exact.model_trouble(subject)
