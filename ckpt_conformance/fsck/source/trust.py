"""What a user vouches for: names in pickles, or all code."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass(frozen=True)
class Trust:
    """What a user vouches for: names, as `module.name`, or all code.

    Raises:
        ValueError: a name has no module, or is no dotted name.

    """

    names: frozenset[str] = frozenset()
    everything: bool = False

    def __post_init__(self) -> None:
        """Check the names."""
        for name in sorted(self.names):
            if not _DOTTED.fullmatch(name):
                raise ValueError(f"{name!r} is no name such as my_package.module.MyClass")

    def covers(self, name: str) -> bool:
        """Return whether the user vouches for a name."""
        return self.everything or name in self.names


NOBODY = Trust()
