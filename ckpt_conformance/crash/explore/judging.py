"""What may be served at a crash point, and what one recovery came to.

A version is one save of a step: saving a step over itself makes a second version of it. Which
versions are legal at a point follows from the journal's markers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract.verdicts import REFUSALS, Outcome
from ckpt_conformance.trace.operations import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
DIED = {
    "hang": Outcome.HANG,
    "memory": Outcome.OUT_OF_MEMORY,
    "crashed": Outcome.CRASHED,
    "killed": Outcome.CRASHED,
}
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
        """Tell whether a rank had begun it when they stopped."""
        if not cut or not self.ranks:
            return self.begun < point
        return any(begun < at for (begun, _), at in zip(self.ranks, cut, strict=True))

    def is_done(self, point: int, cut: Sequence[int]) -> bool:
        """Tell whether every rank had acknowledged it when they stopped."""
        if not cut or not self.ranks:
            return self.acknowledged is not None and self.acknowledged < point
        done = zip(self.ranks, cut, strict=True)
        return all(told is not None and told < at for (_, told), at in done)


@dataclass(frozen=True)
class Facts:
    """What was promised at a crash point.

    `floor` is the newest version that was acknowledged, None if nothing was; `older` are those
    before it; `flying` were begun and not acknowledged. `strict`: a refusal is never fine, since
    what restarts is a command, and nobody is there who would empty the directory.
    """

    floor: int | None
    older: tuple[int, ...]
    flying: tuple[int, ...]
    strict: bool = False

    @property
    def fine(self) -> frozenset[int]:
        """The versions that may be served."""
        floor = () if self.floor is None else (self.floor,)
        return frozenset((*self.flying, *floor))


@dataclass(frozen=True)
class Visit:
    """What one recovery gave: how it ended, the step, which versions that is, the error.

    `older` lists versions that an explicit load still gives although the newest one is refused.
    """

    exit_kind: str  # ended, or as `ProcessResult.exit_kind`
    step: int | None = None
    versions: tuple[int, ...] = ()
    error: Mapping[str, Any] | None = None
    differs: tuple[str, ...] = ()
    older: tuple[int, ...] = ()
    alone: bool = False  # judged in a process of its own
    said: str = ""  # what to tell instead of the step

    @property
    def told(self) -> str:
        """Say in one line what it gave."""
        if self.exit_kind != "ended":
            return self.exit_kind
        if self.error:
            return f"{self.error['type']}: {self.error['message'][:200]}"
        if self.said:
            return self.said
        return f"step {self.step}" if self.step else "no checkpoint: it began anew"


def versions_of(recording: Recording, before: Sequence[int] = ()) -> list[Version]:
    """List the versions: steps that were there before, oldest first, then the recorded saves."""
    found = [Version(number, step) for number, step in enumerate(before)]
    marks = [operation for operation in recording.operations if operation.kind is Kind.MARK]
    if recording.ranks == 1:
        found += [Version(len(before) + at, *one) for at, one in enumerate(_saves(marks))]
        return found
    saves = [_saves([m for m in marks if m.rank == rank]) for rank in range(recording.ranks)]
    for same in zip(*saves, strict=False):  # the n-th save of a rank is the n-th of each
        ranks = tuple((begun, told) for _, begun, told in same)
        told = [at for _, at in ranks if at is not None]
        last = max(told) if len(told) == len(ranks) else None
        first = min(begun for begun, _ in ranks)
        found.append(Version(len(found), same[0][0], first, last, ranks))
    return found


def _saves(marks: Sequence[Operation]) -> list[tuple[int, int, int | None]]:
    """Give step, begun and acknowledged of each save of one process."""
    found: list[tuple[int, int, int | None]] = []
    for mark in marks:
        if mark.mark == "begun":
            later = (m for m in marks if m.index > mark.index and m.step == mark.step)
            done = next((m for m in later if m.mark in {"acknowledged", "failed"}), None)
            index = done.index if done and done.mark == "acknowledged" else None
            found.append((mark.step, mark.index, index))
    return found


def facts_at(versions: Sequence[Version], point: int, cut: Sequence[int] = ()) -> Facts:
    """Give the facts when the first `point` operations had been issued, or those of a cut."""
    done = [v for v in versions if v.is_done(point, cut)]
    done.sort(key=lambda v: (v.acknowledged, v.number))
    begun = [v.number for v in versions if v.is_begun(point, cut) and v not in done]
    numbers = [v.number for v in done]
    return Facts(numbers[-1] if numbers else None, tuple(numbers[:-1]), tuple(begun))


def judge(visit: Visit, facts: Facts) -> Outcome:
    """Classify one recovery: what it served, against what had been acknowledged."""
    if visit.exit_kind == "ended" and visit.error is None and visit.step:
        return _served(set(visit.versions), facts)
    if visit.exit_kind in DIED:
        return DIED[visit.exit_kind]
    if visit.error is not None:
        if facts.floor is not None and not visit.older:
            return Outcome.LOST_ALL
        return Outcome.REFUSED_TYPED if visit.error["typed"] else Outcome.REFUSED_UNTYPED
    return Outcome.COLD_START


def _served(served: set[int], facts: Facts) -> Outcome:
    """Classify what was served by its versions."""
    if served & set(facts.flying):
        return Outcome.NEW
    if facts.floor in served:
        return Outcome.PREVIOUS if facts.flying else Outcome.NEW
    return Outcome.LOST_STEP if served & set(facts.older) else Outcome.SILENT_WRONG


def is_fine(outcome: Outcome, facts: Facts) -> bool:
    """Tell whether an outcome keeps the promise; before the first one a job may begin anew."""
    if facts.floor is None and outcome is Outcome.COLD_START:
        return True
    if facts.floor is None and outcome in REFUSALS:
        return not facts.strict
    return outcome in {Outcome.NEW, Outcome.PREVIOUS}
