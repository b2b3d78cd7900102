"""TorchScript and pt2 under any name: the loads of torch mind none."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.code import exported
from ckpt_conformance.fsck.formats import torchscript, zip_ends
from ckpt_conformance.fsck.formats.zip_ends import UNREADABLE
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.formats.zip_ends import Opened
    from ckpt_conformance.fsck.source.source import Readable


def of_any(file: Readable, length: int) -> Iterator[str]:
    """Yield what is unsafe of a file of any name; nothing where it is none of these.

    torch.jit.load looks at no byte but those to which the end of the archive leads.
    """
    if not zip_ends.has_end(zip_ends.tail(file, length)):
        return
    told = set[str]()
    for opens in (zip_ends.TorchZip, zip_ends.of_python):  # older torch opens pt2 by Python's
        with contextlib.suppress(*UNREADABLE, Malformed):
            for why in _of_archive(opens(file, length)):
                if why not in told:
                    yield why
                told.add(why)


def _of_archive(archive: Opened) -> Iterator[str]:
    yield from map(torchscript.unsafe, _of_script(archive))
    if exported.is_export(archive):
        yield from (one.what for one in exported.of_export(archive))


def _of_script(archive: Opened) -> Iterator[str]:
    found = [(one.filename.partition("/")[2], one) for one in archive.infolist()]
    inside = dict(found)
    if torchscript.CONSTANTS not in map(str.lower, inside):
        return
    chosen = [name for name, _ in found if torchscript.is_source(name)]
    twice = next((name for name, times in Counter(map(str.lower, chosen)).items() if times > 1), "")
    if twice:
        yield f"{clip(twice)} occurs twice: nobody knows which of them a load runs"
        return
    if sum(inside[name].file_size for name in chosen) > torchscript.MOST:
        yield torchscript.TOO_MUCH
        return
    yield from torchscript.problems({name: archive.read(inside[name]) for name in chosen})
    for name, one in found:
        if name.lower() == torchscript.BYTECODE and one.file_size <= torchscript.MOST:
            yield from torchscript.bytecode(archive.read(one))
