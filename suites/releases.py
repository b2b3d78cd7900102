"""What other releases of torch wrote, read by the adapter under test.

What differs between two releases is looked for, and nothing else. So only leaves are compared that
come back in a round trip under the installed release: for the others there is an invariant already.
A leaf that one of the two releases does not have is not compared either; which these are is noted.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_conformance.contract import DEFAULT_KIND, trees, written
from ckpt_conformance.contract.verdicts import Cause, NotApplicable, Remarks, Unknown, Violation
from ckpt_conformance.fault_injectors import spec
from ckpt_conformance.subject import oracle, resumption, worlds, writing
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.suites import layouts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.contract.verdicts import Evidence
    from ckpt_conformance.contract.written import WrittenFolder, WrittenRun
    from ckpt_conformance.harness.client import Finished
    from ckpt_conformance.harness.messages import Fault, Leaves
    from ckpt_conformance.subject.subject import Golden, Subject

NEWEST = layouts.NEWEST
INSTALLED = "the installed torch"
NONE = "no checkpoint of another release of torch was given: certify with --written-by DIR"
PRETENDED: Slot[list[Checkpoint]] = Slot("what the adapter writes under a pretended release")
OTHERS: Slot[list[WrittenFolder]] = Slot("folders that were written under another release")
ARRIVED: Slot[Finished] = Slot("a load of what another release wrote")


@dataclass(frozen=True)
class Checkpoint:
    """A directory that another release of torch left, and what was saved into it."""

    release: str
    run: WrittenRun
    tree: Path

    @property
    def title(self) -> str:
        """Say in a few words which one it is."""
        who = layouts.name(self.run.layout) if self.run.layout else f"a job of kind {self.run.kind}"
        return f"{who}, written by torch {self.release}"


@dataclass
class Compared:
    """What a comparison found: leaves that differ, and those that only one release has."""

    wrong: list[str] = field(default_factory=list[str])
    theirs: list[str] = field(default_factory=list[str])
    ours: list[str] = field(default_factory=list[str])


def of_one_process(subject: Subject) -> list[Checkpoint]:
    """Return what one process wrote under other releases, of jobs that come back under this one.

    Raises NotApplicable if one process wrote nothing, Unknown if no such job comes back here: what
    fails under every release says nothing about two of them.
    """
    found = [one for one in _all(subject) if one.run.layout is None]
    if not found:
        raise NotApplicable("nothing that was given was written by one process")
    comparable = [one for one in found if comes_back(subject, one.run.kind)]
    if not comparable:
        kinds = ", ".join(sorted({one.run.kind for one in found}))
        raise Unknown(
            f"of the jobs that were saved ({kinds}) none comes back under the installed torch: "
            "certify with --profile resume, which tells why",
            cause=Cause.CONTROL,
        )
    return comparable


def of_ranks(subject: Subject) -> list[Checkpoint]:
    """Return what ranks wrote under other releases; raises NotApplicable without any."""
    subject.need("ranks")
    found = [one for one in _all(subject) if one.run.layout is not None]
    if not found:
        raise NotApplicable("nothing that was given was written by ranks")
    return found


def pretended_release() -> str:
    """Name a release that does not exist, of the line of the installed one."""
    line = written.release_of(importlib.metadata.version("torch")).split(".")[:2]
    return ".".join([*line, "9971"])


def pretended_fault() -> Fault:
    """Make the fault that lets a manager take torch for another release."""
    return spec("other-release", version=pretended_release())


def _all(subject: Subject) -> list[Checkpoint]:
    if subject.pretends:
        return subject.once(PRETENDED, lambda: list(_pretended(subject)))
    found = subject.once(OTHERS, lambda: _others(subject))
    checkpoints = [
        Checkpoint(one.record.release, run, one.tree(run))
        for one in found
        for run in one.record.runs
    ]
    subject.remarks.releases = tuple(
        f"torch {one.record.torch} ({len(one.record.runs)} runs)" for one in found
    )
    return checkpoints


def _pretended(subject: Subject) -> Iterator[Checkpoint]:
    """Write under a pretended release, for managers that are broken on purpose."""
    faults = (pretended_fault(),)
    goldens: list[tuple[Golden, dict[str, int] | None]] = [(subject.golden(faults=faults), None)]
    if "ranks" in subject.info.capabilities:
        goldens.append((worlds.golden(subject, writing.TWO, faults=faults), writing.TWO))
    for golden, layout in goldens:
        run = writing.run_of(golden, "", layout)
        yield Checkpoint(pretended_release(), run, golden.snapshot(NEWEST))


def _others(subject: Subject) -> list[WrittenFolder]:
    """Read what was given; raises NotApplicable where it says nothing about another release."""
    name = subject.info.name
    try:
        every = [one for folder in subject.written_by for one in written.find(folder)]
        mine = [one for one in every if one.record.adapter == name]
        here = written.release_of(written.installed())
        others = [one for one in mine if one.record.release != here]
        for one in others:
            written.check_files(one)
            _check_features(subject, one)
    except written.WrittenError as error:
        raise Unknown(str(error), cause=Cause.MACHINE) from error
    if not every:
        raise NotApplicable(NONE)
    if not mine:
        raise NotApplicable(f"nothing that was given was written by {name}")
    if not others:
        raise NotApplicable(
            f"all that was given was written by torch {here}, which is installed here: that says "
            "nothing about another release"
        )
    return others


def _check_features(subject: Subject, folder: WrittenFolder) -> None:
    """Raise Unknown where the adapter declared other features then: its jobs are others now."""
    here, there = sorted(subject.info.cannot_hold), sorted(folder.record.without)
    if here != there:
        raise Unknown(
            f"{folder.path} was written where the adapter declared cannot_hold={there}, and it "
            f"declares {here} now: its jobs differ; write it again",
            cause=Cause.ADAPTER,
        )


def comes_back(subject: Subject, kind: str) -> bool:
    """Return whether a job of a kind comes back under the installed release.

    Raises Unknown if not even the plain job does.
    """
    try:
        resumption.arrive(subject, kind)
    except (NotApplicable, Unknown):
        if kind == DEFAULT_KIND:
            raise
        return False
    return True


# -- loading -----------------------------------------------------------------------------------


def arrived(
    subject: Subject, checkpoint: Checkpoint, layout: dict[str, int] | None = None
) -> Finished:
    """Load what another release wrote, once: in one process, or in a layout of ranks."""

    def load() -> Finished:
        trees.materialize(checkpoint.tree, subject.root)
        if layout is None:
            return subject.resume(kind=checkpoint.run.kind)
        return worlds.resume(subject, layout)

    return subject.once(ARRIVED, load, checkpoint.tree, *sorted((layout or {}).items()))


def is_refused(result: Finished) -> bool:
    """Return whether a load ended with an error that says something."""
    return result.error is not None and bool(result.error.message.strip())


def passed_over(subject: Subject, result: Finished, step: int) -> str:
    """Say how a load neither gave the step nor refused it in words; empty if it did."""
    if is_refused(result):
        return ""
    if not result.went_well:
        return f"a load ends as {subject.tell(result)}"
    got, _ = oracle.arrival(result)
    return "" if got == step else f"a load gives {subject.tell(result)}, and not step {step}"


def evidence(subject: Subject, checkpoint: Checkpoint, result: Finished) -> Evidence:
    """Collect what a reader needs."""
    return subject.evidence(result, written_by=f"torch {checkpoint.release}", what=checkpoint.title)


# -- comparing -----------------------------------------------------------------------------------


def demand_same(subject: Subject, checkpoint: Checkpoint) -> None:
    """Raise Violation if a load of one process serves another state than was saved."""
    result = arrived(subject, checkpoint)
    if result.error is not None:
        return
    saved, own = resumption.arrive(subject, checkpoint.run.kind)
    _, state = oracle.arrival(result)
    _judge(subject, checkpoint, result, _compare(subject, checkpoint.run.saved, state, saved, own))


def demand_loads(
    subject: Subject, checkpoint: Checkpoint, layout: dict[str, int] | None = None
) -> None:
    """Raise Violation if what another release wrote is refused."""
    result = arrived(subject, checkpoint, layout)
    if result.error is not None:
        where = f" in {layouts.name(layout)}" if layout else ""
        raise Violation(
            f"{checkpoint.title}: it is refused{where}: {subject.tell(result)}",
            evidence=evidence(subject, checkpoint, result),
        )


def demand_same_on_ranks(subject: Subject, checkpoint: Checkpoint, layout: dict[str, int]) -> None:
    """Raise Violation if ranks get another state than was saved, or only some of them get one."""
    result = arrived(subject, checkpoint, layout)
    if isinstance(result, worlds.WorldResult) and result.split:
        ranks = worlds.by_rank(subject, result)
        raise Violation(
            f"{checkpoint.title}: of {layouts.name(layout)} some load it and some do not",
            evidence={"ranks": ranks},
        )
    if is_refused(result):
        return
    message = passed_over(subject, result, checkpoint.run.step)
    if message:
        more = evidence(subject, checkpoint, result)
        raise Violation(f"{checkpoint.title}: in {layouts.name(layout)} {message}", evidence=more)
    saved, own = layouts.pair(subject, dict(checkpoint.run.layout or {}), layout)
    _, state = oracle.arrival(result)
    compared = _compare(subject, checkpoint.run.saved, state, saved, own)
    _judge(subject, checkpoint, result, compared, f" in {layouts.name(layout)}")


def _compare(subject: Subject, then: Leaves, now: Leaves, saved: Leaves, own: Leaves) -> Compared:
    """Compare what arrived `now` with what was saved `then`, where the own round trip is right.

    `saved` and `own` are what the installed release saves, and gets back.
    """
    found = Compared()
    for part in oracle.held(saved, subject.holds):
        theirs, ours = then.get(part, {}), saved[part]
        found.theirs += [f"{part}/{path}" for path in theirs.keys() - ours.keys()]
        found.ours += [f"{part}/{path}" for path in ours.keys() - theirs.keys()]
        for path in sorted(theirs.keys() & ours.keys()):
            comes_back = own.get(part, {}).get(path) == ours[path]
            value = now.get(part, {}).get(path, "absent")
            if comes_back and value != theirs[path]:
                found.wrong.append(f"{part}/{path}: {value[:8]} != {theirs[path][:8]}")
    return found


def _judge(
    subject: Subject,
    checkpoint: Checkpoint,
    result: Finished,
    compared: Compared,
    where: str = "",
) -> None:
    one_sided = {f"torch {checkpoint.release}": compared.theirs, INSTALLED: compared.ours}
    subject.remarks.add(
        Remarks(one_sided={who: names for who, names in one_sided.items() if names})
    )
    if compared.wrong:
        shown = compared.wrong[: layouts.MOST]
        raise Violation(
            f"{checkpoint.title}: another state arrives{where}",
            evidence={**evidence(subject, checkpoint, result), "arrived != saved": shown},
        )
