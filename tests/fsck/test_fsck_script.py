"""TorchScript archives: read as what they are, and damage in them is found."""

from __future__ import annotations

import io
import warnings
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch
from unsafe_corpus import Evil

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def script() -> bytes:
    stream = io.BytesIO()
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old files of it are still there
        torch.jit.save(torch.jit.script(model), stream)
    return stream.getvalue()


def test_an_archive_of_torchscript_is_whole(script: bytes, tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    path.write_bytes(script)
    judged = judge(path)
    assert judged.state is State.WHOLE
    (report,) = judged.reports
    assert report.tensors == 4
    (finding,) = report.findings
    assert (finding.kind, "TorchScript" in finding.what) == (Kind.NOTE, True)


def test_a_flip_in_its_packed_code_is_damage(script: bytes, tmp_path: Path) -> None:
    """It is unsafe as well where nobody knows what is left runs: torch looks at no CRC of code."""
    with zipfile.ZipFile(io.BytesIO(script)) as archive:
        one = next(each for each in archive.infolist() if "container" in each.filename)
    assert one.compress_type == zipfile.ZIP_DEFLATED
    data = bytearray(script)
    extra = int.from_bytes(data[one.header_offset + 28 : one.header_offset + 30], "little")
    start = one.header_offset + 30 + len(one.filename) + extra
    path = tmp_path / "script.pt"
    for at in range(start, start + one.compress_size, 7):
        data[at] ^= 4
        path.write_bytes(data)
        data[at] ^= 4
        judged = judge(path)
        assert judged.state in {State.DAMAGED, State.UNSAFE}, at
        damage = [one.what for one in judged.reports[0].findings if one.kind is Kind.DAMAGED]
        assert any("code/" in what for what in damage), at


@pytest.mark.parametrize("held", [{"w": torch.ones(900)}, {"w": torch.ones(900), "x": Evil()}])
def test_packed_records_of_anything_else_are_unknown(tmp_path: Path, held: object) -> None:
    """`zip` has packed it anew: torch loads it, and fsck reads no payload that is packed."""
    path = tmp_path / "model.pt"
    torch.save(held, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    report = judge(path).reports[0]
    is_evil = len(torch.load(path, weights_only=False)) > 1
    assert report.state is (State.UNSAFE if is_evil else State.UNKNOWN)
    assert any("has packed the archive anew" in one.what for one in report.findings)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 10] = 0  # one header says that it is not packed
    path.write_bytes(data)
    assert judge(path).reports[0].state is State.DAMAGED
