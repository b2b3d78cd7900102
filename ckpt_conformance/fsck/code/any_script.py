"""TorchScript and pt2 under any name: the loads of torch mind none."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.code import exported
from ckpt_conformance.fsck.formats import torchscript, zips
from ckpt_conformance.fsck.formats.zips import UNREADABLE, WholeFile
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable


def of_any(file: Readable, length: int) -> Iterator[str]:
    """Yield what is unsafe of a file of any name; nothing where it is none of these."""
    if exactly(file, 0, min(length, len(zips.MAGIC))) != zips.MAGIC:
        return
    try:
        with zipfile.ZipFile(WholeFile(file, length)) as archive:
            yield from map(torchscript.unsafe, _of_zip(archive))
            if exported.is_export(archive):
                yield from (one.what for one in exported.of_export(archive))
    except (*UNREADABLE, Malformed):
        return


def _of_zip(archive: zipfile.ZipFile) -> Iterator[str]:
    inside = {one.filename.partition("/")[2]: one for one in archive.infolist()}
    if torchscript.CONSTANTS not in map(str.lower, inside):
        return
    chosen = [name for name in inside if torchscript.is_source(name)]
    if sum(inside[name].file_size for name in chosen) > torchscript.MOST:
        yield torchscript.TOO_MUCH
        return
    yield from torchscript.problems({name: archive.read(inside[name]) for name in chosen})
    for name, one in inside.items():
        if name.lower() == torchscript.BYTECODE and one.file_size <= torchscript.MOST:
            yield from torchscript.bytecode(archive.read(one))
