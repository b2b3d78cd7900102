"""A rank whose view of a shared directory is older than that of the others.

Models: a client of a network file system that lists a directory from its cache, or that still
remembers that a name is not there, while another client has made it.
Does not model: data that is older than its name; calls of C++ or Rust code.
Proof: `fired`, the number of answers that left a name out.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpt_conformance.contract.journal import ChildJournal
    from ckpt_conformance.fault_injectors.files import FileName


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
        self.patch_functions(os, ("listdir", "scandir"), self._list)
        if self.lookups:
            self.patch_functions(os, ("stat", "lstat"), self._look_up)

    def _is_hidden(self, path: object) -> bool:
        name = self.below(path)
        return name is not None and name.partition(os.sep)[0] in self.hidden

    def _list(self, _name: str, real: Callable[..., Any], path: object = ".") -> object:
        if self.below(path) != ".":
            return real(path)
        entries = real(path)
        kept = [entry for entry in entries if getattr(entry, "name", entry) not in self.hidden]
        self._note(len(kept))
        return _Scan(kept) if hasattr(entries, "close") else kept

    def _look_up(
        self,
        _name: str,
        real: Callable[..., object],
        path: FileName,
        *args: object,
        **options: object,
    ) -> object:
        if not self._is_hidden(path):
            return real(path, *args, **options)
        self._note(0)
        shown = path if isinstance(path, int) else os.fspath(path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), shown)

    def _note(self, kept: int) -> None:
        self.calls += 1
        if not self.fired:
            self.note("listing", f"{len(self.hidden)} names hidden, {kept} shown")


class _Scan:
    """The entries as os.scandir returns them: an iterator that is a context manager too."""

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
