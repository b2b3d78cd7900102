"""Judge files of other formats than torch's: each is named, with what of it was looked at."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.code import exported, keras_hdf5
from ckpt_conformance.fsck.formats import any_zip, flax, foreign, gguf
from ckpt_conformance.fsck.formats.zip_ends import UNREADABLE, WholeFile
from ckpt_conformance.fsck.judge.looks import look
from ckpt_conformance.fsck.layouts.layouts import Format
from ckpt_conformance.fsck.source.findings import (
    Finding,
    Kind,
    Malformed,
    Topic,
)
from ckpt_conformance.fsck.source.sums import Sums, Work, unreadable
from ckpt_conformance.fsck.source.untrusted import clip, plain

if TYPE_CHECKING:
    from ckpt_conformance.fsck.judge.context import Context
    from ckpt_conformance.fsck.source.source import Folder, Readable


def _flax(file: Readable, size: int) -> foreign.Structure:
    structure = foreign.read_msgpack(file, size)
    if not flax.are_arrays_checked(file, size):
        return structure
    return replace(structure, judged=f"{structure.judged}, those of arrays by dtype and shape")


_READERS = {
    Format.GGUF: gguf.judge,
    Format.HDF5: foreign.read_hdf5,
    Format.FLAX: _flax,
    Format.ONNX: foreign.read_onnx,
}
_ZIPS = {
    Format.NPZ: ("npz of numpy", ()),
    Format.KERAS: ("Keras, version 3", ("config.json", "metadata.json", "model.weights.h5")),
    Format.EXPORT: ("pt2 of torch.export", ()),
    Format.SB3: ("stable-baselines3", ("data", "policy.pth")),
}


def foreign_part(context: Context, name: str, form: Format) -> list[Work]:
    """Judge a file of another format, and say how far."""
    look(context, name)
    try:
        if form in _ZIPS:
            return _zip(context, name, form)
        size = context.folder.size(name)
        with context.folder.open(name) as file:
            structure = _READERS[form](file, size)
    except (OSError, Malformed) as error:
        context.refuse(name, error)
        return []
    if form is Format.HDF5:
        _code_of_hdf5(context, name)
    context.report.tensors += structure.tensors
    _say(context, name, structure.title, f"{structure.judged}; nothing protects the values")
    for one in structure.external:
        _external(context, name, one)
    return []


def _say(context: Context, name: str, title: str, judged: str) -> None:
    context.report.say(Kind.NOTE, name, f"this is {title}; judged: {judged}")


def _zip(context: Context, name: str, form: Format) -> list[Work]:
    """Judge an archive; the CRCs of its members are left as work."""
    size = context.folder.size(name)
    with context.folder.open(name) as file:
        found = any_zip.members(file, size)
    title, needed = _ZIPS[form]
    for one in sorted(set(needed) - {member.name for member in found}):
        context.report.say(Kind.MISSING, name, f"it has no {one}, which each file of {title} has")
    _code(context, name, form)
    context.report.tensors += sum(one.name.endswith(".npy") for one in found)
    is_read = context.sizes.reads_payload
    judged = "names, lengths and CRC-32 of the members" if is_read else "names of the members"
    _say(context, name, title, f"{judged}, and what of them a load runs; nothing else in them")
    if not is_read:
        return []
    return [Work(sum(one.packed for one in found), partial(_check, context.folder, name))]


def _code_of_hdf5(context: Context, name: str) -> None:
    """Report what Keras runs of a model in HDF5."""
    try:
        with context.folder.open(name) as file:
            found = keras_hdf5.of_hdf5(file, context.folder.size(name))
    except (OSError, Malformed) as error:
        context.refuse(name, error)
        return
    context.report.findings += [
        Finding(Kind.UNSAFE, name, f"its configuration {one.what}", name=one.name) for one in found
    ]


_CODE = {Format.KERAS: exported.of_keras, Format.EXPORT: exported.of_export}


def _code(context: Context, name: str, form: Format) -> None:
    """Report what a load evaluates or imports of an archive."""
    if form not in _CODE:
        return
    try:
        with context.folder.open(name) as file:
            whole = WholeFile(file, context.folder.size(name))
            with zipfile.ZipFile(whole) as archive:
                found = [*_CODE[form](archive)]
    except Malformed as error:
        context.refuse(name, error)
        return
    except UNREADABLE as error:
        context.report.say(Kind.DAMAGED, name, f"it cannot be read: {str(error)[:200]}")
        return
    context.report.findings += [
        Finding(Kind.UNSAFE, name, one.what, name=one.name) for one in found
    ]


def _check(folder: Folder, name: str, _: memoryview) -> Sums:
    sums = Sums()
    try:
        with folder.open(name) as file:
            for member, packed, why in any_zip.check(file, folder.size(name)):
                sums.crc += packed
                if why:
                    what = f"{clip(member)}: {why}"
                    bad = Finding(Kind.DAMAGED, name, what, (member,), own_topic=Topic.CHECKSUM)
                    sums.findings.append(bad)
    except (OSError, Malformed) as error:
        sums.findings.append(unreadable(name, error))
    return sums


def _external(context: Context, name: str, one: foreign.External) -> None:
    """Check that what lies in another file is inside of it."""
    base = name.rpartition("/")[0]
    try:
        for part in one.file.split("/"):
            plain(part)
    except Malformed as error:
        context.report.say(Kind.DAMAGED, name, f"{clip(one.tensor)}: {error}", (one.tensor,))
        return
    file = f"{base}/{one.file}" if base else one.file
    try:
        size = context.folder.size(file)
    except (OSError, Malformed) as error:
        bad = unreadable(file, error)
        context.report.say(bad.kind, file, f"{bad.what}: {name} has tensors there", (one.tensor,))
        return
    end = one.start + (one.length or 0)
    if end > size:
        what = f"{clip(one.tensor)} ends at byte {end}, and the file has {size} bytes: cut short?"
        place = (min(one.start, size), size)
        finding = Finding(Kind.DAMAGED, file, what, (one.tensor,), *place, own_topic=Topic.SIZE)
        context.report.findings.append(finding)
