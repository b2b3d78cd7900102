"""Files that are a plain pickle, and not the archive of `torch.save` around one: what they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import pickle_names, pickles
from ckpt_conformance.fsck.formats.pickle_machine import MOST_BYTES
from ckpt_conformance.fsck.source.findings import Finding, Kind, Malformed
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from ckpt_conformance.fsck.source.source import Folder

_FIRST = b"\x80"  # of every protocol since 2


def findings_of(folder: Folder, name: str) -> list[Finding] | None:
    """Say what stands in the place of a file of torch; None where it is no pickle."""
    told = _told(folder, name)
    if told is None:
        return None
    what = "it is a plain pickle: torch.load refuses it, and nothing in it can be checked"
    return [one for one in told if one.kind is Kind.DAMAGED] or [Finding(Kind.UNKNOWN, name, what)]


def stray(folder: Folder, name: str) -> list[Finding]:
    """Say that a file of a name that no library writes was not judged; what it runs is damage."""
    what = "no library writes this name, and it is no file of torch.save: it was not judged"
    return [Finding(Kind.NOTE, name, what), *(_told(folder, name) or ())]


def _told(folder: Folder, name: str) -> list[Finding] | None:
    """Judge the names that a pickle asks for; None where it is none."""
    try:
        size = folder.size(name)
        with folder.open(name) as file:
            if size > MOST_BYTES or exactly(file, 0, min(size, 1)) != _FIRST:
                return None
            _, names = pickles.load(exactly(file, 0, size))
    except (OSError, Malformed):
        return None
    return [Finding(kind, name, f"it {text}") for kind, text in pickle_names.judge_names(names)]
