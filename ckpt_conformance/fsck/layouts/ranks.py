"""Files that number themselves: which of `3 of 8` are missing.

Names that say how many there are: `model_world_size_4_rank_2.pt` (verl, FSDP), and
`model-00002-of-00003.safetensors` (Hugging Face, also without its index).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MOST = 100_000  # a name may claim any number
_RANK = re.compile(r"(?P<head>.*world_size_)(?P<all>\d+)(?P<middle>_rank_)(?P<one>\d+)(?P<tail>.*)")
_PART = re.compile(r"(?P<head>.*-)(?P<one>\d+)(?P<middle>-of-)(?P<all>\d+)(?P<tail>\..*)")


def world_size(names: Iterable[str]) -> int | None:
    """Give how many ranks wrote files that say so; None where none does, or they disagree."""
    said = {int(match["all"]) for name in names if (match := _RANK.fullmatch(name))}
    return said.pop() if len(said) == 1 else None


def missing(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Give the names that are missing, each with how many there should be."""
    groups: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name in names:
        for pattern, origin in ((_RANK, "0"), (_PART, "1")):
            match = pattern.fullmatch(name)
            if match and int(match["all"]) <= _MOST:
                width = len(match["one"]) if pattern is _PART else 0
                parts = (match["head"], match["all"], match["middle"], match["tail"])
                groups[*parts, origin, str(width)].add(name)
    for (head, total, middle, tail, origin, digits), there in sorted(groups.items()):
        first, count = int(origin), int(total)
        for number in range(first, first + count):
            one = f"{number:0{digits}d}"
            order = (head, one, middle, total, tail) if first else (head, total, middle, one, tail)
            missed = "".join(order)
            if missed not in there:
                yield missed, count
