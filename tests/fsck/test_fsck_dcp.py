"""Metadata of DCP that contradicts itself or its shards: each contradiction is named."""

from __future__ import annotations

import io
import pickle
import pickletools
import shutil
import struct
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.pickled import pickles
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "step_3"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "a": torch.arange(8.0).reshape(4, 2),
            "b": torch.ones(3),
            "n": 3,
            "nest": {"list": [torch.ones(2), torch.zeros(2)]},
        }
        dcp.save(state, checkpoint_id=folder)
    return folder


def place(found: Any, key: str) -> tuple[Any, Any]:  # noqa: ANN401  DCP's metadata
    """Give the index and the place of the only item of an entry."""
    return next((at, info) for at, info in found.storage_data.items() if at.fqn == key)


def hole(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    chunk = found.state_dict_metadata["a"].chunks[0]
    found.state_dict_metadata["a"].chunks[0] = replace(chunk, sizes=torch.Size([3, 2]))


def larger(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    chunk = found.state_dict_metadata["a"].chunks[0]
    found.state_dict_metadata["a"].chunks[0] = replace(chunk, sizes=torch.Size([5, 2]))


def twice(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    found.state_dict_metadata["a"].chunks.append(found.state_dict_metadata["a"].chunks[0])


def other_dtype(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    found.state_dict_metadata["a"].properties.dtype = torch.int32


def other_shape(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    found.state_dict_metadata["a"].size = torch.Size([2, 4])
    found.state_dict_metadata["a"].chunks[0] = replace(
        found.state_dict_metadata["a"].chunks[0], sizes=torch.Size([2, 4])
    )


def beyond(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    index, info = place(found, "a")
    found.storage_data[index] = replace(info, offset=10**15)


def overlapping(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    _, one = place(found, "n")
    index, info = place(found, "a")
    found.storage_data[index] = replace(info, offset=one.offset + 1)


def nowhere(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    del found.storage_data[place(found, "a")[0]]


def undescribed(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    del found.state_dict_metadata["a"]


def elsewhere(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    index, info = place(found, "a")
    found.storage_data[index] = replace(info, relative_path="../other/__0_0.distcp")


def no_plan(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    del found.planner_data["a"]


def other_path(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    found.planner_data["a"] = ("nest", "a")


def path_of_a_list(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    found.planner_data["a"] = ["a"]


def only_planned(found: Any) -> None:  # noqa: ANN401  DCP's metadata
    undescribed(found)
    del found.storage_data[place(found, "a")[0]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hole, "2 of 8 elements are in no chunk: a hole"),
        (larger, "outside of the shape"),
        (twice, "overlap"),
        (other_dtype, "should be int32 (4, 2) here, and is float32 (4, 2)"),
        (other_shape, "should be float32 (2, 4) here, and is float32 (4, 2)"),
        (beyond, "ends after the file"),
        (overlapping, "overlaps the item before"),
        (nowhere, "described and stored nowhere"),
        (undescribed, "stored, and nothing describes it"),
        (no_plan, "planner_data has no path for 'a'"),
        (other_path, "planner_data leads to 'nest.a' for 'a'"),
        (path_of_a_list, "planner_data has no proper path for 'a'"),
    ],
)
def test_a_contradiction_is_named_with_its_tensor(
    change: Change, reason: str, original: Path, tmp_path: Path
) -> None:
    judged = judge(changed(original, tmp_path, change))
    assert judged.state is State.DAMAGED
    found = judged.reports[0].findings
    assert any(reason in one.what and one.tensors == ("a",) for one in found), found


def test_what_was_planned_and_never_stored_is_a_remark(original: Path, tmp_path: Path) -> None:
    """Old torch planned the objects of every rank, and stored those of the first."""
    judged = judge(changed(original, tmp_path, only_planned))
    assert judged.state is State.WHOLE
    told = "planner_data has a path for 'a', which nothing describes: it was not saved"
    assert [one.what for one in judged.reports[0].findings if one.kind is Kind.NOTE] == [told]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"\x80\x04", b"\x80\x06", "pickle protocol 6"),
        (b"planner_data", b"planter_data", "it lacks planner_data"),
        (b"torch.strided", b"torch.strifed", "the layout 'torch.strifed'"),
        (b"ENCODING\x94\x93\x94K\x00", b"ENCODING\x94\x93\x94K\x07", "memory format"),
    ],
)
def test_a_changed_byte_that_stock_dcp_cannot_load_is_damage(
    old: bytes, new: bytes, reason: str, original: Path, tmp_path: Path
) -> None:
    copy = edited(original, tmp_path, old, new)
    (finding,) = judge(copy).reports[0].findings
    assert (finding.file, finding.kind) == (".metadata", Kind.DAMAGED)
    assert reason in finding.what


@pytest.mark.parametrize("byte", range(4, 11))
def test_a_frame_that_is_longer_than_its_pickle_is_damage(
    byte: int, original: Path, tmp_path: Path
) -> None:
    data = (original / ".metadata").read_bytes()
    copy = edited(original, tmp_path, data[: byte + 1], data[:byte] + bytes([data[byte] | 0x80]))
    (finding,) = judge(copy).reports[0].findings
    assert "frame" in finding.what


def loads_by_frames(data: bytes) -> bool:
    """Return whether Python loads a pickle that it reads a frame at a time."""
    try:
        pickle.load(io.BytesIO(data))  # noqa: S301  our own, but for the length of its frame
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError):
        return False
    return True


def test_a_frame_that_ends_in_a_value_is_damage(original: Path, tmp_path: Path) -> None:
    """A file as long as a buffer, or one of a store, is read a frame at a time, and not loaded."""
    copy = changed(original, tmp_path, lambda _: None)
    data = (copy / ".metadata").read_bytes()
    head, (length,) = data[:3], struct.unpack_from("<Q", data, 3)
    assert head[2:] == b"\x95"
    said = dict[bool, set[State]]()
    for short in range(0, length, 5):
        edited_data = head + struct.pack("<Q", short) + data[11:]
        (copy / ".metadata").write_bytes(edited_data)
        state = judge(copy, Options(metadata_only=True)).state
        said.setdefault(loads_by_frames(edited_data), set()).add(state)
    assert said == {True: {State.WHOLE}, False: {State.DAMAGED}}


def test_a_frame_that_ends_in_one_of_many_items_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read as a run, which passes over the ends of frames."""
    monkeypatch.setattr(pickles, "LARGE", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({f"t{n}": torch.ones(1) for n in range(500)}, checkpoint_id=tmp_path / "step_3")
    path = tmp_path / "step_3" / ".metadata"
    data = path.read_bytes()
    frames = [at for code, _, at in pickletools.genops(data) if code.name == "FRAME"]
    said = dict[bool, set[State]]()
    for short in range(100, 120, 2):
        edited_data = data[: frames[1] + 1] + struct.pack("<Q", short) + data[frames[1] + 9 :]
        path.write_bytes(edited_data)
        state = judge(path.parent, Options(metadata_only=True)).state
        said.setdefault(loads_by_frames(edited_data), set()).add(state)
    assert said == {True: {State.WHOLE}, False: {State.DAMAGED}}


def test_a_field_that_dcp_does_not_have_is_remarked(original: Path, tmp_path: Path) -> None:
    judged = judge(changed(original, tmp_path, lambda found: setattr(found, "extra", 1)))
    assert judged.state is State.WHOLE
    (finding,) = judged.reports[0].findings
    assert (finding.kind, "'extra'" in finding.what) == (Kind.NOTE, True)


def test_metadata_without_planner_data_is_whole(original: Path, tmp_path: Path) -> None:
    """As `DefaultSavePlanner(flatten_state_dict=False)` leaves it."""
    judged = judge(changed(original, tmp_path, lambda found: setattr(found, "planner_data", None)))
    assert judged.state is State.WHOLE


def test_a_name_that_leads_elsewhere_is_refused(original: Path, tmp_path: Path) -> None:
    judged = judge(changed(original, tmp_path, elsewhere))
    (finding,) = judged.reports[0].findings
    assert "leaves the checkpoint" in finding.what


def test_the_control_is_whole(original: Path, tmp_path: Path) -> None:
    judged = judge(changed(original, tmp_path, lambda _: None))
    assert judged.state is State.WHOLE


def changed(original: Path, tmp_path: Path, change: Change) -> Path:
    """Copy the checkpoint and change its metadata, as a buggy writer would have written it."""
    copy = tmp_path / "step_3"
    shutil.copytree(original, copy)
    path = copy / ".metadata"
    found = pickle.loads(path.read_bytes())  # noqa: S301  our own, written above
    change(found)
    path.write_bytes(pickle.dumps(found))
    return copy


def edited(original: Path, tmp_path: Path, old: bytes, new: bytes) -> Path:
    """Copy the checkpoint and replace bytes of its metadata by as many others."""
    copy = tmp_path / "step_3"
    shutil.copytree(original, copy)
    path = copy / ".metadata"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return copy


def test_metadata_that_call_their_class_are_damage(original: Path, tmp_path: Path) -> None:
    """A load calls it without its arguments, and fails: found by the fuzz."""
    copy = shutil.copytree(original, tmp_path / "step_3")
    data = (copy / ".metadata").read_bytes()
    (copy / ".metadata").write_bytes(data.replace(b"\x81", b"R", 1))
    with pytest.raises(TypeError):
        pickle.loads((copy / ".metadata").read_bytes())  # noqa: S301  our own
    (report,) = judge(copy).reports
    assert report.state is State.DAMAGED
    assert "it calls Metadata" in report.findings[0].what


@pytest.mark.parametrize("name", [".metadata.bak", ".metadata.tmp", ".metadata~"])
def test_a_copy_of_the_metadata_asks_for_what_metadata_asks_for(
    name: str, original: Path, tmp_path: Path
) -> None:
    step = tmp_path / "step_3"
    shutil.copytree(original, step)
    shutil.copyfile(step / ".metadata", step / name)
    assert judge(step).state is State.WHOLE
    (step / name).write_bytes(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00:)\x85R.")
    assert judge(step).state is State.UNSAFE
