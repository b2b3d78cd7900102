"""Tensors in pieces: any division of a tensor is compared as the whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_conformance.fsck.contents import tiles
from ckpt_conformance.fsck.contents.entries import Tensor
from ckpt_conformance.fsck.contents.tiles import Piece, Reader, dense
from ckpt_conformance.fsck.diff.compare import Sides
from ckpt_conformance.fsck.source.disk import DiskFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide a shape into boxes, again and again along random axes."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        if 0 < at < size[axis]:
            low, high = list(size), list(size)
            low[axis], high[axis] = at, size[axis] - at
            behind = list(start)
            behind[axis] += at
            boxes += [(start, tuple(low)), (tuple(behind), tuple(high))]
        else:
            boxes.append((start, size))
    return boxes


def stored(
    folder: Path, name: str, value: np.ndarray, boxes: list[Any], orders: list[int]
) -> Tensor:
    """Write each box of a tensor into one file, some of them with their axes turned round."""
    pieces: list[Piece] = []
    item = value.itemsize
    with (folder / name).open("wb") as file:
        for (start, size), order in zip(boxes, orders, strict=True):
            part = value[tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))]
            stride = dense(size, item)
            if order:
                stride = dense(size[::-1], item)[::-1]
                part = part.transpose()
            pieces.append(Piece((start, size), name, file.tell(), stride))
            file.write(np.ascontiguousarray(part).tobytes())
    return Tensor(f"uint{item * 8}", value.shape, tuple(pieces), item)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_division_of_a_tensor_compares_like_the_whole(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tiles", numbered=True)
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4), "shape"))
    item = data.draw(st.sampled_from([1, 2, 4, 8]), "item")
    one = np.arange(math.prod(shape), dtype=f"u{item}").reshape(shape)
    other = one.copy()
    places = data.draw(st.sets(st.integers(0, one.size - 1), max_size=4), "places")
    for at in places:
        other.reshape(-1)[at] ^= 1  # the largest number has none above it
    both: list[Tensor] = []
    for name, value in (("a", one), ("b", other)):
        boxes = data.draw(cuts(shape), name)
        orders = data.draw(st.lists(st.integers(0, 1), min_size=len(boxes), max_size=len(boxes)))
        both.append(stored(folder, name, value, boxes, orders))
    reader = DiskFolder(folder)
    sides = Sides(Reader(reader), Reader(reader))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiles.tiles, "__defaults__", (data.draw(st.sampled_from([8, 40, 4096])),))
        patched.setattr(tiles, "_SMALL", data.draw(st.sampled_from([0, 64, 4096])))
        found = sides.tensors("w", both[0], both[1])
    sides.close()
    if not places:
        assert found is None
        return
    assert found is not None
    first = tuple(int(at) for at in np.unravel_index(min(places), shape))
    assert (found.count, found.first) == (len(places), first)


def test_files_stay_few_while_shards_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of 10,000 shards must not need 10,000 descriptors."""
    opened: list[str] = []
    original: Callable[[DiskFolder, str], Any] = DiskFolder.open

    def counted(self: DiskFolder, name: str) -> Any:  # noqa: ANN401  a file
        opened.append(name)
        return original(self, name)

    monkeypatch.setattr(DiskFolder, "open", counted)
    for at in range(100):
        (tmp_path / f"{at}").write_bytes(b"abcd")
    reader = Reader(DiskFolder(tmp_path))
    for at in range(100):
        reader.file(f"{at}")
    live = sum(not one.closed for one in reader._open.values())
    reader.close()
    assert len(opened) == 100
    assert live <= 32
