"""Makes an input that breaks a rule smaller: fewer files, fewer bytes that differ from the seed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_inputs import Input, Seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Shows = Callable[[Input], bool]


def smaller(one: Input, seeds: Seeds, shows: Shows, seconds: float = 60.0) -> Input:
    """Return the smallest input found in a time that still `shows` what the first one does."""
    end = time.monotonic() + seconds
    best = one
    is_better = True
    while is_better and time.monotonic() < end:
        is_better = False
        for other in _simpler(best, seeds):
            if time.monotonic() > end:
                break
            if shows(other):
                best, is_better = other, True
                break
    return best


def _simpler(one: Input, seeds: Seeds) -> Iterator[Input]:
    """Yield inputs that are a little simpler, those with the largest steps first."""
    if one.options:
        yield Input(one.seed, dict(one.files), 0, one.is_blind)
    for path in sorted(one.files):
        rest = {other: data for other, data in one.files.items() if other != path}
        yield Input(one.seed, rest, one.options, one.is_blind)
    own = seeds.by_name[one.seed].files
    for path, data in sorted(one.files.items()):
        for less in _nearer(own.get(path, b""), data) if data is not None else ():
            yield Input(one.seed, one.files | {path: less}, one.options, one.is_blind)


def _nearer(old: bytes, new: bytes) -> Iterator[bytes]:
    """Yield bytes that are nearer to the old ones than the new ones are."""
    head = _common(old, new)
    tail = _common(old[head:][::-1], new[head:][::-1])
    before, inside, after = new[:head], new[head : len(new) - tail], new[len(new) - tail :]
    was = old[head : len(old) - tail]
    size = len(inside)
    while size:
        for at in range(0, len(inside), size):
            end = at + size
            if len(was) == len(inside) and was[at:end] != inside[at:end]:
                yield before + inside[:at] + was[at:end] + inside[end:] + after
            elif len(was) != len(inside):
                yield before + inside[:at] + inside[end:] + after
        size //= 2


def _common(a: bytes, b: bytes) -> int:
    """Return how many bytes are alike from the first on."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    low, high = 0, most
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low
