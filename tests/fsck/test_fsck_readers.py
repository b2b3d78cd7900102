"""What the readers of fsck understand: tensors, headers, coverage, names."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch
from fsck_readers import read_safetensors, read_torch, torch_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_conformance.fsck.formats import cover
from ckpt_conformance.fsck.layouts import leftovers
from ckpt_conformance.fsck.layouts.step_names import step_of
from ckpt_conformance.fsck.source.findings import Malformed

CLAIM = 10**15


def test_tensors_of_a_torch_file_are_named_and_placed() -> None:
    base = torch.arange(12.0)
    value = {
        "m": {"w": base.view(3, 4), "t": base.view(3, 4).t(), "p": torch.nn.Parameter(base[4:6])},
        "l": [torch.tensor(1), torch.empty(0, 3)],
        "u": torch.ones(3, dtype=torch.uint16),
        "f8": torch.ones(2).to(torch.float8_e4m3fn),
    }
    archive = read_torch(torch_bytes(value))
    assert not archive.problems
    found = {one.name: (one.dtype, one.shape, one.last - one.first) for one in archive.tensors}
    assert found == {
        "m.w": ("float32", (3, 4), 48),
        "m.t": ("float32", (4, 3), 48),
        "m.p": ("float32", (2,), 8),
        "l.0": ("int64", (), 8),
        "l.1": ("float32", (0, 3), 0),
        "u": ("uint16", (3,), 6),
        "f8": ("float8_e4m3fn", (2,), 2),
    }
    assert {one.tensors for one in archive.spans if "m.w" in one.tensors} == {("m.w", "m.t", "m.p")}


def header(**tensors: Any) -> bytes:  # noqa: ANN401  JSON
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def entry(start: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(a=entry(0, 4, [4]), b=entry(5, 6, [1])) + bytes(6), "leave a hole before 'b'"),
        (header(a=entry(0, 4, [4]), b=entry(3, 6, [3])) + bytes(6), "overlap before 'b'"),
        (header(a=entry(0, 4, [5])) + bytes(4), "does not fit"),
        (header(a=entry(0, 4, [4])) + bytes(5), "the file has"),
        (header(a=entry(0, 4, [4])) + bytes(3), "cut short"),
        (header(a=entry(0, 4, [-4])) + bytes(4), "-4"),
        (header(a=entry(0, 4, [4], "X9")) + bytes(4), "'X9', which does not exist"),
        (struct.pack("<Q", CLAIM) + b"{}", f"claims {CLAIM} bytes"),
        (struct.pack("<Q", 5) + b'{"a":', "no JSON"),
        (struct.pack("<Q", 15) + b'{"a":1,"a":2}  ', "occurs twice"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "nested deeper"),
        (b"\x01", "too few"),
    ],
)
def test_a_safetensors_header_that_lies_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        read_safetensors(data)


Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.mark.parametrize(
    ("shape", "boxes", "reason"),
    [
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))], ""),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4))], ""),
        ((), [((), ())], ""),
        ((0, 3), [((0, 0), (0, 3))], ""),
        ((5,), [((0,), (2,)), ((2,), (0,)), ((2,), (3,))], ""),
        ((4, 4), [((0, 0), (2, 4))], "8 of 16 elements are in no chunk: a hole"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "overlap"),
        ((4,), [((0,), (2,)), ((0,), (2,))], "overlap"),
        ((4, 4), [((0, 0), (3, 4)), ((2, 0), (2, 2)), ((3, 2), (1, 2))], "overlap"),
        ((4,), [((2,), (3,))], "outside"),
        ((4,), [((0, 0), (4, 1))], "2 dimensions"),
        ((4,), [], "no chunk"),
        ((), [((), ()), ((), ())], "overlap"),
    ],
)
def test_coverage_finds_holes_and_overlaps(
    shape: tuple[int, ...], boxes: Boxes, reason: str
) -> None:
    found = cover.why_not(shape, boxes)
    assert reason in found
    assert bool(found) == bool(reason)


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.lists(
        st.tuples(
            st.tuples(st.integers(0, 4), st.integers(0, 4)),
            st.tuples(st.integers(0, 5), st.integers(0, 5)),
        ),
        max_size=5,
    ),
)
def test_coverage_agrees_with_counting(shape: tuple[int, int], boxes: Boxes) -> None:
    """The sum of random weights says what counting every element says."""
    counted = torch.zeros(shape, dtype=torch.int64)
    inside = True
    for (row, column), (rows, columns) in boxes:
        inside &= row + rows <= shape[0] and column + columns <= shape[1]
        counted[row : row + rows, column : column + columns] += 1
    whole = inside and bool((counted == 1).all())
    assert (cover.why_not(shape, boxes) == "") is whole


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("global_step_12", 12),
        ("epoch=3-step=500.ckpt", 500),
        ("epoch=3.ckpt", 3),
        ("model_000200.pt", 200),
        ("optim_000200_rank3.pt", 200),
        ("iter_0000100", 100),
        ("step_5", 5),
        ("model-00001-of-00002.safetensors", None),
        ("mp_rank_00_model_states.pt", None),
        ("model_world_size_2_rank_1.pt", None),
        ("last.ckpt", None),
        ("best-val_loss=1.234.ckpt", None),
        ("checkpoint-best-0.930", None),
        ("epoch=02-val_loss=0.32.ckpt", 2),
        ("2026-11-30", None),
        ("run_2026-11-01T10_00.pt", None),
        ("2026-11-30_step_5", 5),
        ("model.100", 100),
        ("model.safetensors", None),
        ("step_900k.pt", 900_000),
        ("step1.5M.ckpt", 1_500_000),
        ("ckpt-2K", 2_000),
        ("llama-7b-step_20.pt", 20),
        ("epoch=3-step=500-v2.ckpt", 500),
    ],
)
def test_the_step_of_a_name(name: str, step: int | None) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize(
    ("name", "left"),
    [
        (".metadata.tmp", True),
        ("model.pt.1a2b.0123456789ab.tmp", True),
        ("tmp_checkpoint-5", True),
        ("step_5.partial", True),
        ("dcp_000003.run.0123456789ab.old", True),
        ("checkpoint-5.pt", False),
        ("template.pt", False),
        ("tmpl.pt", False),
    ],
)
def test_names_of_work_in_progress(name: str, left: bool) -> None:  # noqa: FBT001  the expected value
    assert leftovers.is_one(name) is left
