"""Odd and evil files in the styles of real libraries, each against what the library does with it.

What loads is no damage, what does not load is not whole.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import zipfile
from argparse import Namespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed import checkpoint as dcp
from unsafe_corpus import Evil

from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, Report, State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step with a model."""
    folder = tmp_path / "step_1"
    folder.mkdir()
    torch.save({"w": torch.ones(3)}, folder / "model.pt")
    return folder


def only(path: Path) -> Report:
    (report,) = judge(path).reports
    return report


@pytest.mark.parametrize(
    "value",
    [
        range(3),
        ...,
        NotImplemented,
        torch.nn.parameter.UninitializedParameter(),
        torch.nn.parameter.UninitializedBuffer(),
    ],
    ids=repr,
)
def test_values_that_torch_saves_are_no_code(step: Path, value: object) -> None:
    torch.save({"w": torch.ones(3), "value": value}, step / "model.pt")
    torch.load(step / "model.pt", weights_only=False)
    assert only(step).state is State.WHOLE


def test_safetensors_ignores_other_fields(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "note": 1}
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with safe_open(path, "pt") as opened:
        assert list(opened.keys()) == ["a"]
    assert only(path).state is State.WHOLE


APPLE_DOUBLE = b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(90)


@pytest.mark.parametrize("name", ["._model.pt", "._config.json", "._model.safetensors"])
def test_what_macos_keeps_beside_a_file_is_passed_over(step: Path, name: str) -> None:
    (step / name).write_bytes(APPLE_DOUBLE)
    report = only(step)
    assert (report.state, report.passed_over) == (State.WHOLE, [name])
    loose = step.rename(step.with_name("loose"))
    assert {one.state for one in judge(loose).reports} == {State.WHOLE}


@pytest.mark.parametrize("name", ["._model.pt", "._config.json"])
def test_a_step_that_has_only_what_macos_keeps_is_incomplete(step: Path, name: str) -> None:
    empty = step.with_name("step_2")
    empty.mkdir()
    (empty / name).write_bytes(APPLE_DOUBLE)
    states = {one.path: one.state for one in judge(step.parent).reports}
    assert states == {step: State.WHOLE, empty: State.INCOMPLETE}


@pytest.mark.parametrize("name", ["._model.pt", "._x.dat", "._model.safetensors.index.json"])
def test_code_in_a_file_that_is_called_as_macos_calls_those_is_unsafe(
    step: Path, name: str
) -> None:
    torch.save(Evil(), step / name)
    assert only(step).state is State.UNSAFE
    loose = step.rename(step.with_name("loose"))
    assert judge(loose).state is State.UNSAFE
    assert judge_newest(loose).newest_whole is None


def test_json_in_lines_is_a_log(step: Path) -> None:
    (step / "log.json").write_text('{"loss": 1}\n{"loss": NaN}\n')
    assert only(step).state is State.WHOLE
    assert diff(step, step).differences == []
    (step / "log.json").write_text('{"loss": 1}\n{"loss"')
    assert only(step).state is State.DAMAGED


# -- Megatron-LM -----------------------------------------------------------------------------------

CONFIG = {"sharded_backend": "torch_dist", "common_backend": "torch"}


def megatron(root: Path) -> Path:
    """Write a step as Megatron-LM does: no role, no folder inside."""
    folder = root / "iter_0000010"
    dcp.save({"model.w": torch.ones(9)}, checkpoint_id=folder, no_dist=True)
    torch.save({"args": Namespace(lr=1), "iteration": 10}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_step_of_megatron_is_whole(tmp_path: Path) -> None:
    folder = megatron(tmp_path)
    report = only(tmp_path)
    assert (report.state, report.step) == (State.WHOLE, 10)
    (folder / "metadata.json").write_text(json.dumps(CONFIG | {"common_backend": "other"}))
    (folder / "common.pt").unlink()
    assert only(tmp_path).state is State.WHOLE


@pytest.mark.parametrize("name", ["common.pt", "metadata.json", ".metadata"])
def test_a_step_of_megatron_needs_each_of_its_files(tmp_path: Path, name: str) -> None:
    (megatron(tmp_path) / name).unlink()
    report = only(tmp_path)
    assert report.state is State.INCOMPLETE
    assert name in {one.file for one in report.findings if one.kind is Kind.MISSING}


def test_dcp_with_files_of_such_names_is_none_of_megatron(tmp_path: Path) -> None:
    folder = megatron(tmp_path).rename(tmp_path / "step_10")
    (folder / "metadata.json").write_text("{}")
    (folder / "common.pt").unlink()
    assert only(tmp_path).state is State.WHOLE


# -- arrays of others ------------------------------------------------------------------------------


def packed(value: object) -> bytes:
    """Write msgpack as flax does; what is needed of it."""
    if isinstance(value, dict):
        body = b"".join(packed(part) for pair in value.items() for part in pair)
        return bytes([0x80 | len(value)]) + body
    if isinstance(value, str):
        return bytes([0xA0 | len(value)]) + value.encode()
    if isinstance(value, int):
        return bytes([value])
    if isinstance(value, bytes):
        return b"\xc4" + bytes([len(value)]) + value
    shape, dtype, data = value  # type: ignore[misc]
    inner = bytes([0x90 | len(shape)]) + b"".join(map(packed, shape))
    body = b"\x93" + inner + packed(dtype) + packed(data)
    return b"\xc7" + bytes([len(body)]) + b"\x01" + body


@pytest.mark.parametrize(
    ("dtype", "length", "state"),
    [
        ("float32", 24, State.WHOLE),
        ("bfloat16", 12, State.WHOLE),
        ("int4", 6, State.WHOLE),
        ("float32", 20, State.DAMAGED),
        ("float32", 28, State.DAMAGED),
        ("floatXX", 24, State.UNKNOWN),
    ],
)
def test_bytes_of_flax_are_held_against_dtype_and_shape(
    tmp_path: Path, dtype: str, length: int, state: State
) -> None:
    path = tmp_path / "flax_model.msgpack"
    path.write_bytes(packed({"w": ((2, 3), dtype, bytes(length))}))
    assert only(path).state is state


def keras(weights: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("metadata.json", '{"keras_version": "3.15.1"}')
        archive.writestr("config.json", '{"class_name": "Sequential", "module": "keras"}')
        archive.writestr("model.weights.h5", weights)
    return stream.getvalue()


def test_weights_of_keras_that_are_cut_short_are_damage(repository: Path, tmp_path: Path) -> None:
    weights = (repository / "tests" / "golden" / "fsck" / "foreign" / "model.h5").read_bytes()
    path = tmp_path / "model.keras"
    path.write_bytes(keras(weights))
    assert only(path).state is State.WHOLE
    path.write_bytes(keras(weights[: len(weights) // 2]))
    report = only(path)
    assert report.state is State.DAMAGED
    assert "cut short" in report.findings[0].what


OBJECTS: dict[str, Callable[[], object]] = {
    "sparse": lambda: torch.eye(5).to_sparse(),
    "csr": lambda: torch.eye(5).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(5), 0.1, 0, torch.qint8),
    "meta": lambda: torch.zeros(3, 4, device="meta"),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "conj": lambda: torch.view_as_complex(torch.rand(3, 2)).conj(),
    "storage": lambda: torch.UntypedStorage(5),
    "bits": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
    "numpy": lambda: {"a": np.arange(3), "b": np.random.default_rng(1).bit_generator.state},
}


@pytest.mark.filterwarnings("ignore")  # of torch: prototypes
@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS.keys())
def test_unusual_tensors_are_whole(step: Path, make: Callable[[], object]) -> None:
    torch.save({"w": make()}, step / "model.pt")
    assert only(step).state is State.WHOLE


@pytest.mark.parametrize(
    "name",
    [
        ".optimizer.pt.AbC123",
        "optimizer.pt.6eF7A1b2",
        "optimizer.pt.1a2b3c4d.partial",
        "optimizer.pt.filepart",
        "optimizer.pt.tmp",
        "tmp_optimizer.pt.part",
    ],
)
def test_a_temporary_file_without_its_file_is_of_a_copy_that_did_not_end(
    name: str, tmp_path: Path
) -> None:
    step = tmp_path / "step_1"
    step.mkdir()
    torch.save({"w": torch.ones(2)}, step / "model.pt")
    torch.save({"state": {}, "param_groups": []}, step / "optimizer.pt")
    shutil.copy(step / "optimizer.pt", step / name)
    judged = judge(tmp_path)
    assert judged.state is State.WHOLE
    assert [one.rpartition("/")[2] for one in judged.leftovers] == [name]
    (step / "optimizer.pt").unlink()
    (report,) = judge(tmp_path).reports
    assert [(one.kind, one.file) for one in report.findings] == [(Kind.MISSING, "optimizer.pt")]


@pytest.mark.parametrize(
    "name",
    ["\ud800.safetensors", "a\0b.safetensors", "x" * 5000],
    ids=["half of a pair", "zero", "long"],
)
def test_an_index_that_names_what_no_file_can_be_called(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "step_5"
    folder.mkdir()
    index = {"metadata": {}, "weight_map": {"w": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (report,) = judge(tmp_path).reports
    assert report.state in (State.INCOMPLETE, State.DAMAGED)
