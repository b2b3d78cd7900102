"""Verdicts of checks and outcomes of resumes.

A check raises to give a verdict: `Violation`, `NotApplicable`, `Unknown`. Any other exception is a
fault of the harness and becomes UNKNOWN, never a pass.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Verdict(StrEnum):
    """What a check or an invariant came to; ordered from best to worst by `SEVERITY`."""

    NOT_APPLICABLE = "NOT_APPLICABLE"
    PASS = "PASS"  # noqa: S105  the word of the field, not a secret
    WAIVED = "WAIVED"
    NOT_MET = "NOT_MET"
    UNKNOWN = "UNKNOWN"
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


POINTS = (
    "I/O points of "  # begins the keys that say how many system calls of what were made to fail
)
# Keys of the evidence that a certificate repeats: how a check was made.
REMARKS = ("crash", "ranks")


class Violation(Exception):  # noqa: N818  a verdict, not an error of ours
    """The manager broke the invariant.

    `rate` is (bad, tried) where a check samples, for example silent loads over flipped bits.
    """

    def __init__(
        self,
        message: str,
        *,
        evidence: Mapping[str, Any] | None = None,
        rate: tuple[int, int] | None = None,
    ) -> None:
        """Keep the message, JSON-plain evidence and the rate."""
        super().__init__(message)
        self.evidence = dict(evidence or {})
        self.rate = rate


class NotApplicable(Exception):  # noqa: N818
    """The manager does not declare what the check needs."""


class Unknown(Exception):  # noqa: N818
    """The harness or an assumption failed: a fault did not fire, a control failed."""


CONTROL = "control failed: "


def control_failed(reason: object, see: str = "") -> Unknown:
    """Make the Unknown of a check whose control failed; `see` is the invariant that is about it.

    A reason that is a failed control already is not told twice, and keeps what it refers to.
    """
    told = str(reason).removeprefix(CONTROL)
    refers = f"; see {see}" if see and "; see CKC-" not in told else ""
    return Unknown(f"{CONTROL}{told}{refers}")


@dataclass(frozen=True)
class CheckOutcome:
    """One check's result, plain enough for JSON and for xdist."""

    adapter: str
    invariant: str
    check: str  # module::function[param]
    verdict: Verdict
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])
    rate: tuple[int, int] | None = None
    seconds: float = 0.0
    seed: int = 0
    # What was explored for it, see `crash/summary.py`: {workload: {model: numbers}}.
    crash: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        """Give plain types only."""
        return asdict(self) | {"verdict": str(self.verdict)}


def remarks(outcomes: Iterable[CheckOutcome]) -> dict[str, Any]:
    """Give what checks say of how they were made."""
    told = {str(key): value for one in outcomes for key, value in one.evidence.items()}
    found = {key: told[key] for key in REMARKS if key in told}
    points = {key.removeprefix(POINTS): told[key] for key in told if key.startswith(POINTS)}
    if points:
        found["io_points"] = "; ".join(f"{what}: {points[what]}" for what in sorted(points))
    return found
