"""A process that is killed in the middle of a save costs at most the step that was being saved."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.kept_trees import fingerprint, identity
from ckpt_conformance.contract.verdicts import (
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import (
    counting,
    injected_save,
    payload,
    points,
    system_call,
)
from ckpt_conformance.fault_injectors.injected_calls import why_not
from ckpt_conformance.fault_injectors.injected_save import SaveKind
from ckpt_conformance.fault_injectors.points import Now
from ckpt_conformance.harness import messages
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import (
    Close,
    CopyOut,
    ExitKind,
    Fresh,
    Materialize,
    Run,
    RunResult,
    whole,
)
from ckpt_conformance.harness.strata import NAMING
from ckpt_conformance.subject import batched_recovery, controls, oracle
from ckpt_conformance.subject.batched_recovery import Case
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.suites.controls import test_bit_exact_resume as bit_exact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.points import Point
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Leaves, StepsResult
    from ckpt_conformance.subject.subject import Subject

OLDER, NEWEST, LATER = 2, 4, 6  # the save of the second one is killed
SCREENED, KILLED = 14, 3  # points at the quick budget: of kept directories, of real kills
NAMED = (1, 2, 3)  # calls that give a name, before which a longer save is killed
ROUNDS = 3  # of a kill and a good save, in which what stays grows each time, or does not pile up
KILLED_IN_FULL = 40  # real kills at the full budget, where every point is screened
WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
CRASHES: Slot[list[Crash]] = Slot("what kills leave of a save, by the kind of save")
TEMPORARY = re.compile(
    r"(?:^|[._~-])(?:te?mp|part(?:ial)?|incomplete|staging)(?:[._~-]|$)", re.IGNORECASE
)


@dataclass(frozen=True)
class Crash:
    """What a kill leaves on disk, and how a new process resumes from it."""

    point: Point
    folder: Path
    resumed: ProcessResult
    acknowledged: tuple[int, ...] = ()

    @property
    def is_usable(self) -> bool:
        """Whether a resume works at all; if not, that is the finding of CKC-ATOM-001."""
        ended = self.resumed.exit_kind is ExitKind.ENDED
        return ended and oracle.arrival(self.resumed)[0] in (OLDER, NEWEST)


def crashes(subject: Subject, kind: SaveKind) -> list[Crash]:
    """Resume from what kills leave, once per adapter and kind.

    The counting pass kept the directory at each point. All are resumed from in one child; where
    that does not go well, and at some other points, the process is killed for real.
    """
    return subject.once(CRASHES, lambda: _crash_each(subject, kind), kind)


def _crash_each(subject: Subject, kind: SaveKind) -> list[Crash]:
    every = injected_save.points_of(subject, kind)
    full = subject.budget == "full"
    chosen = every if full else points.choose(every, subject.rng, SCREENED)
    new = injected_save.overwritten(subject) if kind.is_overwrite else None
    kept = _settled(subject, kind, chosen, new)
    good = [crash for crash in kept if is_whole(subject, crash, new)]
    whole = {crash.point for crash in good}
    bad = [point for point in chosen if point not in whole]
    most = KILLED_IN_FULL if full else KILLED
    real = points.choose(bad, subject.rng, most) if full else bad[:most]
    killed = [_kill(subject, point, kind) for point in real]
    if killed and all(is_whole(subject, crash, new) for crash in killed):
        names = ", ".join(crash.point.name for crash in killed)
        raise Unknown(f"what was kept differs from what a kill leaves: {names}")
    sure = [] if bad else [crash.point for crash in good]
    fine = subject.rng.sample(sure, min(most, len(sure)))
    return good + killed + [_kill(subject, point, kind) for point in fine]


def _settled(
    subject: Subject, kind: SaveKind, chosen: Sequence[Point], new: Leaves | None
) -> list[Crash]:
    """Resume from what was kept at each point; what is not whole in a batch is settled alone.

    Where a process of its own gives something else, the order of the batch has mattered: then all
    are resumed from alone.
    """
    screened = {crash.point: crash for crash in _screen(subject, kind, chosen)}
    whole = {point for point, crash in screened.items() if is_whole(subject, crash, new)}
    doubtful = [point for point in chosen if point not in whole]
    alone = {point: _alone(subject, kind, point) for point in doubtful}
    if any(is_whole(subject, crash, new) for crash in alone.values()):
        alone |= {point: _alone(subject, kind, point) for point in chosen if point in whole}
    return [alone.get(point) or screened[point] for point in chosen]


def _alone(subject: Subject, kind: SaveKind, point: Point) -> Crash:
    """Resume, in a process of its own, from what was kept at a point."""
    folder = injected_save.crash_state(subject, kind, point)
    return Crash(point, folder, batched_recovery.alone(subject, Case(folder)))


def _screen(subject: Subject, kind: SaveKind, chosen: Sequence[Point]) -> list[Crash]:
    """Resume, in one child, from what was kept at each point; leaves out what it did not reach."""
    folders = [injected_save.crash_state(subject, kind, point) for point in chosen]
    distinct = list(dict.fromkeys(folders))  # calls that change nothing leave the same one
    in_batch = batched_recovery.recover_in_batch(subject, [Case(folder) for folder in distinct])
    results = dict(zip(distinct, in_batch, strict=True))
    made = [(point, at, results[at]) for point, at in zip(chosen, folders, strict=True)]
    return [Crash(point, folder, result) for point, folder, result in made if result]


def is_whole(subject: Subject, crash: Crash, new: Leaves | None) -> bool:
    """Return whether a resume gives a whole step that it may give; `new`: the second save of 4."""
    step, state = oracle.arrival(crash.resumed)
    if new is not None and step == NEWEST and oracle.same(state, new, subject.holds):
        return True
    legal = subject.legal(subject.golden())
    acknowledged = (OLDER,) if new is None else (OLDER, NEWEST)
    outcome = subject.classify(crash.resumed, legal, newest=NEWEST, acknowledged=acknowledged)
    return outcome in WHOLE


def _kill(subject: Subject, point: Point, kind: SaveKind) -> Crash:
    """Die by a real SIGKILL at a point, and resume."""
    save = partial(injected_save.save, subject, kind)
    result = counting.until_fired(save, point.spec("kill"), point)
    if result.exit_kind is not ExitKind.KILLED or not result.has_fired:
        raise Unknown(f"the kill {point.name} did not fire: {subject.tell(result)}")
    named = f"{kind} {point.fault} {point.at} {point.moment} {point.prefix}"
    folder = subject.folder / "crashes" / named
    trees.materialize(subject.root, folder)
    return Crash(point, folder, subject.resume(), tuple(result.steps_of("acknowledged")))


@check("CKC-ATOM-001")
def test_a_kill_during_a_save_costs_at_most_that_step(subject: Subject) -> None:
    """After a kill at any point of a save the next load gives that step or the one before, whole.

    Why: a file written straight to its final name, a side file, or a pointer that moves before the
    data leaves a job with nothing that loads (A01, A03, B01, M017, M038).
    How: save step 2, die by SIGKILL inside the save of step 4, resume in a new process.
    """
    judge_saves(subject, SaveKind.NEW)


@check("CKC-ATOM-002")
def test_a_kill_during_an_overwrite_keeps_the_old_or_the_new(subject: Subject) -> None:
    """A kill while a step is saved over itself leaves the old save of it or the new one, whole.

    Why: truncating the file that holds the only copy of a step, or removing it before the rename,
    destroys what was acknowledged; writing over it shard by shard mixes two saves (A02, A04, J12).
    How: save step 4, save another job's step 4 over it, die inside, resume, compare with both.
    """
    judge_saves(subject, SaveKind.SAME)


@check("CKC-ATOM-006")
def test_a_kill_costs_no_more_where_tmpdir_is_another_file_system(subject: Subject) -> None:
    """A kill costs at most the step that is saved, also where TMPDIR is on another file system.

    Why: a checkpoint that is staged in TMPDIR is renamed on the developer's machine and copied over
    the final name, in place, where TMPDIR is a disk of its own, as on clusters (A01, A02).
    How: refuse each rename into or out of the directory as the kernel does between two file
    systems; die inside the save of a new step and of one that is there. NOT_APPLICABLE where no
    rename crosses: then nothing could be copied.
    """
    checks = {
        SaveKind.NEW: test_a_kill_during_a_save_costs_at_most_that_step,
        SaveKind.SAME: test_a_kill_during_an_overwrite_keeps_the_old_or_the_new,
    }
    crossing = [kind for kind in checks if injected_save.crosses(subject, kind.elsewhere)]
    if not crossing:
        raise NotApplicable("no file is renamed or linked into or out of the directory")
    for kind in crossing:
        try:
            judge_saves(subject, kind)
        except Violation as error:
            raise controls.blame(subject, error, checks[kind]) from error
        judge_saves(subject, kind.elsewhere)


def judge_saves(subject: Subject, kind: SaveKind) -> None:
    """Judge what kills leave of a save."""
    every, legal = crashes(subject, kind), subject.legal(subject.golden())
    if not kind.is_overwrite:
        judge_all(subject, every, legal, (OLDER,))
        return
    new = injected_save.overwritten(subject)
    rest = [crash for crash in every if not is_whole(subject, crash, new)]
    judge_all(subject, rest, legal, (OLDER, NEWEST))


def judge_all(
    subject: Subject,
    every: Sequence[Crash],
    legal: Mapping[int, Leaves],
    acknowledged: tuple[int, ...],
) -> None:
    """Judge what came of each crash; the worst is raised, with how often each outcome came."""
    seen: list[tuple[Outcome, Violation]] = []
    for crash in every:
        known = (*acknowledged, *crash.acknowledged)
        message = f"killed {crash.point.name}"
        try:
            subject.judge(crash.resumed, legal, WHOLE, message, newest=NEWEST, acknowledged=known)
        except Violation as error:
            seen.append((Outcome(error.evidence["outcome"]), error))
    if seen:
        names = [str(outcome) for outcome, _ in seen]
        worst = min((error for _, error in seen), key=lambda e: badness(e.evidence["outcome"]))
        worst.evidence["outcomes"] = {name: names.count(name) for name in sorted(set(names))}
        worst.rate = (len(seen), len(every))
        raise worst


def badness(outcome: str) -> int:
    """Order outcomes, the worst first: a wrong state that nobody notices."""
    order = (Outcome.SILENT_WRONG, Outcome.COLD_START, Outcome.LOST_ALL, Outcome.LOST_STEP)
    return order.index(Outcome(outcome)) if outcome in order else len(order)


@check("CKC-ATOM-003")
def test_a_job_goes_on_saving_after_a_kill(subject: Subject) -> None:
    """After a kill the job resumes, saves the same step again and the next, and restarts from it.

    Why: what a dead save left behind blocked the next save of that step, or was mixed into it
    (A12, A11).
    How: die inside a save, resume, save that step and the next, resume again from the last, and
    from the one before it where that can be asked for.
    """
    kept = usable(subject)
    tried = min(2 + sum(1 for crash in kept if torn_names(crash)), 5)
    for crash in kept if subject.budget == "full" else kept[:tried]:
        trees.materialize(crash.folder, subject.root)
        trouble = goes_on(subject)
        if trouble is not None and is_of_the_kill(subject, trouble):
            evidence = {"killed": crash.point.name, **trouble.evidence}
            raise Violation(f"after a kill {crash.point.name} {trouble.what}", evidence=evidence)


@check("CKC-ATOM-003")
def test_a_shorter_save_after_a_kill_has_nothing_of_the_dead_one(subject: Subject) -> None:
    """A save that a kill ended leaves nothing in a later, shorter save of the same step.

    Why: a temporary name that is always the same was opened, and what a dead save had left there
    was not cut off: the new file had the tail of the old one (A12).
    How: a job with more parameters is killed before the first, the second and the third call that
    gives a name in its save; then a job with fewer saves the same step in the same directory. A new
    process must get that one.
    """
    wanted = subject.loaded(subject.golden(), OLDER)
    for at in NAMED:
        subject.reset()
        kill = system_call.kill_among(NAMING, at)
        longer = Run(until=OLDER, save_at=(OLDER,), faults=(kill,), fault_step=OLDER)
        killed = subject.execute(longer, kind="names")
        if is_unsupervised(killed):
            raise why_not(subject, killed)
        if not killed.has_fired:
            if not killed.went_well:
                raise control_failed(f"the longer save, not killed: {subject.tell(killed)}")
            if at == NAMED[0]:
                raise NotApplicable("a save renames and links nothing")
            return
        saving = subject.execute(Run(until=OLDER, save_at=(OLDER,)), Close())
        resumed = subject.resume()
        arrived, state = oracle.arrival(resumed)
        if arrived != OLDER or not oracle.same(state, wanted, subject.holds):
            told = {"the later save": subject.tell(saving), "killed": f"before call {at} of these"}
            message = "a save after one that was killed does not come back"
            raise Violation(message, evidence={**subject.evidence(resumed, wanted), **told})


class Trouble(NamedTuple):
    """What does not work after a resume: the step that is concerned, and what was seen."""

    step: int
    what: str
    evidence: dict[str, object]


def goes_on(subject: Subject) -> Trouble | None:
    """Resume, save the hit step again and a later one, restart; say what does not work."""
    again = subject.run(7, (NEWEST, LATER), resume=True, watch=True)
    if not again.went_well:
        return Trouble(LATER, "the next save fails", subject.evidence(again))
    asked: dict[int, int | None] = {LATER: None}  # the step that is due, and what is asked for
    if "explicit_step" in subject.info.capabilities and (subject.info.max_keep or 2) > 1:
        asked[NEWEST] = NEWEST
    loads = {due: subject.resume(step) for due, step in asked.items()}
    for due, result in loads.items():
        lived = whole(again.of(RunResult).states.get(due, {}))
        step, state = oracle.arrival(result)
        if step != due or faithful(subject, state) != faithful(subject, lived):
            what = "the next save" if due == LATER else "the same step, saved again,"
            return Trouble(due, f"{what} does not load", subject.evidence(result, lived))
    return None


def is_of_the_kill(subject: Subject, trouble: Trouble) -> bool:
    """Do the same from a whole step 2, and return whether what does not work worked there.

    Raises Unknown if a resumed job can't go on saving at all. A manager that holds one step does
    not load the one before: that is no matter of a kill.
    """
    subject.materialize(subject.golden(), OLDER)
    without = goes_on(subject)
    if without is not None and without.step == LATER:
        raise controls.blame(
            subject,
            f"without any kill {without.what}: {without.evidence['child']}",
            bit_exact.test_a_run_resumed_again_and_again_goes_on_as_if_unbroken,
            bit_exact.test_what_was_loaded_can_be_saved_again,
        )
    return without is None or trouble.step == LATER


def usable(subject: Subject) -> list[Crash]:
    """List the crashes of a new step that can be resumed from, one for each distinct directory.

    First those with a torn file under its lasting name, one for each name, which the next save may
    take for whole; then those after which the hit step is saved again, with most temporary files in
    its way.
    """
    able = [crash for crash in crashes(subject, SaveKind.NEW) if crash.is_usable]
    distinct = list({identity(fingerprint(crash.folder)): crash for crash in able}.values())
    if not distinct:
        reason = "no killed save can be resumed from"
        raise controls.blame(subject, reason, test_a_kill_during_a_save_costs_at_most_that_step)

    known = lasting(subject)

    def in_the_way(crash: Crash) -> tuple[bool, int]:
        step, _ = oracle.arrival(crash.resumed)
        return step == NEWEST, -len(left_over(crash.folder, known))

    ordered = sorted(distinct, key=in_the_way)
    torn = {name: crash.folder for crash in ordered for name in torn_names(crash)}
    chosen = set(torn.values())
    return sorted(ordered, key=lambda crash: crash.folder not in chosen)


def torn_names(crash: Crash) -> list[str]:
    """Name the files of a whole save that have other bytes, where the save has to be made again."""
    step, _ = oracle.arrival(crash.resumed)
    torn = [mark.name for mark in crash.point.state.marks if mark.now is Now.OTHER]
    return torn if step != NEWEST else []


def faithful(subject: Subject, state: Leaves) -> oracle.State:
    """Keep the leaves that this manager restores without any fault: only they can be compared."""
    golden = subject.golden()
    there, back = golden.at[4], subject.loaded(golden, 4)
    return {
        part: {
            leaf: value
            for leaf, value in leaves.items()
            if there[part].get(leaf) == back[part].get(leaf)
        }
        for part, leaves in oracle.held(state, subject.holds).items()
    }


@check("CKC-ATOM-004")
def test_discovery_after_a_kill_advertises_only_what_loads(subject: Subject) -> None:
    """After a kill discovery names no step that does not load.

    Why: a directory that a killed save left was trusted by its name and picked as the latest (A09,
    B06).
    How: die inside a save, ask discovery in a new process, load the newest step that it names.
    """
    kept = usable(subject)
    by_step = "explicit_step" in subject.info.capabilities
    results = batched_recovery.steps_each(subject, [crash.folder for crash in kept])
    for crash, result in zip(kept, results, strict=True):
        evidence = {"killed": crash.point.name, "discovery": _answer(result)}
        if result.steps is None:
            raise Violation(
                f"killed {crash.point.name}, discovery does not answer", evidence=evidence
            )
        newest = max(result.steps, default=0)
        step, _ = oracle.arrival(crash.resumed)
        if step != newest and newest == NEWEST and by_step:
            step, _ = oracle.arrival(
                batched_recovery.alone(subject, Case(crash.folder, step=newest))
            )
        if step != newest:
            raise Violation(
                f"killed {crash.point.name}, discovery names step {newest}", evidence=evidence
            )


def _answer(result: StepsResult) -> object:
    """Return what discovery answered, in plain values: steps, or an error."""
    error = result.error
    if error is None or error.where:
        return json.loads(messages.encode(result.steps if error is None else error))
    return {"type": str(error.type), "message": error.message}  # the process died


@check("CKC-ATOM-005")
def test_nothing_temporary_stays_or_piles_up(subject: Subject) -> None:
    """A save leaves no temporary file, and what dead saves left does not pile up.

    Why: every killed save left its temporary files behind until the disk was full (M020).
    How: list names after two saves; then die twice inside a save, save once, and count the files.
    Then let step 4 be saved over itself after each kill of such a save; where something stays, die
    there and save again three times, and count the files each time.
    """
    golden = subject.golden()
    kept = [
        path.name for path in trees.files(golden.snapshot(NEWEST)) if TEMPORARY.search(path.name)
    ]
    if kept:
        raise Violation("a successful save leaves temporary files", evidence={"files": kept})
    known = lasting(subject)
    crashed = usable(subject)
    if not left_over(crashed[0].folder, known):
        raise NotApplicable("no killed save leaves a file that the next one could forget")
    left: list[str] = []
    for crash in crashed:
        left = left_over(crash.folder, known)
        trees.materialize(crash.folder, subject.root)
        kill = crash.point.spec("kill")
        killed = subject.run(NEWEST, (NEWEST,), faults=[kill], fault_step=NEWEST)
        if killed.has_fired and may_save_again(subject):
            break  # a manager may make fewer calls beside what a dead save left
    else:
        if not subject.info.saves_over:
            raise Unknown("each second kill came when the step was whole, which is not saved again")
    result = subject.run(NEWEST, (NEWEST,))
    if not result.went_well:
        about = test_a_job_goes_on_saving_after_a_kill
        raise controls.blame(subject, subject.tell(result), about)
    extra = left_over(subject.root, known)
    if len(extra) > len(left):
        more = [name for name in extra if name not in left]
        evidence = {"after one dead save": left, "and after a second one, and a good one": more}
        raise Violation("what dead saves leave piles up", evidence=evidence)
    if injected_save.overwrites(subject):
        _require_no_pile_of_overwrites(subject)


def _require_no_pile_of_overwrites(subject: Subject) -> None:
    """Raise Violation where each kill of a save over a step that is there leaves one file more."""
    whole_same = injected_save.whole(subject, SaveKind.SAME)
    known = [*lasting(subject), set(payload.names(whole_same))]
    for point in _after_which_something_stays(subject, known):
        counts = _left_by_each_round(subject, point, known)
        names = [len(one) for one in counts]
        if len(names) == ROUNDS and names == sorted(set(names)):
            evidence = {"killed": point.name, "after each kill and a good save": counts}
            message = "what dead saves over a step that is there leave piles up"
            raise Violation(message, evidence=evidence)


def _after_which_something_stays(subject: Subject, known: Sequence[set[str]]) -> list[Point]:
    """Choose points of a save over a step after which the next such save leaves something.

    One for each set of kinds of names; those saves are made in one child.
    """
    distinct: dict[frozenset[str], Point] = {}
    for point in injected_save.points_of(subject, SaveKind.SAME):
        over = left_over(injected_save.crash_state(subject, SaveKind.SAME, point), known)
        if over:
            distinct.setdefault(frozenset(map(trees.pattern, over)), point)
    tried = subject.sample(list(distinct.values()), SCREENED)
    ops: list[AnyOp] = []
    for at, point in enumerate(tried):
        tree = injected_save.crash_state(subject, SaveKind.SAME, point)
        again = Run(until=NEWEST, save_at=(NEWEST,), go_on=True)
        after = CopyOut(tree=str(subject.scratch / f"saved {at}"))
        ops += [Materialize(tree=str(tree)), Fresh(), again, Close(go_on=True), after]
    subject.execute(*ops, seed=injected_save.SECOND_JOB_SEED)
    saved = [(subject.scratch / f"saved {at}", point) for at, point in enumerate(tried)]
    return [point for folder, point in saved if folder.exists() and left_over(folder, known)]


def _left_by_each_round(
    subject: Subject, point: Point, known: Sequence[set[str]]
) -> list[list[str]]:
    """Die at a point of a save over step 4 and save it again, by turns; name what each leaves.

    Ends as soon as a round leaves no more than the one before it, or does not go well.
    """
    subject.materialize(subject.golden())
    save = partial(subject.run, NEWEST, (NEWEST,), seed=injected_save.SECOND_JOB_SEED)
    counts: list[list[str]] = []
    for _ in range(ROUNDS):
        killed = save(faults=[point.spec("kill")], fault_step=NEWEST)
        if not killed.has_fired or not save().went_well:
            break
        counts.append(left_over(subject.root, known))
        if len(counts) > 1 and len(counts[-1]) <= len(counts[-2]):
            break
    return counts


def may_save_again(subject: Subject) -> bool:
    """Return whether a save that was killed may be made again: a whole step may be refused."""
    if subject.info.saves_over:
        return True
    left = subject.scratch / "killed-twice"
    trees.materialize(subject.root, left)
    step, _ = oracle.arrival(batched_recovery.alone(subject, Case(left)))
    trees.materialize(left, subject.root)  # a load may tidy up
    return step != NEWEST


def lasting(subject: Subject) -> list[set[str]]:
    """Name the files that each of the two saves leaves where nothing happens."""
    golden = subject.golden()
    return [set(payload.names(golden.snapshot(step))) for step in (OLDER, NEWEST)]


def left_over(folder: Path, lasting: Sequence[set[str]]) -> list[str]:
    """Name the files of a directory that a run without faults does not have.

    Names may have parts that are drawn: of one kind there may be as many as without faults.
    """
    known, kinds = set().union(*lasting), [Counter(map(trees.pattern, one)) for one in lasting]
    names = payload.names(folder)
    room = Counter({kind: max(one[kind] for one in kinds) for kind in set().union(*kinds)})
    room.subtract(trees.pattern(name) for name in names if name in known)
    over: list[str] = []
    for name in (name for name in names if name not in known):
        kind = trees.pattern(name)
        room[kind] -= 1
        over += [name] if room[kind] < 0 else []
    return over
