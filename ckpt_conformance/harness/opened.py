"""Notes of what a run opens, as its processes write them: their form, their place, their reader.

`recorder` notes each name once, in a file of the adapter's own. A note says, too, what a file was
when it was first seen, so that one that changed since is told from one that did not.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract.file_kinds import kinds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FOLDER = "opened"  # in that of the server
LOST = "lost"  # a byte: whether a note could not be written
BEGUN = "begun"  # a file that is as old as the server
COMMAND = "command"  # whose notes they are where no adapter is explored
EVERYBODY = "all"  # notes of the server itself, which every child begins with
# Bound now: injectors of faults replace these functions later.
_stat, _lstat = os.stat, os.lstat
Stamp = tuple[int, ...]  # of a file: device, inode, size, times; empty if there is none


class Note(msgspec.Struct, frozen=True):
    """One name that was seen.

    Kinds: `file`, `folder` (that was listed), `listed` (the same, where folders that the suite
    writes are passed over), `modules` (a folder that an import has looked into), `exists` (whether
    there is something, and of which kind), `link` (where it leads), `written` (a file that is added
    to, which was there or not), `variable`, `variables` (the names of all), `program`, `address`,
    `stale` (compiled code that is not of its source), `unseen` (in words: what could not be noted,
    and so anything may hang on it).
    """

    kind: str
    name: str
    stamp: Stamp = ()


class Opened(msgspec.Struct, frozen=True):
    """All that was noted for an adapter; `is_whole` is False where a note was lost.

    `begun` is when the server was started, in ns as `stat` has it.
    """

    notes: tuple[Note, ...] = ()
    is_whole: bool = True
    begun: int = 0


def stamp_of(path: str) -> Stamp:
    """Return what tells one content of a file from another one; empty if it is not there."""
    try:
        found = _stat(path)
    except (OSError, ValueError):
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def link_stamp_of(path: str) -> Stamp:
    """Return what tells one link from another one at its place; empty if it is not there."""
    try:
        found = _lstat(path)
    except (OSError, ValueError):
        return ()
    return (found.st_dev, found.st_ino, found.st_ctime_ns)


STAMPED: Mapping[str, Callable[[str], Stamp]] = {
    "file": stamp_of,
    "folder": stamp_of,
    "listed": stamp_of,
    "written": stamp_of,
    "exists": kinds_of,
    "link": link_stamp_of,
}


def is_as_noted(note: Note) -> bool:
    """Return whether what was noted is the same now, as far as a stamp tells."""
    return note.kind not in STAMPED or STAMPED[note.kind](note.name) == note.stamp


def read(server: Path, adapter: str) -> Opened:
    """Return what children of an adapter, and the server in this folder, have opened so far."""
    folder = server / FOLDER
    try:
        is_whole = (folder / LOST).read_bytes() == b"\0"
        texts = [path.read_bytes() for path in logs(folder, adapter) if path.exists()]
        lines = {line for text in texts for line in text.splitlines()}  # children repeat each other
        notes = tuple(msgspec.json.decode(line, type=Note) for line in sorted(lines))
        begun = (folder / BEGUN).stat().st_ctime_ns
    except (OSError, msgspec.DecodeError):
        return Opened(is_whole=False)
    return Opened(notes, is_whole, begun)


def prepare(server: Path) -> None:
    """Make the folder of the notes, before the server starts."""
    folder = server / FOLDER
    folder.mkdir()
    (folder / LOST).write_bytes(b"\0")
    (folder / BEGUN).touch()


def logs(folder: Path, adapter: str) -> tuple[Path, Path]:
    """Return the files of notes: of the server, and of an adapter's children."""
    named = hashlib.blake2b(adapter.encode(), digest_size=8).hexdigest()
    return folder / EVERYBODY, folder / named
