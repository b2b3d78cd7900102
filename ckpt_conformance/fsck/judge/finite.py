"""Count NaNs and infinities: per tensor, of floats of every width, tile by tile."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.contents import content, tiles, ulps
from ckpt_conformance.fsck.contents.tiles import Reader
from ckpt_conformance.fsck.judge.judge import sample
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
    own, opened = threading.local(), list[Reader]()

    def run(pair: tuple[str, Tensor]) -> NotFinite | Finding:
        if not hasattr(own, "reader"):
            own.reader = Reader(folder)
            opened.append(own.reader)
        try:
            return _of_tensor(own.reader, *pair)
        except (OSError, Malformed) as error:
            what = f"NaNs of {pair[0]} were not counted: {error}"
            return Finding(Kind.UNKNOWN, pair[1].pieces[0].file, what)

    not_finite: list[NotFinite] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for (_, tensor), outcome in zip(floats, pool.map(run, floats), strict=True):
            if isinstance(outcome, Finding):
                report.findings.append(outcome)
            elif outcome.nan or outcome.infinite:
                not_finite.append(outcome)
            done += tensor.nbytes
            if progress:
                progress(done, total)
    for reader in opened:
        reader.close()
    return not_finite


def _of_tensor(reader: Reader, name: str, tensor: Tensor) -> NotFinite:
    """Count in all pieces of a tensor."""
    nan = infinite = 0
    for piece in tensor.pieces:
        settled = reader.settled(piece, tensor.dtype)
        if not math.prod(piece.box[1]):
            continue
        for box in tiles.tiles(piece.box, tensor.item):
            bits = reader.read(settled, tensor.item, box).reshape(-1)
            more = ulps.nan_inf(tensor.dtype, bits)
            nan, infinite = nan + more[0], infinite + more[1]
    return NotFinite(name, nan, infinite, math.prod(tensor.shape))
