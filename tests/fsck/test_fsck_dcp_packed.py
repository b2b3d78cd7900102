"""DCP whose items an extension has transformed: torch's ZStandard is unpacked, others unknown."""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING
from unittest import mock

import pytest
import torch
from backports import zstd
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from unsafe_corpus import Evil

from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.formats import dcp_packed
from ckpt_conformance.fsck.formats import zstd as zstd_file
from ckpt_conformance.fsck.formats.dcp import read_metadata
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Report


class _Packs(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        self.output, self.held = output, b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self.held += bytes(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.output.write(zstd.compress(self.held))
        super().close()


class ZStandard(StreamTransformExtension):
    """As torch's own, whose packages are not installed here: one frame for each item."""

    name = "stream.zstd"

    @staticmethod
    def registry_name() -> str:
        return ZStandard.name

    @staticmethod
    def from_descriptor(version: str) -> ZStandard:  # noqa: ARG004
        return ZStandard()

    def get_descriptor(self) -> str:
        return f"{self.name}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Packs(output)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002
        return io.BytesIO(zstd.decompress(input.read()))


class _Other(ZStandard):
    name = "rot13"


def saved(folder: Path, extra: object, extension: StreamTransformExtension) -> Path:
    writer = dcp.FileSystemWriter(str(folder), _extensions=[extension])
    dcp.save({"m": torch.arange(900.0), "extra": extra}, storage_writer=writer, no_dist=True)
    return folder


def loaded(folder: Path) -> object:
    """Return what DCP itself loads of the value; raises where the tensor is another."""
    registry = ExtensionRegistry()
    registry.register(ZStandard)
    state = {"m": torch.zeros(900), "extra": {"epoch": 0}}
    reader = dcp.FileSystemReader(str(folder), _extension_registry=registry)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["m"], torch.arange(900.0))
    return state["extra"]


def only(path: Path, *, metadata_only: bool = False) -> Report:
    (report,) = judge(path, Options(metadata_only=metadata_only)).reports
    return report


@pytest.mark.parametrize("metadata_only", [False, True])
def test_what_is_packed_by_zstandard_is_looked_into(tmp_path: Path, *, metadata_only: bool) -> None:
    good = saved(tmp_path / "good", {"epoch": 3}, ZStandard())
    report = only(good, metadata_only=metadata_only)
    assert (report.state, report.findings) == (State.WHOLE, [])
    assert metadata_only or report.crc == (good / "__0_0.distcp").stat().st_size
    evil = only(saved(tmp_path / "evil", Evil(), ZStandard()), metadata_only=metadata_only)
    assert evil.state is State.UNSAFE


@pytest.mark.parametrize("metadata_only", [False, True])
def test_other_transformed_items_are_unknown(tmp_path: Path, *, metadata_only: bool) -> None:
    report = only(saved(tmp_path / "run", 3, _Other()), metadata_only=metadata_only)
    assert report.state is State.UNKNOWN
    assert "rot13/1" in report.findings[0].what


def test_a_flip_in_a_packed_item_is_damage(tmp_path: Path) -> None:
    shard = saved(tmp_path / "run", {"epoch": 3}, ZStandard()) / "__0_0.distcp"
    good = shard.read_bytes()
    same = 0
    for at in range(0, len(good), 7):
        data = bytearray(good)
        data[at] ^= 16
        shard.write_bytes(data)
        if only(shard.parent).state is State.WHOLE:  # the archive's own name, say
            assert loaded(shard.parent) == {"epoch": 3}, at
            same += 1
    assert same < len(good) // 70  # of a tenth of the draws at most


def test_a_large_tensor_is_unpacked_and_held_against_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_packed, "_MOST", 3000)
    run = saved(tmp_path / "run", 3, ZStandard())
    assert only(run).state is State.WHOLE
    monkeypatch.setattr(dcp_packed, "_AROUND", 10)
    assert only(run).state is State.DAMAGED


# -- compared --------------------------------------------------------------------------------------


def both(folder: Path, extra: object, *, plant: bool = False) -> tuple[Path, Path]:
    """Save one state plainly and packed; `plant` changes a number of the packed one."""
    state = {"m": torch.arange(90_000.0).reshape(300, 300).t(), "extra": extra}
    dcp.save(state, checkpoint_id=str(folder / "plain"), no_dist=True)
    if plant:
        state["m"] = state["m"].clone()
        state["m"][7, 11] += 1
    writer = dcp.FileSystemWriter(str(folder / "packed"), _extensions=[ZStandard()])
    dcp.save(state, storage_writer=writer, no_dist=True)
    return folder / "plain", folder / "packed"


@pytest.mark.parametrize("is_large", [False, True])
def test_packed_items_are_compared_as_what_they_unpack_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(dcp_packed, "_MOST", 100_000)
        monkeypatch.setattr(dcp_packed, "_AROUND", 8_000)
    extra = {"epoch": 3, "rng": torch.arange(50)}
    same = diff(*both(tmp_path / "same", extra))
    assert same.is_judged
    assert same.differences == []
    (found,) = diff(*both(tmp_path / "planted", extra, plant=True)).differences
    assert found.name == "m"
    assert (found.first, found.count) == ((7, 11), 1)


@pytest.mark.parametrize("is_large", [False, True])
def test_an_item_is_unpacked_once_for_its_structure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_large: bool
) -> None:
    shard = saved(tmp_path, 3, ZStandard()) / "__0_0.distcp"
    stored = read_metadata((tmp_path / ".metadata").read_bytes()).items[shard.name]
    (item,) = (one for one in stored if one.dtype)
    if is_large:
        monkeypatch.setattr(dcp_packed, "_MOST", 3000)
    unpacked = mock.Mock(side_effect=zstd_file.unpacked)
    monkeypatch.setattr(zstd_file, "unpacked", unpacked)
    with shard.open("rb", buffering=0) as file:
        archive, length = dcp_packed.structure(file, item)
    assert [one.shape for one in archive.tensors] == [(900,)]
    assert length > 900 * 4
    assert unpacked.call_count == 1


def test_packed_values_are_compared(tmp_path: Path) -> None:
    one, two = (tmp_path / "one", tmp_path / "two")
    for folder, epoch in ((one, 3), (two, 4)):
        saved(folder, {"epoch": epoch, "rng": torch.arange(50) + epoch}, ZStandard())
    assert {item.name for item in diff(one, two).differences} == {"extra.epoch", "extra.rng"}
    assert judge(one, Options(nan=True)).reports[0].not_finite == []


def test_a_flip_in_a_packed_item_is_damage_for_diff_too(tmp_path: Path) -> None:
    plain, packed = both(tmp_path, 3)
    shard = packed / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert not diff(plain, packed).is_judged


def test_what_another_extension_has_made_is_not_compared(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one", 3, _Other()), saved(tmp_path / "two", 3, _Other())
    assert not diff(one, two).is_judged
