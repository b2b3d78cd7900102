"""Jobs that get a signal, for real: SIGTERM with a grace, as schedulers preempt, or a dead rank.

The command runs from an empty directory, gets the signal at a chosen call or line, ends or is
ended, and is started again by its own command. What had been promised by then must not be lost, and
the result must be that of the uninterrupted run. To take no notice of SIGTERM violates nothing.
"""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt_conformance.contract.verdicts import Outcome, Unknown
from ckpt_conformance.crash.explore import bundles
from ckpt_conformance.crash.explore.judging import RANK, Recovery, is_fine, judge
from ckpt_conformance.crash.script import results
from ckpt_conformance.crash.script.messages import Interrupt, Signal
from ckpt_conformance.crash.script.rehearsal import PATIENCE, evenly
from ckpt_conformance.trace.operations import NAMING, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.crash.explore.judging import Facts
    from ckpt_conformance.crash.script.command import Signals
    from ckpt_conformance.crash.script.explore import ScriptExplorer
    from ckpt_conformance.crash.script.messages import Issued, Signalled
    from ckpt_conformance.crash.script.progress import Item, Patterns
    from ckpt_conformance.trace.operations import Operation

MOST, FEWEST = 8, 3  # moments of one kind of signal with a quick budget
NAMES = {str(kind) for kind in NAMING}


class Interruption(msgspec.Struct, frozen=True):
    """What came of one signal, as `result.json` and `violation.json` have it."""

    signal: Signal
    outcome: str
    violates: bool
    what: str  # the signal and its moment
    handled: str  # what the job made of it, and how long that took
    began: str  # where the resumed run began
    first_line: str  # of the resumed run that names a step, as it was printed
    summary: str


class Class(msgspec.Struct, frozen=True):
    """Signals of one kind that violate in the same way, and the one that stands for them."""

    outcome: str
    summary: str
    what: str
    handled: str
    count: int
    bundle: str


class Summary(msgspec.Struct, frozen=True):
    """All signals of one kind."""

    kind: str
    told: str
    outcomes: dict[str, int]
    reactions: str  # what jobs made of it, with how many did
    classes: tuple[Class, ...]
    signals: tuple[Interruption, ...]


class Kept(NamedTuple):
    """A violation that was seen twice: what came of it, the job, and what it left."""

    interruption: Interruption
    job: Signalled
    tree: Path


@dataclass
class Interruptions:
    """Sends signals to the jobs of one rehearsed script, and judges what comes back.

    `usual` is what a run does that gets none: its operations and lines, in order.
    """

    explorer: ScriptExplorer
    usual: tuple[Issued, ...] = ()
    kept: dict[str, Kept] = field(default_factory=dict[str, "Kept"])  # by class
    found: list[Interruption] = field(default_factory=list["Interruption"])

    # -- judging --------------------------------------------------------------------------------

    def judge(self, asked: Signal, job: Signalled) -> Interruption:
        """Say what came of one signal."""
        facts = self.facts(asked, job)
        recovery = self._recovery(job)
        outcome, summary = judge(recovery, facts), recovery.summary
        violates = not is_fine(outcome, facts)
        if asked.rank >= 0 and job.forced:
            violates = True
            summary = f"the job did not end after rank {asked.rank} had died; resumed: {summary}"
            outcome = max(outcome, Outcome.HANG, key=RANK.__getitem__)
        steps = self.explorer.rehearsal.patterns
        lines = [line for line in job.resumed.output.splitlines() if steps.step_of(line)]
        return Interruption(
            signal=asked,
            outcome=str(outcome),
            violates=violates,
            what=describe(asked, job.issued, self.usual),
            handled=reaction(asked, job),
            began=recovery.summary,
            first_line=lines[0] if lines else "",
            summary=summary,
        )

    def facts(self, asked: Signal, job: Signalled) -> Facts:
        """Return what had been promised when the job ended: no more than is known for certain.

        That is what the operations before the signal promise, or the lines that it printed as the
        uninterrupted run does. A line of a handler's own promises nothing.
        """
        point = 0
        recording = self.explorer.recording
        if not asked.own:
            point = _point(recording.operations, asked.operations)
        patterns = self.explorer.rehearsal.patterns
        usual = _keys(self.usual, patterns)
        marks = [operation for operation in recording.operations if operation.kind is Kind.MARK]
        said = _common(usual, _keys(job.issued, patterns))
        pairs = zip(marks, usual[:said], strict=False)
        same = [mark for mark, (_, step) in pairs if mark.step == step]
        if said and len(same) == said:
            point = max(point, same[-1].index + 1)
        return self.explorer.result.facts(point)

    def _recovery(self, job: Signalled) -> Recovery:
        refused = job.resumed.exit_kind == "ended" and job.resumed.code != 0
        return self.explorer.recovery_of(job.resumed, self._whole(job.left) if refused else ())

    def _whole(self, left: dict[str, str]) -> tuple[int, ...]:
        """List the versions whose checkpoints are all among the files that were left."""
        explorer, whole = self.explorer, list[int]()
        for version in explorer.versions[:-1]:
            state = explorer.complete((version.acknowledged or 0) + 1)
            names = [n for n in state.names if explorer.rehearsal.patterns.is_checkpoint(n)]
            with tempfile.TemporaryDirectory(prefix="ckc-whole-") as folder:
                tree = Path(folder) / "tree"
                bundles.materialize(explorer.recording, state, tree)
                if names and all(left.get(n) == results.bytes_of(tree / n) for n in names):
                    whole.append(version.number)
        return tuple(whole)

    # -- sending --------------------------------------------------------------------------------

    def run(self, asked: Signals, scratch: Path, *, every: bool) -> None:
        """Send all signals that were asked for; raises Unknown where that does not work.

        `every`: at each operation and line, and not at a few of them. `scratch` is a folder that
        takes what violations have left.
        """
        self._rehearse(asked)
        moments = [(self._moments(rank=-1, every=every), asked.grace)] if asked.preempt else []
        moments += [(self._moments(rank=rank, every=every), 0.0) for rank in asked.ranks]
        signals = [msgspec.structs.replace(s, grace=grace) for some, grace in moments for s in some]
        jobs = self._send(signals)
        ends = [end for s, job in jobs for end in _ends(s, job)]
        if not every:
            ends = [ends[at] for at in evenly(list(range(len(ends))), self._count)]
        self._send(ends)
        self._confirm(scratch)

    def _rehearse(self, asked: Signals) -> None:
        """Run the command once more, without a signal: that is what the moments are chosen from."""
        rehearsal = self.explorer.rehearsal
        job = rehearsal.pool.workers[0].ask(Interrupt(Signal(never=True), rehearsal.deadline))
        if not job.resumed.is_good or not job.resumed.comparison.same:
            raise Unknown(
                "no signal was sent: a run whose calls are followed, and that gets none, does not "
                f"give the usual result: {'; '.join(job.resumed.comparison.differs[:3])}"
            )
        self.usual = job.issued
        absent = [rank for rank in asked.ranks if rank not in job.ranks]
        if absent:
            seen = ", ".join(map(str, job.ranks)) or "none"
            raise Unknown(
                f"--kill-rank {absent[0]}: no process of the job was that rank (seen: {seen}). A "
                "rank is known by RANK in its environment, as torchrun sets it, or "
                "OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID"
            )

    @property
    def _count(self) -> int:
        """How many moments a quick budget has time for."""
        rehearsal = self.explorer.rehearsal
        room = PATIENCE * len(rehearsal.pool.workers) / max(0.1, 2 * rehearsal.seconds)
        return max(FEWEST, min(MOST, int(room)))

    def _moments(self, rank: int, *, every: bool) -> list[Signal]:
        """Choose moments: operations of a rank that has some, and what lies between the saves."""
        own = any(item.rank == rank >= 0 and item.kind != Kind.MARK for item in self.usual)
        places = [n for n, item in enumerate(self.usual) if not own or _is_of(item, rank)]
        if not every:
            lines = [n for n in places if self.usual[n].kind == Kind.MARK]
            rest = [n for n in places if self.usual[n].kind != Kind.MARK]
            some = evenly(lines, max(1, self._count // 3)) if lines else []
            places = sorted([*some, *evenly(rest, self._count - len(some))])
        return [_signal(self.usual[:place], rank, own=own) for place in places]

    def _send(self, signals: Sequence[Signal]) -> list[tuple[Signal, Signalled]]:
        explorer, jobs = self.explorer, list[tuple[Signal, "Signalled"]]()
        deadline, begun = explorer.rehearsal.deadline, time.monotonic()
        answers = explorer.rehearsal.pool.map(
            len(signals), lambda number: Interrupt(signals[number], deadline)
        )
        for number, job in answers:
            asked = signals[number]
            if job.sent:
                jobs.append((asked, job))
                self.found.append(self.judge(asked, job))
            else:
                explorer.unknown(
                    f"not sent: {describe(asked, self.usual, self.usual)}: {_NOT_SENT}"
                )
            explorer.on_progress(len(jobs), len(signals), time.monotonic() - begun)
        return jobs

    def _confirm(self, scratch: Path) -> None:
        """Send once more what stands for each class of violations; see `ScriptExplorer.confirm`."""
        classes, deadline = self.classes(), self.explorer.rehearsal.deadline
        names = list(classes)

        def request(number: int) -> Interrupt:
            name = names[number]
            return Interrupt(classes[name][0].signal, deadline, str(scratch / name))

        for number, job in self.explorer.rehearsal.pool.map(len(names), request):
            then = classes[names[number]][0]
            now = self.judge(then.signal, job)
            if job.sent and now.outcome == then.outcome:
                self.kept[names[number]] = Kept(now, job, scratch / names[number])
            else:
                outcome = now.outcome if job.sent else "not sent"
                what = f"not steady: {then.what}: {then.outcome}, and once more {outcome}"
                self.explorer.unknown(what)

    def classes(self) -> dict[str, list[Interruption]]:
        """Group what violates by the kind of signal and the outcome, worst first."""
        groups: dict[str, list[Interruption]] = {}
        bad = [found for found in self.found if found.violates]
        for found in sorted(bad, key=lambda found: -RANK[Outcome(found.outcome)]):
            groups.setdefault(f"{kind_of(found.signal)}-{found.outcome}", []).append(found)
        return groups

    def summary(self, asked: Signals, paths: Mapping[str, str]) -> list[Summary]:
        """Sum up each kind of signal; `paths` are the bundles by class."""
        groups = self.classes()
        kinds = ["preempt"] if asked.preempt else []
        kinds += [f"rank-{rank}-dies" for rank in asked.ranks]
        return [self._summary(kind, asked, groups, paths) for kind in kinds]

    def _summary(
        self,
        kind: str,
        asked: Signals,
        groups: Mapping[str, Sequence[Interruption]],
        paths: Mapping[str, str],
    ) -> Summary:
        found = [item for item in self.found if kind_of(item.signal) == kind]
        found.sort(key=lambda item: (item.signal.operations, item.signal.ends_after))
        mine = {name: group for name, group in groups.items() if kind_of(group[0].signal) == kind}
        told = f"SIGTERM, SIGKILL after {asked.grace:g} s" if kind == "preempt" else "SIGKILL"
        reactions = Counter(re.sub(r",? after [\d.]+ s$", "", item.handled) for item in found)
        return Summary(
            kind=kind,
            told=told,
            outcomes=dict(Counter(item.outcome for item in found)),
            reactions="; ".join(f"{what} ({count})" for what, count in reactions.most_common()),
            classes=tuple(_class(g, paths.get(name, "")) for name, g in mine.items()),
            signals=tuple(found),
        )


def _class(group: Sequence[Interruption], path: str) -> Class:
    first = group[0]
    return Class(first.outcome, first.summary, first.what, first.handled, len(group), path)


_NOT_SENT = "the job did less this time; a job is the same each time only if nothing races in it"


def kind_of(asked: Signal) -> str:
    """Name a kind of signal, for a row of a report and for the folder of a bundle."""
    return "preempt" if asked.rank < 0 else f"rank-{asked.rank}-dies"


def describe(asked: Signal, issued: Sequence[Issued], usual: Sequence[Issued]) -> str:
    """Say which signal is sent, when, and when its grace ends."""
    name = "SIGTERM" if asked.rank < 0 else f"SIGKILL of rank {asked.rank}"
    items = [item for item in usual if not asked.own or _is_of(item, asked.rank)]
    place = asked.operations + asked.lines
    where = _describe_item(items[place]) if place < len(items) else "its end"
    count = f"after {asked.operations} operations{' of its own' if asked.own else ''}"
    text = f"{name} {count}, at {where}"
    if asked.ends_after < 0:
        return text
    later = [item for item in issued if item.kind != Kind.MARK]
    at = asked.operations + asked.ends_after
    inside = _describe_item(later[at]) if at < len(later) else f"operation {at}"
    return f"{text}; SIGKILL {'inside' if asked.half else 'before'} {inside}"


def _describe_item(item: Issued) -> str:
    return f"{item.line!r}" if item.kind == Kind.MARK else f"{item.kind} {item.path}"


def reaction(asked: Signal, job: Signalled) -> str:
    """Say what the job made of the signal, and how long that took."""
    took = f"{job.seconds:.1f} s"
    if asked.rank >= 0:
        return f"no end within {took}" if job.forced else f"{_ended(job.code)} after {took}"
    what = {
        "caught": "handled",
        "ignored": "ignored",
        "default": "not handled",
    }.get(job.disposition, "unknown")
    if job.forced:
        when = "while it wrote" if asked.ends_after >= 0 else "at the end of the grace"
        return f"{what}: SIGKILL {when}, after {took}"
    return f"{what}: {_ended(job.code)} after {took}"


def _ended(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"{signal.Signals(-code).name} ended it"


def _is_of(item: Issued, rank: int) -> bool:
    return item.rank == rank and item.kind != Kind.MARK


def _signal(before: Sequence[Issued], rank: int, *, own: bool) -> Signal:
    """Make the signal that is sent after what comes before it."""
    lines = sum(item.kind == Kind.MARK for item in before)
    if own:
        return Signal(sum(_is_of(item, rank) for item in before), 0, rank, own=True)
    return Signal(len(before) - lines, lines, rank)


def _ends(asked: Signal, job: Signalled) -> list[Signal]:
    """Choose ends of a grace inside of what a job does after SIGTERM: of its last checkpoint.

    They are the middle of the largest write, and the moments before each change of a name.
    """
    after = [item for item in job.issued[job.at :] if item.kind != Kind.MARK]
    if asked.rank >= 0 or job.disposition != "caught" or not after:
        return []
    # What was called for when the signal came is the first of them: it is done by then.
    writes = [n for n, item in enumerate(after) if item.kind == Kind.WRITE and n > 0]
    middle = max(writes, key=lambda n: after[n].size, default=-1)
    names = [n for n, item in enumerate(after) if item.kind in NAMES and n > 0]
    ends = [msgspec.structs.replace(asked, ends_after=n) for n in names]
    if middle >= 0:
        ends.insert(0, msgspec.structs.replace(asked, ends_after=middle, half=True))
    return ends


def _point(operations: Iterable[Operation], count: int) -> int:
    """Return the point of a recording right after so many operations; marks do not count."""
    point = done = 0
    for operation in operations:
        if done == count:
            break
        point += 1
        done += operation.kind is not Kind.MARK
    return point


def _keys(issued: Sequence[Issued], patterns: Patterns) -> list[Item]:
    """Return the step lines without what changes from run to run: all numbers but the step's."""
    lines = [item.line for item in issued if item.kind == Kind.MARK]
    items = [(line, patterns.step_of(line)) for line in lines]
    return [(re.sub(r"\d+", "#", line), item[1]) for line, item in items if item]


def _common(usual: Sequence[Item], printed: Sequence[Item]) -> int:
    """Count how many of the usual lines were printed, in order, from the first on."""
    lines = iter(printed)
    count = 0
    for line in usual:
        if line not in lines:  # which takes lines until it is found
            break
        count += 1
    return count
