"""What the results of an adapter depend on that its key does not know: seen while checks ran."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.harness import opened
from ckpt_conformance.harness.client import FIXED_MACHINE, LARGE_PAGES
from ckpt_conformance.harness.opened import Note
from ckpt_conformance.plugin.depends import ENVIRONMENT, foreign
from ckpt_conformance.processes.scratch import SESSION
from ckpt_conformance.work import openings, own_code, session_variables, startup
from ckpt_conformance.work.sources import with_added

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


MOST = 5_000  # names; who opens more than these is run again each time
MOST_OF_COMMAND = 20_000  # whose interpreter and packages are among them
MOST_BYTES = 4 << 30  # of the files that are read: each run that looks for results reads them
SIZE = 2  # where a stamp has the size of a file
LOST = "not all that it opens could be noted: a disk was full, or a limit was reached"
# Variables that the harness sets for every child: what the user has there reaches no manager. The
# place of temporary files is another one for each run; its file system is in the key.
OURS = {*FIXED_MACHINE, *LARGE_PAGES, SESSION, "TMPDIR"}
TOO_MUCH = (
    f"there are more than {own_code.MOST_FILES:,} files of code, or {own_code.MOST_NAMES:,} of any "
    "kind, below the folders that it may import from; name smaller ones on the PYTHONPATH, or work "
    "in one"
)


class Seen(msgspec.Struct, frozen=True):
    """What results of an adapter depend on; or why that cannot be said, so they are not kept."""

    opened: openings.Opened = {}
    why_not: str = ""


def of_adapter(server: Path, adapter: str, company: Iterable[str] = ()) -> Seen:
    """Return what children of an adapter have opened, by a server in this folder, as it is now.

    `company` are the adapters that the server has imported, too.
    """
    if first := next(iter(startup.files()), ""):
        return Seen(why_not=f"{first} runs before it can be noted what it opens")
    if not foreign([adapter, *company]):  # all that it opens is of the suite, or installed
        return Seen()
    if _known_code() is None:
        return Seen(why_not=TOO_MUCH)
    found = opened.read(server, adapter)
    if not found.is_whole:
        return Seen(why_not=LOST)
    if edited := next((one.name for one in found.notes if _is_edited(one, found.begun)), ""):
        return Seen(why_not=f"{edited} was edited while it ran")
    return _seen_in(_read_again([one for one in found.notes if _counts(one)]), MOST)


def of_command(folder: Path) -> Seen:
    """Return what runs of a command have opened, by workers that note in this folder, as it is now.

    A key has how it is started alone: all code that it runs is among what it opens.
    """
    if first := next(iter(startup.files()), ""):  # also in the process that runs are forked from
        return Seen(why_not=f"{first} runs before it can be noted what it opens")
    found = opened.read(folder, opened.COMMAND)
    if not found.is_whole:
        return Seen(why_not=LOST)
    read = [note.name for note in found.notes if note.kind == "file"]
    variables = [Note("variable", name) for name in session_variables.named_in(read)]
    notes = [*_read_again(found.notes), *variables]
    return _seen_in(notes, MOST_OF_COMMAND, anywhere=False)


def _seen_in(notes: Sequence[Note], most: int, *, anywhere: bool = True) -> Seen:
    if why_not := next((why for why in map(_why_not, notes) if why), ""):
        return Seen(why_not=why_not)
    if len(notes) > most:
        return Seen(why_not=f"it opens {len(notes):,} files")
    if (size := sum(note.stamp[SIZE] for note in notes if _is_read(note))) > MOST_BYTES:
        return Seen(why_not=f"it reads {size / 2**30:.1f} GiB, too much to compare each time")
    names = ((note.kind, note.name) for note in notes if note.kind != "written")
    return Seen(openings.noted(names, anywhere=anywhere))


def _is_edited(note: Note, begun: int) -> bool:
    """Return whether code is not what it was when the key was made, which is before the server."""
    if not note.stamp or not _is_known_code(note):
        return False
    return note.stamp[-1] > begun or not opened.is_as_noted(note)


def _why_not(note: Note) -> str:
    """Say why what a run has opened cannot be held against what is there later; empty if it can."""
    if not opened.is_as_noted(note):
        return f"{note.name} changed while it ran"
    return WHY_NOT[note.kind].format(note.name) if note.kind in WHY_NOT else ""


WHY_NOT = {
    "program": "it starts {}, and what a program reads is not followed",
    "stale": "Python runs {}, which is not of its source; remove it",
    "unseen": "{}, and so not all that it depends on is known",
    "address": "it connects to {}, and what comes from there may differ",
}


def _read_again(notes: Sequence[Note]) -> list[Note]:
    """Leave out what was in files that are added to, and that nobody reads."""
    read = {note.name for note in notes if note.kind == "file"}
    return [note for note in notes if note.kind != "written" or note.name in read]


def _is_read(note: Note) -> bool:
    return note.kind == "file" and len(note.stamp) > SIZE


def _counts(note: Note) -> bool:
    """Return whether the key of an adapter's results does not know of it yet."""
    if note.kind == "variable":
        is_known = note.name.startswith((*ENVIRONMENT, *openings.SET_BY_US))
        return note.name not in OURS and not is_known
    return not _is_known_code(note)


def _is_known_code(note: Note) -> bool:
    return note.kind == "file" and os.path.realpath(note.name) in (_known_code() or ())


@functools.cache
def _known_code() -> frozenset[str] | None:
    """Return the files that are in the digest of all code outside; None if these are too many."""
    try:
        files = own_code.files_below(with_added(own_code.places_outside()))
        return frozenset(os.path.realpath(path) for _, path in files)
    except own_code.TooMuchError:
        return None
