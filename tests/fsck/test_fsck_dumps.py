"""fsck on emergency dumps of the reference manager: every rank's marker, all of one dump."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from emergency_cases import small
from typer.testing import CliRunner

from ckpt_conformance.cli.main import app
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State
from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.durable import digest_bytes
from ckpt_conformance.reference_impl.manifest import canonical
from ckpt_conformance.reference_impl.resolve import dump_references

if TYPE_CHECKING:
    from pathlib import Path

    from rank_worlds import Worlds

    from ckpt_conformance.fsck.source.findings import Report

pytestmark = pytest.mark.xdist_group("ranks-faults")  # one server for all


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with step 2 saved, and step 3 dumped."""
    manager = CheckpointManager(tmp_path / "run", host="node1")
    manager.save(2, **small(2))
    manager.save_emergency_checkpoint(3, **small(3))
    return tmp_path / "run"


@pytest.fixture(scope="module")
def of_ranks(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two dumps of two ranks, of steps 4 and 5."""
    root = tmp_path_factory.mktemp("ranks")
    for step in (4, 5):
        given = {"root": str(root), "layout": "2:S0", "steps": step}
        worlds.results(2, "emergency_cases:dump_on_ranks", **given)
    return root


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def dumped(root: Path) -> Report:
    """The report of the newest dump."""
    path = dump_references(root)[0].directory
    (report,) = [one for one in judge(root).reports if one.path == path]
    return report


def said(report: Report, kind: Kind) -> list[tuple[str, str]]:
    return [(one.file, one.what) for one in report.findings if one.kind is kind]


def test_a_dump_is_one_checkpoint_and_verified(root: Path) -> None:
    """Every byte against the marker, and the host is told: it loads there alone (M005, M036)."""
    report = dumped(root)
    assert (report.state, report.layout) == (State.WHOLE, "reference-emergency")
    assert (report.step, report.world_size, report.uncovered) == (3, 1, 0)
    assert said(report, Kind.NOTE) == [
        ("rank0.json", "it was dumped on 'node1': its manager loads it there alone")
    ]
    assert len(judge(root).reports) == 2


def test_the_newest_whole_is_what_the_manager_resumes_from(root: Path) -> None:
    """The dump while it is whole, then the regular checkpoint."""
    path = dump_references(root)[0].directory
    for expected in (path, root / "model_000002.pt"):
        done = CliRunner().invoke(app, ["fsck", str(root), "--newest-whole"])
        assert done.stdout.strip().splitlines()[-1] == str(expected)
        flip(path / "optim_000003_rank0.pt", 700)


@pytest.mark.parametrize("name", ["model_000003_rank0.pt", "optim_000003_rank0.pt", "rank0.json"])
def test_a_flipped_bit_is_found_in_its_file(root: Path, name: str) -> None:
    """In a file by its digest, in a marker by its own."""
    path = dump_references(root)[0].directory / name
    flip(path, path.stat().st_size // 2)
    report = dumped(root)
    assert report.state is State.DAMAGED
    assert {file for file, _ in said(report, Kind.DAMAGED)} == {name}


def test_a_dump_without_a_marker_is_not_whole(root: Path) -> None:
    """A process that was killed in it, or a file that is gone (MX12)."""
    path = dump_references(root)[0].directory
    (path / "rank0.json").unlink()
    report = dumped(root)
    assert report.state is State.INCOMPLETE
    assert "none has finished" in said(report, Kind.MISSING)[0][1]


def test_a_file_of_a_dump_that_is_gone_is_missing(root: Path) -> None:
    (dump_references(root)[0].directory / "optim_000003_rank0.pt").unlink()
    report = dumped(root)
    assert [file for file, _ in said(report, Kind.MISSING)] == ["optim_000003_rank0.pt"]


def test_every_rank_has_to_have_its_marker(of_ranks: Path, tmp_path: Path) -> None:
    """The other rank was killed: its part may be anything (MX12)."""
    root = shutil.copytree(of_ranks, tmp_path / "copy")
    assert (dumped(root).state, dumped(root).world_size) == (State.WHOLE, 2)
    (dump_references(root)[0].directory / "rank1.json").unlink()
    report = dumped(root)
    assert report.state is State.INCOMPLETE
    assert "rank 1 of 2 has no marker" in said(report, Kind.MISSING)[0][1]


def test_parts_of_two_attempts_are_no_dump(of_ranks: Path, tmp_path: Path) -> None:
    """Every marker is there, and each is whole: they are of two steps (MX12)."""
    root = shutil.copytree(of_ranks, tmp_path / "copy")
    newer, older = (one.directory for one in dump_references(root))
    for file in older.glob("*rank1*"):
        shutil.copy(file, newer / file.name)
    report = dumped(root)
    assert report.state is State.DAMAGED
    words = " ".join(what for _, what in said(report, Kind.DAMAGED))
    assert "rank was at step 4 of 2 ranks, rank 0 at step 5" in words


def test_a_marker_that_was_forged_for_another_rank_is_told(root: Path) -> None:
    """Its digest fits, and its number does not fit its name."""
    path = dump_references(root)[0].directory / "rank0.json"
    body = json.loads(path.read_bytes())
    body |= {"rank": 1, "world_size": 2}
    del body["manifest_digest"]
    body["manifest_digest"] = digest_bytes(canonical(body))
    path.write_bytes(canonical(body))
    assert dumped(root).state is State.DAMAGED
