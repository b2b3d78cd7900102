"""Retention: rotation deletes what it should, and nothing else."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import Capability, kept_trees, trees
from ckpt_conformance.contract.verdicts import (
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import at_rest, counting, system_call
from ckpt_conformance.fault_injectors.injected_calls import why_not
from ckpt_conformance.fault_injectors.points import Now
from ckpt_conformance.fault_injectors.system_call import REMOVALS
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import (
    Close,
    ExitKind,
    Options,
    Run,
    RunResult,
    Save,
    SaveResult,
    Steps,
    StepsResult,
    Train,
    calls_of,
    whole,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import batched_recovery, by_name, controls, names, oracle
from ckpt_conformance.subject.batched_recovery import Case, resume_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.suites.controls import copied_steps, no_load, rotation_orders
from ckpt_conformance.suites.controls import test_bit_exact_resume as bit_exact
from ckpt_conformance.suites.controls import test_damage as damage
from ckpt_conformance.suites.controls import test_discovery as discovery
from ckpt_conformance.suites.controls import test_explicit_step as explicit
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.counting import Counted
    from ckpt_conformance.fault_injectors.points import Point
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Fault, Leaves, Tree
    from ckpt_conformance.subject.subject import Golden, Subject

_BEGINNING = re.compile(r"[._-]*[A-Za-z]+")  # of a name
ASK = (Close(), Steps())  # a manager may still be deleting: to close it is to wait for that
HALF_DELETED = 6  # directories with a part of an old step, at the quick budget
FAN_OUT = re.compile(r"[0-9a-f]{2,3}")
GROWTH = 4  # names more after six saves more, of which each deletes one
ROTATION: Slot[Counted] = Slot("calls of a save that rotates")
EITHER = {Outcome.NEW, Outcome.PREVIOUS}


def rotating(
    subject: Subject,
    until: int,
    save_at: tuple[int, ...],
    keep: int,
    *,
    then: Sequence[AnyOp] = ASK,
    **given: Any,  # noqa: ANN401  of a run
) -> ProcessResult:
    """Train with saves of which `keep` shall stay, close, then ask for the steps."""
    return subject.run(until, save_at, options=Options(keep_last=keep), then=then, **given)


def left(subject: Subject, result: ProcessResult) -> list[int]:
    """Return the steps that a rotating run left; raises Unknown if it did not end well."""
    steps = result.of(StepsResult).steps
    if result.exit_kind is not ExitKind.ENDED or steps is None:
        raise trouble(subject, result)
    return sorted(steps)


def trouble(subject: Subject, result: ProcessResult) -> Unknown:
    """Make the Unknown of a check whose run without faults does not end well."""
    return smoke.trouble(
        subject,
        result,
        smoke.test_each_declared_capability_works,
        discovery.test_steps_names_what_loads,
        discovery.test_foreign_names_disturb_nothing,
        bit_exact.test_a_run_resumed_again_and_again_goes_on_as_if_unbroken,
    )


def keeping(subject: Subject, number: int) -> int:
    """Return the number to keep; raises NotApplicable where the manager never keeps so many."""
    most = subject.info.max_keep
    if most is not None and number > most:
        raise NotApplicable(
            f"it keeps at most {most} checkpoints, as declared; this is about {number}"
        )
    if number < subject.info.min_keep:
        raise NotApplicable(
            f"it keeps at least {subject.info.min_keep} checkpoints, as declared; this is about "
            f"{number}"
        )
    return number


def filled(subject: Subject) -> tuple[int, tuple[int, ...]]:
    """Return the fewest to keep, and steps to save before step 2: then step 4 rotates first.

    Raises NotApplicable where more steps than one had to be saved before step 2.
    """
    more = subject.info.min_keep - 1
    if more > 1:
        keeping(subject, 2)
    return subject.info.min_keep, tuple(range(1, 1 + more))


def fresh(subject: Subject) -> None:
    """Empty the manager's directory."""
    trees.clear(subject.root)


def only_steps(subject: Subject, golden: Golden) -> None:
    """Copy what belongs to steps as it was at last, without ids and pointers: another run's."""
    fresh(subject)
    for step in golden.saves:
        for name in names.of_step(golden, step):
            root = golden.snapshot(golden.saves[-1])
            root = root if (root / name.path).exists() else golden.snapshot(step)
            target = subject.root / name.path
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if name.is_folder else shutil.copy2)(root / name.path, target)


@check("CKC-RETN-001")
def test_one_whole_checkpoint_is_always_there(subject: Subject) -> None:
    """With one checkpoint to keep, neither a kill nor a full disk leaves none.

    Why: the old one was deleted, then the process died before the new one was written (C01; item 8
    of the measured behaviour).
    How: keep one, hit the second save where old names are gone and new ones are not yet there. What
    loads when it is asked for by its name is not lost: that a restart finds it is CKC-ATOM-001.
    """
    legal = subject.legal(subject.golden())
    run, counted = partial(_save_one_of_two, subject), rotation_of_one(subject)
    chosen = dangerous(subject, counted)
    hits: list[tuple[str, Fault, Point | None]] = [
        (f"a kill {point.name}", point.spec("kill"), point) for point in chosen
    ]
    full = dict.fromkeys((counted.points[0], chosen[0]))  # from the first call, and in mid-rotation
    hits += [  # the number of these counts calls that need room alone
        (f"a full disk {point.name}", counting.full_from(counted, point), None) for point in full
    ]
    for what, fault, aim in hits:
        result = counting.until_fired(run, fault, aim)
        if not result.has_fired:
            raise Unknown(f"the fault did not fire: {what}")
        acknowledged = set(result.steps_of("acknowledged"))
        if not acknowledged:
            raise Unknown(f"{what} came before the save that rotates: no step was acknowledged")
        message = f"{what} during a rotating save leaves nothing that loads"
        tree = subject.scratch / "left"
        trees.materialize(subject.root, tree)
        resumed = subject.resume()
        outcome = subject.classify(resumed, legal, newest=4, acknowledged=acknowledged)
        due = [step for step in legal if step >= max(acknowledged)]  # nothing older will do
        if outcome not in EITHER and not by_name.loads(subject, tree, legal, due):
            subject.judge(resumed, legal, EITHER, message, newest=4, acknowledged=acknowledged)


def _save_one_of_two(subject: Subject, faults: Sequence[Fault]) -> ProcessResult:
    """Save step 2, and step 4 with faults, of which as few as can be shall stay."""
    fresh(subject)
    keep, first = filled(subject)
    return rotating(subject, 4, (*first, 2, 4), keep, faults=faults, fault_step=4, then=[])


def dangerous(subject: Subject, counted: Counted) -> list[Point]:
    """Choose points of a counted save: first where old names are gone, and new ones not there."""
    if counted.result.error or not counted.calls:
        raise control_failed(f"no call of the save was seen: {subject.tell(counted.result)}")
    before, after = _before_and_after(counted)
    old, new = set(before) - set(after), set(after) - set(before)

    def danger(point: Point) -> tuple[int, int]:
        marks = {mark.name: mark.now for mark in point.state.marks}
        gone = sum(marks.get(name) is Now.GONE for name in old)
        return gone * sum(marks.get(name) is Now.BEFORE for name in new), gone

    every = list(counted.points)
    subject.rng.shuffle(every)
    by_danger = sorted(every, key=danger, reverse=True)
    return by_danger[:2] if subject.budget == "quick" else by_danger


@check("CKC-ATOM-004")
def test_discovery_after_a_kill_of_a_rotation_names_only_what_loads(subject: Subject) -> None:
    """After a kill inside a save that rotates discovery names no step that does not load.

    Why: the files of an old step are deleted one by one; while the one that makes it a checkpoint
    is still there, a half of it is advertised (A09).
    How: keep one; of the directories that a kill in the second save may leave take those in which a
    part of the old step is gone; ask discovery in a new process, load each step that it names.
    """
    subject.need(Capability.RETENTION)
    subject.need(Capability.STEPS)
    subject.need(Capability.EXPLICIT_STEP)
    counted = rotation_of_one(subject)
    if counted.result.error or not counted.calls:
        raise control_failed(f"no call of the save was seen: {subject.tell(counted.result)}")
    parted = half_deleted(subject, counted)
    if not parted:
        raise NotApplicable("rotation takes a step away in one call")
    unharmed = _before_and_after(counted)
    place = _kept_rotation(subject)
    trees_of_all = [*unharmed, *(_tree_at(point) for point in parted)]
    folders = [kept_trees.kept(place, tree) for tree in trees_of_all]
    wrong = _named_in_vain(subject, folders)
    for told in filter(None, wrong[: len(unharmed)]):
        reason = f"without any kill discovery names what does not load: {told}"
        raise controls.blame(subject, reason, discovery.test_steps_names_what_loads)
    for point, told in zip(parted, wrong[len(unharmed) :], strict=True):
        if told:
            step = max(told)
            what = f"discovery names step {step}" if step else "discovery does not answer"
            raise Violation(f"killed {point.name}, {what}", evidence={"loads": told})


def _named_in_vain(subject: Subject, folders: Sequence[Path]) -> list[dict[int, str]]:
    """Map for each directory the steps that are named and do not load to how their loads end.

    Step 0 stands for a discovery that does not answer.
    """
    answers = batched_recovery.steps_each(subject, folders)
    named = zip(folders, answers, strict=True)
    cases = [Case(folder, step=step) for folder, answer in named for step in answer.steps or ()]
    loads = iter(resume_each(subject, cases, lambda result: oracle.arrival(result)[0] is not None))
    wrong: list[dict[int, str]] = []
    for answer in answers:
        if answer.steps is None:
            wrong.append({0: answer.error.message if answer.error else "no answer"})
            continue
        by_step = {step: next(loads) for step in answer.steps}
        vain = {step: load for step, load in by_step.items() if oracle.arrival(load)[0] != step}
        wrong.append({step: subject.tell(load) for step, load in vain.items()})
    return wrong


def rotation_of_one(subject: Subject) -> Counted:
    """Count the calls of a save that rotates with as few to keep as can be; once per adapter."""
    run = partial(_save_one_of_two, subject)
    place = _kept_rotation(subject)
    return subject.once(ROTATION, lambda: counting.count_calls(subject, run, place))


def _kept_rotation(subject: Subject) -> Path:
    """Return the folder with the trees that its counting pass kept."""
    return subject.folder / "kept" / "one of two"


def _before_and_after(counted: Counted) -> tuple[Tree, Tree]:
    """Return the trees before and after a counted save, of which a call was seen."""
    return counted.calls[0].tree, counted.points[-1].disk[1]


def half_deleted(subject: Subject, counted: Counted) -> list[Point]:
    """Choose points at which a part of what the save deletes is gone, each content once."""
    before, after = _before_and_after(counted)
    old = {name for name, digest in before.items() if name not in after and digest != "/"}

    def left(point: Point) -> int:
        return len(old & _tree_at(point).keys())

    whole_calls = [point for point in counted.points if point.moment != "prefix"]
    parted = {kept_trees.identity(_tree_at(p)): p for p in whole_calls if 0 < left(p) < len(old)}
    return subject.sample(list(parted.values()), HALF_DELETED)


def _tree_at(point: Point) -> Tree:
    """Return the tree before or after the call of a point."""
    return point.disk[point.moment == "after"]


@check("CKC-RETN-002")
def test_exactly_the_newest_stay(subject: Subject) -> None:
    """After twelve saves with three to keep, exactly steps 10, 11 and 12 are there, and load.

    Why: names sorted as text let step 10 go before step 2; a limit was not enforced (C08, VX10).
    How: save twelve steps in one child, close, ask, load each that stays by its number. A manager
    that saves in the background may keep one more until its next save. Where they are the right
    ones, look at how many names there are after 6, 12 and 18 saves: what grows with every deletion
    is left of it. Then as few as the adapter allows (`min_keep`): a limit of one is a limit. Then
    save the newest step once more, where a manager does that: no other step goes for it; and, in
    the same directory, steps each below the one before, then one above all: the oldest save is not
    the smallest number. Then save steps of which one has the digits of another, so that the shorter
    goes first; the job is the same until the last of them, so what they hold may be kept once.
    """
    keep = subject.keepable(3)
    saved = rotating(subject, 13, tuple(range(1, 13)), keep, watch=True)
    steps = left(subject, saved)
    if not smoke.are_newest(saved, steps, range(1, 13), keep):
        message = f"rotation does not leave the newest {keep} of twelve"
        raise Violation(message, evidence={"steps": steps})
    if Capability.EXPLICIT_STEP in subject.info.capabilities:
        _require_load(subject, saved, steps, 12)
    counts = {12: _parts(subject.root)}
    for saves in (6, 18):
        fresh(subject)
        rotating(subject, saves, tuple(range(1, saves + 1)), keep)
        counts[saves] = _parts(subject.root)
    # The number of files of a step may vary by a few; a name for each deletion makes six more.
    if min(counts[12] - counts[6], counts[18] - counts[12]) >= GROWTH:
        evidence = {f"names after {saves} saves": counts[saves] for saves in sorted(counts)}
        raise Violation("rotation leaves parts of what it deleted", evidence=evidence)
    if subject.info.min_keep < keep:
        _require_fewest(subject)
    if subject.info.shape == "manager":
        lost = rotation_orders.require_no_loss_by_a_save_over(subject, keep)
        # Who goes by times goes by the order of saves, too: CKC-RETN-003, a SHOULD, tells it.
        about = test_rotation_goes_by_steps_not_by_times
        if lost and not controls.blame(subject, lost, about).see:
            raise lost
        rotation_orders.require_no_loss_by_digits(subject, keep)


def _parts(root: Path) -> int:
    """Count the names below a directory, but for folders of a fan-out, which are reused for ever.

    A store of contents, as git is, puts them into folders by the first digits of their digests: 256
    at most, and an empty one stays. Not all such names are numbers of steps: one has a letter.
    """
    kinds = {name: kind for name, (kind, *_) in trees.listing(root).items()}
    folders = [PurePosixPath(name) for name, kind in kinds.items() if kind == "dir"]
    beside: dict[PurePosixPath, set[str]] = defaultdict(set)
    for folder in folders:
        beside[folder.parent].add(folder.name)
    fans = {parent for parent, names in beside.items() if _is_fan_out(names)}
    return len(kinds) - sum(folder.parent in fans for folder in folders)


def _is_fan_out(names: Collection[str]) -> bool:
    """Tell names of two or three hexadecimal digits, all of one length."""
    are_digits = all(FAN_OUT.fullmatch(name) for name in names)
    return are_digits and len(set(map(len, names))) == 1 and not all(map(str.isdecimal, names))


def _require_fewest(subject: Subject) -> None:
    """Raise Violation unless the fewest that can be kept are exactly the newest."""
    keep = subject.info.min_keep
    fresh(subject)
    saved = rotating(subject, keep + 3, tuple(range(1, keep + 3)), keep)
    steps = left(subject, saved)
    if not smoke.are_newest(saved, steps, range(1, keep + 3), keep):
        message = f"rotation does not leave the newest {keep} of {keep + 2}"
        raise Violation(message, evidence={"steps": steps})


def _require_load(subject: Subject, saved: ProcessResult, steps: Sequence[int], saves: int) -> None:
    """Raise Violation if a step that stays of so many saves does not load.

    Where the newest does not come back as it was saved, that is no matter of rotation: then the
    others have to load, and their bits are not compared.
    """
    states = {step: whole(state) for step, state in saved.of(RunResult).states.items()}
    last = max(steps)
    latest = subject.resume(last)
    arrived, state = oracle.arrival(latest)
    if arrived != last:
        raise controls.blame(
            subject,
            f"step {last}, the last that was saved, does not load: {subject.tell(latest)}",
            smoke.test_a_new_process_loads_what_was_saved,
            explicit.test_an_explicit_step_is_served_whole,
        )
    is_exact = oracle.same(state, states[last], subject.holds)
    loads = {step: subject.resume(step) for step in sorted(set(steps) - {last})}
    for step, load in loads.items():
        arrived, state = oracle.arrival(load)
        if arrived == step and (not is_exact or oracle.same(state, states[step], subject.holds)):
            continue
        evidence = subject.evidence(load, states[step], left=list(steps))
        controls.require(explicit.test_an_explicit_step_is_served_whole, subject)
        if not loads_where_all_stay(subject, step, saves):
            continue  # what is wrong with this step is no matter of rotation
        message = f"rotation leaves step {step}, and it does not load"
        raise Violation(message, evidence=evidence)


def loads_where_all_stay(subject: Subject, step: int, saves: int) -> bool:
    """Return whether a step comes back as it was saved where nothing is deleted."""
    fresh(subject)
    saved = subject.run(saves + 1, tuple(range(1, saves + 1)), watch=True, then=[Close()])
    arrived, state = oracle.arrival(subject.resume(step))
    expected = whole(saved.of(RunResult).states.get(step, {}))
    return arrived == step and oracle.same(state, expected, subject.holds)


@check("CKC-RETN-003")
def test_rotation_goes_by_steps_not_by_times(subject: Subject) -> None:
    """Rotation deletes the oldest step, whatever the times of the files.

    Why: on a mounted store the order of times was wrong, and the newest went first (C05).
    How: save steps 2 and 4, reverse all times, resume, save step 6 with two to keep, ask.
    """
    golden = subject.golden()
    subject.materialize(golden)
    discovery.set_times(subject.root, golden, reverse=True)
    steps = left(subject, rotating(subject, 6, (6,), keeping(subject, 2), resume=True))
    if not {4, 6} <= set(steps):
        raise Violation("times of files decide what is deleted", evidence={"steps": steps})


@check("CKC-RETN-004")
def test_what_was_just_saved_stays(subject: Subject) -> None:
    """A save never deletes the checkpoint that it has just written.

    Why: in a reused directory the first new checkpoint counted as the oldest, and went at once
    (C06, C07); test_cleanup_never_deletes_latest_or_in_flight of K019.
    How: beside steps 2 and 4, of this run and then of another, save step 1 with as few to keep as
    the adapter allows (`min_keep`); of this run also with a mirror, where there is one, and look
    when its uploads have ended. A save of step 1 that is refused in words, and changes nothing
    that is there, has written nothing that could be deleted. Nor is deleted what loads by its
    name: that `steps` does not list it is CKC-DISC-009.
    """
    golden = subject.golden()
    lays: dict[str, Callable[[Golden], None]] = {
        "this run": subject.materialize,
        "another run": partial(only_steps, subject),
    }
    if Capability.MIRROR in subject.info.capabilities:
        lays["this run, with a mirror"] = subject.materialize
    for whose, lay in lays.items():
        lay(golden)
        mirror = str(subject.scratch / "mirror") if "mirror" in whose else None
        before, content = there(subject), kept_trees.fingerprint(subject.root)
        options = Options(keep_last=subject.info.min_keep, mirror=mirror)
        result = subject.run(1, (1,), options=options, then=ASK)
        refused = 1 in result.steps_of("failed") and result.error and result.error.message.strip()
        if refused and kept_trees.fingerprint(subject.root) == content:
            told = subject.tell(result)
            raise NotApplicable(f"a save of step 1 beside steps 2 and 4 is refused: {told}")
        steps = left(subject, result)
        if 1 not in steps and not _still_loads(subject, 1):
            evidence = just_saved(subject, whose, before) | {"steps() after the save": steps}
            if evidence["names added"] and not named(subject):
                told = "steps() does not name step 1, of which something is there"
                raise controls.blame(subject, told, discovery.test_steps_names_what_loads)
            message = "the checkpoint just saved was deleted by its own save"
            raise Violation(message, evidence=evidence)


def named(subject: Subject) -> bool:
    """Whether the adapter lets a step be asked for, by its number or by its path."""
    ways = {Capability.EXPLICIT_STEP, Capability.REFERENCE}
    return bool(ways & set(subject.info.capabilities))


def _still_loads(subject: Subject, step: int) -> bool:
    """Whether a step that was just saved loads when it is asked for; what is there stays."""
    tree = subject.scratch / "saved"
    trees.materialize(subject.root, tree)
    legal = subject.legal(subject.golden((step,)))
    found = by_name.loads(subject, tree, legal, [step])
    trees.materialize(tree, subject.root)
    return found == step


def just_saved(subject: Subject, whose: str, before: list[str]) -> dict[str, object]:
    """Tell what a save of step 1 beside newer steps did: names before and after, and a restart."""
    after = there(subject)
    evidence: dict[str, object] = {
        "directory before": f"steps 2 and 4 of {whose}: {', '.join(before[:8])}",
        "save": f"step 1 with keep_last={subject.info.min_keep}, acknowledged",
        "names deleted": [name for name in before if name not in after][:8],
        "names added": [name for name in after if name not in before][:8],
    }
    return evidence | {"a restart gives": subject.tell(subject.resume())}


@check("CKC-RETN-005")
def test_only_own_files_are_deleted(subject: Subject) -> None:
    """Saves and rotation delete nothing that the manager did not write in this directory.

    Why: a cleanup at start-up took what it did not know for leftovers (B16); paths kept in a
    checkpoint pointed into the run it was copied from (C10, KX8).
    How: plant foreign names, an hour old, save and rotate; run on in a copy of the tree; look at
    the originals. Some begin as names do that a save makes and removes or renames.
    """
    golden = subject.golden()
    similar = _like_drafts(subject)
    similar += [path for name in names.of_step(golden, 4) for path in names.lookalikes(name)]
    foreign = names.plant_all(subject.root, [*names.strange(subject.seed, 12), *similar])
    names.age(subject.root)
    before = {name: _stamp(subject.root / name) for name in foreign}
    result = rotating(subject, 6, (2, 4, 6), subject.info.min_keep, then=[Close()])
    if not result.went_well:
        raise trouble(subject, result)
    gone = [name for name in foreign if before[name] != _stamp(subject.root / name)]
    if gone:
        raise Violation("foreign files were deleted or changed", evidence={"names": gone[:8]})
    subject.materialize(golden)
    listed = trees.listing(subject.root)
    copied = subject.scratch / "copied"
    trees.copy(subject.root, copied)
    keep = subject.info.min_keep
    rotating(subject, 6, (6,), keep, resume=True, root=copied, then=[Close()])
    gone = [
        name for name, entry in listed.items() if trees.listing(subject.root).get(name) != entry
    ]
    if gone:
        message = "a run in a copy of the tree deleted files of the original"
        raise Violation(message, evidence={"names": gone[:8]})


def _like_drafts(subject: Subject) -> list[str]:
    """Return names that begin as a draft's do, which a save makes and renames or removes.

    None where this machine does not let a save be watched.
    """
    subject.reset()
    saved = subject.execute(Train(n=2), Save(faults=(system_call.count(),)), Close())
    calls = calls_of(saved.of(SaveResult).faults) if saved.went_well else []
    made = {part for call in calls for part in PurePosixPath(call.path).parts[:1]}
    matches = map(_BEGINNING.match, sorted(made - set(there(subject)) - {".."}))
    stems = dict.fromkeys(match[0] for match in matches if match)
    subject.reset()
    return [name for stem in stems for name in (f"{stem}_notes/a.txt", f"{stem}-notes.txt")]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_mode, info.st_ino, info.st_size


@check("CKC-RETN-006")
def test_restarts_do_not_pile_up_checkpoints(subject: Subject) -> None:
    """After restarts as many checkpoints are kept as without.

    Why: a list of what may go that lives in memory is empty after a restart (C11, VX10).
    How: save with two to keep, count; resume and save in two more children, count again. Where
    saves go on in the background there may be one more, or less: see CKC-RETN-002.
    """
    keep = keeping(subject, 2)
    saved = rotating(subject, 3, (1, 2, 3), keep)
    first = left(subject, saved)
    rotating(subject, 5, (4, 5), keep, resume=True, then=[Close()])
    last = left(subject, rotating(subject, 7, (6, 7), keep, resume=True))
    if abs(len(last) - len(first)) > saved.of(RunResult).in_background:
        evidence = {"in one child": first, "after two restarts": last}
        raise Violation("restarts change how many checkpoints are kept", evidence=evidence)


@check("CKC-RETN-007")
def test_an_error_while_deleting_fails_no_save(subject: Subject) -> None:
    """When an old checkpoint cannot be deleted, the save that wrote the new one still succeeds.

    Why: a directory that another process removed, or may not remove, ended the job in a save that
    was already written (D09).
    How: let every deletion of two rotating saves fail, but for what the same saves remove where all
    is kept (a journal, a draft); both must return, and the last must load.
    """
    golden = subject.golden((2, 4, 6))
    legal = subject.legal(golden, 6)
    keep, first = filled(subject)
    saves = (*first, 2, 4, 6)
    to_four, all_kept = (_removals(subject, saves[: saves.index(n) + 1], None) for n in (4, 6))
    rotated = _removals(subject, saves, keep)
    if len(rotated) <= len(all_kept) or set(rotated) <= set(all_kept):
        raise NotApplicable("rotation removes no file and no directory")
    own = sum(path not in all_kept for path in to_four)  # drafts whose names are drawn
    fresh(subject)
    fault = _removing(own + 1, spare=all_kept)
    result = rotating(subject, 6, saves, keep, faults=[fault], fault_step=4, then=[Close()])
    if not result.has_fired:
        raise Unknown("the fault did not fire: no deletion of the rotation was seen")
    if result.steps_of("acknowledged") != list(saves):
        message = "an error while deleting an old checkpoint fails the save"
        raise Violation(message, evidence=subject.evidence(result))
    message = "after an error while deleting, the new checkpoint does not load"
    resumed = subject.resume()
    subject.judge(resumed, legal, {Outcome.NEW}, message, newest=6, acknowledged={2, 4, 6})


def _removals(subject: Subject, saves: tuple[int, ...], keep: int | None) -> tuple[str, ...]:
    """List the names that saves remove, from step 4 on."""
    fresh(subject)
    counted = subject.run(
        saves[-1],
        saves,
        options=Options(keep_last=keep),
        faults=[_removing(0)],
        fault_step=4,
    )
    if is_unsupervised(counted):
        raise why_not(subject, counted)
    if not counted.went_well:
        raise trouble(subject, counted)
    return tuple(call.path for call in calls_of(counted.of(RunResult).faults))


def _removing(at: int, spare: tuple[str, ...] = ()) -> Fault:
    """Make a fault at system calls that remove a name: all from one on are refused; 0 counts."""
    return fault_injectors.spec(
        "system-call", at=at, only=REMOVALS, error="EACCES", persistent=at > 0, spare=spare
    )


@check("CKC-RETN-008")
def test_a_finished_run_can_be_launched_again(subject: Subject) -> None:
    """Launching a finished run again changes no checkpoint and ends without an error.

    Why: the final checkpoint was saved a second time, and its directory existed already (C17).
    How: run to the end with a save at the last step, launch the same again with resume.
    """
    golden = subject.golden()
    first = subject.run(4, (2, 4), then=[Close()])
    if not first.went_well:
        raise trouble(subject, first)
    before = kept_trees.fingerprint(subject.root)
    again = subject.run(4, (2, 4), resume=True, then=[Close()])
    if not again.went_well:
        raise no_load.violation(subject, again, "a finished run does not end well again")
    own = tuple(name.path for step in (2, 4) for name in names.of_step(golden, step))
    after = kept_trees.fingerprint(subject.root)
    changed = [name for name in before if name.startswith(own) and after.get(name) != before[name]]
    if changed:
        message = "a finished run that is launched again changes its checkpoints"
        raise Violation(message, evidence={"changed": changed[:8]})


@check("CKC-RETN-009")
def test_incomplete_leftovers_take_no_slot(subject: Subject) -> None:
    """What is not whole does not count among the checkpoints to keep.

    Why: two directories of dead saves took the places, and the good ones were pruned (KX8, C02).
    How: beside steps 2 and 4 plant empty names of 6 and 8; save step 10 with two to keep, ask. Then
    a manager lists steps 2, 4 and 6, a file of 4 and of 6 is cut in half, beside a whole manifest
    if there is one, and the same manager saves step 10: what was whole need not be so any more.
    Then a copy of step 4 lies under the names of step 6, where a load refuses it.
    """
    golden = subject.golden()
    of_four = names.require_step_names(golden, 4)
    subject.materialize(golden)
    for step in (6, 8):
        names.plant_incomplete(subject.root, of_four, step)
    result = rotating(subject, 10, (10,), keeping(subject, 2), then=[Close()])
    if not result.went_well:
        raise trouble(subject, result)
    stay = subject.steps()
    is_gone = not set(paths(golden, 4)) & set(there(subject))
    lost = [step for step in (4, 10) if step not in stay or (step == 4 and is_gone)]  # noqa: PLR2004
    if lost:
        evidence = {"lost": lost, "steps": stay}
        raise Violation("leftovers took the place of whole checkpoints", evidence=evidence)
    _require_no_slot_for_what_is_cut(subject)
    _require_no_slot_for_a_copy(subject)


def _require_no_slot_for_a_copy(subject: Subject) -> None:
    """Raise Violation unless step 4 stays beside a copy of it that no load takes for step 6."""
    golden = subject.golden()
    told = copied_steps.refused(subject, golden)
    if not told:
        return
    copied_steps.lay(subject, golden)
    result = rotating(subject, 10, (10,), keeping(subject, 2), then=[Close()])
    if not result.went_well:
        raise trouble(subject, result)
    stay = subject.steps()
    lost = [step for step in (copied_steps.ORIGINAL, 10) if step not in stay]
    if lost:
        evidence = {"lost": lost, "steps": stay, "a load of the copy": told}
        message = "a copy under another number took the place of a step that loads"
        raise Violation(message, evidence=evidence)


def _require_no_slot_for_what_is_cut(subject: Subject) -> None:
    """Raise Violation unless step 2 stays where steps 4 and 6 are cut and two are to be kept."""
    golden = subject.golden((2, 4, 6))
    subject.materialize(golden)
    if not set(paths(golden, 2)) & set(there(subject)) or not damage.older_stays(golden):
        return
    cut = [damage.largest_of(golden, step) for step in (4, 6)]
    files = sorted({n for one in cut for n in (one, *at_rest.copies_of(subject.root, one))})
    options = Options(keep_last=keeping(subject, 2))
    save = Run(until=10, save_at=(10,))
    half = probe("cut", files=files)
    result = subject.execute(Steps(), half, save, Close(), options=options)
    if not result.went_well:
        raise trouble(subject, result)
    stay = subject.steps()
    lost = [step for step in (2, 10) if step not in stay]
    if lost:
        evidence = {"lost": lost, "steps": stay, "cut in half": cut}
        raise Violation("steps that are cut short took the place of whole ones", evidence=evidence)


@check("CKC-RETN-012")
def test_leftovers_do_not_cost_the_last_step_that_loads(subject: Subject) -> None:
    """Beside what dead saves left, rotation keeps the newest step that was acknowledged.

    Why: two directories of dead saves were the newest two; the next save rotated everything that
    loads away, what it had just saved as well (C02, C06).
    How: beside steps 2 and 4 plant empty names of 6 and 8, an hour apart and before the next save;
    save step 5 with as few to keep as can be; what was acknowledged last loads by a restart, by its
    name, or without the leftovers.
    """
    golden = subject.golden((2, 4, 5))
    names.require_step_names(golden, 4)
    legal = subject.legal(golden, 4, 5)
    if not (lost := _lost_beside(subject, golden, legal, (6, 8))):
        return
    if without := _lost_beside(subject, golden, legal, ()):
        reason = f"without leftovers, too, {without['a restart gives']}"
        raise controls.blame(subject, reason, test_what_was_just_saved_stays)
    raise Violation("leftovers of dead saves cost the last step that loads", evidence=lost)


def _lost_beside(
    subject: Subject, golden: Golden, legal: Mapping[int, Leaves], leftovers: Sequence[int]
) -> dict[str, object]:
    """Save step 5 beside steps 2 and 4 and leftovers; tell what is lost, empty if nothing is."""
    subject.materialize(golden, 4)
    step_names, planted = names.of_step(golden, 4), list[str]()
    for step in leftovers:
        planted += names.plant_incomplete(subject.root, step_names, step)
        names.age(subject.root)
    result = rotating(subject, 5, (5,), subject.info.min_keep, then=[Close()])
    if 5 not in result.steps_of("begun"):  # noqa: PLR2004  the step that is saved
        raise trouble(subject, result)
    due = 5 if 5 in result.steps_of("acknowledged") else 4  # noqa: PLR2004  the steps that were saved
    tree = subject.scratch / "rotated"
    trees.materialize(subject.root, tree)
    if _serves(subject, legal, due) or by_name.loads(subject, tree, legal, [due]):
        return {}
    told = subject.tell(subject.resume())
    trees.materialize(tree, subject.root)
    after = there(subject)
    for path in (subject.root / name for name in planted):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if _serves(subject, legal, due):
        return {}
    return {
        "save": f"step 5 with keep_last={subject.info.min_keep}: {subject.tell(result)}",
        "planted": planted[:8],
        "names after it": after[:8] or "none is left",
        "lost": f"step {due}, which was acknowledged",
        "a restart gives": told,
    }


def _serves(subject: Subject, legal: Mapping[int, Leaves], step: int) -> bool:
    """Whether a restart gives a step as it was saved."""
    arrived, state = oracle.arrival(subject.resume())
    return arrived == step and oracle.same(state, legal[step], subject.holds)


def paths(golden: Golden, step: int) -> list[str]:
    """Return the paths that a step has, or would have."""
    return [name.of(step) for name in names.of_step(golden, 4)]


def there(subject: Subject) -> list[str]:
    """List what is in the manager's directory."""
    return list(trees.listing(subject.root))


@check("CKC-RETN-010")
def test_checkpoints_of_another_run_stay(subject: Subject) -> None:
    """Another run's checkpoints in the same directory are not deleted.

    Why: a second experiment in a reused directory pruned the results of the first (C06, C10).
    How: lay out another run's steps 2 and 4, save 6 and 8 from scratch with one to keep, look.
    """
    names.require_step_names(golden := subject.golden(), 4)
    only_steps(subject, golden)
    if oracle.step_of(subject.resume()) != golden.saves[-1]:
        raise NotApplicable("steps share files: those of another run cannot be laid out alone")
    only_steps(subject, golden)
    before = trees.listing(subject.root)
    result = rotating(subject, 8, (6, 8), subject.info.min_keep, then=[Close()])
    if not result.went_well:
        raise trouble(subject, result)
    if gone := sorted({*before} - {*trees.listing(subject.root)}):
        raise Violation("another run's checkpoints were deleted", evidence={"names": gone[:8]})
