"""The readers of fsck on bytes that nobody vouches for: one exception, bounded memory and time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as to_safetensors
from torch.distributed import checkpoint as dcp_library

from ckpt_conformance.fault_injectors import crafted
from ckpt_conformance.fsck import cover, dcp, manifest, pickles, safetensors_file, torch_file
from ckpt_conformance.fsck.findings import Kind, Malformed, State
from ckpt_conformance.fsck.judge import judge
from ckpt_conformance.fsck.layouts import is_leftover, step_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FUZZ = settings(
    max_examples=300,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
CLAIM = 10**15


class File(io.BytesIO):
    """Bytes that answer to `fstat`, as a file does."""

    def __init__(self, data: bytes) -> None:
        """Take the bytes, and a descriptor of as many."""
        super().__init__(data)
        self._memory = os.memfd_create("fsck")
        os.ftruncate(self._memory, len(data))

    def fileno(self) -> int:
        return self._memory

    def __del__(self) -> None:
        """Close the descriptor."""
        os.close(self._memory)


def read_torch(data: bytes) -> torch_file.Archive:
    return torch_file.read(File(data), 0, len(data))


def read_safetensors(data: bytes) -> list[safetensors_file.Stored]:
    return safetensors_file.read(File(data))


def torch_bytes(value: Any) -> bytes:  # noqa: ANN401  whatever torch saves
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, bytes]:
    """One valid input for each reader."""
    folder = tmp_path_factory.mktemp("originals")
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": {"c": torch.ones(2).half(), "n": 3}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_library.save(state, checkpoint_id=folder)
    golden = repository / "tests" / "golden" / "schema-1" / "model" / "meta_000003.json"
    return {
        "torch": torch_bytes(state),
        "metadata": (folder / ".metadata").read_bytes(),
        "safetensors": to_safetensors({"a": torch.ones(3), "b": torch.ones(2, 2).half()}),
        "manifest": golden.read_bytes(),
        "pickle": pickle.dumps({"a": [1, (2, "x")], 3: {4.5, None}}, protocol=4),
    }


READERS: dict[str, Callable[[bytes], object]] = {
    "torch": read_torch,
    "metadata": dcp.read_metadata,
    "safetensors": read_safetensors,
    "manifest": manifest.read,
    "pickle": pickles.load,
}

edits = st.lists(
    st.tuples(
        st.integers(0, 1 << 30),
        st.sampled_from(["flip", "set", "cut", "insert", "copy"]),
        st.binary(max_size=12),
    ),
    min_size=1,
    max_size=6,
)


def edited(data: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    """Change bytes as a fuzzer does: here and there, a little."""
    for number, how, new in changes:
        at = number % (len(data) + 1)
        if how == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << number % 8]) + data[at + 1 :]
        elif how == "set":
            data = data[:at] + new + data[at + len(new) :]
        elif how == "cut":
            data = data[:at]
        elif how == "insert":
            data = data[:at] + new + data[at:]
        elif how == "copy":
            data = data[:at] + data[at // 2 : at // 2 + 40] + data[at:]
    return data


@pytest.mark.parametrize("reader", READERS)
def test_the_original_is_read(reader: str, originals: dict[str, bytes]) -> None:
    found = READERS[reader](originals[reader])
    assert found
    assert not getattr(found, "problems", [])


@pytest.mark.parametrize("reader", READERS)
@FUZZ
@given(changes=edits)
def test_mutated_bytes_raise_one_exception(
    reader: str, originals: dict[str, bytes], changes: list[tuple[int, str, bytes]]
) -> None:
    try:
        READERS[reader](edited(originals[reader], changes))
    except Malformed as error:
        assert len(str(error)) < 1000  # noqa: PT017  the length of the message, on every example


@pytest.mark.parametrize("reader", READERS)
@FUZZ
@given(data=st.binary(max_size=300))
def test_any_bytes_raise_one_exception(reader: str, data: bytes) -> None:
    with contextlib.suppress(Malformed):
        READERS[reader](data)


@FUZZ
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=30,
    ),
    st.integers(2, 5),
)
def test_plain_values_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    again, names = pickles.load(data)
    if not names:  # protocol 2 writes bytes as a call of _codecs.encode
        assert pickle.dumps(again, 5) == pickle.dumps(pickle.loads(data), 5)  # noqa: S301  our own


# -- what somebody who wants to do harm could leave ------------------------------------------------

HOSTILE: dict[str, bytes] = {
    "memo index": b"\x80\x02N" + b"r" + struct.pack("<I", 0xFFFFFFFF) + b".",
    "bytearray of 10^15": b"\x80\x05\x96" + struct.pack("<Q", CLAIM) + b".",
    "text of 10^15": b"\x80\x04\x8d" + struct.pack("<Q", CLAIM) + b".",
    "negative length": b"\x80\x02T" + struct.pack("<i", -5) + b".",
    "no end": b"\x80\x02N",
    "empty": b"",
    "pop of nothing": b"\x80\x020.",
    "persistent of nothing": b"\x80\x02Q.",
    "a list as a key": b"\x80\x02}]Ns.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_or_harmless(name: str) -> None:
    data = HOSTILE[name]
    try:
        pickles.load(data)
    except Malformed:
        return
    assert name == "memo index"  # one entry of a dict here: harmless


def test_nested_tuples_are_no_key() -> None:
    """Hashing 60 levels of (x, x) would take 2**60 steps."""
    tuples = b"\x80\x04)\x94" + b"".join(b"h%ch%c\x86\x94" % (at, at) for at in range(60))
    with pytest.raises(Malformed, match="more parts"):
        pickles.load(tuples + b"}h" + bytes([60]) + b"Ns.")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
from pathlib import Path
from ckpt_conformance.fsck.judge import judge
for name in sys.argv[1:]:
    print(judge(Path(name)).state)
"""


def test_claims_cost_neither_memory_nor_time(tmp_path: Path, repository: Path) -> None:
    """With 512 MiB of memory, files that claim 10^15 bytes and unfold without end are judged."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [CLAIM], "data_offsets": [0, CLAIM]}})
    torch_file_bytes = torch_bytes({"w": torch.ones(4)})
    files = {
        "header.safetensors": struct.pack("<Q", CLAIM) + b"{}",
        "claim.safetensors": struct.pack("<Q", len(header)) + header.encode(),
        "stride.pt": torch_file_bytes.replace(b"K\x04\x85", b"M\xff\xff\x85", 1),
        "lists.pt": torch_bytes(unfolding()),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", LIMITED, *(str(tmp_path / name) for name in files)]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == ["damaged", "damaged", "damaged", "whole"], done.stderr


def unfolding() -> list[Any]:
    """Nest a list of two equal lists 60 times: 2**60 parts in 200 instructions."""
    inner: list[Any] = [1]
    for _ in range(60):
        inner = [inner, inner]
    return inner


def test_a_canary_in_dcp_metadata_is_named_and_does_not_run(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_library.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "step_1")
    marker = tmp_path / "ran"
    path = tmp_path / "step_1" / ".metadata"
    data = path.read_bytes()
    path.write_bytes(data[:2] + crafted.canary(marker) + data[11:])  # the frame's length goes
    judged = judge(tmp_path)
    assert judged.state is State.DAMAGED
    (finding,) = judged.reports[0].findings
    assert finding.file == ".metadata"
    assert "os.open" in finding.what
    assert not marker.exists()


class Runs:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Ask for a call."""
        return os.system, ("false",)


class Foreign:
    """A class of somebody's project."""


def test_names_in_a_torch_file_are_judged() -> None:
    harmful = read_torch(torch_bytes({"w": torch.ones(2), "x": Runs()}))
    assert [(kind, "runs code" in str(why)) for kind, why, _ in harmful.problems] == [
        (Kind.DAMAGED, True)
    ]
    foreign = read_torch(torch_bytes({"w": torch.ones(2), "x": Foreign()}))
    assert [kind for kind, _, _ in foreign.problems] == [Kind.NOTE]
    assert [one.name for one in foreign.tensors] == ["w"]


# -- what each reader understands ------------------------------------------------------------------


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


@FUZZ
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
        ("model.safetensors", None),
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
    assert is_leftover(name) is left
