"""The exceptions that this manager documents.

Each says what was found, why it is refused, and what to do next. A plain `OSError` of the disk
during a save is not wrapped: it reaches the caller as itself, and the older checkpoints stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class SaveRefused(CheckpointError):  # noqa: N818 - part of the fixed public API
    """The state holds what a safe load would refuse; found before anything is written."""
