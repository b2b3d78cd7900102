"""Optimizers of several ranks: what each wrote is compared as one, whatever the mesh was."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_worlds import Worlds
from torch.distributed.tensor import Replicate, Shard, _utils

from ckpt_conformance.fsck.contents import ranks
from ckpt_conformance.fsck.contents.entries import Tensor
from ckpt_conformance.fsck.contents.leaves import Value
from ckpt_conformance.fsck.contents.tiles import dense_piece
from ckpt_conformance.fsck.diff.diff import diff

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("ranks")

LAYOUTS = {"1:S0": 1, "2:S0": 2, "2:R": 2, "3:S1": 3, "2x2:S0,S1": 4, "2x2:R,S0": 4, "2x2:S0,S0": 4}
NAME = "optim.optimizer.state.0.exp_avg"
OWN = re.compile(r"rank\d+\.|(rng|dataloader)\.|step$")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job in each layout, in both formats of the reference manager."""
    root = tmp_path_factory.mktemp("layouts")
    worlds = Worlds()
    try:
        for layout, size in LAYOUTS.items():
            for kind in ("model", "dcp"):
                where = str(place(root, layout, kind))
                worlds.results(
                    size,
                    "rank_cases:save_planted",
                    root=where,
                    layout=layout,
                    use_dcp=kind == "dcp",
                )
    finally:
        worlds.close()
    return root


def place(root: Path, layout: str, kind: str) -> Path:
    return root / kind / re.sub(r"\W", "_", layout)


def step(root: Path, layout: str, kind: str, number: int) -> Path:
    name = f"{kind}_{number:06d}"
    return place(root, layout, kind) / (name if kind == "dcp" else f"{name}.pt")


SIDES = [*itertools.product(LAYOUTS, ("model", "dcp"))]


@pytest.mark.parametrize(("layout", "kind"), SIDES)
def test_the_state_of_all_ranks_is_the_same_in_every_layout(
    layout: str, kind: str, saved: Path
) -> None:
    compared = diff(step(saved, "1:S0", "model", 1), step(saved, layout, kind, 1))
    assert compared.is_judged
    assert [one.name for one in compared.differences if not OWN.match(one.name)] == []
    assert NAME in compared.same


@pytest.mark.parametrize(("layout", "kind"), SIDES)
def test_one_step_of_the_last_bit_is_found_in_what_a_rank_wrote(
    layout: str, kind: str, saved: Path
) -> None:
    compared = diff(step(saved, "2:S0", "model", 1), step(saved, layout, kind, 2))
    others = [one for one in compared.differences if not OWN.match(one.name)]
    assert [(one.name, one.count, one.distance.max_ulps) for one in others] == [(NAME, 1, 1)]


# -- the arithmetic --------------------------------------------------------------------------------

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
