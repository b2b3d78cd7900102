"""Tensors of formats that others than torch write, compared by name and bit for bit.

The golden files were written by the libraries that `golden/fsck/foreign.json` names.
"""

from __future__ import annotations

import shutil
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckpt_conformance.fsck.diff.diff import Compared, diff
from ckpt_conformance.fsck.formats import flax, gguf
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.places import folder_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUMBERS = torch.arange(256, dtype=torch.float32).reshape(4, 64)
READ = {
    "model.gguf": {"w": NUMBERS},
    "state.npz": {"a": NUMBERS, "b": torch.tensor(3)},
    "packed.npz": {"a": NUMBERS, "z": torch.zeros(0, dtype=torch.float64)},
    "flax_model.msgpack": {
        "p": {"w": NUMBERS, "b": torch.ones(3, dtype=torch.float16)},
        "step": 5,
        "rate": 1.5,
        "n": None,
    },
    "model.onnx": {"w": NUMBERS},
    "apart.onnx": {"w": NUMBERS},
}
MORE = {
    "model.gguf": {"q", "tokens", "general.architecture"},
    "state.npz": {"c"},
    "model.onnx": {"(graph)"},
    "apart.onnx": {"(graph)"},
}


@pytest.fixture
def golden(repository: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "golden"
    shutil.copytree(repository / "tests" / "golden" / "fsck" / "foreign", copy)
    return copy


def told(compared: Compared) -> dict[str, str]:
    assert compared.is_judged, (compared.a.problems, compared.b.problems)
    return {one.name: str(one.status) for one in compared.differences}


@pytest.mark.parametrize("name", READ)
def test_a_file_holds_what_torch_holds(name: str, golden: Path, tmp_path: Path) -> None:
    torch.save(READ[name], tmp_path / "truth.pt")
    compared = diff(golden / name, tmp_path / "truth.pt")
    assert set(told(compared)) == MORE.get(name, set())
    assert compared.same
    assert compared.a.by_bytes == 0


def test_what_is_quantized_is_compared_by_the_bytes_of_its_rows(golden: Path) -> None:
    other = golden / "other.gguf"
    with (golden / "model.gguf").open("rb") as file:
        header = gguf.read(file, (golden / "model.gguf").stat().st_size)
    (packed,) = [one for one in header.tensors if one.name == "q"]
    assert (packed.dtype, packed.shape) == ("Q8_0", (4, 68))
    data = bytearray((golden / "model.gguf").read_bytes())
    data[packed.start + 68 + 7] ^= 1
    other.write_bytes(data)
    (found,) = diff(golden / "model.gguf", other).differences
    assert (found.name, found.a, found.count, found.first) == ("q", "Q8_0 [4, 68]", 1, (1, 7))


def test_values_of_the_header_are_compared(golden: Path) -> None:
    data = (golden / "model.gguf").read_bytes()
    (golden / "other.gguf").write_bytes(data.replace(b"llama", b"lamas"))
    (found,) = diff(golden / "model.gguf", golden / "other.gguf").differences
    assert (found.name, found.a, found.b) == ("general.architecture", "'llama'", "'lamas'")


def test_an_unknown_type_of_gguf_is_compared_by_the_bytes_of_the_file(golden: Path) -> None:
    data = bytearray((golden / "model.gguf").read_bytes())
    at = data.index(b"\1\0\0\0\0\0\0\0q") + 9  # the name, then dimensions, two sizes, the type
    data[at + 4 + 16] = 99
    (golden / "model.gguf").write_bytes(data)
    compared = diff(golden / "model.gguf", golden / "model.gguf")
    assert (compared.same, compared.a.by_bytes) == (["model.gguf"], 1)


def rewrite(path: Path, change: Callable[[np.ndarray[Any, Any]], None], how: int) -> None:
    """Write an npz anew, at another time."""
    with np.load(path) as found:
        arrays = {name: found[name].copy() for name in found.files}
    change(arrays["a"])
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", (2001, 2, 3, 4, 5, 6))
            member.compress_type = archive.compression
            with archive.open(member, "w") as file:
                np.lib.format.write_array(file, array)


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", ["state.npz", "packed.npz"])
def test_npz_is_the_same_whenever_and_however_it_was_packed(
    name: str, how: int, golden: Path, tmp_path: Path
) -> None:
    other = tmp_path / name
    shutil.copy(golden / name, other)
    rewrite(other, lambda _: None, how=how)
    assert other.read_bytes() != (golden / name).read_bytes()
    assert told(diff(golden / name, other)) == {}

    def change(array: np.ndarray[Any, Any]) -> None:
        array.view(np.uint32)[3, 5] ^= 1

    rewrite(other, change, how=how)
    (found,) = diff(golden / name, other).differences
    assert (found.name, found.count, found.first, found.distance.max_ulps) == ("a", 1, (3, 5), 1)


def test_columns_dtypes_and_objects_of_numpy(tmp_path: Path) -> None:
    straight = np.arange(12, dtype=np.int32).reshape(3, 4)
    arrays: dict[str, Any] = {"w": straight, "c": np.ones(2, np.complex64), "t": np.ones((), bool)}
    np.savez(tmp_path / "model.npz", **{**arrays, "w": np.asfortranarray(straight)})
    save_file(
        {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()},
        tmp_path / "model.safetensors",
    )
    compared = diff(tmp_path / "model.npz", tmp_path / "model.safetensors")
    assert (told(compared), len(compared.same)) == ({}, 3)
    fields = np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")])
    for name, value in (("one", 2.0), ("two", 3.0)):
        fields["b"] = value
        np.savez(tmp_path / f"model_{name}.npz", f=fields, s=np.array(["x", "yy"]), g=np.float32(1))
    compared = diff(tmp_path / "model_one.npz", tmp_path / "model_two.npz")
    assert (told(compared), sorted(compared.same)) == ({"f": "differs"}, ["g", "s"])
    swapped = np.arange(3, dtype=">f4")
    np.savez(tmp_path / "model.npz", w=swapped)
    np.savez(tmp_path / "model_one.npz", w=swapped.astype("<f4"))
    compared = diff(tmp_path / "model.npz", tmp_path / "model_one.npz")
    assert told(compared) == {"w": "dtype-differs"}


@pytest.mark.parametrize(("name", "says"), [("state.npz", "CRC-32"), ("packed.npz", "")])
def test_a_flip_in_an_npz_is_damage_and_no_difference(
    name: str, says: str, golden: Path, tmp_path: Path
) -> None:
    other = tmp_path / name
    data = bytearray((golden / name).read_bytes())
    data[len(data) // 3] ^= 0x10
    other.write_bytes(data)
    compared = diff(golden / name, other)
    assert not compared.is_judged
    assert says in compared.b.problems[0]
    assert compared.a.problems == []


def exported(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Save a program of torch.export; give its state."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.norm = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)
            self.other = torch.nn.Parameter(torch.ones(4, 2).bfloat16().t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.one(x)) * self.other.float().sum()

    model = Model().eval()
    model.load_state_dict(state or model.state_dict())
    program = torch.export.export(model, (torch.ones(1, 3),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch itself warns of the one that is transposed
        torch.export.save(program, path)
    return model.state_dict()


def test_a_program_of_torch_export_has_the_names_of_the_model(tmp_path: Path) -> None:
    state = exported(tmp_path / "model.pt2", {})
    torch.save(state, tmp_path / "truth.pt")
    compared = diff(tmp_path / "model.pt2", tmp_path / "truth.pt")
    assert sorted(compared.same) == sorted(state)
    assert {one.name for one in compared.differences} <= {
        *("byteorder", "models/model.json", "data/sample_inputs/model.pt")
    } | {one.name for one in compared.differences if one.name.startswith("data/")}
    state["one.weight"].view(torch.int32)[1, 2] ^= 1
    exported(tmp_path / "other.pt2", state)
    compared = diff(tmp_path / "model.pt2", tmp_path / "other.pt2")
    (found,) = [one for one in compared.differences if not one.name.startswith("models/")]
    assert (found.name, found.count, found.first) == ("one.weight", 1, (1, 2))


def test_the_rest_of_a_model_of_onnx_is_compared(golden: Path) -> None:
    data = (golden / "model.onnx").read_bytes()
    at = data.index(NUMBERS.numpy().tobytes())
    (golden / "other.onnx").write_bytes(data[: at + 4 * 9] + b"\1" + data[at + 4 * 9 + 1 :])
    (found,) = diff(golden / "model.onnx", golden / "other.onnx").differences
    assert (found.name, found.count, found.first) == ("w", 1, (0, 9))
    (golden / "other.onnx").write_bytes(data.replace(b"Add", b"Sub"))
    (found,) = diff(golden / "model.onnx", golden / "other.onnx").differences
    assert (found.name, found.count) == ("(graph)", 3)
    kept = diff(golden / "model.onnx", golden / "apart.onnx")
    assert kept.same == ["w"]


def test_members_of_keras_are_compared_one_by_one(tmp_path: Path) -> None:
    for name, date in (("a", "2025"), ("b", "2026")):
        with zipfile.ZipFile(tmp_path / f"{name}.keras", "w") as archive:
            archive.writestr("config.json", '{"layers": [1, 2]}')
            archive.writestr("metadata.json", f'{{"date_saved": "{date}"}}')
            archive.writestr("model.weights.h5", b"\x89HDF")
    compared = diff(tmp_path / "a.keras", tmp_path / "b.keras")
    assert told(compared) == {"metadata.json.date_saved": "differs"}
    assert (sorted(compared.same), compared.a.by_bytes) == (
        ["config.json.layers", "model.weights.h5"],
        1,
    )


@pytest.mark.parametrize("name", ["model.gguf", "state.npz", "packed.npz", "flax_model.msgpack"])
def test_nans_are_counted(name: str, golden: Path) -> None:
    (report,) = judge(golden / name, Options(nan=True)).reports
    assert report.not_finite == []
    if name.endswith(".npz"):
        rewrite(golden / name, lambda array: array.fill(np.inf), how=zipfile.ZIP_DEFLATED)
    else:
        data = (golden / name).read_bytes()
        at = data.index(NUMBERS[:1].numpy().tobytes())
        infinite = np.full(256, np.inf, np.float32).tobytes()
        (golden / name).write_bytes(data[:at] + infinite + data[at + 1024 :])
    (report,) = judge(golden / name, Options(nan=True)).reports
    assert report.not_finite is not None
    assert [(one.tensor.rpartition(".")[2], one.infinite) for one in report.not_finite] in (
        [("w", 256)],
        [("a", 256)],
    )


@pytest.mark.parametrize(
    "data",
    [
        b"\xc7\x05\x01\x93\x91\x02\xa1",
        b"\xc7\x02\x01\x92\x90",
        b"\xc7\xff\x01\x93",
        b"\xc7\x02\x05\x90\x90",
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x81\x90\x01",
        b"\xc7\x03\x02\x92\x01\x02",
        b"\xc7\x09\x01\x93\x91\x02\xa1f\xc4\x01x\x00",
    ],
)
def test_msgpack_that_flax_does_not_write(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.msgpack").write_bytes(data)
    with folder_at(tmp_path).open("a.msgpack") as file, pytest.raises(Malformed):
        flax.read(file, len(data))


def test_an_array_of_flax_whose_shape_asks_for_more_is_refused(golden: Path) -> None:
    path = golden / "flax_model.msgpack"
    path.write_bytes(path.read_bytes().replace(b"\x92\x04\x40", b"\x92\x05\x40"))
    compared = diff(path, path)
    assert not compared.is_judged
    assert "ask for" in compared.a.problems[0]
