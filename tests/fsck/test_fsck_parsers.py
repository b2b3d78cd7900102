"""The readers of fsck on bytes that nobody vouches for: one exception, bounded memory and time."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fsck_readers import read_safetensors, read_torch, torch_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as to_safetensors
from torch.distributed import checkpoint as dcp_library
from unsafe_corpus import Evil

from ckpt_conformance.fault_injectors import crafted
from ckpt_conformance.fsck.formats import dcp, manifest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.pickled import pickles
from ckpt_conformance.fsck.source.findings import Kind, Malformed, State

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
    st.integers(0, 5),
)
def test_plain_values_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    again, names = pickles.load(data)
    if not names.names:  # protocol 2 writes bytes as a call of _codecs.encode
        assert repr(again) == repr(value)  # not ==: NaN differs from itself


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
from ckpt_conformance.fsck.judge.judge import judge
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
    assert judged.state is State.UNSAFE
    (finding,) = judged.reports[0].findings
    assert finding.file == ".metadata"
    assert "os.open" in finding.what
    assert not marker.exists()


class Foreign:
    """A class of somebody's project."""


def test_names_in_a_torch_file_are_judged() -> None:
    harmful = read_torch(torch_bytes({"w": torch.ones(2), "x": Evil()}))
    assert [(one.kind, one.name) for one in harmful.problems] == [
        (Kind.UNSAFE, f"{os.system.__module__}.system")
    ]
    foreign = read_torch(torch_bytes({"w": torch.ones(2), "x": Foreign()}))
    assert [kind for kind, *_ in foreign.problems] == [Kind.UNSAFE]
    assert [one.name for one in foreign.tensors] == ["w"]


@pytest.mark.parametrize("reference", [b"Pstorage\n", b"X\x01\0\0\0aQ", b"(tQ", b"NQ"])
def test_a_storage_that_no_tensor_shows_is_judged(reference: bytes, tmp_path: Path) -> None:
    """Torch loads each one that is named: it raises AssertionError, IndexError or TypeError."""
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02" + reference + b"0}.")
        archive.writestr("model/version", b"3\n")
    with pytest.raises((AssertionError, IndexError, TypeError, RuntimeError)):
        torch.load(path, weights_only=False)
    (report,) = judge(path).reports
    assert report.state is State.DAMAGED


def test_a_storage_alone_is_whole(tmp_path: Path) -> None:
    torch.save({"raw": torch.UntypedStorage(8)}, tmp_path / "model.pt")
    (report,) = judge(tmp_path).reports
    assert report.state is State.WHOLE
