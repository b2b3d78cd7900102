"""What the results of an adapter depend on that its key does not know: seen while checks ran."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.harness import opened
from ckpt_conformance.harness.client import FIXED_MACHINE, LARGE_PAGES
from ckpt_conformance.plugin.depends import ENVIRONMENT, is_ours
from ckpt_conformance.processes.scratch import SESSION
from ckpt_conformance.work import openings, own_code
from ckpt_conformance.work.sources import with_added

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.harness.opened import Note

MOST = 5_000  # names; who opens more than these is run again each time
# Variables that the harness sets for every child: what the user has there reaches no manager. The
# place of temporary files is another one for each run; its file system is in the key.
OURS = {*FIXED_MACHINE, *LARGE_PAGES, SESSION, "TMPDIR"}


class Seen(msgspec.Struct, frozen=True):
    """What results of an adapter depend on; or why that cannot be said, so they are not kept."""

    opened: openings.Opened = {}
    why_not: str = ""


def of_adapter(server: Path, adapter: str) -> Seen:
    """Return what children of an adapter have opened, by a server in this folder, as it is now."""
    if is_ours(adapter):  # all that it opens is of the suite, or installed
        return Seen()
    found = opened.read(server, adapter)
    if not found.is_whole:
        return Seen(why_not="not all that it opens could be noted")
    if edited := next((one.name for one in found.notes if _is_edited(one, found.begun)), ""):
        return Seen(why_not=f"{edited} was edited while it ran")
    notes = [note for note in found.notes if _counts(note)]
    if why_not := next((why for why in map(_why_not, notes) if why), ""):
        return Seen(why_not=why_not)
    if len(notes) > MOST:
        return Seen(why_not=f"it opens {len(notes):,} files")
    names = ((note.kind, note.name) for note in notes)
    return Seen({openings.key(*name): openings.digest(*name) for name in names})


def _is_edited(note: Note, begun: int) -> bool:
    """Return whether code is not what it was when the key was made, which is before the server."""
    if note.kind != "file" or not note.stamp or os.path.realpath(note.name) not in _known_code():
        return False
    return note.stamp[-1] > begun or note.stamp != opened.stamp_of(note.name)


def _why_not(note: Note) -> str:
    """Say why what a run has opened cannot be held against what is there later; empty if it can."""
    if note.kind in opened.STAMPED and note.stamp != opened.stamp_of(note.name):
        return f"{note.name} changed while it ran"
    return WHY_NOT[note.kind].format(note.name) if note.kind in WHY_NOT else ""


WHY_NOT = {
    "program": "it starts {}, and what a program reads is not followed",
    "stale": "Python runs {}, which is not of its source; remove it",
    "address": "it connects to {}, and what comes from there may differ",
}


def _counts(note: Note) -> bool:
    """Return whether the key does not know of it yet."""
    if note.kind == "variable":
        return note.name not in OURS and not note.name.startswith(ENVIRONMENT)
    return note.kind != "file" or os.path.realpath(note.name) not in _known_code()


@functools.cache
def _known_code() -> frozenset[str]:
    """Return the files that are in the digest of all code outside."""
    try:
        files = own_code.files_below(with_added(own_code.places_outside()))
        return frozenset(os.path.realpath(path) for _, path in files)
    except own_code.TooMuchError:
        return frozenset()
