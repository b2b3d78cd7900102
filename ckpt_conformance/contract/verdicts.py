"""Verdicts of checks and outcomes of resumes.

A check raises to give a verdict: `Violation`, `NotApplicable`, `Unknown`. Any other exception is a
fault of the harness and becomes UNKNOWN, never a pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Evidence = dict[str, Any]  # whatever a check has to show, under names for people


class Verdict(StrEnum):
    """What a check or an invariant came to; ordered from best to worst by `SEVERITY`."""

    NOT_APPLICABLE = "NOT_APPLICABLE"
    PASS = "PASS"  # noqa: S105  the word of the field, not a secret
    WAIVED = "WAIVED"
    NOT_MET = "NOT_MET"
    UNKNOWN = "UNKNOWN"
    SAME_CAUSE = "SAME_CAUSE"  # of an invariant only: broken, by a cause that another one tells
    VIOLATION = "VIOLATION"


SEVERITY = {verdict: rank for rank, verdict in enumerate(Verdict)}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Merge verdicts; nothing at all merges to NOT_APPLICABLE."""
    return max(verdicts, key=SEVERITY.__getitem__, default=Verdict.NOT_APPLICABLE)


class Outcome(StrEnum):
    """What one resume came to."""

    NEW = "NEW"
    PREVIOUS = "PREVIOUS"
    REFUSED_TYPED = "REFUSED_TYPED"
    REFUSED_UNTYPED = "REFUSED_UNTYPED"
    LOST_STEP = "LOST_STEP"
    LOST_ALL = "LOST_ALL"
    COLD_START = "COLD_START"
    SILENT_WRONG = "SILENT_WRONG"
    HANG = "HANG"
    CRASHED = "CRASHED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"


REFUSALS = frozenset({Outcome.REFUSED_TYPED, Outcome.REFUSED_UNTYPED})


class Violation(Exception):  # noqa: N818  a verdict, not an error of ours
    """The manager broke the invariant.

    `rate` is (bad, tried) where a check samples, for example silent loads over flipped bits.
    `origin` is the id of an origin in the catalogue, where the cause lies outside of the manager.
    """

    def __init__(
        self,
        message: str,
        *,
        evidence: Mapping[str, Any] | None = None,
        rate: tuple[int, int] | None = None,
        origin: str = "",
    ) -> None:
        """Keep the message, JSON-plain evidence, the rate and what is known of the cause."""
        super().__init__(message)
        self.evidence: Evidence = {str(key): value for key, value in (evidence or {}).items()}
        self.rate = rate
        self.origin = origin


class NotApplicable(Exception):  # noqa: N818
    """The manager does not declare what the check needs."""


class StoodInFor(NotApplicable):
    """Another check of the promise says it here, in a weaker way: the certificate remarks on it."""


class Cause(StrEnum):
    """Why a verdict is UNKNOWN. The exit status depends on it, so it is never read from a text."""

    HARNESS = "harness"  # a fault of the suite, a fault that did not fire, no outcome at all
    CONTROL = "control"  # what the check stands on fails without the fault, too
    MACHINE = "machine"  # this machine can't do it (no seccomp, no loop device, too few GPUs)
    ADAPTER = "adapter"  # the adapter does not do its part
    INTERRUPTED = "interrupted"  # the run was stopped before the check


CONTROL = "control failed: "  # begins the sentence about a control, for people


class Unknown(Exception):  # noqa: N818
    """The harness or an assumption failed: a fault did not fire, a control failed.

    `see` is the id of the invariant that says why, empty if none does. `str` gives the sentence
    for people: a failed control is named as one, and the reference stands at its end.
    """

    def __init__(self, reason: str, *, cause: Cause = Cause.HARNESS, see: str = "") -> None:
        """Keep the reason alone, without what the sentence adds to it."""
        super().__init__(reason)
        self.reason = reason
        self.cause = cause
        self.see = see

    def __str__(self) -> str:
        """Write the sentence for people."""
        return f"{CONTROL}{self.detail}" if self.cause is Cause.CONTROL else self.detail

    @property
    def detail(self) -> str:
        """The reason and the reference, not yet named as a failed control."""
        return f"{self.reason}; see {self.see}" if self.see else self.reason


def control_failed(reason: object, see: str = "") -> Unknown:
    """Make the Unknown of a check whose control failed; `see` is the invariant that is about it.

    An Unknown that is a failed control already is not named so twice, and keeps its reference.
    """
    if isinstance(reason, Unknown) and reason.cause is Cause.CONTROL:
        return Unknown(reason.reason, cause=Cause.CONTROL, see=reason.see or see)
    return Unknown(str(reason), cause=Cause.CONTROL, see=see)


def joined(doubts: Sequence[Unknown]) -> Unknown:
    """Make one Unknown of several (at least one), in one sentence; the first gives the cause."""
    first, *others = doubts
    reason = "; ".join([first.reason, *map(str, others)])
    return Unknown(reason, cause=first.cause, see=first.see)


@dataclass
class Remarks:
    """How a check was made, where a certificate must say it; empty fields say nothing."""

    io_points: dict[str, str] = field(default_factory=dict[str, str])
    """Operation (save, load, rotation) -> how many of its system calls were made to fail."""
    planted: dict[str, str] = field(default_factory=dict[str, str])
    """Discovery, rotation -> how many names it saw, and on which file system."""
    crash: str = ""  # how saves were recorded, where system calls could not be
    ranks: str = ""  # the largest world at the full budget, and why no larger one
    releases: tuple[str, ...] = ()
    """Releases of torch whose checkpoints were read, and how many runs of each."""
    one_sided: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Release -> leaves that only it has, of two that were compared."""

    def as_evidence(self) -> dict[str, str]:
        """Write them as entries of the evidence, for people."""
        points = {f"I/O points of {what}": remark for what, remark in self.io_points.items()}
        points |= {f"planted for {what}": remark for what, remark in self.planted.items()}
        releases = ", ".join(self.releases)
        only = "; ".join(f"{who}: {', '.join(names)}" for who, names in self.one_sided.items())
        others = {"crash": self.crash, "ranks": self.ranks, "releases": releases, "only in": only}
        return points | {name: remark for name, remark in others.items() if remark}

    def add(self, other: Remarks) -> None:
        """Take over what another check says; of two that differ the later one counts."""
        self.io_points |= other.io_points
        self.planted |= other.planted
        self.crash = other.crash or self.crash
        self.ranks = other.ranks or self.ranks
        self.releases = tuple(dict.fromkeys((*self.releases, *other.releases)))
        for who, names in other.one_sided.items():
            self.one_sided[who] = sorted({*self.one_sided.get(who, ()), *names})


class PhaseStates(Struct, frozen=True):
    """Of one phase of the saves: distinct contents that a model gave, and how many were visited."""

    unique: int
    visited: int

    def __add__(self, other: PhaseStates) -> PhaseStates:
        """Add up what was explored of two workloads."""
        return PhaseStates(self.unique + other.unique, self.visited + other.visited)


class CrashStates(Struct, frozen=True, kw_only=True):
    """How many crash states of one persistence model were explored, and how recoveries ended.

    `states` are those that the model gave, `unique` their distinct contents, `visited` how many of
    these were recovered from, `points` the crash points of those. `outcomes` and `violating` count
    the states with one of these contents, `grades` the classes of violation by their evidence.
    `phases` has the contents of states right after an acknowledgement, in a save, and of others.
    `strata` counts sorts of states by the role of a file (see `crash.explore.losses`).
    """

    states: int
    unique: int
    visited: int = 0
    points: int = 0
    violating: int = 0
    outcomes: dict[str, int]
    grades: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    phases: dict[str, PhaseStates] = msgspec.field(default_factory=dict[str, PhaseStates])
    strata: PhaseStates = PhaseStates(0, 0)

    def __add__(self, other: CrashStates) -> CrashStates:
        """Add up what was explored of two workloads."""
        return CrashStates(
            states=self.states + other.states,
            unique=self.unique + other.unique,
            visited=self.visited + other.visited,
            points=self.points + other.points,
            violating=self.violating + other.violating,
            outcomes=dict(Counter(self.outcomes) + Counter(other.outcomes)),
            grades=dict(Counter(self.grades) + Counter(other.grades)),
            phases={
                phase: self.phases.get(phase, NO_STATES) + other.phases.get(phase, NO_STATES)
                for phase in self.phases | other.phases
            },
            strata=self.strata + other.strata,
        )


NO_STATES = PhaseStates(0, 0)
CrashSummary = dict[str, CrashStates]  # by persistence model


@dataclass(frozen=True)
class CheckOutcome:
    """One check's result, plain enough for JSON and for xdist."""

    adapter: str
    invariant: str
    check: str  # module::function[param]
    verdict: Verdict
    reason: str = ""  # a sentence for people
    evidence: Evidence = field(default_factory=dict[str, Any])
    rate: tuple[int, int] | None = None
    seconds: float = 0.0
    seed: int = 0
    crash: dict[str, CrashSummary] = field(default_factory=dict[str, CrashSummary])  # by workload
    cause: Cause | None = None  # of an UNKNOWN
    see: str = ""  # id of the invariant that says why it is UNKNOWN
    remarks: Remarks = field(default_factory=Remarks)
    origin: str = ""  # of a violation: the id of its cause, if that lies outside of the manager
    told_by: str = ""  # and id of the invariant that tells that cause, if it is not this one

    def to_json(self) -> dict[str, Any]:
        """Turn it into what a bundle keeps of a violation, in plain types."""
        message = self.to_message()
        return {key: value for key, value in message.items() if key not in NOT_IN_BUNDLES}

    def to_message(self) -> dict[str, Any]:
        """Turn all of it into plain types, as a worker sends it to the process that collects."""
        cause = None if self.cause is None else str(self.cause)
        crash = msgspec.to_builtins(self.crash)
        return asdict(self) | {"verdict": str(self.verdict), "crash": crash, "cause": cause}

    @classmethod
    def from_message(cls, message: object) -> CheckOutcome:
        """Read what `to_message` gave; raises msgspec.ValidationError for anything else."""
        return msgspec.convert(message, cls)


NOT_IN_BUNDLES = ("cause", "see", "remarks")  # a violation has neither, and its evidence has these
