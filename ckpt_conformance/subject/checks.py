"""How a suite says which invariant a check verifies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MARKER = "ckpt"


def check(invariant: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as the check of one invariant, by its id; a suite's tests are such."""
    return pytest.mark.ckpt(invariant)


def id_of(function: Callable[..., Any]) -> str:
    """Return the id that `check` marked a function with; raises StopIteration if it did not."""
    marks: list[pytest.Mark] = getattr(function, "pytestmark", [])
    return next(str(mark.args[0]) for mark in marks if mark.name == MARKER)


def key_of(function: Callable[..., Any]) -> str:
    """Name a check as `suite::check`; several may hold one invariant."""
    return f"{function.__module__.rpartition('.')[2]}::{function.__name__}"


def invariant_of(item: pytest.Item) -> str | None:
    """Return the id that a collected test verifies, or None for an ordinary test."""
    marker = item.get_closest_marker(MARKER)
    return str(marker.args[0]) if marker else None
