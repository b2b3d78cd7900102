"""Parts that ranks wrote are put together as torch divides them; see `test_fsck_diff_plants.py`."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard, _utils

from ckpt_conformance.fsck.contents import ranks
from ckpt_conformance.fsck.contents.entries import Tensor
from ckpt_conformance.fsck.contents.leaves import Value
from ckpt_conformance.fsck.contents.tiles import dense_piece

PLACEMENTS = {"S(0)": Shard(0), "S(1)": Shard(1), "S(2)": Shard(2), "R": Replicate()}


@given(
    shape=st.tuples(*[st.integers(0, 7)] * 3),
    mesh=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_boxes_are_those_of_torch(
    shape: tuple[int, ...], mesh: list[int], data: st.DataObject
) -> None:
    words = [data.draw(st.sampled_from(sorted(PLACEMENTS))) for _ in mesh]
    parts, expected = {}, set()
    for rank, at in enumerate(itertools.product(*map(range, mesh))):
        local, first = _utils._compute_local_shape_and_global_offset(
            shape, tuple(mesh), [*at], [PLACEMENTS[word] for word in words]
        )
        box = ((0,) * len(local), tuple(local))
        parts[f"optim.rank{rank}.w"] = Tensor(
            "float32", tuple(local), (dense_piece(str(rank), 0, box, 4),), 4
        )
        if all(local):
            expected.add((str(rank), tuple(first), tuple(local)))
    layout = {"w": f"{nested(mesh)} {' '.join(words)}"}
    (joined,) = ranks.together(parts, len(parts), layout).items()
    name, tensor = joined
    assert name == "optim.w"
    assert isinstance(tensor, Tensor)
    assert tensor.shape == shape
    found = {(piece.file, *piece.box) for piece in tensor.pieces if all(piece.box[1])}
    assert found == expected


def nested(mesh: list[int], first: int = 0) -> object:
    """Return the ranks of a mesh as nested lists."""
    if not mesh:
        return first
    inner = 1
    for size in mesh[1:]:
        inner *= size
    return [nested(mesh[1:], first + at * inner) for at in range(mesh[0])]


def tensor(*shape: int, file: str = "f", dtype: str = "float32") -> Tensor:
    return Tensor(dtype, shape, (dense_piece(file, 0, ((0,) * len(shape), shape), 4),), 4)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (tensor(2, 3), tensor(2, 3), "[0, 1] _StridedShard(dim=0, sf=2)"),
        (tensor(2, 3), tensor(2, 4), "[0, 1] S(0)"),
        (tensor(2, 3), tensor(2, 3), "[0, 1] S(2)"),
        (tensor(2, 3), tensor(2, 3), "[0, 7] S(0)"),
        (tensor(2, 3), tensor(2, 3), "[[0, 1]] S(0)"),
        (tensor(2, 3), tensor(2, 3), "[] S(0)"),
        (tensor(2, 3), tensor(2, 3), "[0, 1"),
        (tensor(2, 3), tensor(1, 3), "[0, 1] R"),
        (tensor(2, 3), tensor(2, 3, dtype="float64"), "[0, 1] R"),
        (Value(1), tensor(2), ""),
        (Value(1), Value(1.0), ""),
    ],
)
def test_what_does_not_fit_keeps_the_rank_in_its_name(
    first: Tensor | Value, second: Tensor | Value, words: str
) -> None:
    parts = {"optim.rank0.w": first, "optim.rank1.w": second}
    assert ranks.together(parts, 2, {"w": words} if words else {}) == parts
