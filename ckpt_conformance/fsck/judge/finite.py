"""Count NaNs and infinities: per tensor, of floats of every width, tile by tile."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.contents import content, tiles, ulps
from ckpt_conformance.fsck.contents.entries import Tensor
from ckpt_conformance.fsck.contents.tiles import Reader
from ckpt_conformance.fsck.judge.judging import sample
from ckpt_conformance.fsck.source.findings import Finding, Kind, Malformed, NotFinite, TooLarge
from ckpt_conformance.fsck.source.source import cancelling_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.fsck.formats.cover import Box
    from ckpt_conformance.fsck.judge.judge import Options
    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.source.findings import Report
    from ckpt_conformance.fsck.source.source import Folder

MOST_READ = 8
"""How many times the bytes of a checkpoint are read at most: tied tensors are read for each."""


def count(
    folder: Folder,
    candidate: Candidate,
    report: Report,
    options: Options,
    progress: Callable[[int, int], None] | None = None,
) -> list[NotFinite] | None:
    """Return the tensors of a checkpoint that are not finite, by name; None where none were read.

    What cannot be read is a finding. A sample leaves tensors out.
    """
    try:
        read = content.read(folder, candidate)
    except (OSError, Malformed) as error:
        report.say(Kind.UNKNOWN, "", f"NaNs were not counted: {error}")
        return None
    entries = read.entries
    if read.by_bytes:
        more = f", nor in {len(read.by_bytes) - 1} other files" if read.by_bytes[1:] else ""
        what = f"NaNs were not counted in it{more}: numbers of {candidate.layout} are not read"
        report.say(Kind.NOTE, read.by_bytes[0], what)
    floats = [
        (name, tensor)
        for name, tensor in entries.items()
        if isinstance(tensor, Tensor) and tensor.dtype in ulps.FLOATS
    ]
    if read.by_bytes and not floats:
        return None
    floats = sample(floats, [tensor.nbytes for _, tensor in floats], options, report.path.name)
    total, done = sum(min(tensor.nbytes, report.size) for _, tensor in floats), 0
    not_finite: list[NotFinite] = []
    readers = _Readers(folder, MOST_READ * report.size)
    with cancelling_pool(options.jobs) as pool:
        outcomes = pool.map(readers.count_in, floats)
        for (_, tensor), outcome in zip(floats, outcomes, strict=True):
            if isinstance(outcome, Finding):
                report.findings.append(outcome)
            elif outcome.nan or outcome.infinite:
                not_finite.append(outcome)
            done += min(tensor.nbytes, report.size)
            if progress:
                progress(done, total)
    readers.close()
    return not_finite


class _Readers:
    """A reader for each thread, opened when the thread needs one."""

    def __init__(self, folder: Folder, most: int) -> None:
        self._folder = folder
        self._left = most
        self._lock = threading.Lock()
        self._local = threading.local()
        self._opened: list[Reader] = []

    def count_in(self, named: tuple[str, Tensor]) -> NotFinite | Finding:
        """Count in one tensor, given with its name; a finding where it cannot be read."""
        if not hasattr(self._local, "reader"):
            self._local.reader = Reader(self._folder)
            self._opened.append(self._local.reader)
        name, tensor = named
        try:
            return _of_tensor(self._local.reader, name, tensor, self._take)
        except (OSError, Malformed) as error:
            what = f"NaNs of {name} were not counted: {error}"
            return Finding(Kind.UNKNOWN, tensor.pieces[0].file, what)

    def _take(self, nbytes: int) -> None:
        """Take bytes of those that may be read; TooLarge where all are used up."""
        with self._lock:
            if nbytes > self._left:
                raise TooLarge(f"the tensors show the bytes of their files over {MOST_READ} times")
            self._left -= nbytes

    def close(self) -> None:
        """Close the files of all readers."""
        for reader in self._opened:
            reader.close()


def _of_tensor(reader: Reader, name: str, tensor: Tensor, take: Callable[[int], None]) -> NotFinite:
    """Count in all pieces of a tensor; `take` is told how many bytes of a file each asks for."""
    found: dict[Box, tuple[int, int]] = {}  # of copies of a part the worst
    for piece in tensor.pieces:
        nan = infinite = 0
        resolved = reader.resolved(piece, tensor.dtype)
        if not math.prod(piece.box[1]):
            continue
        box, shown = _real(piece.box, resolved.stride or (), tensor.item)
        packed = resolved.packed
        take(packed.end - packed.start if packed else math.prod(box[1]) * tensor.item)
        for tile in tiles.tiles(box, tensor.item):
            bits = reader.read(resolved, tensor.item, tile).reshape(-1)
            more = ulps.nan_inf(tensor.dtype, bits)
            nan, infinite = nan + more[0] * shown, infinite + more[1] * shown
        found[piece.box] = max(found.get(piece.box, (0, 0)), (nan, infinite))
    nan, infinite = (sum(counts) for counts in zip((0, 0), *found.values(), strict=True))
    return NotFinite(name, nan, infinite, math.prod(tensor.shape))


def _real(box: Box, stride: Sequence[int], item: int) -> tuple[Box, int]:
    """Return the elements of a box that have bytes of their own, and how often each is shown.

    A stride of 0 shows the same elements again and again: 10**15 times four bytes are four bytes.
    TooLarge where elements share bytes in another way: then there may be as many.
    """
    sizes = tuple(size if step else 1 for size, step in zip(box[1], stride, strict=True))
    extent = item + sum((size - 1) * step for size, step in zip(sizes, stride, strict=True))
    if math.prod(sizes) * item > extent:
        raise TooLarge(f"its {math.prod(box[1])} elements overlap in {extent} bytes")
    return (box[0], sizes), math.prod(box[1]) // math.prod(sizes)
