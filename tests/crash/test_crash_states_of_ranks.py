"""Saves of several ranks: recorded in one child, ordered, explored by worlds, replayed."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from ckpt_conformance.contract.verdicts import Outcome, Unknown, Violation
from ckpt_conformance.crash.explore import (
    bundles,
    engine,
    reproduced,
    verdicts,
    workloads,
)
from ckpt_conformance.crash.explore.engine import RanksExplorer
from ckpt_conformance.crash.explore.exploration import BY_PROCESS, complete
from ckpt_conformance.crash.model.models import MODELS, OF_RANKS
from ckpt_conformance.harness.messages import Run
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.subject import Subject
from ckpt_conformance.trace import vector_clocks
from ckpt_conformance.trace.operations import Recording

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.harness.client import ProcessResult, Server
    from ckpt_conformance.harness.messages import Program

TWO = {"fsdp": 2}
RECIPES = ("dcp-per-step", "dcp-overwrite")


@pytest.fixture(scope="module")
def subjects(new_subject: Callable[..., Subject]) -> Callable[[str], Subject]:
    return cache(new_subject)


def test_one_recording_has_the_operations_of_all_ranks_in_order(
    subjects: Callable[[str], Subject],
) -> None:
    recording = workloads.record(subjects("dcp-per-step"), "second", TWO).recording
    assert recording.ranks == 2
    assert not recording.unsupported
    ones = recording.operations
    shard = {one.rank: one for one in ones if one.kind == "fsync" and "distcp" in one.path}
    index = next(one for one in ones if one.kind == "rename" and one.target.endswith(".metadata"))
    assert shard.keys() == {0, 1}
    other = 1 - index.rank
    assert index.after[other] > shard[other].index, "a collective stands between them"
    assert shard[0].after[1] <= min(one.index for one in ones if one.path == shard[1].path)
    closed = {one.rank: one for one in ones if one.kind == "close" and "distcp" in one.path}
    assert all(shard[rank].index < closed[rank].index for rank in (0, 1))
    marks = {(one.rank, one.mark) for one in ones if one.mark}
    assert marks == {(rank, mark) for rank in (0, 1) for mark in ("begun", "acknowledged")}
    done = [one for one in ones if one.mark == "acknowledged"]
    assert all(one.after[index.rank] > index.index for one in done)


def test_a_recording_keeps_its_order(subjects: Callable[[str], Subject]) -> None:
    recording = workloads.record(subjects("dcp-per-step"), "second", TWO).recording
    assert Recording.read(recording.folder).operations == recording.operations


def test_the_last_state_is_what_stands_there(subjects: Callable[[str], Subject]) -> None:
    recorded = workloads.record(subjects("dcp-per-step"), "second", TWO)
    whole = complete(recorded.recording, len(recorded.recording.operations))
    assert recorded.final is not None
    there = {path.relative_to(recorded.final).as_posix() for path in recorded.final.rglob("*")}
    assert set(whole.names) == there
    for model in OF_RANKS:
        assert not MODELS[model].illegal(recorded.recording, whole)


def apart(store: Path, patience: float) -> Callable[[Subject, Program], list[ProcessResult]]:
    """Send a rank group whose second rank looks for the others elsewhere."""
    honest = Subject.send_rank_group

    def meeting(program: Program, at: int) -> Program:
        assert program.world is not None
        place = str(store) if at == 1 else program.world.store
        world = structs.replace(program.world, timeout=patience, store=place)
        return structs.replace(program, world=world)

    def send(self: Subject, program: Program) -> list[ProcessResult]:
        ranks = tuple(meeting(rank, at) for at, rank in enumerate(program.rank_group))
        return honest(self, structs.replace(program, rank_group=ranks))

    return send


@pytest.mark.slow
def test_a_rank_that_does_not_start_ends_the_recording(
    subjects: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Why: the others wait in their rendezvous; a recording that hangs stops the whole run."""
    monkeypatch.setattr(Subject, "send_rank_group", apart(tmp_path / "no folder" / "store", 0.5))
    with pytest.raises(Unknown):
        workloads.record(subjects("dcp-per-step"), "first", TWO)


def test_a_rank_group_past_its_deadline_is_ended_with_all_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
    server: Server,
    new_subject: Callable[..., Subject],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Subject, "send_rank_group", apart(tmp_path / "store", 60.0))
    subject = new_subject("dcp-per-step")
    result = worlds.recorded(subject, TWO, Run(until=1), folder=tmp_path / "record", deadline=2.0)
    assert result.exit_kind == "hang"
    pid = server.process.pid
    assert not Path(f"/proc/{pid}/task/{pid}/children").read_text()


@pytest.mark.slow
def test_shards_of_two_saves_side_by_side_are_found(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("dcp-overwrite")
    with pytest.raises(Violation, match="SILENT_WRONG after ranks") as caught:
        verdicts.require_clean(subject, ["second"], ["ranks"], explore=verdicts.explored_of_ranks)
    assert caught.value.evidence["differs"]
    explorer = verdicts.explored_of_ranks(subject, "second")
    worst = explorer.result.models["ranks"].worst[Outcome.SILENT_WRONG]
    assert worst.recovery.alone
    assert len(set(worst.case.state.cut)) == 2
    assert not MODELS["ranks"].illegal(explorer.recording, worst.case.state)


@pytest.mark.slow
def test_real_ranks_that_are_killed_there_leave_the_same_bytes(
    subjects: Callable[[str], Subject],
) -> None:
    subject = subjects("dcp-overwrite")
    explorer = verdicts.explored_of_ranks(subject, "second")
    worst = explorer.result.models["ranks"].worst[Outcome.SILENT_WRONG]
    assert worst.grade == BY_PROCESS


def test_cuts_of_the_model_are_what_real_ranks_can_leave(
    subjects: Callable[[str], Subject],
) -> None:
    """Why: a cut that can't happen would blame a right manager; there real ranks never arrive."""
    subject = subjects("dcp-per-step")
    recorded = workloads.record(subject, "second", TWO)
    explorer = RanksExplorer(subject, recorded)
    cases = explorer.enumerate("ranks")
    lagging = [one for one in cases if one.state.why.endswith("went on")]
    assert len(lagging) > 10
    for case in random.Random(3).sample(lagging, 5):  # noqa: S311
        assert reproduced.is_left_by_ranks(explorer, case.state, tries=6), case.state.cut


def test_ranks_never_arrive_at_a_cut_that_cannot_happen(
    subjects: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "STOPPED", 3.0)
    subject = subjects("dcp-per-step")
    explorer = RanksExplorer(subject, workloads.record(subject, "second", TWO))
    ones = explorer.recording.operations
    index = next(one for one in ones if one.kind == "rename")
    cut = tuple(index.index + 1 if rank == index.rank else 1 for rank in (0, 1))
    state = replace(explorer.complete(index.index + 1), cut=cut)
    assert "another went on" in MODELS["ranks"].illegal(explorer.recording, state)
    assert not reproduced.is_left_by_ranks(explorer, state, tries=1)


@pytest.mark.slow
def test_a_bundle_of_ranks_replays(subjects: Callable[[str], Subject], tmp_path: Path) -> None:
    subject = subjects("dcp-overwrite")
    explorer = verdicts.explored_of_ranks(subject, "second")
    worst = explorer.result.models["ranks"].worst[Outcome.SILENT_WRONG]
    folder = bundles.write(tmp_path, explorer, worst)
    again = bundles.replay(folder, subject)
    assert (again.outcome, again.fine) == (Outcome.SILENT_WRONG, False)
    lines = (folder / "operations.txt").read_text().splitlines()
    assert any(line.startswith(("-- rank 0", "-- rank 1")) for line in lines)


def test_an_index_that_waits_for_all_shards_is_clean(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("dcp-per-step")
    for model in verdicts.MODELS_OF_RANKS:
        verdicts.require_clean(subject, ["second"], [model], explore=verdicts.explored_of_ranks)
    explorer = verdicts.explored_of_ranks(subject, "second")
    assert {"NEW", "PREVIOUS"} == set(explorer.result.models["ranks"].outcomes)


@pytest.mark.slow
def test_without_the_collectives_an_impossible_cut_is_blamed(
    subjects: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why: the order is what keeps a right manager from blame; a marking that misses it is seen."""
    subject = subjects("dcp-per-step")
    fresh = Subject(subject.info, subject.client, subject.folder / "unmarked", seed=subject.seed)
    recorded = workloads.record(fresh, "second", TWO)
    ones = recorded.recording.operations
    loose = vector_clocks.order(ones, [], {one.process: one.rank for one in ones}, 2)
    monkeypatch.setattr(recorded.recording, "operations", loose)
    recorded.recording.save()
    with pytest.raises(Violation):
        verdicts.require_clean(fresh, ["second"], ["ranks"], explore=verdicts.explored_of_ranks)


@pytest.mark.slow
def test_a_file_that_one_rank_does_not_sync_is_lost_but_on_an_nfs(
    subjects: Callable[[str], Subject],
) -> None:
    """It was closed, and a close sends it there: the models tell the two apart."""
    subject = subjects("mutant:A05-ranks")
    recorded = workloads.record(subject, "second", TWO)
    explorer = engine.RanksExplorer(subject, recorded, engine.FULL_OF_RANKS)
    models = engine.run(explorer, ("nfs", "node-loss")).models
    assert "LOST_STEP" in models["node-loss"].outcomes
    assert set(models["nfs"].outcomes) <= {"NEW", "PREVIOUS"}
