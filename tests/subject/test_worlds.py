"""Worlds: ranks begin together, end each in its own way, and are joined into one state."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import trees
from ckpt_conformance.harness.messages import (
    ExitKind,
    Gate,
    ReadLeaves,
    Run,
    RunResult,
)
from ckpt_conformance.subject import oracle, worlds
from ckpt_conformance.suites import drawn_layouts, layouts
from ckpt_conformance.workload import joining
from ckpt_conformance.workload.hashing import hash_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt_conformance.subject.subject import Subject

LAYOUTS = [
    {"fsdp": 2},
    {"fsdp": 3},
    {"fsdp": 4},
    {"tp": 2},
    {"fsdp": 2, "tp": 2},
    {"replicate": 2, "fsdp": 2},
    {"fsdp": 2, "dim": 1},
]
TRAIN = Run(until=6, final=True)


@pytest.fixture(scope="module")
def subject(new_subject: Callable[..., Subject]) -> Subject:
    return new_subject("dcp-per-step")


def final(result: worlds.WorldResult) -> Mapping[str, object]:
    assert result.exit_kind is ExitKind.ENDED, result.output
    assert result.error is None
    state = result.of(RunResult).final
    assert state is not None
    return {name: leaves for name, leaves in state.items() if name not in ("rng", "loader")}


@pytest.fixture(scope="module")
def alone(subject: Subject) -> worlds.WorldResult:
    return worlds.execute(subject, {"fsdp": 1}, TRAIN)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_the_same_bits(
    subject: Subject, alone: worlds.WorldResult, layout: dict[str, int]
) -> None:
    result = worlds.execute(subject, layout, TRAIN)
    assert final(result) == final(alone)
    first = [trained for trained in result.records if trained.rank == 0]
    wanted = alone.records
    assert first
    assert [one.record.loss for one in first] == [one.record.loss for one in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("layout", drawn_layouts.layouts(worlds.MANY), ids=str)
def test_every_layout_that_is_drawn_trains_the_same_bits(
    subject: Subject, alone: worlds.WorldResult, layout: dict[str, int]
) -> None:
    assert final(worlds.execute(subject, layout, TRAIN)) == final(alone)


def test_ranks_draw_apart_and_read_apart(subject: Subject) -> None:
    records = worlds.execute(subject, {"fsdp": 2}, TRAIN).records
    mine, theirs = ([r.record for r in records if r.rank == rank] for rank in (0, 1))
    assert mine
    assert all(a.draws != b.draws for a, b in zip(mine, theirs, strict=True))
    assert all(not set(a.batch) & set(b.batch) for a, b in zip(mine, theirs, strict=True))


def test_a_rank_that_dies_leaves_the_others_an_end(subject: Subject) -> None:
    fault = fault_injectors.spec("file-write", ranks=[1], at=1, mode="kill")
    trees.clear(subject.root)
    result = worlds.run(subject, {"fsdp": 2}, 2, (2,), faults=[fault])
    assert [one.exit_kind for one in result.ranks] == [ExitKind.ENDED, ExitKind.KILLED]
    assert result.error
    assert "rank 0: " in result.error.message
    assert not result.reached(RunResult)
    assert result.of(RunResult) == RunResult()


def test_a_rank_that_hangs_ends_at_the_deadline(subject: Subject) -> None:
    stuck = Gate(state="await", ranks=(1,))
    result = worlds.execute(subject, {"fsdp": 2}, stuck, ReadLeaves(), deadline=2.0)
    assert [one.exit_kind for one in result.ranks] == [ExitKind.ENDED, ExitKind.HANG]
    assert result.exit_kind is ExitKind.HANG


def test_no_process_of_a_world_is_left(subject: Subject) -> None:
    fault = fault_injectors.spec("file-write", ranks=[0], at=2, mode="kill")
    worlds.run(subject, {"fsdp": 4}, 2, (2,), faults=[fault])
    token = str(subject.root)
    assert [pid for pid in running() if token in pid] == []


def running() -> list[str]:
    """Give the command lines and open files of all other processes of this machine."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) != os.getpid():
            try:
                names = [str(link.readlink()) for link in (entry / "fd").iterdir()]
            except OSError:
                continue
            found.append(" ".join(names))
    return found


def test_ranks_at_different_steps_arrive_nowhere(subject: Subject) -> None:
    gold = worlds.golden(subject, {"fsdp": 2})
    subject.materialize(gold)
    fault = fault_injectors.spec("stale-listing", ranks=[1], hidden=["step-4"])
    result = worlds.resume(subject, {"fsdp": 2}, faults=[fault])
    assert result.split
    assert oracle.arrival(result) == (-1, {})


# -- joining ----------------------------------------------------------------------------------


def box(offset: int, values: list[float], shape: int = 4) -> dict[str, Any]:
    data = struct.pack(f"<{len(values)}f", *values)
    return {
        "dtype": "torch.float32",
        "shape": [shape],
        "offset": [offset],
        "size": [len(values)],
        "width": 4,
        "data": data.hex(),
    }


def join(*held: dict[str, Any]) -> str:
    return joining.assemble([{"model": {"w": one}} for one in held])["model"]["w"]


def test_boxes_are_joined_into_the_digest_of_the_whole() -> None:
    whole = hash_bytes(b"torch.float32[4]", struct.pack("<4f", 1, 2, 3, 4))
    assert join(box(0, [1, 2]), box(2, [3, 4])) == whole
    assert join(box(0, [1, 2, 3, 4]), box(0, [1, 2, 3, 4])) == whole
    assert join(box(2, [4, 3]), box(0, [1, 2])) != whole


def test_a_hole_an_overlap_and_another_shape_are_told() -> None:
    assert join(box(0, [1, 2]), box(3, [4])) == "no rank holds 1 of its 4 elements"
    assert join(box(0, [1, 2]), box(1, [9, 3, 4])) == "ranks disagree on the same elements"
    assert join(box(0, [1, 2]), box(2, [3, 4, 5], 5)) == "ranks disagree on dtype or shape"


def test_what_differs_between_ranks_is_a_leaf_of_each() -> None:
    joined = joining.assemble([{"rng": {"a": "x", "b": "1"}}, {"rng": {"a": "x", "b": "2"}}])
    assert joined == {"rng": {"a": "x", "b@0": "1", "b@1": "2"}}
    assert worlds.of_rank(joined["rng"], 1) == {"a": "x", "b": "2"}


def test_a_busy_machine_gets_more_time(
    new_subject: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no end at first is no verdict: a run without faults, and a load of what it left."""
    subject = new_subject("dcp-per-step")
    monkeypatch.setattr(worlds, "DEADLINE", 0.05)
    monkeypatch.setattr(worlds, "BUSY", 1200.0)
    made = worlds.golden(subject, {"fsdp": 2})
    assert layouts.pair(subject, {"fsdp": 2}, {"fsdp": 2})[0] == made.at[4]
    assert worlds.loaded(subject, made, {"fsdp": 2}, 4)
