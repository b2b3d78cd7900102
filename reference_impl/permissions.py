"""Who else could have written a checkpoint.

No pickle is ever run on load, so a foreign file can't run code; but it decides what is trained on.
Whose files are served is a setting, off by default: in a container the user often is another one
than the owner of the mounted directory. A file that others may write to is reported either way.
"""

from __future__ import annotations

import logging
import stat
from typing import TYPE_CHECKING

from ckpt_conformance.reference_impl.errors import CheckpointDamaged

if TYPE_CHECKING:
    import os
    from collections.abc import Collection
    from pathlib import Path

logger = logging.getLogger(__name__)
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_owner(path: Path, status: os.stat_result, owners: Collection[int] | None) -> None:
    """Refuse a file of a foreign owner (K018, K019).

    Args:
        path: for the message.
        status: of the open file.
        owners: user ids whose files are served; None serves everyone's.

    Raises:
        CheckpointDamaged: the file belongs to somebody else.
    """
    if owners is not None and status.st_uid not in owners:
        known = ", ".join(map(str, sorted(owners)))
        raise CheckpointDamaged(f"{path.name} belongs to user {status.st_uid}, not to {known}")


def report_mode(path: Path, status: os.stat_result) -> None:
    """Report a file that others may write to (K018, K019)."""
    if status.st_mode & OTHERS_WRITE:
        mode = stat.filemode(status.st_mode)
        logger.warning("%s (%s) can be written by others: chmod go-w protects it", path, mode)
