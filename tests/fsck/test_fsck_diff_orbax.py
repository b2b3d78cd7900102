"""Arrays of Orbax compared by name: with other saves, with other formats, by one bit.

The golden ones were written by Orbax and TensorStore (`golden/make_fsck.py orbax`).
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from ckpt_conformance.contract import trees
from ckpt_conformance.fsck.contents import tiles
from ckpt_conformance.fsck.diff.diff import Compared, Options, diff
from ckpt_conformance.fsck.formats import zarr, zstd
from ckpt_conformance.fsck.judge.judge import Options as JudgeOptions
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.report import diff_lines

if TYPE_CHECKING:
    from pathlib import Path

SAVES = ("manager/1", "manager/10", "zarr2", "zarr3", "ocdbt3")


@pytest.fixture(autouse=True)
def _packages() -> None:
    """Ask for what the extra `orbax` brings."""
    try:
        zstd.check_installed()
    except zstd.NotInstalled as error:
        pytest.skip(str(error))


@pytest.fixture
def golden(repository: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "golden"
    shutil.copytree(repository / "tests" / "golden" / "fsck" / "orbax", copy)
    return copy


@pytest.fixture
def state() -> dict[str, Any]:
    """What was saved, made again with the seed of `make_fsck.py`."""
    numbers = np.random.default_rng(0)
    weight = torch.from_numpy(numbers.normal(size=(24, 16)).astype(np.float32))
    moment = torch.from_numpy(numbers.normal(size=(30, 20)).astype(np.float32))
    params = {"w": weight, "b": torch.ones(16, dtype=torch.bfloat16)}
    return {"params": params, "moment": moment, "step": 3}


def told(compared: Compared) -> dict[str, str]:
    assert compared.is_judged, (compared.a.problems, compared.b.problems)
    return {one.name: str(one.status) for one in compared.differences}


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(SAVES, 2)])
def test_saves_of_one_state_are_the_same_though_files_are_not(
    one: str, other: str, golden: Path
) -> None:
    """The manager saved no text, and a JSON beside the tree."""
    compared = diff(golden / one, golden / other)
    assert set(told(compared)) <= {"name", "extra.a"}
    assert {"params.w", "params.b", "moment", "step"} <= set(compared.same)
    assert compared.a.by_bytes == compared.b.by_bytes == 0


@pytest.mark.parametrize("one", SAVES)
def test_orbax_holds_what_torch_holds(
    one: str, golden: Path, state: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "state.pt")
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    compared = diff(golden / one, tmp_path / "state.pt")
    assert set(told(compared)) <= {"name", "extra.a"}
    rename = Options(renames=((re.compile("^"), "model."),))
    compared = diff(golden / one, tmp_path / "dcp", rename)
    assert set(told(compared)) <= {"model.name", "model.extra.a"}
    assert "model.moment" in compared.same


def test_orbax_and_safetensors_by_rename(
    golden: Path, state: dict[str, Any], tmp_path: Path
) -> None:
    save_file({"w": state["params"]["w"], "b": state["params"]["b"]}, tmp_path / "m.safetensors")
    options = Options(renames=((re.compile(r"^params\."), ""),), only=(re.compile("^[wb]$"),))
    compared = diff(golden / "ocdbt3", tmp_path / "m.safetensors", options)
    assert (told(compared), sorted(compared.same)) == ({}, ["b", "w"])


@pytest.mark.parametrize(("name", "at"), [("params.w", (23, 15)), ("moment", (0, 0))])
@pytest.mark.parametrize("save", SAVES)
def test_one_bit_is_found_where_it_is(  # noqa: PLR0913, PLR0917  what is varied, and two folders
    save: str, name: str, at: tuple[int, int], golden: Path, state: dict[str, Any], tmp_path: Path
) -> None:
    value = state["params"]["w"] if name == "params.w" else state["moment"]
    value.view(torch.int32)[at] ^= 1
    torch.save(state, tmp_path / "state.pt")
    compared = diff(golden / save, tmp_path / "state.pt")
    assert set(told(compared)) - {"name", "extra.a"} == {name}
    (found,) = [one for one in compared.differences if one.name == name]
    assert (found.count, found.first, found.distance.max_ulps) == (1, at, 1)


def test_a_bit_in_a_chunk_of_orbax_itself(golden: Path, tmp_path: Path) -> None:
    """It can be unpacked and no CRC is there, so fsck says whole: only another copy tells."""
    other = tmp_path / "other"
    shutil.copytree(golden / "zarr2", other)
    chunk = other / "moment" / "1.0"
    pack = import_module("backports.zstd")
    data = bytearray(pack.decompress(chunk.read_bytes()))
    data[5 * 4] ^= 1
    chunk.write_bytes(pack.compress(bytes(data)))
    (found,) = diff(golden / "zarr2", other).differences
    assert (found.name, found.count) == ("moment", 1)


def test_what_orbax_notes_for_itself_is_no_difference(golden: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(golden / "zarr2", other)
    for name in ("_sharding", "array_metadatas/process_0", "commit_success.txt"):
        (other / name).unlink()
    assert told(diff(golden / "zarr2", other)) == {}


def test_what_a_user_put_beside_the_arrays_is_compared(golden: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(golden / "manager" / "10", other)
    about = other / "_CHECKPOINT_METADATA"
    about.write_text(about.read_text().replace('"metrics": {}', '"metrics": {"loss": 0.5}'))
    assert told(diff(golden / "manager" / "10", other)) == {"metrics.loss": "only-in-b"}
    (other / "notes").write_text("mine")
    assert "notes" in told(diff(golden / "manager" / "10", other))


FORMS = {
    "gzip": torch.float32,
    "zlib": torch.int16,
    "plain": torch.bfloat16,
    "transposed": torch.float64,
    "shards": torch.float16,
}


def test_every_way_to_store_an_array_is_read(golden: Path, tmp_path: Path) -> None:
    """By TensorStore's own arrays: packers, orders of dimensions, shards, what was not written."""
    numbers = torch.arange(35, dtype=torch.float64).reshape(5, 7) - 9
    state = {name: numbers.to(dtype) for name, dtype in FORMS.items()}
    state["some"] = torch.full((5, 7), 1.5)
    state["few"] = torch.full((5, 7), -2.5, dtype=torch.bfloat16)
    for name in ("some", "few"):
        state[name][1] = numbers[1].to(state[name].dtype)
    torch.save(state, tmp_path / "state.pt")
    compared = diff(golden / "forms", tmp_path / "state.pt")
    assert sorted(compared.same) == sorted(state)
    assert set(told(compared)) == {
        "summed",
        "swapped",
        *(f"blosc.{row}.{column}" for row in range(2) for column in range(2)),
    }
    kinds = {one.name: one.a for one in compared.differences}
    assert kinds["swapped"] == "float32 (big-endian) [5, 7]"
    assert kinds["summed"] == "int32 (big-endian) [5, 7]"
    assert compared.a.by_bytes == 4
    last = [*diff_lines.lines(compared)][-1]
    assert "4 files are not read here" in last
    (blosc,) = [one for one in compared.differences if one.name == "blosc.0.0"]
    assert blosc.a is not None
    assert blosc.a.startswith("bytes [")


def test_nans_in_orbax_are_counted(golden: Path) -> None:
    (report,) = judge(golden / "zarr2", JudgeOptions(nan=True)).reports
    assert report.not_finite == []
    chunk = golden / "zarr2" / "moment" / "1.0"
    pack = import_module("backports.zstd")
    data = bytearray(pack.decompress(chunk.read_bytes()))
    data[:8] = np.array([np.nan, np.inf], np.float32).tobytes()
    chunk.write_bytes(pack.compress(bytes(data)))
    (report,) = judge(golden / "zarr2", JudgeOptions(nan=True)).reports
    assert report.not_finite is not None
    assert [(one.tensor, one.nan, one.infinite) for one in report.not_finite] == [("moment", 1, 1)]
    assert not [one for one in report.findings if "NaN" in one.what]


def test_zeros_that_are_packed_well_are_counted(tmp_path: Path) -> None:
    """A view that shows the bytes of a file again and again is not; what is packed is no view."""
    pack = import_module("backports.zstd")
    about = {"chunks": [500, 500], "compressor": {"id": "zstd"}, "dtype": "<f4", "filters": None}
    about |= {"fill_value": None, "order": "C", "shape": [500, 500], "zarr_format": 2}
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".zarray").write_text(json.dumps(about))
    (tmp_path / "w" / "0.0").write_bytes(pack.compress(bytes(1_000_000)))
    (tmp_path / "_METADATA").write_text('{"tree_metadata": {}}')
    (report,) = judge(tmp_path, JudgeOptions(nan=True)).reports
    assert report.not_finite == []
    assert not [one for one in report.findings if "NaN" in one.what]


def test_a_large_chunk_is_unpacked_as_it_is_read(
    golden: Path, state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is more than some MiB is never held as a whole; back in it is unpacked again."""
    monkeypatch.setattr(tiles, "_FEW", 0)
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    for save in SAVES:
        assert set(told(diff(golden / save, tmp_path / "dcp"))) <= {"name", "extra.a"}
    assert told(diff(golden / "forms", golden / "zarr2"))  # rows of chunks in another order
    assert told(diff(golden / "forms", golden / "forms")) == {}


def test_chunks_that_are_no_longer_what_they_should_be_are_damage(golden: Path) -> None:
    other = golden / "zarr3"
    chunk = next(one for one in sorted(trees.files(other / "moment")) if one.name != "zarr.json")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    compared = diff(golden / "zarr2", other)
    assert not compared.is_judged
    assert any("moment" in problem for problem in compared.b.problems)


@pytest.mark.parametrize("length", [11, 13])
@pytest.mark.parametrize("few", [0, 1 << 20])
def test_more_or_less_than_what_should_come_out_is_refused(
    length: int, few: int, monkeypatch: pytest.MonkeyPatch, golden: Path
) -> None:
    from ckpt_conformance.fsck.source.places import folder_at

    monkeypatch.setattr(tiles, "_FEW", few)
    packed = tiles.Packed("", 0, 0, length, tiles.plain_bytes, bytes(12))
    piece = tiles.Piece(((0,), (length,)), "", 0, (1,), packed=packed)
    with pytest.raises(Malformed, match="come out"):
        tiles.Reader(folder_at(golden)).read(piece, 1, ((0,), (length,)))


@pytest.mark.parametrize(
    ("dtype", "name", "fill", "expected"),
    [
        ("<f4", "float32", "NaN", b"\0\0\xc0\x7f"),
        ("<f4", "float32", -0.0, b"\0\0\0\x80"),
        (">f4", "float32", 1.0, b"\x3f\x80\0\0"),
        ("<i2", "int16", -2, b"\xfe\xff"),
        ("|b1", "bool", True, b"\1"),
        ("|u1", "uint8", 7, b"\7"),
        ("bfloat16", "bfloat16", 1.5, b"\xc0\x3f"),
        ("bfloat16", "bfloat16", "Infinity", b"\x80\x7f"),
        ("<f4", "float32", None, bytes(4)),
        ("<i2", "int16", 1 << 20, None),
        ("<f4", "float32", "0x7f", None),
        ("<c8", "complex64", [1, 2], None),
    ],
)
def test_what_was_not_written_is_the_fill_value(
    dtype: str, name: str, fill: object, expected: bytes | None
) -> None:
    packing = zarr.Packing(is_big=dtype[0] == ">")
    array = zarr.Array(dtype, zarr.item_size(dtype), (3,), (2,), packing, "", ".", fill)
    if expected is None:
        with pytest.raises(Malformed, match="were not written"):
            zarr.fill_bytes(array, name)
    else:
        assert zarr.fill_bytes(array, name) == expected
