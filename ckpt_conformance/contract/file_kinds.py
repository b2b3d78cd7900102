"""What is at a path, and of which kind: all that a question such as `Path.exists` depends on."""

from __future__ import annotations

import contextlib
import os
import stat

# Bound now: injectors of faults, and who notes questions, replace these functions later.
_stat, _lstat = os.stat, os.lstat


def kinds_of(path: str) -> tuple[int, ...]:
    """Return the kind of file that a name is, and that it leads to, as of `stat.S_IFMT`.

    One kind for a link that leads nowhere; none if nothing is there.
    """
    kinds: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        kinds.append(stat.S_IFMT(_lstat(path).st_mode))
        kinds.append(stat.S_IFMT(_stat(path).st_mode))
    return tuple(kinds)
