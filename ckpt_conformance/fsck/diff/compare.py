"""Compare one entry of two checkpoints: a tensor bit for bit and tile by tile, a value at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ckpt_conformance.fsck.contents import tiles, ulps
from ckpt_conformance.fsck.contents.entries import Tensor
from ckpt_conformance.fsck.contents.leaves import Value, same_value
from ckpt_conformance.fsck.pickled.pickle_values import Name
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import clip, is_sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from ckpt_conformance.fsck.contents.entries import Entry
    from ckpt_conformance.fsck.contents.tiles import Piece, Reader
    from ckpt_conformance.fsck.contents.ulps import Distance
    from ckpt_conformance.fsck.formats.cover import Box

    Array = npt.NDArray[Any]


class Status(StrEnum):
    """The outcome of comparing one entry."""

    SAME = "same"
    DIFFERS = "differs"
    DTYPE = "dtype-differs"
    SHAPE = "shape-differs"
    KIND = "kind-differs"  # a tensor and a plain value
    KEY = "key-differs"  # 1 and "1"
    GRAD = "requires-grad-differs"
    ONLY_A = "only-in-a"
    ONLY_B = "only-in-b"


class DifferenceJson(TypedDict):
    """A `Difference` in the output of `diff --json`; an infinite distance is the text `inf`."""

    name: str
    status: str
    a: str | None
    b: str | None
    elements: int | None
    count: int | None
    first: list[int] | None
    max_abs: float | str | None
    max_ulps: int | None
    nans: int


@dataclass(frozen=True)
class Difference:
    """How one entry differs.

    Attributes:
        a, b: each side in words: the value, or dtype and shape.
        elements, count: of a tensor that differs: how many it has, and how many of them differ.
        first: index of the first that differs, in the order of the elements.
        distance: how far they are apart.

    """

    name: str
    status: Status
    a: str | None
    b: str | None
    elements: int | None = None
    count: int | None = None
    first: tuple[int, ...] | None = None
    distance: Distance = ulps.NO_DISTANCE

    def to_json(self) -> DifferenceJson:
        """Return plain types."""
        max_abs = self.distance.max_abs
        is_finite = not isinstance(max_abs, float) or math.isfinite(max_abs)
        return {
            "name": self.name,
            "status": str(self.status),
            "a": self.a,
            "b": self.b,
            "elements": self.elements,
            "count": self.count,
            "first": None if self.first is None else list(self.first),
            "max_abs": max_abs if is_finite else str(max_abs),
            "max_ulps": self.distance.max_ulps,
            "nans": self.distance.nans,
        }


def describe(entry: Entry) -> str:
    """Write one side in words."""
    if isinstance(entry, Tensor):
        pending = f" (to be {entry.pending})" if entry.pending else ""
        return f"{entry.dtype}{pending} {list(entry.shape)}"
    return _shown(entry.value)


def _shown(value: object) -> str:
    """Show a plain value from a file, and not all of a long one."""
    if is_sequence(value):
        inner = ", ".join(_shown(one) for one in value[:6])
        more = f", … {len(value)} items" if len(value) > 6 else ""  # noqa: PLR2004  as above
        return f"({inner}{more})" if isinstance(value, tuple) else f"[{inner}{more}]"
    if isinstance(value, Name):
        return clip(str(value)).strip("'")
    if isinstance(value, bytes):
        return f"{len(value)} bytes {value[:12].hex()}{'…' if len(value) > 12 else ''}"  # noqa: PLR2004
    return "{}" if isinstance(value, dict) else clip(value)


def static(name: str, a: Entry | None, b: Entry | None) -> Difference | None:
    """Compare what needs no payload; None where nothing differs, or the payload has to tell."""
    if a is None or b is None:
        status = Status.ONLY_B if a is None else Status.ONLY_A
        return Difference(
            name, status, None if a is None else describe(a), None if b is None else describe(b)
        )
    if isinstance(a, Value) and isinstance(b, Value):
        if same_value(a.value, b.value):
            return None
        return Difference(name, Status.DIFFERS, *_describe_both(a.value, b.value))
    status = Status.KIND
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        has_same_dtype = (a.dtype, a.pending) == (b.dtype, b.pending)
        if has_same_dtype and a.shape == b.shape:
            return None
        status = Status.SHAPE if has_same_dtype else Status.DTYPE
    return Difference(name, status, describe(a), describe(b))


def keys(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    """Compare the types of keys that lead to the same names, as far as both sides say them."""
    for name in sorted(a.keys() & b.keys()):
        if a[name] != b[name]:
            yield Difference(name, Status.KEY, f"a key of type {a[name]}", f"of type {b[name]}")


def gradients(name: str, a: Tensor, b: Tensor) -> Difference | None:
    """Compare whether a gradient is required, if both sides say it."""
    if None in (a.requires_grad, b.requires_grad) or a.requires_grad == b.requires_grad:
        return None
    texts = [f"requires_grad={one.requires_grad}" for one in (a, b)]
    return Difference(name, Status.GRAD, texts[0], texts[1])


def _describe_both(a: object, b: object) -> tuple[str, str]:
    """Describe two values that differ; of long lists, the first items that do."""
    if is_sequence(a) and is_sequence(b) and type(a) is type(b) and len(a) == len(b) > 6:  # noqa: PLR2004
        at = next(at for at, pair in enumerate(zip(a, b, strict=True)) if not same_value(*pair))
        return f"item {at} of {len(a)}: {_shown(a[at])}", f"item {at}: {_shown(b[at])}"
    left, right = _shown(a), _shown(b)
    if left == right:  # 1 and True, or what clip left out
        left, right = f"{left} ({type(a).__name__})", f"{right} ({type(b).__name__})"
    return left, right


class SideError(Exception):
    """Bytes of one side that could not be read; `side` is 0 for A, 1 for B."""

    def __init__(self, side: int, error: OSError | Malformed) -> None:
        """Take what was raised."""
        super().__init__(str(error))
        self.side = side


class Sides:
    """Two readers, for one thread; compares the payload of tensors."""

    def __init__(self, a: Reader, b: Reader, progress: Callable[[int], None] | None = None) -> None:
        """Take the readers; `progress` is told the bytes of each tile of one side."""
        self.readers = (a, b)
        self.progress = progress

    def close(self) -> None:
        """Close the files."""
        for reader in self.readers:
            reader.close()

    def tensors(self, name: str, a: Tensor, b: Tensor) -> Difference | None:
        """Compare two tensors of one dtype and shape; None where every bit is the same.

        Of a part that is there several times each is compared, and counted once.

        Raises:
            SideError: bytes of one side cannot be read.

        """
        tally = _Tally(a.dtype, a.shape)
        of_box: dict[Box, int] = {}
        resolved: tuple[dict[Box, Piece], dict[Box, Piece]] = ({}, {})
        if math.prod(a.shape):
            for left, right, shared in tiles.pairs(a.pieces, b.pieces):
                both = [
                    self._resolve(side, piece, a.dtype, resolved[side])
                    for side, piece in enumerate((left, right))
                ]
                before = tally.count
                for box in tiles.tiles(shared, a.item):
                    self._tile(both, a.item, box, tally)
                of_box[shared] = max(of_box.get(shared, 0), tally.count - before)
        if not tally.count:
            return None
        outcome = (tally.elements, sum(of_box.values()), tally.first, tally.distance)
        return Difference(name, Status.DIFFERS, describe(a), describe(b), *outcome)

    def _resolve(self, side: int, piece: Piece, dtype: str, known: dict[Box, Piece]) -> Piece:
        """Find the tensor in an item, once; what is refused names its file."""
        if piece.box not in known:
            try:
                known[piece.box] = self.readers[side].resolved(piece, dtype)
            except Malformed as error:
                place = f" bytes {error.start}..{error.end}" if error.end else ""
                raise SideError(side, Malformed(f"{piece.file}{place}: {error}")) from None
            except OSError as error:
                raise SideError(side, error) from error
        return known[piece.box]

    def _tile(self, pieces: Sequence[Piece], item: int, box: Box, tally: _Tally) -> None:
        """Compare one tile."""
        arrays: list[Array] = []
        for side, piece in enumerate(pieces):
            try:
                arrays.append(self.readers[side].read(piece, item, box).reshape(-1))
            except (OSError, Malformed) as error:
                raise SideError(side, Malformed(f"{piece.file}: {error}")) from error
        left, right = arrays
        if not np.array_equal(left.view("u1"), right.view("u1")):
            tally.take(box, left, right)
        if self.progress:
            self.progress(left.nbytes)


class _Tally:
    """What is known of the elements that differ."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self.elements = math.prod(shape)
        self.count = 0
        self.first: tuple[int, ...] | None = None
        self.distance = ulps.NO_DISTANCE

    def take(self, box: Box, left: Array, right: Array) -> None:
        """Take two tiles that differ, each as a row of elements."""
        differ = _unequal(left, right)
        where = np.flatnonzero(differ)
        self.count += len(where)
        inner = np.unravel_index(int(where[0]), box[1] or (1,))
        first = tuple(at + int(more) for at, more in zip(box[0], inner, strict=False))
        self.first = first if self.first is None else min(self.first, first)
        self.distance |= ulps.distance(self.dtype, left[where], right[where])


def _unequal(left: Array, right: Array) -> Array:
    """Return a mask of the elements that differ in a bit; 16 bytes are compared in halves."""
    if left.dtype.itemsize <= 8:  # noqa: PLR2004  bytes of the widest number
        return np.asarray(left != right)
    halves = left.view("u8") != right.view("u8")
    return np.asarray(halves.reshape(-1, 2).any(1))
