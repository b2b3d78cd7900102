"""Results that were kept are what was judged, whatever names and findings are in them."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.fsck.judge import stored
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Finding, Kind, Topic

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Report


def again(report: Report) -> Report:
    """Write a report as the command keeps it, and read it."""
    return stored.report_of(stored.decode(stored.encode(report.to_json())))


def test_a_name_of_two_halves_of_a_pair_is_kept(tmp_path: Path) -> None:
    """Python reads CESU-8 of a pickle as two halves; JSON has no two of them that are not one."""
    path = tmp_path / "model.pt"
    torch.save({"name": torch.ones(9)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    halves = b"\xed\xa0\xbd\xed\xb8\x80"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if name.endswith("data.pkl"):
                old, new = b"X\x04\0\0\0name", b"X\x06\0\0\0" + halves
                assert old in data
                data = data.replace(old, new)  # noqa: PLW2901
            archive.writestr(name, data[:-4] if name.endswith("data/0") else data)
    (report,) = judge(path).reports
    assert any(one.tensors for one in report.findings)
    assert again(report).to_json() == report.to_json()


def test_a_topic_that_is_said_is_the_one_that_a_kind_has() -> None:
    """Else one of two findings is told twice, or not, by where the results come from."""
    said = Finding(Kind.DAMAGED, "a", "why", own_topic=Topic.STRUCTURE)
    meant = Finding(Kind.DAMAGED, "a", "why")
    assert said == meant
    assert said.topic is Topic.STRUCTURE
