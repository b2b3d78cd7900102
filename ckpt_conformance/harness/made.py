"""What a process makes, moves and removes itself: what it reads there later is its own."""

from __future__ import annotations

import os


class Made:
    """The files and folders of one process and of those that it was forked from.

    A name is held without links in it: what a link leads to may change while the name stays.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.places: set[str] = set()

    def holds(self, name: str) -> bool:
        """Return whether what is opened by a name was made, or lies in a folder that was."""
        return self._is_in(os.path.realpath(name))

    def holds_entry(self, name: str) -> bool:
        """Return the same of the name itself, which may be a link."""
        return self._is_in(_entry(name))

    def add(self, name: str) -> None:
        """Take a file that is written anew, which a link may lead to."""
        self.places.add(os.path.realpath(name))

    def add_entry(self, name: str) -> None:
        """Take a name that is made."""
        self.places.add(_entry(name))

    def forget(self, name: str) -> None:
        """Take that something of others may be there from now on."""
        place = _entry(name)
        self.places -= {one for one in self.places if f"{one}/".startswith(f"{place}/")}

    def move(self, source: str, target: str) -> None:
        """Take that something that was made has another name."""
        before, after = _entry(source), _entry(target)
        moved = {one for one in self.places if f"{one}/".startswith(f"{before}/")}
        self.places -= moved
        self.places |= {after, *(after + one.removeprefix(before) for one in moved)}

    def _is_in(self, place: str) -> bool:
        while place not in self.places:
            above: str = os.path.dirname(place)  # noqa: PTH120
            if above == place or not self.places:
                return False
            place = above
        return True


def _entry(name: str) -> str:
    """Return a name without links in the folders above it."""
    folder, last = os.path.split(name)
    return os.path.join(os.path.realpath(folder), last)  # noqa: PTH118
