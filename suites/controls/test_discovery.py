"""Discovery: which checkpoint a restart takes, whatever else lies in the directory."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import (
    REFUSALS,
    NotApplicable,
    Outcome,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import payload
from ckpt_conformance.harness import probes
from ckpt_conformance.harness.messages import (
    Close,
    CopyOut,
    ExitKind,
    Fresh,
    LeavesResult,
    Load,
    LoadResult,
    Materialize,
    Perturb,
    Probe,
    ReadLeaves,
    Run,
    RunResult,
    Save,
    Steps,
    StepsResult,
    Train,
    whole,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import controls, names, oracle, resumption
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED
from ckpt_conformance.subject.undisturbed import saves_leave_the_run
from ckpt_conformance.suites.controls import copied_steps, foreign_names, no_load, step_numbers
from ckpt_conformance.suites.controls import test_bit_exact_resume as bit_exact
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Leaves
    from ckpt_conformance.subject.names import StepName
    from ckpt_conformance.subject.subject import Golden, Subject

    Way = tuple[str, Callable[[], object]]  # what was done to the directory, and how

WORSE = {Outcome.COLD_START, Outcome.SILENT_WRONG, Outcome.LOST_STEP}
NEVER_WRONG = {Outcome.NEW, Outcome.PREVIOUS, Outcome.LOST_STEP, *REFUSALS}
COMPONENTS = ("model", "optimizer", "scheduler", "scaler", "ema", "loader", "rng", "extra")
CHANGE = "ckpt_conformance.subject.observing:change_component"
DEADLINE = 20.0  # seconds of two processes that wait for each other
DRAWN = {"loader", "rng", "gradients"}  # what the first batch after a load changes


def judge(
    subject: Subject,
    result: ProcessResult,
    legal: Mapping[int, Leaves],
    allowed: set[Outcome],
    message: str,
    **evidence: object,
) -> None:
    """Judge a resume where the saves of steps 2 and 4 had returned, and nothing is newer."""
    subject.judge(result, legal, allowed, message, newest=4, acknowledged={2, 4}, **evidence)


@check("CKC-DISC-001")
def test_the_newest_step_is_the_largest_number(subject: Subject) -> None:
    """After saves of steps 9, 10, 99 and 100 a restart takes 100.

    Why: names sorted as text put step 500 after step 2500, and the run goes back (B10, C08).
    How: save across powers of ten (a manager also beyond the padding), restart, load the latest.
    Who refuses a number of many digits, also alone, keeps the promise with those saved before it.
    """
    steps: tuple[int, ...] = step_numbers.POWERS
    if subject.info.shape == "manager":
        steps += step_numbers.WIDER
        result = step_numbers.saved(subject, *steps)
    else:
        result = subject.run(max(steps), steps, then=[Close()])
    saved = result.steps_of("acknowledged")
    resumed = subject.resume()
    if not result.went_well and not step_numbers.is_refused(subject, steps[len(saved) :]):
        raise smoke.trouble(subject, result)
    newest = max(steps if result.went_well else saved)
    if oracle.step_of(resumed) != newest:
        evidence = subject.evidence(resumed, saved=saved)
        no_load.is_told_by_its_owner(subject, resumed)
        raise Violation(f"step {newest} is the newest and was not taken", evidence=evidence)


def incomplete(subject: Subject, golden: Golden) -> list[Way]:
    """Return ways to leave step 6 empty or half there, beside the whole steps of `golden`."""
    step_names = names.require_step_names(golden, 4)
    lost = names.pointers(golden, 4)

    def lay(empty: list[StepName], without: list[str]) -> None:
        subject.materialize(golden)
        names.plant_incomplete(subject.root, empty, 6)
        for path in without:
            (subject.root / path).unlink()

    removed = f", and without the files {', '.join(lost)}" if lost else ""
    ways: list[Way] = [(f"step 6 is empty{removed}", lambda: lay(step_names, lost))]
    if lost:
        ways.append(("step 6 is empty", lambda: lay(step_names, [])))
    if len(step_names) > 1:
        ways += [(f"{name.of(6)} is empty", partial(lay, [name], [])) for name in step_names]
    return ways


def chosen(subject: Subject, ways: list[Way], quick: int) -> list[Way]:
    """Choose the first way, which is the worst, and some of the others by the seed."""
    return [*ways[:1], *subject.sample(ways[1:], quick - 1)]


@check("CKC-DISC-002")
def test_an_empty_newest_step_is_never_served(subject: Subject) -> None:
    """A checkpoint of which only the names exist is not served, and is no reason to begin anew.

    Why: a read error taken for absence begins at step 0 and overwrites what was there (B08, B05).
    How: plant empty files and directories under the names of the next step, restart.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    for way, lay in chosen(subject, incomplete(subject, golden), quick=2):
        lay()
        message = "an empty newest checkpoint misleads the restart"
        judge(subject, subject.resume(), legal, NEVER_WRONG, message, planted=way)


@check("CKC-DISC-010")
def test_an_incomplete_newest_step_hides_no_whole_one(subject: Subject) -> None:
    """With the newest checkpoint incomplete, the newest whole one is loaded.

    Why: a job that dies on its half-written newest directory waits until a person deletes it
    (B07, A09); test_resume_falls_back_to_newest_complete of K019.
    How: plant empty names of the next step; or leave out what the newest save wrote last. This is
    about a refusal: what loses a step is CKC-DISC-002 and CKC-DISC-014.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    for way, lay in chosen(subject, incomplete(subject, golden), quick=2):
        lay()
        result = subject.resume()
        outcome = subject.classify(result, legal, newest=4, acknowledged={2, 4})
        if outcome in WORSE:
            about = (
                test_an_empty_newest_step_is_never_served,
                test_an_incomplete_newest_step_costs_no_whole_one,
            )
            raise controls.blame(subject, f"{outcome} instead of a refusal", *about)
        _expect_whole(subject, result, legal, {Outcome.NEW}, way)
    for way, path in subject.sample(_written_by(golden, 4), quick=1):
        subject.materialize(golden)
        path_of = subject.root / path
        shutil.rmtree(path_of) if path_of.is_dir() else path_of.unlink()
        allowed = {Outcome.NEW, Outcome.LOST_STEP}  # a file that nobody needs may be missing
        _expect_whole(subject, subject.resume(), legal, allowed, way)


@check("CKC-DISC-014")
def test_an_incomplete_newest_step_costs_no_whole_one(subject: Subject) -> None:
    """With the newest checkpoint incomplete, a restart neither goes further back nor spoils others.

    Why: a fallback that skips one step too many throws an acknowledged one away, without a word;
    one that cleans up may take the whole ones with it (B07, B05).
    How: plant empty names of the next step, restart: an older step than the newest whole one is a
    loss. A restart that refuses has left the newest whole step where it was.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    own = names.require_step_names(golden, 4)
    message = "an incomplete newest checkpoint costs the whole one before it"
    for way, lay in chosen(subject, incomplete(subject, golden), quick=2):
        lay()
        before = _inside(subject, own)
        result = subject.resume()
        judge(subject, result, legal, {*Outcome} - {Outcome.LOST_STEP}, message, planted=way)
        lost = [name for name in before if name not in _inside(subject, own)]
        if result.error and lost:
            evidence = subject.evidence(result, planted=way, deleted=lost[:8])
            raise Violation("a restart that refuses deletes the whole step", evidence=evidence)


def _inside(subject: Subject, own: list[StepName]) -> list[str]:
    """List what is there of a step's own names."""
    listed = trees.listing(subject.root)
    folders = tuple(f"{name.path}/" for name in own)
    paths = {name.path for name in own}
    return [name for name in listed if name in paths or name.startswith(folders)]


def _written_by(golden: Golden, step: int) -> list[tuple[str, str]]:
    """List (what to say, path) of each file below a step's own names, to be left out in turn."""
    root, files = golden.snapshot(step), list[tuple[str, str]]()
    for name in names.of_step(golden, step):
        inside = sorted(path for path in (root / name.path).rglob("*") if path.is_file())
        for path in inside or [root / name.path]:
            relative = path.relative_to(root).as_posix()
            files.append((f"step {step} without {relative}", relative))
    return files


def _expect_whole(
    subject: Subject,
    result: ProcessResult,
    legal: Mapping[int, Leaves],
    allowed: set[Outcome],
    way: str,
) -> None:
    message = "an incomplete newest checkpoint hides the whole one"
    judge(subject, result, legal, allowed, message, planted=way)


def _spoil(path: Path, older: Path, fault: str) -> None:
    """Lose, age or garble one pointer, a file or a link."""
    is_link = path.is_symlink()
    old = os.fsencode(path.readlink()) if is_link else path.read_bytes()
    path.unlink()
    if fault == "stale" and older.is_symlink():
        path.symlink_to(older.readlink())
    elif fault == "stale":
        path.write_bytes(older.read_bytes())
    elif is_link and fault != "lost":
        path.symlink_to("checkpoint-of-nobody")
    elif fault != "lost":
        path.write_bytes(old.replace(b"4", b"99") if fault == "other" else b"\xff\xfe{\x00 no name")


def _spoiled(subject: Subject, golden: Golden) -> list[Way]:
    """Return ways to spoil the pointers: all of them at once, and each one."""
    names.require_step_names(golden, 4)
    pointers, old = names.pointers(golden, 4), golden.snapshot(2)

    def way(fault: str, paths: list[str]) -> Way:
        def spoil() -> None:
            subject.materialize(golden)
            for path in paths:
                _spoil(subject.root / path, old / path, fault)

        return f"{fault}: {', '.join(paths)}", spoil

    faults = ("other", "garbled", "lost")
    ways = [way("stale", pointers), way("lost", pointers)]
    return ways + [way(fault, [path]) for fault in faults for path in pointers] if pointers else []


@check("CKC-DISC-003")
def test_a_spoiled_pointer_hides_nothing(subject: Subject) -> None:
    """Without its pointer, with a stale or a garbled one, the newest whole step is loaded.

    Why: a fallback that is weaker than the main rule walks into wreckage, or back (B05, B01).
    How: delete, age and garble each small file that belongs to no step and that the newest save
    changed, restart.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    ways = _spoiled(subject, golden)
    if not ways:
        raise NotApplicable("the manager keeps no pointer beside its checkpoints")
    for way, spoil in [*ways[:2], *subject.sample(ways[2:], quick=1)]:
        spoil()
        message = "a spoiled pointer misleads the restart"
        judge(subject, subject.resume(), legal, {Outcome.NEW}, message, spoiled=way)


@check("CKC-DISC-004")
def test_a_tree_resumes_from_another_place(subject: Subject) -> None:
    """A directory that was moved, or that is reached from another working directory, resumes.

    Why: an absolute path, or one relative to where the job happened to run, is stored in a pointer
    and means nothing after a move (B12, B13, B16).
    How: move the root away and load there; save with a relative root, load it from elsewhere.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    subject.materialize(golden)
    elsewhere = subject.scratch / "moved" / "to here"
    elsewhere.parent.mkdir()
    shutil.move(subject.root, elsewhere)
    message = "a directory that was moved does not resume"
    judge(subject, subject.resume(root=elsewhere), legal, {Outcome.NEW}, message)
    subject.root.mkdir()
    near, far, there = _near_and_far(subject)
    subject.execute(near, Run(until=4, save_at=(2, 4)), Close(), root=subject.root.name)
    result = subject.execute(far, Run(resume=True, stop_after=0), root=there, seed=OTHER_SEED)
    message = "a relative directory does not resume from another working directory"
    judge(subject, result, legal, {Outcome.NEW}, message)


def _near_and_far(subject: Subject) -> tuple[Probe, Probe, Path]:
    """Return how to enter the parent of the root, and another directory; the root seen from there.

    From the parent the root is its own name.
    """
    near, far = (
        probe("enter", folder=str(place)) for place in (subject.root.parent, subject.folder)
    )
    return near, far, subject.root.relative_to(subject.folder)


@check("CKC-DISC-016")
def test_a_relative_directory_stays_where_it_was_opened(subject: Subject) -> None:
    """A job that changes its working directory goes on to save where it began.

    Why: a path that is kept as it was given means another place from then on: the saves of a job
    lie in two directories, and a restart finds the older ones (B13).
    How: open with a relative root, save, change the working directory, save again; restart.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    trees.clear(subject.root)
    near, far, _ = _near_and_far(subject)
    moved = (near, Run(until=2, save_at=(2,)), far, Run(until=4, save_at=(4,)))
    result = subject.execute(*moved, Close(), root=subject.root.name)
    message = "after a change of the working directory a job saves to another place"
    evidence = {"saving": subject.tell(result)}
    judge(subject, subject.resume(), legal, {Outcome.NEW}, message, **evidence)


@check("CKC-DISC-005")
def test_foreign_names_disturb_nothing(subject: Subject) -> None:
    """Names that the manager did not write change neither its saves nor its discovery.

    Why: one `step_tmp` beside the steps made a save raise ValueError (KX8); a stray sibling was
    merged into the weights (R02); a link onto itself has no end (B14).
    How: plant look-alikes, other tools' names, dangling links and loops; save, restart, load. What
    lies in folders that the manager makes comes when these are there: load and save beside it.
    """
    golden = subject.golden()
    legal = subject.legal(golden, 4)
    trees.clear(subject.root)
    similar = [path for name in names.of_step(golden, 4) for path in names.lookalikes(name)]
    beside = [path for path in similar if "/" not in path]
    planted = names.plant_all(subject.root, [*names.strange(subject.seed, 12), *beside])
    shown, count = planted[:4], len(planted)
    result = subject.run(4, (2, 4), then=[Close()])
    if not result.went_well:
        evidence = subject.evidence(result, planted=shown, count=count)
        raise Violation("a foreign name breaks the save", evidence=evidence)
    subject.judge(
        subject.resume(),
        legal,
        {Outcome.NEW},
        "a foreign name disturbs discovery",
        newest=4,
        acknowledged={4},
        planted=shown,
        count=count,
    )
    if len(beside) < len(similar):
        foreign_names.require_undisturbed_within(subject, golden, legal, similar)


@check("CKC-DISC-006")
def test_times_of_files_do_not_matter(subject: Subject) -> None:
    """Discovery goes by steps, not by the times of files.

    Why: a copy, a restored backup or a mounted store sets times in any order (C05).
    How: make the times of all files equal, then reversed; restart, load the latest.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    names.require_step_names(golden, 4)
    for times in ("equal", "reversed"):
        subject.materialize(golden)
        set_times(subject.root, golden, reverse=times == "reversed")
        message = "times of files mislead the restart"
        judge(subject, subject.resume(), legal, {Outcome.NEW}, message, times=times)


def set_times(root: Path, golden: Golden, *, reverse: bool) -> None:
    """Make all times equal, long ago; or let what belongs to an older step look newer."""
    at = {name.path: step for step in golden.saves for name in names.of_step(golden, step)}
    for base, folders, files in os.walk(root, topdown=False):
        for name in (*folders, *files):
            path = os.path.join(base, name)  # noqa: PTH118  os.walk gives strings
            relative = os.path.relpath(path, root)
            steps = [step for mine, step in at.items() if f"{relative}/".startswith(f"{mine}/")]
            seconds = 1_000_000_000 - (max(steps, default=0) * 1_000 if reverse else 0)
            os.utime(path, (seconds, seconds), follow_symlinks=False)


@check("CKC-DISC-007")
def test_nothing_to_load_is_refused(subject: Subject) -> None:
    """A load from a directory without a checkpoint refuses.

    Why: a wrong path ended in a warning, and the run began from scratch (B09).
    How: load the latest from an empty directory; the control is that what was saved loads.
    """
    result = subject.resume()
    if result.exit_kind is not ExitKind.ENDED:
        message = "a load from an empty directory does not end well"
        raise Violation(message, evidence=subject.evidence(result))
    if result.error is None:
        raise Violation("an empty directory was loaded", evidence=subject.evidence(result))
    if trouble := resumption.plain_trouble(subject):
        raise control_failed("what was saved is refused, too", trouble)


@check("CKC-DISC-008")
def test_the_last_save_of_a_step_is_served(subject: Subject) -> None:
    """When a step is saved twice, the second save is what a load gives.

    Why: a stale sibling, or half of an older save of the same name, was preferred (R01, A10).
    How: save step 4, change every tensor, save step 4 again, restart; the control saved it once.
    Then change one component after the other and save the step each time; then load, save and load
    by one manager. Where a load gives another state than was saved, the control saves each into an
    empty directory. Then one manager meets step 4 with a flipped bit in a file of its own, the
    largest one, and another one in each that holds tensors, and saves the same step 4 once more.
    """
    again = (Perturb(), Save(step=4))
    subject.execute(Train(n=4), Save(step=3), *again, Close())
    control = subject.resume()
    if oracle.step_of(control) != 4:  # noqa: PLR2004  the step that was saved last
        raise smoke.trouble(subject, control, test_the_newest_step_is_the_largest_number)
    legal = {4: whole(control.of(RunResult).states[4])}
    subject.reset()
    saved = subject.execute(Train(n=4), Save(step=4), *again, Close())
    if saved.steps_of("acknowledged") != [4, 4]:
        raise NotApplicable(f"the manager saves no step a second time: {subject.tell(saved)}")
    message = "the second save of a step is not what is loaded"
    result = subject.resume()
    subject.judge(result, legal, {Outcome.NEW}, message, newest=4, acknowledged={4})
    _require_each_second_save(subject)
    _require_a_save_over_damage(subject)


def _require_each_second_save(subject: Subject) -> None:
    """Raise Violation if a save over a step is not what is loaded, whatever differs in it."""
    over = _saved_one_by_one(subject, "over")
    wrong = [what for what, (state, loaded) in over.items() if state != loaded]
    alone = _saved_one_by_one(subject, "alone", is_alone=True) if wrong else {}
    lost = [what for what in wrong if what in alone and alone[what][1] != over[what][1]]
    if lost:
        told = {
            what: oracle.differences(over[what][1], over[what][0], subject.holds)
            for what in lost[:2]
        }
        message = f"a second save of a step, {lost[0]} is not what is loaded"
        raise Violation(message, evidence={"loaded != saved": told})


def _saved_one_by_one(
    subject: Subject, name: str, *, is_alone: bool = False
) -> dict[str, tuple[Leaves, Leaves]]:
    """Save step 4 again and again; give what was saved each time, and what a load gives of it.

    Each save differs in one component from the one before; then the manager loads the last one,
    the job is another one, and it saves and loads once more. With `is_alone` each save finds an
    empty directory.
    """
    parts = [part for part in COMPONENTS if part in subject.holds]
    folders = [subject.scratch / name / part for part in parts]
    empty = subject.scratch / name / "empty"
    empty.mkdir(parents=True)
    first: list[AnyOp] = [Materialize(tree=str(empty))]
    ops: list[AnyOp] = [*first, Train(n=4), Save(step=4)]
    looks: list[AnyOp] = []
    for part, folder in zip(parts, folders, strict=True):
        change = Probe(probe=CHANGE, args={"component": part}, go_on=True)
        ops += [*(first if is_alone else ()), change, ReadLeaves(), Save(step=4)]
        ops += [CopyOut(tree=str(folder))]
        looks += [Materialize(tree=str(folder)), Fresh(), Load(), ReadLeaves()]
    ops += first if is_alone else [Load()]
    ops += [Perturb(), ReadLeaves(), Save(step=4), Fresh(seed=OTHER_SEED), Load(), ReadLeaves()]
    saving = _states(subject, subject.execute(*ops))
    loading = _states(subject, subject.execute(*looks, seed=OTHER_SEED))
    what = [f"in which only {part} is another," for part in parts]
    found = dict(zip(what, zip(saving, loading, strict=False), strict=False))
    if len(saving) == len(parts) + 2:
        found["after a load by the same manager,"] = (saving[-2], saving[-1])
    return found


def _states(subject: Subject, result: ProcessResult) -> list[Leaves]:
    """Return the held components of each state that a child digested."""
    states = [whole(one.leaves or {}) for one in result.all_of(LeavesResult)]
    return [oracle.held(state, subject.holds) for state in states]


def _require_a_save_over_damage(subject: Subject) -> None:
    """Raise Violation if a damaged step is not served after the manager that met it saved it anew.

    Only a file that the first save of the step has made is damaged: of one that holds other steps
    too, a save need not know which part it may rely on. A save that raises has not been made.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    known: Any = {"newest": 4, "acknowledged": {2, 4}}
    for damage in _damages_of_the_newest(golden):
        for result in _saved_over_damage(subject, damage):
            if subject.classify(result, legal, **known) is Outcome.NEW:
                continue
            plain = [one for step in (4, 2) for one in _saved_over_damage(subject, (), step)]
            given = [subject.classify(one, legal, **known) for one in plain]
            if {*given} != {Outcome.NEW}:
                reason = (
                    f"without damage, too, a load after a load and a save of step 4 gives {given}"
                )
                checks = (saves_leave_the_run, test_the_newest_step_is_the_largest_number)
                raise controls.blame(subject, reason, *checks)
            message = "a step that was damaged is saved anew, acknowledged, and not what is loaded"
            files = [one.args["file"] for one in damage]
            evidence = subject.evidence(result, legal[4], damaged=files[:8])
            doubt = controls.blame(subject, message, test_a_resumed_run_overwrites_no_other_step)
            raise doubt if doubt.see else Violation(message, evidence=evidence)


def _damages_of_the_newest(golden: Golden) -> list[list[Probe]]:
    """Make flips of bits in files that are there since the newest save: what is tried one by one.

    First in the largest one, then at once in all that hold tensors: who finds the first one damaged
    may write all anew, and use what it has of the others all the same.
    """
    old, new = (golden.snapshot(step) for step in golden.saves)
    files = {path.relative_to(new).as_posix(): path.stat().st_size for path in trees.files(new)}
    made = [name for name in files if files[name] and not os.path.lexists(old / name)]
    if not made:
        return []
    largest = max(made, key=lambda name: files[name])
    found = payload.find(new, golden.payload_samples[golden.saves[-1]], made)
    middles = {place.file: place.offset + place.length // 2 for place in found}
    flips = [probe("flip", file=file, offset=offset) for file, offset in middles.items()]
    first = [probe("flip", file=largest, offset=files[largest] // 2)]
    return [first, flips] if middles.keys() - {largest} else [first]


def _saved_over_damage(
    subject: Subject, damage: Sequence[Probe], newest: int = 4
) -> list[ProcessResult]:
    """Let one manager load what is damaged, save step 4 as it was, and load; then another one.

    The same job makes the same step 4. Empty where the save raises, or the load before ends all.
    Before it the steps up to `newest` are there: a load that falls back has loaded the older one.
    """
    subject.materialize(subject.golden(), newest)
    again = Run(until=4, save_at=(4,), go_on=True)
    look = (Fresh(seed=OTHER_SEED), Run(resume=True, stop_after=0, go_on=True))
    result = subject.execute(*damage, Load(go_on=True), Fresh(), again, *look, Close(), *look)
    runs = result.all_of(RunResult)
    if result.exit_kind is not ExitKind.ENDED or result.steps_of("acknowledged") != [4]:
        return []
    return [replace(result, results=(run,)) for run in runs[1:]]


@check("CKC-DISC-009")
def test_steps_names_what_loads(subject: Subject) -> None:
    """`steps()` is ascending and names exactly the steps that load.

    Why: two rules of discovery in one code base disagree, and one of them is used (B04, B11).
    How: save two steps; ask; load the latest and, where it can be asked for, each saved step. A
    manager also saves across powers of ten, where text has another order.
    """
    golden = subject.golden()
    subject.materialize(golden)
    listed = subject.steps()
    for steps in (listed, _listed_across_powers(subject)):
        if steps != sorted(set(steps)):
            raise Violation(f"steps() gives {steps}: not ascending", evidence={"steps": steps})
    requests: list[int | None] = [None]
    if "explicit_step" in subject.info.capabilities:
        requests += [2, 4]
    results = {step: subject.resume(step) for step in requests}
    arrived = {oracle.step_of(result) for result in results.values()}
    loads = sorted(step for step in arrived if step is not None)
    if listed[-1:] != loads[-1:] or (len(requests) > 1 and listed != loads):
        evidence = {"loads": {step: subject.tell(result) for step, result in results.items()}}
        no_load.is_told_by_its_owner(subject, *results.values())
        raise Violation(f"steps() gives {listed}, what loads is {loads}", evidence=evidence)


@check("CKC-DISC-017")
def test_an_open_manager_sees_what_another_process_saves(subject: Subject) -> None:
    """A manager that is open lists and loads what another process has saved since.

    Why: one that lists its directory once gives an evaluator, or the rank that waits for a step,
    the steps of the day on which it was opened (B04).
    How: one that is open in one process is asked before and after another process saves a step
    more, rotates, and closes its manager, so that nothing of it is under way, all within the second
    of what was there before. Who can't save beside a manager that is open is not judged. The
    control of the cause has the save two seconds later.
    """
    controls.require(test_steps_names_what_loads, subject)
    evidence = _unseen(subject, later=0)
    if not evidence:
        return
    if _unseen(subject, later=2):
        message = "a manager that is open does not see what another process has saved"
        raise Violation(message, evidence=evidence)
    message = "a manager that is open does not see what another process saves in the same second"
    evidence["two seconds later"] = "it sees that: it goes by times of modification"
    raise Violation(message, evidence=evidence)


def _unseen(subject: Subject, *, later: int) -> dict[str, object]:
    """Tell what an open manager does not see of a save so many seconds later; empty for nothing."""
    looked, saved = _beside_a_save(subject, later)
    listed = [result.steps for result in looked.all_of(StepsResult)]
    loaded = [result.step for result in looked.all_of(LoadResult)]
    if listed[:1] in ([], [None]) or loaded[:1] in ([], [None]):
        raise control_failed(f"a manager lists and loads nothing: {subject.tell(looked)}")
    if saved.steps_of("acknowledged") != [6]:
        told = f"no other process saves while a manager is open: {subject.tell(saved)}"
        raise NotApplicable(told) if saved.exit_kind is ExitKind.ENDED else control_failed(told)
    there, latest = subject.steps(), oracle.step_of(subject.resume())
    if (listed[1:], loaded[1:]) == ([there], [latest]):
        return {}
    return {
        "it lists": listed[1:],
        "a new process lists": there,
        "it loads": loaded[1:],
        "a new process loads": latest,
        "it says": subject.tell(looked),
    }


def _beside_a_save(subject: Subject, later: int) -> tuple[ProcessResult, ProcessResult]:
    """Let one process list and load before and after another one saves step 6 and closes.

    What that save changes gets a time of modification so many whole seconds later.
    """
    subject.materialize(subject.golden())
    redate = probe("redate", times=probes.times_of(subject.root), later=later)
    begin, end = probes.gates(subject.scratch / f"{later} s later", 2)
    saves = (Run(resume=True, until=6, save_at=(6,), go_on=True), Close(go_on=True))
    meet, leave = "wait_for_the_other", "let_the_other_go"
    look = (Steps(go_on=True), Fresh(), Load(go_on=True))
    meanwhile = (probe(meet, gate=begin), probe(leave, gate=begin), probe(meet, gate=end))
    reader = subject.program(*look, *meanwhile, *look, probe(leave, gate=end), deadline=DEADLINE)
    ops = (probe("stand", gate=begin), *saves, redate, probe("stand", gate=end))
    writer = subject.program(*ops, rank=1, options=subject.keeping(2), deadline=DEADLINE)
    looked, saved = subject.send([reader, writer])
    return looked, saved


def _listed_across_powers(subject: Subject) -> list[int]:
    """Ask a live manager that saved across powers of ten; a framework's trainer lists none."""
    if subject.info.shape != "manager":
        return []
    elsewhere = subject.scratch / "elsewhere"
    elsewhere.mkdir()
    ops = step_numbers.saves(*step_numbers.POWERS)
    result = subject.execute(*ops, Steps(), root=elsewhere)
    steps = result.of(StepsResult).steps
    if steps is None:
        powers = step_numbers.POWERS
        raise control_failed(f"a manager that saves steps {powers} ends: {subject.tell(result)}")
    return steps


@check("CKC-DISC-012")
def test_a_resumed_run_overwrites_no_other_step(subject: Subject) -> None:
    """A save of a resumed run leaves every other step's checkpoint as it was.

    Why: a name from a counter that starts at 0 in each process wrote step 2200 over step 200
    (C14).
    How: resume from step 4, save step 6 in that child; then ask for step 2 (step 4, where the
    manager keeps two) and for the latest. Then resume from step 2 where 4 and 6 are there, save
    another step 4: the latest is that one or 6, as its manager has it, and each is whole. Whether
    6, of the run that was left, may be deleted is asked by CKC-RETN-014.
    """
    most = subject.info.max_keep or 3
    if most < 2:  # noqa: PLR2004  the step that is saved, and another one
        raise NotApplicable("the manager keeps one step alone")
    golden = subject.golden()
    legal = subject.legal(golden)
    subject.materialize(golden)
    result = subject.run(6, (6,), resume=True, then=[Close()])
    if not result.went_well:
        reason = f"a resumed run cannot save: {subject.tell(result)}"
        about = bit_exact.test_a_run_resumed_again_and_again_goes_on_as_if_unbroken
        raise controls.blame(subject, reason, about)
    message = "the save of a resumed run spoiled an older step"
    result = subject.resume(2 if most > 2 else 4)  # noqa: PLR2004  the oldest that may be there
    subject.judge(result, legal, {Outcome.LOST_STEP}, message, newest=6, acknowledged={2, 4, 6})
    result = subject.resume()
    if oracle.step_of(result) != 6:  # noqa: PLR2004  the step that the resumed run saved
        message = "the save of a resumed run is not the newest"
        raise Violation(message, evidence=subject.evidence(result))
    if most > 2 and subject.info.shape == "manager":  # noqa: PLR2004  the three that are there
        _save_after_going_back(subject)


def _save_after_going_back(subject: Subject) -> None:
    """Resume from step 2 beside 4 and 6, save another 4; raise Violation unless both are whole.

    Which of them is the latest is the manager's own policy. It may also delete step 6, which is of
    a run that was given up, if it names it no more. A save that is refused costs nothing.
    """
    golden = subject.golden((2, 4, 6))
    states = {step: subject.loaded(subject.golden(), step) for step in (2, 4)}
    kept = subject.holds - DRAWN
    exact = {part for part in kept if states[4].get(part) == golden.at[4].get(part)}
    subject.materialize(golden)
    back = (Load(step=2), Perturb(), Train(n=2))
    saved = subject.execute(*back, ReadLeaves(), Save(step=4), seed=OTHER_SEED)
    new = whole(saved.of(LeavesResult).leaves or {})
    if saved.steps_of("acknowledged") != [4]:
        return
    requests: tuple[bool | int, ...] = (True, 4, 6)
    looks = [Run(resume=request, stop_after=0, go_on=True) for request in requests]
    ops = [op for look in looks for op in (look, Close(), Fresh())]
    result = subject.execute(*ops, Steps(), seed=OTHER_SEED)
    legal = {4: new, 6: golden.at[6]}
    gave = [_gave(look, legal, exact) for look in result.all_of(RunResult)]
    is_gone = max(legal) not in (result.of(StepsResult).steps or ())
    if gave[:2] in ([4, 4], [6, 4]) and (gave[2:] == [6] or (is_gone and gave[2:] == [None])):
        return
    told = dict(zip(("the latest", "step 4", "step 6"), gave, strict=False))
    message = f"after a resume from an older step, and a save, {_what_is_wrong(gave)}"
    evidence = subject.evidence(result, loads=told)
    about = (
        test_the_last_save_of_a_step_is_served,
        bit_exact.test_a_run_resumed_again_and_again_goes_on_as_if_unbroken,
    )
    doubt = controls.blame(subject, message, *about)
    raise doubt if doubt.see else Violation(message, evidence=evidence)


def _what_is_wrong(gave: Sequence[int | str | None]) -> str:
    """Say what loads gave: a state that nobody saved, an error, or a step that was not due."""
    if any(isinstance(one, str) for one in gave):
        return "a load gives what nobody saved"
    return "a step that is due does not load" if None in gave else "a load gives another step"


def _gave(look: RunResult, legal: Mapping[int, Leaves], parts: set[str]) -> int | str | None:
    """Return the step of a whole state that a load gave; words for another one, None if refused."""
    if look.arrived is None:
        return None
    step = look.arrived.step
    state = whole(look.states.get(step, {}))
    if step in legal and oracle.same(state, legal[step], parts):
        return step
    differs = oracle.differences(state, legal[step], parts) if step in legal else []
    return f"step {step}, and not as it was saved: {', '.join(differs)}"


@check("CKC-DISC-013")
def test_an_incomplete_step_is_not_advertised(subject: Subject) -> None:
    """`steps()` does not name a step that is not whole.

    Why: a directory without its manifest was advertised, staged and failed on every node (M040,
    B04); test_latest_only_resolves_to_durable_checkpoints of K019.
    How: plant empty names of the next step, or take a whole step's files away; ask. Then copy a
    step under the names of the next one, and ask; that is judged where a load refuses the copy.
    """
    golden = subject.golden()
    whole = [step for step in (2, 4) if names.require_step_names(golden, step)]
    subject.materialize(golden)
    before = subject.steps()
    for way, lay in chosen(subject, incomplete(subject, golden), quick=2):
        lay()
        listed = subject.execute(Steps()).of(StepsResult).steps
        if listed is None:
            about = test_an_incomplete_step_hides_no_whole_one_from_steps
            raise controls.blame(subject, f"{way}: discovery does not answer", about)
        if set(listed) - set(before):
            evidence = {"planted": way, "whole": whole}
            raise Violation(f"steps() gives {listed} instead of {before}", evidence=evidence)
    copied_steps.require_unnamed(subject, golden)


@check("CKC-DISC-015")
def test_an_incomplete_step_hides_no_whole_one_from_steps(subject: Subject) -> None:
    """Beside a step that is not whole `steps()` answers, and names every whole one.

    Why: one directory of a dead save made the listing raise, or stop before the steps behind it;
    what is not listed is not served, and rotation does not know it (B04, A09).
    How: plant empty names of the next step, or take a whole step's files away; ask.
    """
    golden = subject.golden()
    subject.materialize(golden)
    before = subject.steps()
    for way, lay in chosen(subject, incomplete(subject, golden), quick=2):
        lay()
        result = subject.execute(Steps())
        listed = result.of(StepsResult).steps
        hidden = sorted(set(before) - set(listed or ()))
        if hidden:
            evidence = subject.evidence(result, planted=way, whole=before, listed=listed)
            message = f"steps() does not name {hidden}" if listed is not None else "no answer"
            raise Violation(f"an incomplete step hides whole ones: {message}", evidence=evidence)
