"""Pickles whose names are all data, and which reach memory that is not theirs: never whole.

NumPy believes what a pickle says of an array's type and of its memory. By that an outsider has made
code run, with names alone that pass in silence.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import pickle
import re
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import unsafe_corpus as evil

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path

Call = tuple[Any, ...]
BYTES = b"A" * 8


class Made:
    """Pickled as a call, and a state."""

    def __init__(self, *call: object) -> None:
        """Take a function, its arguments, and what BUILD sets."""
        self.call = call

    def __reduce__(self) -> Call:
        """Be that call."""
        return self.call


def rebuilt(kind: object, data: object) -> Made:
    """An array of one element as NumPy pickles it: version, shape, type, order, bytes."""
    state = (1, (1,), kind, 0, data)
    return Made(reconstruct, (np.ndarray, (0,), b"b"), state)


def dtype(name: str, *state: object) -> Made:
    """A type as NumPy pickles it: order, subtype, names, fields, size, alignment, flags."""
    return Made(np.dtype, np.dtype(name).__reduce__()[1], (3, *state))


OBJECTS = dtype("O8", "|", None, None, None, -1, -1, 63)
HIDDEN = dtype("O8", "|", None, None, None, -1, -1, 0)
WHOLE = dtype("u8", "<", None, None, None, -1, -1, 0)


HIDES = (3, "|", None, ("a",), {"a": (OBJECTS, 0)}, 8, 1, 0)
reconstruct: Any = np.zeros(1).__reduce__()[0]
FREED = Made(reconstruct, (np.ndarray, (1000,), b"d"), (1, (1,), WHOLE, 0, BYTES))


def record(field: object, at: int, size: int = 8, flags: int = 0) -> Made:
    """A type of one field."""
    return dtype(f"V{size}", "|", None, ("a",), {"a": (field, at)}, size, 1, flags)


from_buffer: Any = functools.partial(Made, np.zeros(2).__reduce_ex__(5)[0])
CASES = {
    "an array made over another one's pointers": Made(
        np.ndarray, ((), WHOLE, rebuilt(OBJECTS, [1.0]))
    ),
    "an array of a buffer that is an array": from_buffer(
        (rebuilt(OBJECTS, [1.0]), WHOLE, (1,), "C")
    ),
    "an array made by what rebuilds tensors": Made(
        torch._tensor._rebuild_from_type_v2, (np.ndarray, torch.Tensor, ((1,), WHOLE, BYTES), {})
    ),
    "objects whose flags are hidden": rebuilt(HIDDEN, BYTES),
    "a field of objects in a type without": rebuilt(record(OBJECTS, 0), BYTES),
    "a field far behind its type": rebuilt(record(WHOLE, 1 << 30), BYTES),
    "a field before its type": rebuilt(record(WHOLE, -8), BYTES),
    "a subtype of more elements": rebuilt(
        dtype("V8", "|", (WHOLE, (1000,)), None, None, 8, 1, 0), BYTES
    ),
    "a size that is not the name's": rebuilt(
        dtype("V8", "|", None, None, None, 1 << 20, 1, 0), BYTES
    ),
    "a field of a field": rebuilt(record(record(WHOLE, 4), 0), BYTES),
    "a type made by what makes objects": rebuilt(
        Made(copyreg._reconstructor, (np.dtype, np.dtype, "V8"), HIDES), BYTES
    ),
    "a type whose names are lists": rebuilt(
        dtype("V8", "|", None, (["a"],), {"a": (WHOLE, 0)}, 8, 1, 0), BYTES
    ),
    "a type whose name has no end": rebuilt(
        Made(np.dtype, ("V" + "9" * 5000, 0, 1), WHOLE.call[2]), BYTES
    ),
    "an array that has memory before it gets its own": FREED,
    "a scalar of hidden objects": Made(np.float32(1).__reduce__()[0], (record(OBJECTS, 0), BYTES)),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("what", CASES)
def test_memory_of_others_is_unsafe(what: str, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "model_step_1.pt"
    evil.FILES["zip"](path, pickle.dumps({"model": CASES[what]}, protocol))
    (report,) = judge(path).reports
    assert report.state is State.UNSAFE, report.findings


def test_a_type_made_with_keywords_is_looked_at(tmp_path: Path) -> None:
    """Instruction NEWOBJ_EX makes the same type as a call does."""
    path = tmp_path / "model_step_1.pt"
    case = rebuilt(record(OBJECTS, 0), BYTES)
    called = pickle.dumps({"model": case}, 2)
    made, times = re.subn(rb"(V8(?:q.)?\x89\x88\x87(?:q.)?)R", b"\\1}\x92", called, flags=re.DOTALL)
    assert times == 1
    evil.FILES["zip"](path, made)
    (report,) = judge(path).reports
    assert report.state is State.UNSAFE, report.findings


def test_an_array_that_gets_its_memory_twice_is_unsafe(tmp_path: Path) -> None:
    """The first memory is freed, and a tensor may lie in it."""
    path = tmp_path / "model_step_1.pt"
    once = pickle.dumps(rebuilt(WHOLE, BYTES), 2).removesuffix(b".")
    state = once[once.index(b"(K\x01") :]
    evil.FILES["zip"](path, once + state + b".")
    (report,) = judge(path).reports
    assert report.state is State.UNSAFE, report.findings


def test_numpy_believes_it(tmp_path: Path) -> None:
    """A file of these ends the process that loads it: it is no theory."""
    path = tmp_path / "model_step_1.pt"
    case = rebuilt(record(OBJECTS, 0), BYTES)
    evil.FILES["zip"](path, pickle.dumps({"model": Made(str, (case,))}, 2))
    load = f"import torch; torch.load({str(path)!r}, weights_only=False)"
    assert subprocess.run([sys.executable, "-c", load], check=False).returncode < 0


def arrays() -> dict[str, Any]:
    """What NumPy itself writes."""
    fields = np.dtype([("a", "u1"), ("b", "f8", (2, 3)), ("c", "O")], align=True)
    nested = np.dtype([("x", [("y", "<i4"), ("z", "U5")]), ("t", "S3")])
    return {
        "plain": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "fields": np.zeros(3, fields),
        "nested": np.zeros(3, nested),
        "titles": np.zeros(1, np.dtype({"a": ("f8", 0, "title"), "b": ("i4", 8)})),
        "overlapping": np.zeros(
            1, np.dtype({"names": ["a", "b"], "formats": ["u4", "u2"], "offsets": [0, 2]})
        ),
        "objects": np.array([{"a": 1}, None], object),
        "texts": np.array(["a", "bcd"]),
        "times": np.array(["2026-01-01"], "M8[ns]"),
        "swapped": np.arange(3, dtype=">i4"),
        "scalar": np.float32(1.5),
        "record": np.zeros(1, nested)[0],
        "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
        "matrix": np.asarray([[1.0]]).view(np.matrix),
        "empty": np.zeros((0, 4), np.float16),
        "records": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "namespace": types.SimpleNamespace(a=1),
        "counts": collections.defaultdict(int, a=1),
        "texts of keys": collections.defaultdict(str, a="b"),
        "void": np.zeros(2, "V7"),
        "types": [np.dtype("f4"), fields, np.dtype((np.int32, (2, 2)))],
    }


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("what", arrays())
def test_what_numpy_writes_is_not_unsafe(what: str, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "model_step_1.pt"
    evil.FILES["zip"](path, pickle.dumps({"model": arrays()[what]}, protocol))
    (report,) = judge(path).reports
    assert report.state is State.WHOLE, report.findings


@pytest.mark.parametrize("value", [np.zeros(3), torch.zeros(3)], ids=["array", "tensor"])
def test_items_of_an_array_are_set_by_no_library(value: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """What a pickle sets after the bytes were read is in no comparison of bytes."""
    path = tmp_path / "model_step_1.pt"
    torch.save({"model": SetsItems(value.__reduce_ex__(2))}, path)
    (report,) = judge(path).reports
    assert report.state is State.UNSAFE, report.findings


class SetsItems:
    """An array whose first item is set once it was made."""

    def __init__(self, call: Call) -> None:
        """Take how it is pickled."""
        self.call = call

    def __reduce__(self) -> Call:
        """Set an item behind it."""
        of, args, state = (*self.call, None)[:3]
        return (of, args, state, None, iter([(0, 1.0)]))
