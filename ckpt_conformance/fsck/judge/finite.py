"""Count NaNs and infinities: per tensor, of floats of every width, tile by tile."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.contents import content, tiles, ulps
from ckpt_conformance.fsck.contents.tiles import Reader
from ckpt_conformance.fsck.judge.judging import sample
from ckpt_conformance.fsck.source.findings import Finding, Kind, Malformed, NotFinite

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.fsck.contents.content import Tensor
    from ckpt_conformance.fsck.judge.judge import Options
    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.source.findings import Report
    from ckpt_conformance.fsck.source.source import Folder


def count(
    folder: Folder,
    candidate: Candidate,
    report: Report,
    options: Options,
    progress: Callable[[int, int], None] | None = None,
) -> list[NotFinite]:
    """Return the tensors of a checkpoint that are not finite, by name.

    What cannot be read is a finding. A sample leaves tensors out.
    """
    try:
        entries = content.read(folder, candidate).entries
    except (OSError, Malformed) as error:
        report.say(Kind.UNKNOWN, "", f"NaNs were not counted: {error}")
        return []
    floats = [
        (name, tensor)
        for name, tensor in entries.items()
        if isinstance(tensor, content.Tensor) and tensor.dtype in ulps.FLOATS
    ]
    floats = sample(floats, [tensor.nbytes for _, tensor in floats], options, report.path.name)
    total, done = sum(tensor.nbytes for _, tensor in floats), 0
    not_finite: list[NotFinite] = []
    readers = _Readers(folder)
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = pool.map(readers.count_in, floats)
        for (_, tensor), outcome in zip(floats, outcomes, strict=True):
            if isinstance(outcome, Finding):
                report.findings.append(outcome)
            elif outcome.nan or outcome.infinite:
                not_finite.append(outcome)
            done += tensor.nbytes
            if progress:
                progress(done, total)
    readers.close()
    return not_finite


class _Readers:
    """A reader for each thread, opened when the thread needs one."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._local = threading.local()
        self._opened: list[Reader] = []

    def count_in(self, named: tuple[str, Tensor]) -> NotFinite | Finding:
        """Count in one tensor, given with its name; a finding where it cannot be read."""
        if not hasattr(self._local, "reader"):
            self._local.reader = Reader(self._folder)
            self._opened.append(self._local.reader)
        name, tensor = named
        try:
            return _of_tensor(self._local.reader, name, tensor)
        except (OSError, Malformed) as error:
            what = f"NaNs of {name} were not counted: {error}"
            return Finding(Kind.UNKNOWN, tensor.pieces[0].file, what)

    def close(self) -> None:
        """Close the files of all readers."""
        for reader in self._opened:
            reader.close()


def _of_tensor(reader: Reader, name: str, tensor: Tensor) -> NotFinite:
    """Count in all pieces of a tensor."""
    nan = infinite = 0
    for piece in tensor.pieces:
        resolved = reader.resolved(piece, tensor.dtype)
        if not math.prod(piece.box[1]):
            continue
        for box in tiles.tiles(piece.box, tensor.item):
            bits = reader.read(resolved, tensor.item, box).reshape(-1)
            more = ulps.nan_inf(tensor.dtype, bits)
            nan, infinite = nan + more[0], infinite + more[1]
    return NotFinite(name, nan, infinite, math.prod(tensor.shape))
