"""Where a frame of a pickle may end: between two reads of an instruction, and never inside one."""

from __future__ import annotations

import pickletools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def ends_of_reads(data: bytes, start: int) -> Iterator[int]:
    """Yield where each read of an instruction but its last ends: its code, a length, a line.

    A frame may end there.
    """
    yield start + 1
    code = chr(data[start])
    argument = next(one.arg for one in pickletools.opcodes if one.code == code)
    if argument is None:
        return
    if argument.n == pickletools.UP_TO_NEWLINE:
        yield data.find(b"\n", start) + 1
    elif argument.n < 0:
        widths = {
            pickletools.TAKEN_FROM_ARGUMENT1: 1,
            pickletools.TAKEN_FROM_ARGUMENT4: 4,
            pickletools.TAKEN_FROM_ARGUMENT4U: 4,
            pickletools.TAKEN_FROM_ARGUMENT8U: 8,
        }
        yield start + 1 + widths[argument.n]
