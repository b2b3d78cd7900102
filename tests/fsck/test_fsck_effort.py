"""Pickles of few bytes that take long: what is not followed to its end is unknown, never whole."""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.pickled import effort, pickles
from ckpt_conformance.fsck.pickled.faults import Unfinished
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Report

MOST = 50_000
FIRST, LAST = b"\x80\x02", b"}."
NAMED = FIRST + b"cbuiltins\ncomplex\nq\x000"
RUNS = b"cos\nsystem\nX\x02\0\0\0id\x85R0"
# One turn of each: the instructions that take longest, by what is done for them.
TURNS = {
    "values": (FIRST, b"N0"),
    "names": (FIRST, b"ca\nb\n0"),
    "calls": (NAMED, b"h\x00)R0"),
    "instances": (NAMED, b"h\x00)\x810"),
    "old instances": (FIRST, b"(ia\nb\n0"),
    "lines": (FIRST, b"I1\n0"),
    "items": (FIRST + b"}", b"K\x01Ns"),
    "keys": (FIRST + b"(" + b"N" * 63 + b"tq\x010}", b"h\x01Ns"),
    "attributes": (
        FIRST + b"cbuiltins\ngetattr\nq\x000ca\nb\nq\x01X\x01\0\0\0a\x86q\x02",
        b"h\x00h\x02R0",
    ),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "MOST", MOST)


def of_turns(sort: str, turns: int) -> bytes:
    first, turn = TURNS[sort]
    return first + turn * turns + LAST


def archive(path: Path, **more: bytes) -> None:
    """Write what `torch.save` writes, and other pickles beside it."""
    torch.save({"weight": torch.zeros(2)}, path)
    with zipfile.ZipFile(path) as opened:
        records = {name: opened.read(name) for name in opened.namelist()}
    records |= {f"{path.stem}/{name}.pkl": data for name, data in more.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as written:
        for name, data in records.items():
            written.writestr(name, data)


def of_structure(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as opened:
        opened.writestr(f"{path.stem}/data.pkl", data)
        opened.writestr(f"{path.stem}/version", b"3\n")


def only(root: Path) -> Report:
    (report,) = judge(root).reports
    return report


@pytest.mark.parametrize("sort", TURNS)
def test_each_sort_of_instruction_is_counted(sort: str) -> None:
    first, turn = TURNS[sort]
    pickles.load(of_turns(sort, 100))
    with pytest.raises(Unfinished, match="more than the 50000 steps"):
        pickles.load(of_turns(sort, MOST))
    with pytest.raises(Unfinished) as stopped:
        pickles.load(of_turns("values", MOST))
    assert len(first) + len(turn) < (stopped.value.start or 0) <= 2 * MOST


@pytest.mark.parametrize("sort", TURNS)
def test_a_structure_that_takes_too_long_is_unknown(sort: str, tmp_path: Path) -> None:
    of_structure(tmp_path / "model.pt", of_turns(sort, MOST))
    report = only(tmp_path)
    (found,) = [one for one in report.findings if one.kind is not Kind.UNSAFE]
    assert found.kind is Kind.UNKNOWN
    assert "steps that are followed" in found.what
    assert report.state in (State.UNKNOWN, State.UNSAFE)  # no list has `a.b`


@pytest.mark.parametrize("at_once", [False, True])
def test_keys_of_one_hash_take_as_long_as_they_are_compared(*, at_once: bool) -> None:
    """Numbers that differ by a multiple of the modulus have one hash: a dict compares all."""
    keys = [number * sys.hash_info.modulus for number in range(1, 3_000)]
    data = pickle.dumps(dict.fromkeys(keys) if at_once else [{key: 0} for key in keys], protocol=2)
    with pytest.raises(Unfinished):
        pickles.load(data)
    others = {hash(f"{key}") | 1 << 62: None for key in keys}
    assert pickles.load(pickle.dumps(others, protocol=2))[0] == others


@pytest.mark.parametrize("name", ["a.pkl", "state.pickle"])
def test_a_plain_pickle_that_takes_too_long_is_unknown(name: str, tmp_path: Path) -> None:
    step = tmp_path / "step_5"
    step.mkdir()
    archive(step / "model.pt")
    (step / name).write_bytes(of_turns("calls", MOST))
    assert only(tmp_path).state is State.UNKNOWN


def test_metadata_of_a_dcp_that_takes_too_long_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    (tmp_path / ".metadata").write_bytes(of_turns("values", MOST))
    assert only(tmp_path).state is State.UNKNOWN


def test_what_it_asks_for_before_is_unsafe(tmp_path: Path) -> None:
    first, turn = TURNS["values"]
    of_structure(tmp_path / "model.pt", first + RUNS + turn * MOST + LAST)
    assert only(tmp_path).state is State.UNSAFE


def test_what_it_asks_for_behind_is_not_whole(tmp_path: Path) -> None:
    first, turn = TURNS["values"]
    of_structure(tmp_path / "model.pt", first + turn * MOST + RUNS + LAST)
    assert only(tmp_path).state is State.UNKNOWN


def test_a_call_behind_in_a_pickle_that_torch_does_not_read_is_not_whole(tmp_path: Path) -> None:
    first, turn = TURNS["values"]
    archive(tmp_path / "model.pt", other=first + turn * MOST + RUNS + LAST)
    assert only(tmp_path).state is State.UNKNOWN


def test_all_pickles_of_a_file_are_counted_together(tmp_path: Path) -> None:
    some = of_turns("values", MOST // 4)
    archive(tmp_path / "model.pt", one=some)
    assert only(tmp_path).state is State.WHOLE
    archive(tmp_path / "model.pt", **{f"n{number}": some for number in range(3)})
    assert only(tmp_path).state is State.UNKNOWN


def test_each_file_has_its_own_count(tmp_path: Path) -> None:
    step = tmp_path / "step_5"
    step.mkdir()
    archive(step / "model.pt")
    for number in range(8):
        (step / f"state_{number}.pkl").write_bytes(of_turns("values", MOST // 4))
    assert only(tmp_path).state is State.WHOLE


def test_a_list_that_programs_write_is_read(tmp_path: Path) -> None:
    torch.save({"order": [*range(MOST // 2)]}, tmp_path / "model.pt")
    assert only(tmp_path).state is State.WHOLE


def test_many_tensors_are_read() -> None:
    """A name, and two calls, for each: what a model costs, of which the largest have 10^5."""
    file = io.BytesIO()
    torch.save({f"layer.{number}": torch.zeros(1) for number in range(500)}, file)
    with zipfile.ZipFile(file) as opened:
        data = opened.read("archive/data.pkl")
    pickles.load(data)
