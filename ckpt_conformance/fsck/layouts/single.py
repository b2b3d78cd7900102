"""A path to one file: the set that it belongs to, or the file alone and a word about its set."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.layouts import layouts, names, ranks
from ckpt_conformance.fsck.layouts.layouts import Candidate, Found
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.places import folder_at
from ckpt_conformance.fsck.source.remote import Url

if TYPE_CHECKING:
    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Folder

_TEXT = {".md", ".txt", ".yaml", ".yml", ".toml", ".log", ".py", ".sh"}
_DATA = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def find(path: Where) -> Found:
    """Find what a file names: the set of the reference manager's, any other as it is."""
    folder = folder_at(path.parent)
    if layouts.is_reference_file(path):  # one file names all of a step
        own = _reference(folder, path.name)
        if own:
            return Found([own])
    kind = layouts.format_of(folder, path.name) or _by_name(path)
    step = layouts.step_of(path.name)
    one = Candidate(path, path.parent, kind, step, [(kind, "", path.name)], [path.name])
    one.is_alone = True
    one.is_of_more = bool([*ranks.missing([path.name])]) or _is_of_more(folder, path)
    return Found([one])


def _by_name(path: Where) -> str:
    """Give the format that a name promises, whatever the bytes are; RequestError for none."""
    if path.name.endswith(".json") or path.suffix in _TEXT:
        raise RequestError(f"{path} is no checkpoint; give its folder: {path.parent}")
    return "safetensors" if path.name.endswith(".safetensors") else "torch"


def _reference(folder: Folder, name: str) -> Candidate | None:
    """Give the set of a file of the reference manager; None where the folder is not one of its."""
    found = Found()
    with contextlib.suppress(OSError, Malformed):
        there = [one for one, kind in folder.listing().items() if kind != "folder"]
        layouts.per_rank(folder, "", there, found)
    return next((one for one in found.candidates if name in one.files), None)


def _is_of_more(folder: Folder, path: Where) -> bool:
    """Tell whether the names beside a file make one checkpoint of it and of others.

    A store is not asked: it may give a file to whom it refuses a listing.
    """
    if isinstance(path, Url):
        return False
    try:
        there = [one for one in folder.listing() if not layouts.is_leftover(one)]
    except OSError:
        return False
    above = "/".join(path.parent.resolve().parts[-2:])
    if layouts.is_by_names(there) or names.library(f"{above}/{one}" for one in there):
        return True
    others = [one for one in there if one != path.name and one.endswith(_DATA)]
    step = layouts.step_of(path.name)
    is_of_step = layouts.OF_A_STEP.match(path.parent.resolve().name) is not None
    of_same = [one for one in others if step is not None and layouts.step_of(one) == step]
    return bool(of_same) or (is_of_step and bool(others))
