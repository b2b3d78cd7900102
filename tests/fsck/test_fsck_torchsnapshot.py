"""Snapshots of torchsnapshot, as it wrote them: it serves other values from a file that was cut."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import unsafe_corpus as evil
from fsspec.implementations.memory import MemoryFileSystem
from url_stores import upload

from ckpt_conformance.contract import trees
from ckpt_conformance.fsck.diff.compare import Status
from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.formats import torchsnapshot
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Kind, Malformed, State, TooLarge
from ckpt_conformance.fsck.source.places import place

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.fsck.source.findings import Finding, Report

SIGN = torchsnapshot.METADATA
STEPS = ("step_1", "step_2")


@pytest.fixture
def golden(repository: Path, tmp_path: Path) -> Path:
    """A copy of what the library wrote."""
    copy = tmp_path / "golden"
    shutil.copytree(repository / "tests" / "golden" / "fsck" / "torchsnapshot", copy)
    return copy


def only(path: Path) -> Report:
    (report,) = judge(path).reports
    return report


def wrong(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.kind is not Kind.NOTE]


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a snapshot."""
    values = json.loads((folder / SIGN).read_text(encoding="utf-8"))
    change(values["manifest"])
    (folder / SIGN).write_text(json.dumps(values), encoding="utf-8")


def test_what_torchsnapshot_wrote_is_recognised_and_whole(golden: Path) -> None:
    reports = {one.path.name: one for one in judge(golden).reports}
    assert set(reports) == {"step_1", "step_2", "parts"}
    for report in reports.values():
        assert (report.layout, report.state, wrong(report)) == (
            "torchsnapshot",
            State.WHOLE,
            [],
        )
        assert (report.world_size, report.passed_over) == (1, [])
    assert [reports[name].tensors for name in ("step_1", "parts")] == [9, 1]


@pytest.mark.parametrize("is_empty", [True, False])
def test_an_uncommitted_snapshot_is_incomplete_and_never_the_newest(
    golden: Path, *, is_empty: bool
) -> None:
    if is_empty:
        (golden / "step_3").mkdir()
    else:
        shutil.copytree(golden / "step_2", golden / "step_3")
        (golden / "step_3" / SIGN).unlink()
        assert only(golden / "step_3").state is State.INCOMPLETE
    first = judge(golden).reports[0]
    assert (first.layout, first.step, first.state) == ("torchsnapshot", 3, State.INCOMPLETE)
    assert [one.file for one in wrong(first)] == [SIGN]
    newest = judge_newest(golden).newest_whole
    assert newest is not None
    assert newest.path == golden / "step_2"


@pytest.mark.parametrize("name", ["step_1", "parts"])
@pytest.mark.parametrize("left", [0, 0.5, -1])
def test_a_file_that_was_cut_is_damage(golden: Path, name: str, left: float) -> None:
    """Of raw tensors that were put together, torchsnapshot 0.1.0 serves other values."""
    for path in sorted(trees.files(golden / name)):
        kept = path.read_bytes()
        path.write_bytes(kept[:-1] if left < 0 else kept[: int(len(kept) * left)])
        report = only(golden / name)
        path.write_bytes(kept)
        assert report.state is State.DAMAGED, path
        told = str(path.relative_to(golden / name))
        assert {one.file for one in wrong(report)} == {told}


@pytest.mark.parametrize("name", ["step_1", "parts"])
def test_a_missing_file_is_told_with_its_tensors(golden: Path, name: str) -> None:
    for path in sorted(trees.files(golden / name)):
        if path.name == SIGN:
            continue
        path.rename(golden.parent / "aside")
        report = only(golden / name)
        (golden.parent / "aside").rename(path)
        (told,) = wrong(report)
        assert (told.kind, told.file) == (Kind.MISSING, str(path.relative_to(golden / name)))
        assert told.tensors


def test_a_file_that_is_longer_is_damage(golden: Path) -> None:
    (path,) = (golden / "step_1" / "batched").iterdir()
    path.write_bytes(path.read_bytes() + b"more")
    assert only(golden / "step_1").state is State.DAMAGED


def test_objects_are_judged_as_pickles(golden: Path) -> None:
    class Own:
        pass

    Own.__module__, Own.__qualname__ = "somewhere", "Own"
    module = types.ModuleType("somewhere")
    module.Own = Own  # type: ignore[attr-defined]
    sys.modules["somewhere"] = module
    try:
        torch.save(Own(), golden / "step_1" / "0" / "extra" / "nothing")
    finally:
        del sys.modules["somewhere"]
    report = only(golden / "step_1")
    assert report.state is State.UNSAFE
    assert [one.name for one in wrong(report)] == ["somewhere.Own"]


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a rank that is none": lambda all_: all_.update({"7/x": all_["0/extra/step"]}),
    "a key without an entry": lambda all_: all_.pop("0/extra/step"),
    "a number that is none": lambda all_: all_["0/extra/step"].update(serialized_value="5x"),
    "a float of three bytes": lambda all_: all_["0/extra/rate"].update(serialized_value="AAAA"),
    "a type": lambda all_: all_["0/extra/step"].update(type="complex"),
    "a dtype": lambda all_: all_["0/model/weight"].update(dtype="torch.float31"),
    "a shape": lambda all_: all_["0/model/weight"].update(shape=[4, 4]),
    "a negative shape": lambda all_: all_["0/model/weight"].update(shape=[-4, 4]),
    "a range that is turned": lambda all_: all_["0/model/weight"].update(byte_range=[9, 3]),
    "a range of text": lambda all_: all_["0/model/weight"].update(byte_range="all"),
    "a place outside": lambda all_: all_["0/model/weight"].update(location="../../secret"),
    "an absolute place": lambda all_: all_["0/model/weight"].update(location="/etc/passwd"),
    "two at one place": lambda all_: all_["0/model/weight"].update(
        byte_range=[one + 4 for one in all_["0/model/weight"]["byte_range"]]
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_metadata_that_contradict_themselves_are_damage(golden: Path, what: str) -> None:
    edit(golden / "step_1", CHANGES[what])
    assert only(golden / "step_1").state is State.DAMAGED


def test_a_part_of_a_tensor_that_is_left_out_is_told(golden: Path) -> None:
    edit(golden / "parts", lambda all_: all_["0/extra/w"]["chunks"].pop())
    assert only(golden / "parts").state is State.DAMAGED


def test_shards_of_ranks_cover_their_tensor(golden: Path) -> None:
    """Written as the library's documentation of `ShardedTensor` has it; no two ranks ran here."""

    def shard(all_: dict[str, Any]) -> None:
        all_["0/extra/w"] = {"type": "ShardedTensor", "shards": all_["0/extra/w"]["chunks"]}

    edit(golden / "parts", shard)
    assert only(golden / "parts").state is State.WHOLE
    edit(golden / "parts", lambda all_: all_["0/extra/w"]["shards"][2]["offsets"].__setitem__(0, 0))
    assert only(golden / "parts").state is State.DAMAGED


def test_yaml_of_older_releases_is_read_and_bounded(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = pytest.importorskip("yaml")
    sign = golden / "step_1" / SIGN
    sign.write_text(yaml.safe_dump(json.loads(sign.read_text())), encoding="utf-8")
    report = only(golden / "step_1")
    assert (report.state, report.tensors) == (State.WHOLE, 9)
    sign.write_text("a: !!python/object/apply:os.system ['true']\n", encoding="utf-8")
    with pytest.raises(Malformed, match="nor YAML"):
        torchsnapshot.read(sign.read_bytes())
    assert only(golden / "step_1").state is State.DAMAGED
    monkeypatch.setattr(torchsnapshot, "_MOST_YAML", 10)
    with pytest.raises(TooLarge):
        torchsnapshot.read(sign.read_bytes())


def test_a_url_has_the_verdicts_of_a_path(golden: Path) -> None:
    (golden / "step_2" / SIGN).unlink()
    try:
        upload(golden, "memory://golden")
        here, there = judge(golden), judge(place("memory://golden"))
    finally:
        MemoryFileSystem.store.clear()
    told = [
        {one.path.name: (one.layout, one.state, one.step, one.findings) for one in judged.reports}
        for judged in (here, there)
    ]
    assert told[0] == told[1]


# -- diff, and NaN ---------------------------------------------------------------------------------


def place_of(folder: Path, name: str) -> tuple[Path, int]:
    """Return the file of a raw tensor, and where it begins there."""
    stored = torchsnapshot.read((folder / SIGN).read_bytes()).stored
    (one,) = (one for one in stored if one.name == name)
    return folder / one.file, one.start


def plant(folder: Path, name: str, value: float) -> None:
    """Write another first element into a raw tensor."""
    file, start = place_of(folder, name)
    data = bytearray(file.read_bytes())
    data[start : start + 4] = struct.pack("<f", value)
    file.write_bytes(data)


def test_one_state_saved_twice_is_the_same_under_other_names_of_files(golden: Path) -> None:
    names = [{file.name for file in (golden / step / "batched").iterdir()} for step in STEPS]
    assert names[0] != names[1]
    compared = diff(*(golden / step for step in STEPS))
    assert (compared.differences, len(compared.same)) == ([], 28)


def test_an_element_is_found_by_the_name_of_its_tensor(golden: Path) -> None:
    plant(golden / "step_2", "0/optim/state/1/exp_avg", 2.0)
    (found,) = diff(*(golden / step for step in STEPS)).differences
    assert (found.name, found.count, found.first) == ("optim.state.1.exp_avg", 1, (0,))


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("0/extra/step", {"serialized_value": "6"}, "extra.step"),
        ("0/extra/rate", {"serialized_value": "AAAAAAAA4L8="}, "extra.rate"),
        ("0/extra/raw", {"serialized_value": "eHk="}, "extra.raw"),
    ],
)
def test_a_value_in_the_metadata_is_compared(
    golden: Path, path: str, value: dict[str, str], name: str
) -> None:
    edit(golden / "step_2", lambda all_: all_[path].update(value))
    assert [one.name for one in diff(*(golden / step for step in STEPS)).differences] == [name]


def test_keys_of_another_type_differ(golden: Path) -> None:
    edit(golden / "step_2", lambda all_: all_["0/optim/state"].update(keys=["0", 1]))
    (found,) = diff(*(golden / step for step in STEPS)).differences
    assert (found.name, found.status) == ("optim.state.0", Status.KEY)


def test_shards_of_two_ranks_are_put_together(golden: Path) -> None:
    shutil.copytree(golden / "parts", golden / "ranks")

    def divide(all_: dict[str, Any]) -> None:
        chunks = all_.pop("0/extra/w")["chunks"]
        for rank, own in enumerate((chunks[:2], chunks[2:])):
            all_[f"{rank}/extra/w"] = {"type": "ShardedTensor", "shards": own}
        all_["1/extra"] = all_["0/extra"]

    edit(golden / "ranks", divide)
    values = json.loads((golden / "ranks" / SIGN).read_text(encoding="utf-8"))
    (golden / "ranks" / SIGN).write_text(json.dumps({**values, "world_size": 2}), encoding="utf-8")
    compared = diff(golden / "parts", golden / "ranks")
    assert (compared.differences, compared.same) == ([], ["extra.w"])


def test_a_value_of_each_rank_has_the_rank_in_its_name(golden: Path) -> None:
    def second(all_: dict[str, Any]) -> None:
        all_["1/extra"] = {"type": "dict", "keys": ["step"]}
        all_["1/extra/step"] = {**all_["0/extra/step"], "serialized_value": "7"}

    edit(golden / "step_2", second)
    sign = golden / "step_2" / SIGN
    values = json.loads(sign.read_text(encoding="utf-8"))
    sign.write_text(json.dumps({**values, "world_size": 2}), encoding="utf-8")
    names = {one.name for one in diff(*(golden / step for step in STEPS)).differences}
    assert {"extra.step", "rank0.extra.step", "rank1.extra.step"} <= names


def test_nan_is_counted_in_raw_tensors(golden: Path) -> None:
    plant(golden / "step_1", "0/model/weight", float("nan"))
    (report,) = judge(golden / "step_1", Options(nan=True)).reports
    assert [(one.tensor, one.nan) for one in report.not_finite or ()] == [("model.weight", 1)]


def test_what_runs_in_the_place_of_a_tensor_is_unsafe(golden: Path) -> None:
    """Of tensors as they lie in memory the size is all that is known: a pickle can have it."""
    (path,) = (golden / "step_1/batched").iterdir()
    pickled = evil.TWO + evil.system(Path("ran")) + b"."
    path.write_bytes(pickled.ljust(path.stat().st_size, b"\0"))
    assert only(golden / "step_1").state is State.UNSAFE


def test_keys_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    """Numbers can be chosen so that a dict compares each with all others: that takes hours."""
    keys = "\n".join(f"{number * sys.hash_info.modulus}: 0" for number in range(1, 50_000))
    (tmp_path / ".snapshot_metadata").write_text(f"version: 0.1.0\nworld_size: 1\n{keys}\n")
    (report,) = judge(tmp_path).reports
    assert report.state is State.DAMAGED
    assert any("a key that is no text" in one.what for one in report.findings)
