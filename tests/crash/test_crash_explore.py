"""The explorer on recordings made by hand: what violates is found, blamed, shrunk, replayed.

The manager is real (`torch-save-atomic-per-step` or its in-place twin); the trace of its save is
written here, so that one call can be left out of it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from traces import Trace, atomic, in_place

from ckpt_conformance.contract.verdicts import Outcome, Unknown
from ckpt_conformance.crash.explore import bundles, engine, reproduced, workloads
from ckpt_conformance.crash.explore.engine import Explorer, Limits, Recorded
from ckpt_conformance.crash.explore.exploration import BY_PROCESS
from ckpt_conformance.crash.explore.judging import Facts
from ckpt_conformance.crash.model.models import OF_A_DISK
from ckpt_conformance.report import certificate
from ckpt_conformance.subject import bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpt_conformance.crash.explore.exploration import Exploration
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.subject.subject import Subject

PER_STEP, IN_PLACE = "torch-save-atomic-per-step", "torch-save-inplace"
LIMITS = Limits(candidates=300, recoveries=60, alone=10, rounds=2)


@pytest.fixture(scope="module")
def subjects(new_subject: Callable[..., Subject]) -> Callable[[str], Subject]:
    @cache
    def get(name: str) -> Subject:
        subject = new_subject(name)
        subject.golden()
        return subject

    return get


def second_save(subject: Subject, folder: Path, skip: Sequence[str] = ()) -> Recorded:
    """Give the trace of step 4 after step 2, by a manager that leaves calls out."""
    golden = subject.golden()
    trace = Trace(folder / "recording", subject.root, golden.snapshot(2))
    data = (golden.snapshot(4) / "checkpoint-4.pt").read_bytes()
    atomic(trace, "checkpoint-4.pt", data, 4, skip)
    return Recorded("second", trace.finish(), [(2, golden.snapshot(2))])


def run(subject: Subject, recorded: Recorded, *models: str) -> Exploration:
    result = engine.explore(subject, recorded, models, LIMITS)
    assert not result.unknown
    return result


def test_a_recording_that_failed_can_be_made_again(
    subjects: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects(PER_STEP)
    live = subject.execute

    def fail(*ops: dict[str, Any], **given: Any) -> ProcessResult:  # noqa: ANN401
        return replace(live(*ops, **given), exit_kind="crashed")

    with monkeypatch.context() as patch:
        patch.setattr(subject, "execute", fail)
        with pytest.raises(Unknown, match="nothing disturbs"):
            workloads.record(subject, "first")
    recorded = workloads.record(subject, "first")
    assert recorded.recording.operations


def test_a_careful_save_passes_everything(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject = subjects(PER_STEP)
    recorded = second_save(subject, tmp_path)
    result = run(subject, recorded, *OF_A_DISK)
    assert not result.violations
    assert result.audit == []
    kill = result.models["kill"]
    assert set(kill.outcomes) == {"NEW", "PREVIOUS"}
    syncs = {o.index + 1 for o in recorded.recording.operations if o.kind == "fsync"}
    every = set(range(len(recorded.recording.operations) + 1))
    assert set(kill.points) >= every - syncs, "a sync alone changes no content"
    assert kill.recovered == kill.distinct <= kill.candidates
    assert set(result.used.values()) == {""}, "the job goes on after a recovery"


def test_without_fsync_power_loss_is_found_and_blamed(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject = subjects(PER_STEP)
    result = run(subject, second_save(subject, tmp_path, ["fsync"]), "kill", "ext4")
    assert result.models["kill"].is_clean
    worst = result.models["ext4"].worst
    assert set(worst) == {Outcome.REFUSED_UNTYPED}, "the newest is empty; the older one is whole"
    violation = worst[Outcome.REFUSED_UNTYPED]
    assert violation.recovery.alone
    assert violation.recovery.older == (0,)
    assert violation.guilty is not None
    assert violation.guilty.kind == "rename"
    assert violation.blame is not None
    assert violation.blame.rule == "renamed-unsynced"


def test_without_a_directory_fsync_the_acknowledged_step_is_lost(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject = subjects(PER_STEP)
    result = run(subject, second_save(subject, tmp_path, ["directory"]), "kill", "ext4")
    assert result.models["kill"].is_clean
    (violation,) = result.models["ext4"].worst.values()
    assert violation.outcome is Outcome.LOST_STEP
    assert violation.blame is not None
    assert violation.blame.rule == "directory-not-synced"


def test_in_place_is_lost_under_kill(subjects: Callable[[str], Subject], tmp_path: Path) -> None:
    subject = subjects(IN_PLACE)
    golden = subject.golden()
    trace = Trace(tmp_path / "recording", subject.root, golden.snapshot(2))
    in_place(trace, "checkpoint.pt", (golden.snapshot(4) / "checkpoint.pt").read_bytes(), 4)
    recorded = Recorded("second", trace.finish(), [(2, golden.snapshot(2))])
    result = run(subject, recorded, "kill")
    violation = result.models["kill"].worst[Outcome.LOST_ALL]
    assert violation.case.state.point == 2, "shrunk to the truncate, the first operation that harms"
    assert violation.guilty is not None
    assert violation.guilty.kind == "truncate"
    assert "saving.py:1" in violation.source


def a_kill_that_loses_all(subject: Subject, folder: Path) -> Explorer:
    """Explore an in-place save by a trace that the real manager issues, too."""
    golden = subject.golden()
    trace = Trace(folder / "recording", subject.root, golden.snapshot(2))
    in_place(trace, "checkpoint.pt", (golden.snapshot(4) / "checkpoint.pt").read_bytes(), 4)
    recorded = Recorded("second", trace.finish(), [(2, golden.snapshot(2))])
    explorer = Explorer(subject, recorded, LIMITS)
    engine.run(explorer, ["kill"])
    return explorer


def test_a_killed_process_leaves_what_the_model_says(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    explorer = a_kill_that_loses_all(subjects(IN_PLACE), tmp_path)
    report = explorer.result.models["kill"]
    assert report.worst[Outcome.LOST_ALL].grade == "allowed by the model only"
    reproduced.reproduce(explorer)
    assert report.worst[Outcome.LOST_ALL].grade == certificate.REPRODUCED == BY_PROCESS
    explorer.tally()
    assert report.worst[Outcome.LOST_ALL].grade == BY_PROCESS, "judged anew it stays so"


@pytest.mark.parametrize("left", [None, {}, {"checkpoint.pt": b"other"}])
def test_a_killed_process_that_leaves_something_else_proves_nothing(
    subjects: Callable[[str], Subject],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: dict[str, bytes] | None,
) -> None:
    explorer = a_kill_that_loses_all(subjects(IN_PLACE), tmp_path)
    monkeypatch.setattr(reproduced, "_kill", lambda *_: left)
    reproduced.reproduce(explorer)
    worst = explorer.result.models["kill"].worst[Outcome.LOST_ALL]
    assert worst.grade == "allowed by the model only"


def test_a_first_save_that_dies_loses_nothing(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject = subjects(IN_PLACE)
    data = (subject.golden().snapshot(2) / "checkpoint.pt").read_bytes()
    trace = Trace(tmp_path / "recording", subject.root)
    in_place(trace, "checkpoint.pt", data, 2)
    result = run(subject, Recorded("first", trace.finish()), "kill")
    kill = result.models["kill"]
    assert kill.is_clean
    assert kill.outcomes["REFUSED_UNTYPED"], "nothing was acknowledged: a refusal is no loss"


def test_the_same_seed_gives_the_same_exploration(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject = subjects(PER_STEP)
    recorded = second_save(subject, tmp_path, ["fsync"])
    told = [run(subject, recorded, "ext4").to_json() for _ in range(2)]
    for each in told:
        each.pop("seconds")
    assert told[0] == told[1]


def test_several_jobs_find_the_same(
    subjects: Callable[[str], Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects(PER_STEP)
    recorded = second_save(subject, tmp_path, ["fsync"])
    monkeypatch.setattr(engine, "CHUNK", 8)
    limits = Limits(candidates=300, recoveries=24, alone=4, rounds=0, jobs=2)
    one = engine.explore(subject, recorded, ["ext4"], limits)
    assert one.recovered >= 16
    again = engine.explore(subject, recorded, ["ext4"], Limits(300, 24, 4, rounds=0))
    assert one.models["ext4"].outcomes == again.models["ext4"].outcomes


def test_a_whole_step_that_does_not_load_is_unknown(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject = subjects(PER_STEP)
    trace = Trace(tmp_path / "recording", subject.root)
    atomic(trace, "checkpoint-4.pt", b"no checkpoint", 4)
    result = engine.explore(subject, Recorded("first", trace.finish()), ["kill"], LIMITS)
    assert any("control failed" in why for why in result.unknown)


def test_ctrl_c_gives_what_was_found(
    subjects: Callable[[str], Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects(PER_STEP)
    recorded = second_save(subject, tmp_path)
    monkeypatch.setattr(engine, "CHUNK", 3)

    def stop(done: int, *_: Any) -> None:  # noqa: ANN401
        if done >= 6:
            raise KeyboardInterrupt

    result = engine.explore(subject, recorded, ["kill"], LIMITS, stop)
    assert result.interrupted
    assert result.models["kill"].recovered == 6


def test_a_bundle_replays_alone(subjects: Callable[[str], Subject], tmp_path: Path) -> None:
    subject = subjects(PER_STEP)
    recorded = second_save(subject, tmp_path, ["fsync"])
    explorer = Explorer(subject, recorded, LIMITS)
    result = engine.run(explorer, ["ext4"])
    folder = bundles.write(tmp_path / "bundles", explorer, result.violations[0])
    again = bundles.replay(folder, subject)
    assert again.outcome is Outcome.REFUSED_UNTYPED
    assert not again.fine
    assert "EOFError" in again.summary
    text = (folder / "operations.txt").read_text()
    assert "---- crash here" in text
    assert ">>" in text
    whole = subject.golden().snapshot(4) / "checkpoint-4.pt"
    (folder / "checkpoints" / "checkpoint-4.pt").write_bytes(whole.read_bytes())
    assert bundles.replay(folder, subject).fine, "mended, it is fine"


def test_a_bundle_of_an_earlier_version_replays(
    subjects: Callable[[str], Subject], repository: Path
) -> None:
    """What was written before the facts got the names that they have in the code now.

    Of its recording only the operations were kept, and its root is a path that nobody can make.
    """
    folder = repository / "tests" / "golden" / "bundles" / "second-kill-LOST_ALL"
    again = bundles.replay(folder, subjects(IN_PLACE))
    assert again.outcome is Outcome.LOST_ALL
    assert not again.fine
    assert "EOFError" in again.summary
    content = bundle.read(folder)
    assert bundles.part_of(content, bundles.Promise).facts == Facts(0, (), (1,))
    del content["facts"]["floor"]
    with pytest.raises(bundle.BundleError, match="facts"):
        bundles.part_of(content, bundles.Promise)
