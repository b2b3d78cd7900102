"""Find the checkpoint of a file that the user named: all of its step, or the file."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.formats import safetensors_file
from ckpt_conformance.fsck.layouts import layouts, leftovers, step_names
from ckpt_conformance.fsck.layouts import names as written
from ckpt_conformance.fsck.layouts.layouts import Candidate, Format, Overview, Part
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.places import folder_at
from ckpt_conformance.fsck.source.remote import Url
from ckpt_conformance.fsck.source.source import EntryKind

if TYPE_CHECKING:
    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Folder

_DATA = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def find_file(path: Where) -> Overview:
    """Find the checkpoint of a file: all of the step for the reference manager, else the file."""
    folder = folder_at(path.parent)
    if layouts.is_reference_file(path):  # one file names all of a step
        own = _reference(folder, path.name)
        if own:
            return Overview([own])
    form = layouts.format_of(folder, path.name) or _by_name(folder, path)
    part = Part(form, "", path.name)
    candidate = Candidate(
        path, path.parent, str(form), step_names.step_of(path.name), [part], [path.name]
    )
    candidate.is_alone = True
    has_missing = any(written.missing([path.name]))
    candidate.is_part_of_set = has_missing or _is_part_of_set(folder, path)
    return Overview([candidate])


def _by_name(folder: Folder, path: Where) -> Format:
    """Return the format of a file that the user named; RequestError for a text."""
    if layouts.is_text(path.name):
        raise RequestError(f"{path} is no checkpoint; give its folder: {path.parent}")
    with contextlib.suppress(OSError, Malformed), folder.open(path.name) as file:
        if safetensors_file.begins(file.read(safetensors_file.HEAD)):
            return Format.SAFETENSORS
    return Format.TORCH


def _reference(folder: Folder, name: str) -> Candidate | None:
    """Return the files of a step of the reference manager; None where it did not write them."""
    overview = Overview()
    with contextlib.suppress(OSError, Malformed):
        names = [file for file, kind in folder.listing().items() if kind is not EntryKind.FOLDER]
        for _, files in layouts.per_rank_steps(names)[0]:
            if name in files:
                layouts.take_per_rank(folder, files, overview)
    return next(iter(overview.candidates), None)


def _is_part_of_set(folder: Folder, path: Where) -> bool:
    """Return whether a file is one of several that make a checkpoint, by the names beside it.

    A store is not asked: it may give a file to whom it refuses a listing.
    """
    if isinstance(path, Url):
        return False
    try:
        names = [
            name
            for name in folder.listing()
            if not (leftovers.is_one(name) or layouts.is_beside(name))
        ]
    except OSError:
        return False
    above = "/".join(path.parent.resolve().parts[-2:])
    if layouts.is_by_names(names) or written.library(f"{above}/{name}" for name in names):
        return True
    others = [name for name in names if name != path.name and name.endswith(_DATA)]
    step = step_names.step_of(path.name)
    is_of_step = layouts.OF_A_STEP.match(path.parent.resolve().name) is not None
    of_same_step = [
        name for name in others if step is not None and step_names.step_of(name) == step
    ]
    return bool(of_same_step) or (is_of_step and bool(others))
