"""Stores that say little, and folders of Megatron that hold little: what is still told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import fsspec
import megatron_layouts
import pytest
import torch
from url_stores import Broken, upload

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State
from ckpt_conformance.fsck.source.places import place
from ckpt_conformance.fsck.source.remote import BLOCK, RemoteFile

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A store whose listings say no sizes, as those of HTTP do, with one checkpoint."""
    fsspec.register_implementation(Broken.protocol, Broken, clobber=True)
    Broken.store.clear()
    Broken.failing.clear()
    full = Broken.ls

    def ls(self: Broken, path: str, **more: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        return [one | {"size": None} for one in full(self, path, **more)]

    monkeypatch.setattr(Broken, "ls", ls)
    torch.save({"w": torch.ones(2)}, tmp_path / "step_5.pt")
    return upload(tmp_path, "broken://bucket/run")


def test_sizes_that_no_listing_says_are_asked_for(silent: str) -> None:
    (report,) = judge(place(silent)).reports
    assert report.state is State.WHOLE
    assert report.uncovered == 0


@pytest.mark.parametrize("error", [TimeoutError("late"), PermissionError("Forbidden")])
def test_a_file_that_cannot_be_looked_at_is_unknown(error: Exception, silent: str) -> None:
    Broken.failing["info"] = ("step_5.pt", error)
    (report,) = judge(place(silent)).reports
    assert {one.kind for one in report.findings} == {Kind.UNKNOWN}


def test_a_size_that_nobody_says_is_unknown(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Broken.info
    monkeypatch.setattr(Broken, "info", lambda self, path: full(self, path) | {"size": None})
    (report,) = judge(place(silent)).reports
    assert {one.kind for one in report.findings} == {Kind.UNKNOWN}
    assert "does not say how long" in report.findings[0].what


def test_a_large_read_is_one_request_and_few_blocks_are_kept() -> None:
    asked: list[int] = []

    def read(start: int, end: int) -> bytes:
        asked.append(end - start)
        return bytes(end - start)

    file = RemoteFile(read, 100 * BLOCK)
    assert file.readinto(bytearray(20 * BLOCK)) == 20 * BLOCK
    assert asked == [20 * BLOCK]
    for at in range(40):
        file.seek(at * BLOCK)
        file.read(4)
        file.seek(at * BLOCK + 100)
        file.read(4)
    assert asked[1:] == [BLOCK] * 40
    assert len(file._blocks) <= 4


# -- folders of Megatron ---------------------------------------------------------------------------


def test_what_the_formats_of_a_folder_demand_is_missed(tmp_path: Path) -> None:
    """Without any shard nothing but `metadata.json` says that there were some."""
    megatron_layouts.v2(tmp_path)
    folder = tmp_path / f"global_step_{megatron_layouts.STEP}" / "actor" / "extra" / "dist_ckpt"
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).unlink()
    (report,) = judge(tmp_path).reports
    assert [one.file for one in report.findings] == ["actor/extra/dist_ckpt/.metadata"]
    config = json.loads((folder / "metadata.json").read_text()) | {"sharded_backend": "zarr"}
    (folder / "metadata.json").write_text(json.dumps(config))
    (report,) = judge(tmp_path).reports
    assert report.findings == []
