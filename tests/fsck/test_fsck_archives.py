"""Archives that torch refuses although each record fits its CRC: found by `make fuzz-fsck`."""

from __future__ import annotations

import contextlib
import io
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch
from fsck_readers import torch_bytes

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Report

Members = list[tuple[str, bytes]]


def members(value: object) -> Members:
    """Return the records of a file of torch.save."""
    with zipfile.ZipFile(io.BytesIO(torch_bytes(value))) as archive:
        return [(one.filename, archive.read(one)) for one in archive.infolist()]


def judged(path: Path, held: Members) -> tuple[Report, bool]:
    """Write an archive; tell what fsck says of it, and whether torch loads it."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held:
            archive.writestr(zipfile.ZipInfo(name), data)
    loads = False
    with contextlib.suppress(Exception):
        torch.load(path, weights_only=False)
        loads = True
    (report,) = judge(path).reports
    return report, loads


@pytest.fixture
def held() -> Members:
    return members({"w": torch.arange(4.0)})


def with_record(held: Members, name: str, data: bytes | None) -> Members:
    """Return records of which one is another, or gone."""
    top = held[0][0].partition("/")[0]
    others = [one for one in held if one[0] != f"{top}/{name}"]
    return others if data is None else [*others, (f"{top}/{name}", data)]


def test_an_archive_that_python_packed_anew_is_whole(held: Members, tmp_path: Path) -> None:
    report, loads = judged(tmp_path / "model.pt", held)
    assert (report.state, loads) == (State.WHOLE, True)


@pytest.mark.parametrize(
    ("name", "data", "state"),
    [
        ("version", None, State.DAMAGED),
        ("version", b"", State.DAMAGED),
        ("version", b"little", State.DAMAGED),
        ("version", b"\xff", State.DAMAGED),
        ("version", b"0", State.DAMAGED),
        ("version", b"-1", State.DAMAGED),
        ("version", b"64", State.UNKNOWN),
        ("version", b"9" * 30, State.UNKNOWN),
        (".data/version", b"64", State.UNKNOWN),
        ("byteorder", b"", State.DAMAGED),
        ("byteorder", b"LITTLE", State.DAMAGED),
        (".storage_alignment", b"x", State.DAMAGED),
        (".data/serialization_id", b"\xff", State.DAMAGED),
    ],
)
def test_a_small_record_that_torch_refuses(
    name: str, data: bytes | None, state: State, held: Members, tmp_path: Path
) -> None:
    report, loads = judged(tmp_path / "model.pt", with_record(held, name, data))
    assert not loads
    assert report.state is state, report.findings
    assert any(name in one.what for one in report.findings)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("version", b"1\n"),
        ("version", b"10"),
        ("byteorder", None),
        ("byteorder", b"big"),
        (".storage_alignment", b" 64\n"),
        (".storage_alignment", None),
        (".data/serialization_id", None),
        (".format_version", b"\xff"),
    ],
)
def test_a_small_record_that_torch_takes(
    name: str, data: bytes | None, held: Members, tmp_path: Path
) -> None:
    report, loads = judged(tmp_path / "model.pt", with_record(held, name, data))
    assert loads
    assert report.state is State.WHOLE, report.findings


@pytest.mark.parametrize("name", ["x/a", "a", "", "archiv/code/a.py"])
def test_a_record_outside_of_the_folder_of_all_is_refused(
    name: str, held: Members, tmp_path: Path
) -> None:
    report, loads = judged(tmp_path / "model.pt", [*held, (name, b"1")])
    assert not loads
    assert report.state is State.DAMAGED
    report, loads = judged(tmp_path / "model.pt", [(one.split("/", 1)[1], of) for one, of in held])
    assert not loads
    assert report.state is State.DAMAGED


def test_a_tensor_that_wants_no_gradient_in_another_way_is_refused(
    held: Members, tmp_path: Path
) -> None:
    """Its fifth argument is a bool, or torch raises."""
    changed = [(one, of.replace(b"\x89c", b"K\x00c")) for one, of in held]
    assert changed != held
    report, loads = judged(tmp_path / "model.pt", changed)
    assert not loads
    assert report.state is State.DAMAGED
