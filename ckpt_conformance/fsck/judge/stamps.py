"""What can be seen of the files of a checkpoint without reading them: whether it changed since.

Inode, size and times are looked at before anything is read, and again when all was read: what was
renamed, replaced, cut or written to in between shows. A page that was mapped before, and is written
to without another system call, shows only when the kernel writes it back.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.layouts import layouts, listing, one_file
from ckpt_conformance.fsck.layouts.listing import Sort
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.places import folder_at, is_far
from ckpt_conformance.fsck.source.source import in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt_conformance.fsck.layouts.listing import Found
    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Entry, Folder

_SECOND = 1_000_000_000  # nanoseconds
_TICK, _COARSE = 20_000_000, 2 * _SECOND
"""Nanoseconds in which a file system may give one time to two changes: a timer's tick of the
kernel; FAT, and servers that keep whole seconds."""


class Stamps(NamedTuple):
    """What was seen of the files of a checkpoint.

    Attributes:
        files: by name, each with what a link leads to.
        texts: files that nobody loads as a state: they may be written to (a log), not go away.

    """

    files: Mapping[str, tuple[Entry, ...]]
    texts: frozenset[str]

    def are_same(self, now: Stamps | None) -> bool:
        """Return whether nothing that counts was changed, came or went since."""
        if now is None or self.files.keys() != now.files.keys() or not self.texts <= now.texts:
            return False
        pairs = ((seen, now.files[name]) for name, seen in self.files.items())
        return all(
            len(one) == len(two) and all(a.is_same(b) for a, b in zip(one, two, strict=True))
            for one, two in pairs
        )


def stamps_of(top: Where, found: Found) -> Stamps | None:
    """Look at the files of what was found; None where it cannot be found any more."""
    try:
        folder = folder_at(top if top.is_dir() else top.parent).inner(found.base)
        names = sorted(_names(folder, found))
        if is_far(top):
            folder.fetch(names)  # by a listing, where they are many
        seen = in_threads(folder.seen, names)
    except (OSError, Malformed):
        return None
    if not any(seen):
        return None
    texts = frozenset(name for name in names if _is_text(name))
    both = zip(names, seen, strict=True)
    return Stamps({name: one for name, one in both if name not in texts}, texts)


def _names(folder: Folder, found: Found) -> Iterator[str]:
    """Yield the files of what was found, relative to its folder."""
    if found.sort is Sort.FILE:  # one file may name all of a step
        for candidate in one_file.find_file(folder.root / found.names[0]).candidates:
            yield from candidate.files
    elif found.sort in (Sort.FOLDER, Sort.UNCOMMITTED):
        yield from listing.files_below(folder, found.depth)
    else:
        yield from found.names


def _is_text(name: str) -> bool:
    return layouts.is_text(name) and not name.endswith(".json")


def wait_for_tick(stamps: Stamps) -> None:
    """Wait where a change that comes now could get the time of one that was seen: 20 ms mostly."""
    entries = [one for seen in stamps.files.values() for one in seen]
    times = [stamp for one in entries for stamp in one.times if stamp]
    if not times:
        return
    tick = _TICK if any(stamp % _SECOND for stamp in times) else _COARSE
    left = max(times) + tick - time.time_ns()
    if 0 < left <= tick:  # a clock that is wrong is not waited for
        time.sleep(left / _SECOND)
