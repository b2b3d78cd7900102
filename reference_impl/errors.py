"""The exceptions that this manager documents.

Each says what was found, why it is refused, and what to do next. A plain `OSError` of the disk
during a save is not wrapped: it reaches the caller as itself, and the older checkpoints stay.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.reference_impl.layout import Refusal


class CheckpointError(Exception):
    """Base of everything that this manager raises on purpose."""


class CheckpointNotFound(CheckpointError):  # noqa: N818 - part of the fixed public API
    """Nothing is there, or not what was asked for by name."""


class CheckpointDamaged(CheckpointError):  # noqa: N818 - part of the fixed public API
    """A checkpoint is there and must not be served: sizes, digests or structure are wrong.

    Attributes:
        refused: the checkpoints that were tried, each with its reason.
    """

    def __init__(self, message: str, refused: Sequence[Refusal] = ()) -> None:
        """Keep the message, and what was tried."""
        super().__init__(message)
        self.refused = tuple(refused)


class CheckpointMismatch(CheckpointError):  # noqa: N818 - part of the fixed public API
    """A whole checkpoint does not fit this job: keys, shapes, dtypes, ties or components."""


class ExpertsChanged(CheckpointMismatch):
    """A checkpoint of another number of experts (M036)."""


class DumpElsewhere(CheckpointMismatch):
    """An emergency dump that is whole, and is not for this host or this number of ranks (M036).

    A load that was asked for no checkpoint by name passes over it and serves the next one.
    """


class BackgroundSaveFailed(CheckpointError):  # noqa: N818 - named like the others
    """A save that went on in the background failed, and nobody had asked: its step is not there.

    It is raised from that error, by the next save or by `close`. The next save was not begun, so
    that a loop that catches this can make it again.

    Attributes:
        steps: those whose saves failed.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        """Name the steps."""
        named = ", ".join(map(str, steps))
        super().__init__(
            f"the save of step {named} in the background failed: no checkpoint of it is there; "
            f"older ones are. Call `wait` of what `save_async` returns to learn it sooner",
        )
        self.steps = tuple(steps)

    def __reduce__(self) -> tuple[type[BackgroundSaveFailed], tuple[tuple[int, ...]]]:
        """Let it travel between processes, as errors of workers do."""
        return type(self), (self.steps,)


class WriterDied(CheckpointError):  # noqa: N818 - named like the others
    """The process that wrote a save ended before it answered: no checkpoint names what it wrote.

    Attributes:
        step: what was saved.
        code: its exit code; minus the number of the signal that ended it, such as -9.
    """

    def __init__(self, step: int, code: int | None) -> None:
        """Keep both."""
        why = " (SIGKILL: out of memory?)" if code == -signal.SIGKILL else ""
        super().__init__(
            f"the process that wrote step {step} ended with exit code {code}{why}: no checkpoint "
            f"of it is there; older ones are. The next save begins a new one",
        )
        self.step, self.code = step, code

    def __reduce__(self) -> tuple[type[WriterDied], tuple[int, int | None]]:
        """Let it travel between processes."""
        return type(self), (self.step, self.code)


class WriterFailed(CheckpointError):  # noqa: N818 - named like the others
    """The process that wrote a save met an error that is none of the disk; it lives on.

    Attributes:
        step: what was saved.
        reason: the type and the message of that error.
    """

    def __init__(self, step: int, reason: str) -> None:
        """Keep both."""
        super().__init__(f"the process that wrote step {step} failed: {reason}")
        self.step, self.reason = step, reason

    def __reduce__(self) -> tuple[type[WriterFailed], tuple[int, str]]:
        """Let it travel between processes."""
        return type(self), (self.step, self.reason)


class SaveRefused(CheckpointError):  # noqa: N818 - part of the fixed public API
    """The state holds what a safe load would refuse; found before anything is written."""


class Failure(NamedTuple):
    """What went wrong on one rank.

    Attributes:
        rank: its number in the group.
        kind: name of the error's class.
        message: of the error.
    """

    rank: int
    kind: str
    message: str


class RankFailed(CheckpointError):  # noqa: N818 - named like the others
    """At least one rank failed, and so all of them did: every rank raises this same error.

    Where all failures are of one documented kind, the error is of that kind, too.

    Attributes:
        what: what the ranks were doing.
        failures: one for each rank that failed.
    """

    def __init__(self, what: str, failures: Sequence[Failure]) -> None:
        """Name every rank that failed."""
        reasons = "; ".join(
            f"rank {failure.rank}: {failure.kind}: {failure.message}" for failure in failures
        )
        super().__init__(f"{what} failed on {len(failures)} of the ranks: {reasons}")
        self.what = what
        self.failures = tuple(failures)

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, tuple[Failure, ...]]]:
        """Let it travel between processes, as errors of workers do."""
        return type(self), (self.what, self.failures)


class RankLost(CheckpointError):  # noqa: N818 - named like the others
    """A rank died, hangs, or left: nothing more can be agreed with it. Start the job again.

    A save that was under way is whole on disk, or absent: the next load tells.
    """


class RanksRefused(RankFailed, SaveRefused):
    """What a rank refused to save; nothing was published."""


class RanksMismatch(RankFailed, CheckpointMismatch):
    """What did not fit the job on some rank; no rank was touched."""


class RanksExpertsChanged(RankFailed, ExpertsChanged):
    """A checkpoint of another number of experts than the job of some rank has."""


class RanksElsewhere(RankFailed, DumpElsewhere):
    """A dump that is not for the host of some rank."""


class RanksNotFound(RankFailed, CheckpointNotFound):
    """What the first rank did not find."""


class RanksDamaged(RankFailed, CheckpointDamaged):
    """What some rank found damaged."""

    refused: tuple[Refusal, ...] = ()


JOINT: Mapping[str, type[RankFailed]] = {
    SaveRefused.__name__: RanksRefused,
    CheckpointMismatch.__name__: RanksMismatch,
    DumpElsewhere.__name__: RanksElsewhere,
    ExpertsChanged.__name__: RanksExpertsChanged,
    CheckpointNotFound.__name__: RanksNotFound,
    CheckpointDamaged.__name__: RanksDamaged,
}
"""The class of the joint error, by the name of the class that all failures share."""


def joint(what: str, failures: Sequence[Failure]) -> RankFailed:
    """Build the error that every rank raises: the same on each, whatever its own part was."""
    kinds = {failure.kind for failure in failures}
    error = JOINT.get(kinds.pop(), RankFailed) if len(kinds) == 1 else RankFailed
    return error(what, failures)
