"""Members of archives of other programs: without a name, and where their bytes are not."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
from fsck_runs import Finished

from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Finding, Kind, Report, State, ordered

if TYPE_CHECKING:
    from pathlib import Path


def _npz(path: Path, name: str = "w.npy") -> bytes:
    array = io.BytesIO()
    np.save(array, np.arange(4000.0))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", array.getvalue())
        with archive.open(zipfile.ZipInfo(name), "w") as member:  # writestr needs a name
            member.write(array.getvalue())
    return path.read_bytes()


def test_a_member_without_a_name_is_compared_and_judged(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    _npz(path, "")
    assert judge(path).state is State.WHOLE
    assert diff(path, path).differences == []
    assert Finished("fsck", path, "--nan").status == 0


def test_a_member_that_lies_behind_the_end_is_damage(tmp_path: Path) -> None:
    """The standard library raises an error of no words."""
    path = tmp_path / "model.npz"
    data = bytearray(_npz(path))
    entry = data.rindex(b"PK\x03\x04")
    struct.pack_into("<H", data, entry + 28, 60_000)  # bytes between its name and its data
    path.write_bytes(data)
    with np.load(path) as held, pytest.raises((EOFError, ValueError, zipfile.BadZipFile)):
        held["w"]
    report = judge(path).reports[0]
    assert report.state is State.DAMAGED
    assert all(one.what for one in report.findings)


def test_findings_about_one_place_come_in_one_order() -> None:
    """Threads find them in any order."""
    found = [
        Finding(Kind.DAMAGED, "a", "b", ("y",), 3, 9),
        Finding(Kind.DAMAGED, "a", "b", ("x",), 3, 9),
        Finding(Kind.DAMAGED, "a", "b", ("x",), 3, 5),
        Finding(Kind.DAMAGED, "a", "a", ("x",)),
        Finding(Kind.NOTE, "a", "a"),
    ]
    assert ordered(found) == ordered(reversed(found))
    report = Report("p", "dcp")  # type: ignore[arg-type]  no place is looked at
    report.take_findings(found)
    assert report.findings == ordered(found)
