"""An index of chunks that is edited has a hole or an overlap, in one tensor, and is still read."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from dcp_bytes import metadata_of

from ckpt_conformance.fault_injectors import dcp_metadata
from ckpt_conformance.fsck.formats import cover

if TYPE_CHECKING:
    from pathlib import Path


def boxes(path: Path, name: str) -> list[cover.Box]:
    described: Any = pickle.loads(path.read_bytes()).state_dict_metadata  # noqa: S301  our own
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described[name].chunks]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = tmp_path / ".metadata"
    path.write_bytes(metadata_of({"small": ((3, 2), 3), "large": ((5, 2), 3), "one": ((90,), 1)}))
    return path


@pytest.mark.parametrize(
    ("fault", "why", "count"),
    [("hole", "10 of 30 elements are in no chunk: a hole", 2), ("overlap", "overlap", 4)],
)
def test_a_tensor_gets_a_hole_or_an_overlap(index: Path, fault: str, why: str, count: int) -> None:
    assert cover.why_not((15, 2), boxes(index, "large")) == ""
    assert dcp_metadata.edit(None, str(index), fault) == "large"
    large = boxes(index, "large")
    assert len(large) == count
    assert why in cover.why_not((15, 2), large)
    assert cover.why_not((9, 2), boxes(index, "small")) == "", "one tensor is hurt, no other"
    stored = pickle.loads(index.read_bytes()).storage_data  # noqa: S301  our own
    assert {tuple(key.offset) for key in stored if key.fqn == "large"} == {
        offsets for offsets, _ in large
    }


def test_an_index_is_known_by_its_bytes(index: Path, tmp_path: Path) -> None:
    assert dcp_metadata.is_index(index)
    (tmp_path / "other").write_bytes(pickle.dumps({"torch": 1}))
    assert not dcp_metadata.is_index(tmp_path / "other")


def test_a_tensor_in_one_piece_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(metadata_of({"one": ((90,), 1)}))
    assert dcp_metadata.edit(None, str(path), "hole") == ""
