"""TorchScript under a name of any kind: `torch.jit.load` minds none."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import torchscript, zips
from ckpt_conformance.fsck.formats.any_file import UNREADABLE, WholeFile
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable


def of_any(file: Readable, length: int) -> Iterator[str]:
    """Yield what is unsafe of a file of any name; nothing where it is no TorchScript."""
    if exactly(file, 0, min(length, len(zips.MAGIC))) != zips.MAGIC:
        return
    try:
        with zipfile.ZipFile(WholeFile(file, length)) as archive:
            yield from map(torchscript.unsafe, _of_zip(archive))
    except UNREADABLE:
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
