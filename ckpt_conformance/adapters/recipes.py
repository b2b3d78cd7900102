"""What adapters of recipes share: ways to save with a primitive that knows no manager."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ckpt_conformance.contract import Manager, OpenOptions

OVERWRITING = frozenset({Capability.STEPS})  # one checkpoint, saved over and over
PER_STEP = OVERWRITING | {Capability.EXPLICIT_STEP}


@dataclass(frozen=True)
class Recipe(AdapterBase):
    """Adapter of a recipe: `manager` opens it on a directory. It saves every component."""

    manager: Callable[[Path], Manager] | None = None
    holds: frozenset[str] = EVERYTHING | {"gradients"}

    def open(self, root: Path, options: OpenOptions) -> Manager:
        """Open the recipe on a directory."""
        del options
        if self.manager is None:
            msg = f"recipe {self.name!r} names no manager"
            raise TypeError(msg)
        return self.manager(root)


def numbers(paths: Iterable[Path], pattern: str) -> list[int]:
    """Return the steps in the names that match a pattern whole, ascending."""
    matches = (re.fullmatch(pattern, path.name) for path in paths)
    return sorted(int(match[1]) for match in matches if match)
