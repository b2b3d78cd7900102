"""What may be loaded after a crash at a point, and what one recovery came to.

A version is one save of a step: saving a step over itself makes a second version of it. Which
versions are legal at a point follows from the journal's markers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract.verdicts import REFUSALS, Outcome
from ckpt_conformance.harness.messages import ExitKind
from ckpt_conformance.subject.oracle import OUTCOME_OF_DEATH
from ckpt_conformance.trace.operations import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.trace.operations import Operation, Recording

# From best to worst; a crash map shows the worst outcome of a point.
ORDER = (
    Outcome.NEW,
    Outcome.PREVIOUS,
    Outcome.REFUSED_TYPED,
    Outcome.REFUSED_UNTYPED,
    Outcome.LOST_STEP,
    Outcome.OUT_OF_MEMORY,
    Outcome.CRASHED,
    Outcome.HANG,
    Outcome.COLD_START,
    Outcome.LOST_ALL,
    Outcome.SILENT_WRONG,
)
RANK = {outcome: rank for rank, outcome in enumerate(ORDER)}
BEFORE = -1  # begun and acknowledged before the recording


@dataclass(frozen=True)
class Version:
    """One save of a step; `begun` and `acknowledged` are indices of markers, None: never.

    On several ranks it is begun when the first rank begins it, and acknowledged when the last one
    acknowledges it: `ranks` gives both markers of each.
    """

    number: int
    step: int
    begun: int = BEFORE
    acknowledged: int | None = BEFORE
    ranks: tuple[tuple[int, int | None], ...] = ()

    def is_begun(self, point: int, cut: Sequence[int]) -> bool:
        """Whether a rank had begun it when they stopped."""
        if not cut or not self.ranks:
            return self.begun < point
        return any(begun < at for (begun, _), at in zip(self.ranks, cut, strict=True))

    def is_done(self, point: int, cut: Sequence[int]) -> bool:
        """Whether every rank had acknowledged it when they stopped."""
        if not cut or not self.ranks:
            return self.acknowledged is not None and self.acknowledged < point
        done = zip(self.ranks, cut, strict=True)
        return all(index is not None and index < at for (_, index), at in done)


class Facts(
    msgspec.Struct,
    frozen=True,
    rename={"last_acknowledged": "floor", "in_flight": "flying"},  # as bundles have always had it
):
    """What was promised at a crash point, as numbers of versions.

    `last_acknowledged` is the newest version that was acknowledged, None if nothing was; `older`
    are those before it; `in_flight` were begun and not acknowledged. `strict`: a refusal is never
    fine, since what restarts is a command, and nobody is there who would empty the directory.
    """

    last_acknowledged: int | None
    older: tuple[int, ...]
    in_flight: tuple[int, ...]
    strict: bool = False

    @property
    def acknowledged(self) -> tuple[int, ...]:
        """The versions that were acknowledged, newest first."""
        if self.last_acknowledged is None:
            return ()
        return (self.last_acknowledged, *reversed(self.older))

    @property
    def fine(self) -> frozenset[int]:
        """The versions that may be loaded."""
        return frozenset((*self.in_flight, *self.acknowledged[:1]))


class LoadError(msgspec.Struct, frozen=True):
    """The exception that a recovery ended with.

    `typed`: it is one that the manager documents. `memory`: it came from a lack of memory.
    """

    type: str  # dotted name of the class
    message: str
    typed: bool = False
    memory: bool = False


class Recovery(msgspec.Struct, frozen=True):
    """What one recovery gave: how it ended, the step, which versions that is, the error.

    `older` lists versions that an explicit load still gives although the newest one is refused.
    """

    exit_kind: str  # ended, or as `ProcessResult.exit_kind`
    step: int | None = None
    versions: tuple[int, ...] = ()
    error: LoadError | None = None
    differs: tuple[str, ...] = ()
    older: tuple[int, ...] = ()
    alone: bool = False  # judged in a process of its own
    said: str = ""  # what to say instead of the step

    @property
    def summary(self) -> str:
        """What it gave, in one line."""
        if self.exit_kind != "ended":
            return self.exit_kind
        if self.error:
            return f"{self.error.type}: {self.error.message[:200]}"
        if self.said:
            return self.said
        return f"step {self.step}" if self.step else "no checkpoint: it began anew"

    def agrees_with(self, other: Recovery) -> bool:
        """Whether both came to the same: what was recovered before must not change that.

        Nor with which error: one of another class is of what an earlier recovery has left.
        """
        ends = [(r.exit_kind, r.step, r.versions, r.error and r.error.type) for r in (self, other)]
        return ends[0] == ends[1]


def versions_of(recording: Recording, before: Sequence[int] = ()) -> list[Version]:
    """List the versions: steps that were there before, oldest first, then the recorded saves."""
    versions = [Version(number, step) for number, step in enumerate(before)]
    marks = [operation for operation in recording.operations if operation.kind is Kind.MARK]
    if recording.ranks == 1:
        return versions + [
            Version(len(before) + at, *save) for at, save in enumerate(_saves(marks))
        ]
    by_rank = [_saves([m for m in marks if m.rank == rank]) for rank in range(recording.ranks)]
    for same in zip(*by_rank, strict=False):  # the n-th save of a rank is the n-th of each
        ranks = tuple((begun, acknowledged) for _, begun, acknowledged in same)
        done = [acknowledged for _, acknowledged in ranks if acknowledged is not None]
        last = max(done) if len(done) == len(ranks) else None
        first = min(begun for begun, _ in ranks)
        versions.append(Version(len(versions), same[0][0], first, last, ranks))
    return versions


def _saves(marks: Sequence[Operation]) -> list[tuple[int, int, int | None]]:
    """Return the step and the indices of `begun` and `acknowledged` of one process's saves."""
    saves: list[tuple[int, int, int | None]] = []
    for mark in marks:
        if mark.mark == "begun":
            later = (m for m in marks if m.index > mark.index and m.step == mark.step)
            end = next((m for m in later if m.mark in {"acknowledged", "failed"}), None)
            acknowledged = end.index if end and end.mark == "acknowledged" else None
            saves.append((mark.step, mark.index, acknowledged))
    return saves


def facts_at(versions: Sequence[Version], point: int, cut: Sequence[int] = ()) -> Facts:
    """Return what was promised when the first `point` operations had been issued, or at a cut."""
    done = [v for v in versions if v.is_done(point, cut)]
    done.sort(key=lambda v: (v.acknowledged, v.number))
    begun = [v.number for v in versions if v.is_begun(point, cut) and v not in done]
    numbers = [v.number for v in done]
    return Facts(numbers[-1] if numbers else None, tuple(numbers[:-1]), tuple(begun))


def judge(recovery: Recovery, facts: Facts) -> Outcome:
    """Classify one recovery, by what was promised when the crash came."""
    if recovery.exit_kind == "ended" and recovery.error is None and recovery.step:
        return _loaded(set(recovery.versions), facts)
    if recovery.exit_kind in OUTCOME_OF_DEATH:
        return OUTCOME_OF_DEATH[ExitKind(recovery.exit_kind)]
    if recovery.error is not None:
        if facts.last_acknowledged is not None and not recovery.older:
            return Outcome.LOST_ALL
        return Outcome.REFUSED_TYPED if recovery.error.typed else Outcome.REFUSED_UNTYPED
    return Outcome.COLD_START


def _loaded(versions: set[int], facts: Facts) -> Outcome:
    """Classify a load that gave a state, by the versions that this state is."""
    if versions & set(facts.in_flight):
        return Outcome.NEW
    if facts.last_acknowledged in versions:
        return Outcome.PREVIOUS if facts.in_flight else Outcome.NEW
    return Outcome.LOST_STEP if versions & set(facts.older) else Outcome.SILENT_WRONG


def is_fine(outcome: Outcome, facts: Facts) -> bool:
    """Whether an outcome keeps the promise; before the first one a job may begin anew."""
    if facts.last_acknowledged is None and outcome is Outcome.COLD_START:
        return True
    if facts.last_acknowledged is None and outcome in REFUSALS:
        return not facts.strict
    return outcome in {Outcome.NEW, Outcome.PREVIOUS}
