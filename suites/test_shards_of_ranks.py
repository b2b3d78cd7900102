"""A checkpoint of several ranks is served whole or not at all, and to every rank alike."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import (
    REFUSALS,
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import at_rest, dcp_metadata, payload
from ckpt_conformance.harness.messages import (
    Close,
    LeavesResult,
    Load,
    LoadResult,
    Probe,
    ProbeResult,
    ReadLeaves,
    Run,
    RunResult,
    Save,
    SaveResult,
)
from ckpt_conformance.subject import oracle, worlds
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.at_rest import Damage
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import RankLeaves
    from ckpt_conformance.subject.subject import Golden, Subject
    from ckpt_conformance.subject.worlds import Layout

OLDER, NEWEST = 2, 4
TWO: Layout = {"fsdp": 2}
OTHER_RUN = 31  # the seed of the run whose shard is not this run's
NEVER_WRONG = {Outcome.NEW, Outcome.LOST_STEP, *REFUSALS}
UNEQUAL = Probe(probe="ckpt_conformance.harness.ranks:unequal")  # changes a buffer on rank 1


@dataclass(frozen=True)
class Case:
    """One damaged directory: what was done, and where it is."""

    message: str
    damage: Damage
    folder: Path


def files(subject: Subject) -> tuple[Golden, list[str]]:
    """Return the run of two ranks and the files that its newest save made."""
    gold = worlds.golden(subject, TWO)
    return gold, payload.of_step(gold, NEWEST)


def damaged(
    subject: Subject, gold: Golden, names: Sequence[str], hurt: Callable[[Path, str], Damage]
) -> list[Case]:
    """Damage each file in a copy of the whole directory."""
    made: list[Case] = []
    for at, name in enumerate(names):
        folder = subject.scratch / f"case-{at}"
        trees.materialize(gold.snapshot(NEWEST), folder)
        damage = hurt(folder, name)
        made.append(Case(f"{name}: {damage.fault}", damage, folder))
    return made


def never_served(subject: Subject, gold: Golden, cases: Sequence[Case]) -> None:
    """Resume two ranks from each; accept anything but a wrong state, a cold start, a split."""
    legal = worlds.legal(subject, gold, TWO)
    for case in cases:
        trees.materialize(case.folder, subject.root)
        result = worlds.resume(subject, TWO)
        evidence = {"damage": case.damage.to_json(), "ranks": worlds.by_rank(subject, result)}
        if result.split:
            raise Violation(f"{case.message}: the ranks do not agree", evidence=evidence)
        subject.judge(
            result,
            legal,
            NEVER_WRONG,
            case.message,
            newest=NEWEST,
            acknowledged=(OLDER, NEWEST),
            **evidence,
        )


def siblings(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pair the files that differ in one number only: the same thing of two ranks."""
    groups: dict[str, list[str]] = {}
    for name in names:
        for match in re.finditer(r"\d+", name):
            hole = f"{name[: match.start()]}#{name[match.end() :]}"
            groups.setdefault(hole, []).append(name)
    return [(group[0], group[1]) for group in groups.values() if len(group) > 1]


def next_of(name: str, names: Sequence[str]) -> str | None:
    """Name what the next rank would write: the number in which siblings differ, one higher."""
    for match in re.finditer(r"\d+", name):
        head, tail = name[: match.start()], name[match.end() :]
        if f"{head}{int(match[0]) - 1}{tail}" in names:
            return f"{head}{int(match[0]) + 1}{tail}"
    return None


def older_of(gold: Golden, name: str) -> str | None:
    """Name what stood for a file of the newest step at the older one: the step is in its name."""
    there = payload.names(gold.snapshot(OLDER))
    plain = re.sub(r"\d+", _no_step, name)
    alike = [old for old in there if re.sub(r"\d+", _no_step, old) == plain]
    return alike[0] if len(alike) == 1 else None


def _no_step(match: re.Match[str]) -> str:
    return "#" if int(match[0]) in (OLDER, NEWEST) else match[0]


@check("CKC-SHRD-014")
def test_a_missing_shard_is_never_passed_over(subject: Subject) -> None:
    """With any file of any rank missing, all ranks refuse or fall back; none goes on without.

    Why: the rank whose file is gone begins cold beside ranks that resumed, or the job refuses on
    one rank and hangs on the others (N03, I03, M034, M040).
    How: two ranks; delete each file that the newest save made, one at a time; resume.
    """
    subject.need("ranks")
    gold, names = files(subject)
    never_served(subject, gold, damaged(subject, gold, subject.sample(names, 8), at_rest.remove))


@check("CKC-SHRD-015")
def test_a_torn_shard_is_never_served(subject: Subject) -> None:
    """With a file of any rank cut short, all ranks refuse or fall back.

    Why: a rank that died, or whose disk was full, leaves half of its file, and the others whole
    ones (N01, A01).
    How: two ranks; cut each file that the newest save made in half, one at a time; resume.
    """
    subject.need("ranks")
    gold, names = files(subject)
    never_served(subject, gold, damaged(subject, gold, subject.sample(names, 8), at_rest.truncate))


@check("CKC-SHRD-016")
def test_the_shard_of_another_rank_is_never_served(subject: Subject) -> None:
    """With the files of two ranks swapped, all ranks refuse or fall back.

    Why: shards of one shape fit everywhere; a copy that renumbers ranks permutes the weights, and
    nothing is said (J10, I01).
    How: two ranks; swap the files that differ in one number of their names; resume.
    """
    subject.need("ranks")
    gold, names = files(subject)
    pairs = siblings(names)
    if not pairs:
        raise NotApplicable("no two files of a step differ in one number of their names")
    other = dict(pairs)
    cases = damaged(
        subject,
        gold,
        subject.sample(list(other), 2),
        lambda folder, name: at_rest.swap_files(folder, name, other[name]),
    )
    never_served(subject, gold, cases)


@check("CKC-SHRD-017")
def test_a_stale_shard_is_never_served(subject: Subject) -> None:
    """With a file from another step or another run in it, a checkpoint is refused.

    Why: a shard of the same layout fits: half of the rows are two steps old, and nothing is said
    (MX3, N01, J12).
    How: two ranks; put the older step's file in the place of the newest one's, then the same step's
    file of another run; resume.
    """
    subject.need("ranks")
    gold, names = files(subject)
    other = worlds.golden(subject, TWO, seed=OTHER_RUN)
    sources = {name: gold.snapshot(OLDER) / old for name in names if (old := older_of(gold, name))}
    cases = damaged(
        subject,
        gold,
        subject.sample(list(sources), 8),
        lambda folder, name: at_rest.replace_file(folder, name, sources[name]),
    )
    never_served(subject, gold, cases)
    theirs = [
        name
        for name in names
        if (there := other.snapshot(NEWEST) / name).is_file()
        and there.read_bytes() != (gold.snapshot(NEWEST) / name).read_bytes()
    ]
    cases = damaged(
        subject,
        gold,
        subject.sample(theirs, 8),
        lambda folder, name: at_rest.replace_file(
            folder, name, other.snapshot(NEWEST) / name, "other-run"
        ),
    )
    never_served(subject, gold, cases)


@check("CKC-SHRD-020")
def test_the_shard_of_a_rank_that_is_not_there_disturbs_nothing(subject: Subject) -> None:
    """With a shard of one rank more in it, a checkpoint is served as it was saved, or refused.

    Why: a save by fewer ranks into a directory that is there leaves the files of the others; who
    counts files takes it for a checkpoint of another world (J12, I03).
    How: two ranks; copy the second rank's file under the name that a third one would have; resume.
    """
    subject.need("ranks")
    gold, names = files(subject)
    more = {second: third for _, second in siblings(names) if (third := next_of(second, names))}
    if not more:
        raise NotApplicable("no two files of a step differ in one number of their names")
    cases = damaged(
        subject,
        gold,
        subject.sample(list(more), 2),
        lambda folder, name: at_rest.add(folder, more[name], (folder / name).read_bytes()),
    )
    never_served(subject, gold, cases)


@check("CKC-SHRD-021")
def test_an_index_with_a_hole_or_an_overlap_is_never_believed(subject: Subject) -> None:
    """Where the index leaves out a part of a tensor, or tells it twice, all ranks refuse.

    Why: a reader that copies what overlaps takes a part for the whole: the rest of the destination
    keeps what was there before, and nothing is said (J05, MX3).
    How: two ranks; in the index of DCP take the last chunk of the largest tensor out, then put in
    one more that tells a row again; resume.
    """
    subject.need("ranks")
    gold, names = files(subject)
    indexes = [name for name in names if dcp_metadata.is_index(gold.snapshot(NEWEST) / name)]
    if not indexes:
        raise NotApplicable("no file of a step is an index of chunks as DCP writes it")
    cases = [
        indexed(subject, gold, name, fault) for name in indexes for fault in dcp_metadata.OF_RANKS
    ]
    never_served(subject, gold, cases)


def indexed(subject: Subject, gold: Golden, name: str, fault: str) -> Case:
    """Edit an index in a copy of the whole directory."""
    folder = subject.scratch / f"case-{fault}"
    trees.materialize(gold.snapshot(NEWEST), folder)
    before = at_rest.digest(folder / name)
    args = {"path": str(folder / name), "fault": fault}
    result = subject.execute(Probe(probe=dcp_metadata.EDIT, args=args))
    tensor: str | None = result.of(ProbeResult).value
    if tensor is None:
        raise Unknown(f"the index {name} could not be edited: {subject.tell(result)}")
    if not tensor:
        raise NotApplicable(f"{name} tells of no tensor in several parts")
    damage = at_rest.prove(fault, folder, name, before, detail=tensor)
    return Case(f"{name}: {fault} in {tensor}", damage, folder)


@check("CKC-SHRD-018")
def test_a_refused_load_has_touched_no_rank(subject: Subject) -> None:
    """A load that is refused has changed nothing on any rank.

    Why: a caller that catches the refusal and goes on, with a fallback or from the beginning,
    trains on weights of which some are the checkpoint's (MX3, N07).
    How: two ranks; damage each file of the only step that is there; compare every rank's state
    before the load and after its refusal.
    """
    subject.need("ranks")
    gold = worlds.golden(subject, TWO)
    names = payload.names(gold.snapshot(OLDER))
    refused = False
    for name in subject.sample(names, 4):
        folder = subject.scratch / "case"
        trees.materialize(gold.snapshot(OLDER), folder)
        damage = at_rest.truncate(folder, name)
        trees.materialize(folder, subject.root)
        result = worlds.execute(subject, TWO, ReadLeaves(), Load(go_on=True), ReadLeaves())
        refused = refused or any(rank.of(LoadResult).error for rank in result.ranks)
        for rank, process in enumerate(result.ranks):
            error, changed = process.of(LoadResult).error, _changed_by_load(process)
            if error and changed is not None:
                raise Violation(
                    f"{name}: {damage.fault}: the load is refused, and rank {rank} is changed",
                    evidence={"changed": changed, "refused": error.message},
                )
    if not refused:
        raise control_failed("no load of a torn file was refused", "CKC-SHRD-015")


def _changed_by_load(process: ProcessResult) -> list[str] | None:
    """Name the components that a load changed; None if all is equal, or it did not live on."""
    before, after = process.of(LeavesResult, 0).leaves, process.of(LeavesResult, 1).leaves
    if before is None or after is None or before == after:
        return None
    return [part for part, leaves in before.items() if leaves != after.get(part)]


@check("CKC-SHRD-019")
def test_replicas_that_differ_are_not_made_one(subject: Subject) -> None:
    """Where ranks hold different values of what is saved once, the save refuses or keeps each.

    Why: layer norms that had drifted apart, and experts that every rank numbers from 0, were saved
    under one name: one rank's copy was kept, and loaded by all (I04, I05, I09).
    How: change a buffer on rank 1 before a save; if the save returns, resume: every rank must get
    what it had.
    """
    subject.need("ranks")
    worlds.golden(subject, TWO)
    ops = (Run(until=2), UNEQUAL, Save(), ReadLeaves(), Close())
    result = worlds.execute(subject, TWO, *ops)
    if not result.reached(ProbeResult):
        raise control_failed(f"the ranks do not come to their save: {subject.tell(result)}")
    if any(rank.of(SaveResult).error for rank in result.ranks):
        return
    if not result.reached(LeavesResult):
        raise control_failed(f"the save of unequal replicas has no end: {subject.tell(result)}")
    resumed = worlds.resume(subject, TWO)
    if oracle.arrival(resumed)[0] != 2:  # noqa: PLR2004  the step that was saved
        raise control_failed(f"what was saved does not load: {subject.tell(resumed)}")
    for rank, (saved, loaded) in enumerate(zip(result.ranks, resumed.ranks, strict=True)):
        wanted = saved.of(LeavesResult).leaves or {}
        arrived = loaded.of(RunResult).states.get(2, {})
        if _buffer(arrived) != _buffer(wanted):
            raise Violation(
                f"rank {rank} does not get its own buffer back, and the save was not refused",
                evidence={"ranks": worlds.by_rank(subject, resumed)},
            )


def _buffer(state: RankLeaves) -> object:
    """Return the digest of the buffer that was made unequal."""
    return state.get("model", {}).get("constant")
