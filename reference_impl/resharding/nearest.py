"""The name that was probably meant."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LOOKED_AT = 2_000  # names: comparing is slow, and a model has more of them in each layer alike


def near(name: str, names: Iterable[str]) -> str:
    """Name the one that is most alike, as the end of a sentence; nothing if none is."""
    some = list(names)[:LOOKED_AT]
    found = get_close_matches(name, some, n=1, cutoff=0.5)
    return f"; the nearest is {found[0]!r}" if found else ""
