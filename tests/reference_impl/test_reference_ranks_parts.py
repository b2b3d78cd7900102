"""Parts of tensors: boxes, coverage, reading a box of a file, who writes what; in one process."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_conformance.reference_impl import CheckpointDamaged, SaveRefused, durable
from ckpt_conformance.reference_impl.durable import digest_bytes, open_regular
from ckpt_conformance.reference_impl.errors import Failure, RankFailed, joint
from ckpt_conformance.reference_impl.fill import ReadPlan, fill
from ckpt_conformance.reference_impl.manifest import (
    FileEntry,
    Manifest,
    PartEntry,
    ShardedEntry,
    canonical,
    parse_manifest,
)
from ckpt_conformance.reference_impl.ranks_loading import divided
from ckpt_conformance.reference_impl.ranks_state import joined_ties, outline
from ckpt_conformance.reference_impl.shards import Box, Held, assign, whole_box, why_not_covered
from ckpt_conformance.reference_impl.torch_zip import ShardedRef, TensorRef
from ckpt_conformance.reference_impl.train_state import fresh_rng_state, set_rng_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Some part of a shape, not empty."""
    begin = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = (draw(st.integers(1, size - at)) for at, size in zip(begin, shape, strict=True))
    return Box(begin, tuple(sizes))


def elements(box: Box) -> set[tuple[int, ...]]:
    sides = (range(at, at + size) for at, size in zip(box.begin, box.sizes, strict=True))
    return set(itertools.product(*sides))


@st.composite
def cuts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A shape cut into boxes, which cover it exactly once."""
    found = [whole_box(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        wide = [at for at, size in enumerate(box.sizes) if size > 1]
        if wide:
            at = draw(st.sampled_from(wide))
            size = draw(st.integers(1, box.sizes[at] - 1))
            rest = box.sizes[at] - size
            first, second = list(box.sizes), list(box.sizes)
            first[at], second[at] = size, rest
            begin = list(box.begin)
            begin[at] += size
            found += [Box(box.begin, tuple(first)), Box(tuple(begin), tuple(second))]
        else:
            found.append(box)
    return found


@given(st.data())
@settings(database=None, deadline=None, max_examples=200)
def test_coverage_is_that_of_every_element(data: st.DataObject) -> None:
    """Any hole or overlap is seen, and nothing else: compared with counting every element (I06)."""
    shape = data.draw(SHAPES)
    boxes = data.draw(st.one_of(cuts_of(shape), st.lists(boxes_of(shape), max_size=4)))
    counted = [place for box in boxes for place in elements(box)]
    once = sorted(counted) == sorted(elements(whole_box(shape)))
    assert (why_not_covered(shape, boxes) == "") == once


@given(st.data())
@settings(database=None, deadline=None, max_examples=200)
def test_any_box_is_read_from_any_parts(data: st.DataObject) -> None:
    """Whatever the parts in the file and the box that is wanted, the bytes are those (I01, I10)."""
    shape = data.draw(SHAPES)
    dtype = data.draw(st.sampled_from([torch.float32, torch.int16, torch.bool, torch.complex64]))
    numbers = torch.arange(1, math.prod(shape) + 1) % 2 if dtype == torch.bool else None
    numbers = torch.arange(1, math.prod(shape) + 1) if numbers is None else numbers
    whole = numbers.to(dtype).reshape(shape)
    parts = data.draw(cuts_of(shape))
    chunk = data.draw(st.sampled_from([1, 8, 40, 1 << 20]))
    check_reading(whole, parts, chunk, data.draw(boxes_of(shape)), alone=data.draw(st.booleans()))


def check_reading(
    whole: torch.Tensor, parts: list[Box], chunk: int, wanted: Box, *, alone: bool
) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "CHUNK", chunk)
        data, refs = b"head", []
        for box in parts:
            part = whole[box.slices_in(whole_box(whole.shape))].contiguous()
            raw = part.reshape(-1).view(torch.uint8).numpy().tobytes()
            refs.append((box, TensorRef("file", len(data), len(raw), whole.dtype, box.sizes)))
            data += raw + b"between"
        path = Path(folder) / "file"
        path.write_bytes(data)
        source = ShardedRef("", 0, whole.nbytes, whole.dtype, tuple(whole.shape), tuple(refs))
        plan = ReadPlan()
        target = torch.zeros_like(whole)
        plan.add(source, target)
        transposed = torch.zeros(tuple(reversed(whole.shape)), dtype=whole.dtype).permute(
            tuple(reversed(range(whole.ndim)))
        )
        plan.add(source, transposed)
        local = torch.zeros(wanted.sizes, dtype=whole.dtype)
        plan._add_box(source, local, wanted)
        with open_regular(path) as file:
            fill(plan, {"file": (file, FileEntry(len(data), digest_bytes(data)))}, alone=alone)
    assert torch.equal(target, whole)
    assert torch.equal(transposed, whole)
    assert torch.equal(local, whole[wanted.slices_in(whole_box(whole.shape))])


def test_a_file_that_changed_after_its_verification_is_not_served(tmp_path: Path) -> None:
    """Whoever reads most of a file hashes it again."""
    (tmp_path / "file").write_bytes(b"\1" * 16)
    plan = ReadPlan()
    plan.add(TensorRef("file", 0, 16, torch.uint8, (16,)), torch.zeros(16, dtype=torch.uint8))
    entry = FileEntry(16, digest_bytes(b"\0" * 16))
    with open_regular(tmp_path / "file") as file, pytest.raises(CheckpointDamaged, match="changed"):
        fill(plan, {"file": (file, entry)}, alone=False)


# ---- who writes what ---------------------------------------------------------------------------


def test_every_box_is_written_once_and_work_is_shared() -> None:
    whole = {f"key{at}": Held("float32", (8,), whole_box((8,))) for at in range(9)}
    found = assign([whole, whole, whole])
    assert [len(keys) for keys in found.writes] == [3, 3, 3]
    assert sorted(key for keys in found.writes for key in keys) == sorted(whole)
    assert sorted(found.shared) == sorted(whole)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (Held("float32", (4,), Box((1,), (3,))), "its parts overlap"),
        (Held("float32", (4,), Box((3,), (1,))), "1 of 4 elements are in no part"),
        (Held("float32", (4,), Box((2,), (3,))), "lies outside"),
        (Held("float16", (4,), Box((2,), (2,))), "float16"),
        (Held("float32", (5,), Box((2,), (3,))), r"\(5,\)"),
    ],
)
def test_ranks_that_do_not_hold_the_whole_are_refused(second: Held, words: str) -> None:
    """A hole, an overlap, another shape or dtype: found at the save (I04, I06)."""
    with pytest.raises(SaveRefused, match=words):
        assign([{"key": Held("float32", (4,), Box((0,), (2,)))}, {"key": second}])


def test_empty_tensors_and_ranks_without_rows() -> None:
    """A rank may hold nothing of a tensor; a tensor without elements is written once (I02)."""
    nothing = Box((0,), (0,))
    held = [
        {
            "row": Held("float32", (1,), whole_box((1,))),
            "empty": Held("int8", (0, 3), Box((0, 0), (0, 0))),
        },
        {"row": Held("float32", (1,), nothing), "empty": Held("int8", (0, 3), Box((0, 0), (0, 0)))},
    ]
    assert sorted(key for keys in assign(held).writes for key in keys) == ["empty", "row"]


def test_files_are_divided_by_size() -> None:
    shares = divided({"a": 10, "b": 6, "c": 5, "d": 0}, 2)
    assert sorted(name for share in shares for name in share) == ["a", "b", "c", "d"]
    assert ["b", "c"] in [sorted(share) for share in shares]


def test_ties_of_ranks_are_joined() -> None:
    assert joined_ties([[], [["a", "b"]], [["b", "c"], ["x", "y"]]]) == [
        ["a", "b", "c"],
        ["x", "y"],
    ]


def test_outline_tells_values_and_types_apart() -> None:
    one: dict[str, Any] = {"lr": 1, "list": [1, 2], "empty": []}
    for other in ({**one, "lr": 1.0}, {**one, "list": [2, 1]}, {**one, "empty": {}}, {"lr": 1}):
        assert outline(one) != outline(other)
    assert outline(one) == outline(dict(reversed(one.items())))


# ---- errors and generators ---------------------------------------------------------------------


def test_the_joint_error_is_of_the_kind_that_all_failures_are() -> None:
    same = [Failure(0, "SaveRefused", "a"), Failure(2, "SaveRefused", "b")]
    assert isinstance(joint("save", same), SaveRefused)
    assert isinstance(joint("save", same), RankFailed)
    mixed = [*same, Failure(1, "OSError", "disk")]
    assert not isinstance(joint("save", mixed), SaveRefused)
    assert str(joint("save", mixed)).endswith("rank 1: OSError: disk")
    error = joint("save", same)
    travelled = pickle.loads(pickle.dumps(error))  # noqa: S301  our own
    assert type(travelled) is type(error)
    assert (str(travelled), travelled.failures) == (str(error), error.failures)


def test_fresh_generators_differ_by_rank_and_are_usable() -> None:
    """Every generator has a seed of its own, the same for the same save and rank (KX2)."""
    states = [fresh_rng_state(f"save/{rank}") for rank in range(3)]
    again = fresh_rng_state("save/1")
    for key, part in (("python", "words"), ("numpy", "words")):
        words = [state[key][part] for state in states]
        assert torch.equal(again[key][part], words[1])
        assert not torch.equal(words[0], words[1])
        assert not torch.equal(words[1], words[2])
    before = torch.random.get_rng_state()
    try:
        set_rng_state(states[1])
        assert torch.equal(torch.random.get_rng_state(), states[1]["torch_cpu"])
    finally:
        torch.random.set_rng_state(before)


# ---- the manifest of several ranks -------------------------------------------------------------


def manifest() -> Manifest:
    parts = (
        PartEntry("__0_0.distcp", 0, 8, (0, 0), (1, 2)),
        PartEntry("__1_0.distcp", 8, 16, (1, 0), (2, 2)),
    )
    return Manifest(
        "run",
        "save",
        "torch 2",
        "dcp",
        1,
        0,
        2,
        {},
        {"model": {}},
        {name: FileEntry(24, "0" * 64) for name in ("__0_0.distcp", "__1_0.distcp")},
        {},
        [],
        {"model.a": ShardedEntry("float32", (3, 2), parts)},
        {"model.a": "[0, 1] S(0)"},
    )


def test_manifest_of_ranks_round_trip() -> None:
    one = manifest()
    assert parse_manifest(one.to_bytes(), "meta.json") == one


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.update(begin=[0, 0]),
        lambda part: part.update(begin=[1]),
        lambda part: part.update(sizes=[2, 1]),
        lambda part: part.update(nbytes=8),
        lambda part: part.update(offset=12),
        lambda part: part.update(offset=-1),
        lambda part: part.update(file="../__1_0.distcp"),
        lambda part: part.update(more=1),
        lambda part: part.pop("file"),
        lambda part: part.clear(),
    ],
)
def test_hostile_parts_are_refused(change: Callable[[Any], object]) -> None:
    """A manifest whose digest is right, and whose parts are not (MX3)."""
    import json

    body = json.loads(manifest().to_bytes())
    del body["manifest_digest"]
    change(body["sharded"]["model.a"]["parts"][1])
    body["manifest_digest"] = digest_bytes(canonical(body))
    with pytest.raises(CheckpointDamaged):
        parse_manifest(canonical(body), "meta.json")
