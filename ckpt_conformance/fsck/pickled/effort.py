"""How much is read of the pickles of one file, whichever way they are hidden in it.

Bytes do not bound it: an instruction is one byte, and a file may hold pickles in pickles. So what
is followed is counted, for all of a file together: the unit is an instruction that pushes a plain
value, some 120 ns of a processor of 2024, and what takes longer counts as more. It is no clock, so
that a file gets the same verdict on each machine.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

MOST = 40_000_000
"""Units for a file: five seconds. A list of ten million numbers takes ten million units."""

NAME, CALL, ITEMS, LINE = 8, 14, 6, 3
"""Units of a name that is imported, of a call or an instance, of items that are set at once, and of
what stands in a line, beyond the instruction."""


class _Current(threading.local):
    """The budget of the file that this thread reads."""

    left: int | None = None


_current = _Current()


@contextmanager
def for_one_file() -> Generator[None]:
    """Give what is read in here one budget together; inside of another, nothing of its own."""
    if _current.left is not None:
        yield
        return
    _current.left = MOST
    try:
        yield
    finally:
        _current.left = None


def is_spent_by(units: int) -> bool:
    """Take units of the budget of this thread's file; tell whether there were too few."""
    if _current.left is None:
        return False
    _current.left = max(0, _current.left - units)
    return not _current.left
