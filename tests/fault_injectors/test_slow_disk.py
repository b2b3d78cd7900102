"""A rank that is held: until when, and what is kept of that moment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.journal import ChildJournal, Fired, Released, read
from ckpt_conformance.fault_injectors import rank_points, slow_disk
from ckpt_conformance.fault_injectors.slow_disk import Look, Peer, SlowDisk
from ckpt_conformance.subject import worlds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpt_conformance.subject.subject import Subject

WAITS = "input()"
RUNS = "while True: pass"
ENDS = ""
OF_A_CHILD = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {RUNS!r}])
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    found = tmp_path / "root"
    found.mkdir()
    return found


@contextlib.contextmanager
def peer(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run another rank, with its children in a group of its own; it has begun when this is left."""
    begun = f"print(flush=True)\n{code}"
    command = [sys.executable, "-c", begun]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if not code:
            process.stdout.read()
        try:
            yield process
        finally:
            os.killpg(process.pid, 9)


def held(root: Path, code: str, *events: dict[str, Any], old: str = "") -> Released:
    """Hold this process at its second write while another rank does something; what it noted."""
    other, own, copy = (root.parent / name for name in ("journal-1", "journal", "copy"))
    other.write_text(old)
    trees.clear(copy)
    call = fault_injectors.spec("file-write", at=2, mode="hold")  # its first is to open the file
    counted = {"injector": call.injector, "args": call.args}
    peers = {"1": (str(other), other.stat().st_size)}
    journal = ChildJournal(own)
    fault = SlowDisk(root, journal, call=counted, copy=str(copy), peers=peers)
    with peer(code) as process:
        with other.open("a") as file:
            for event in [{"event": "watched", "process": process.pid}, *events]:
                print(json.dumps(event), file=file)
        fault.install()
        try:
            (root / "shard").write_bytes(b"data")
        finally:
            fault.remove()
            os.close(journal.descriptor)
    assert (fault.calls, fault.fired, len(fault.log)) == (2, 1, 2)
    first, last = read(own)
    assert isinstance(first, Fired)
    assert first.mode == "hold"
    assert isinstance(last, Released)
    return last


@pytest.mark.parametrize(
    ("code", "events", "expected"),
    [
        (WAITS, [], "waits"),
        (RUNS, [{"event": "acknowledged", "step": 4}], "acknowledged"),
        (RUNS, [{"event": "failed", "step": 4}], "failed"),
        (ENDS, [], "gone"),
    ],
    ids=["waits", "acknowledged", "failed", "gone"],
)
def test_a_rank_is_let_go_when_the_others_are_done(
    root: Path, code: str, events: list[dict[str, Any]], expected: str
) -> None:
    (root / "older").write_bytes(b"older")
    old = json.dumps({"event": "acknowledged", "step": 2}) + "\n"
    released = held(root, code, *events, old=old)
    assert released.others == {"1": expected}
    assert released.settled
    copy = root.parent / "copy"
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        "older": b"older",
        "shard": b"",
    }
    assert (root / "shard").read_bytes() == b"data"


@pytest.mark.parametrize("code", [RUNS, OF_A_CHILD], ids=["itself", "a child of it"])
def test_a_rank_that_goes_on_is_not_taken_for_one_that_waits(
    root: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_disk, "LIMIT", 0.4)
    released = held(root, code)
    assert released.others == {"1": "runs"}
    assert not released.settled
    assert list((root.parent / "copy").iterdir()) == []


def test_a_rank_that_has_not_come_to_the_save_is_away(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert slow_disk.state_of(path, 0) == ("away", set())
    journal = ChildJournal(path)
    journal.acknowledged(2)
    assert slow_disk.state_of(path, 0) == ("away", set())
    Peer(tmp_path, journal).install()
    journal.acknowledged(4)
    os.close(journal.descriptor)
    assert slow_disk.state_of(path, 0) == ("acknowledged", set())


def test_threads_that_wake_up_now_and_then_are_not_busy() -> None:
    """Those of gloo do so a hundred times a second, and a busy machine lets them wait."""

    def looks(*busy: set[str], files: list[str] | None = None) -> list[Look]:
        names = files or [""] * len(busy)
        return [
            Look({"1": "waits"}, {name: ("file", 0, 0)}, threads)
            for name, threads in zip(names, busy, strict=True)
        ]

    assert slow_disk.is_quiet(looks(*[{"7"}, {"8"}] * 5))
    assert not slow_disk.is_quiet(looks(*[{"7"}] * 6, *[{"8"}] * 4))
    assert not slow_disk.is_quiet(looks(*[set[str]()] * 9))
    assert not slow_disk.is_quiet(looks(*[set[str]()] * 10, files=[*"aaaaaaaaab"]))


def test_the_others_wait_for_a_slow_rank(new_subject: Callable[..., Subject]) -> None:
    """Of what a correct manager does while a rank is held nothing is to be seen."""
    subject = new_subject("dcp-per-step")
    layout = {"fsdp": 2}
    point = next(p for p in rank_points.points_of(subject, layout) if p.rank == 1)
    copy = subject.scratch / "copy"
    trees.clear(copy)
    result = rank_points.save(subject, layout, rank_points.slow(subject, layout, point, copy))
    assert result.went_well
    assert result.steps_of("acknowledged") == [2, 4]
    (released,) = [event for event in result.events if isinstance(event, Released)]
    assert (released.rank, released.others, released.settled) == (1, {"0": "waits"}, True)
    assert list(copy.glob("*/.metadata")) == [copy / "step-2" / ".metadata"]


def test_eight_ranks_are_left_out_where_they_do_not_fit() -> None:
    found, remark = worlds.fit(4 << 20, 3 << 20)
    assert found == 4
    assert remark.endswith("none of 8: 8 ranks take up to 4.0 GiB, and 3.0 GiB are free")
    assert worlds.fit(3 << 20, 3 << 20)[0] == 8
