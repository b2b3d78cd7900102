"""A rank whose view of a shared directory is older than that of the others.

Models: a client of a network file system that lists a directory from its cache, or that still
remembers that a name is not there, while another client has made it.
Does not model: data that is older than its name; calls of C++ or Rust code.
Proof: `fired`, the number of answers that left a name out.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpt_conformance.contract.journal import ChildJournal


class StaleListing(Injector):
    """Leaves names out of listings; with `lookups` they can't be opened or examined either."""

    name = "stale-listing"

    def __init__(self, root: Path, journal: ChildJournal, **given: Any) -> None:  # noqa: ANN401
        """Take the names (relative to the directory) that this rank does not see yet."""
        self.hidden = frozenset(given.pop("hidden"))
        self.lookups = bool(given.pop("lookups", False))
        super().__init__(root, journal, **given)

    def install(self) -> None:
        """Replace the calls that list, and those that look a name up."""
        for name in ("listdir", "scandir"):
            original = getattr(os, name)
            listing: Any = self._listing(original)
            self.patch_everywhere(original, name, listing)
        if self.lookups:
            for name in ("stat", "lstat"):
                original = getattr(os, name)
                self.patch_everywhere(original, name, self._lookup(original))

    def _is_hidden(self, path: object) -> bool:
        found = self.below(path)
        return found is not None and found.partition(os.sep)[0] in self.hidden

    def _listing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def listed(path: Any = ".") -> Any:  # noqa: ANN401  as os.listdir and os.scandir
            if self.below(path) != ".":
                return real(path)
            entries = real(path)
            kept = [one for one in entries if getattr(one, "name", one) not in self.hidden]
            self._note(len(kept))
            return _Scan(kept) if hasattr(entries, "close") else kept

        return listed

    def _lookup(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def looked_up(path: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
            if not self._is_hidden(path):
                return real(path, *args, **named)
            self._note(0)
            raise FileNotFoundError(2, os.strerror(2), os.fspath(path))

        return looked_up

    def _note(self, kept: int) -> None:
        self.calls += 1
        if not self.fired:
            self.note("listing", f"{len(self.hidden)} names hidden, {kept} shown")


class _Scan:
    """What os.scandir gives: an iterator that is a context too."""

    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self.entries = iter(entries)

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self.entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self.entries)

    def __enter__(self) -> _Scan:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""
