"""Managers judged on crash states of mounted images, and the grades that a violation gets of it.

The traces are made by hand, the managers and the file systems are real. Without root, loop devices
or a mkfs the tests are skipped, and say what is missing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from traces import Trace, atomic

from ckpt_conformance.contract.verdicts import Outcome, Unknown
from ckpt_conformance.crash.explore import engine, observed, real_fs, real_states
from ckpt_conformance.crash.explore.engine import Explorer, Limits, Recorded
from ckpt_conformance.crash.explore.exploration import BY_MODEL
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.trace.operations import ROOT, Kind, Operation, Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt_conformance.crash.explore.exploration import Exploration
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.subject.subject import Subject

PER_STEP, FIXED = "torch-save-atomic-per-step", "torch-save-atomic-fixed-name"
NAMES = {PER_STEP: "checkpoint-4.pt", FIXED: "checkpoint.pt"}
LIMITS = Limits(candidates=300, recoveries=60, alone=5, rounds=1, onward=0, images=4)
EMPTY = {PER_STEP: Outcome.REFUSED_UNTYPED, FIXED: Outcome.LOST_ALL}  # what a file of 0 bytes is


@pytest.fixture(scope="module")
def subjects(new_subject: Callable[..., Subject]) -> Callable[[str], Subject]:
    return cache(new_subject)


def explored(
    subject: Subject, folder: Path, filesystem: str, skip: Sequence[str] = ()
) -> Exploration:
    """Explore step 4 after step 2, under the model and on images of a file system."""
    missing = real_fs.unavailable(filesystem)
    if missing:
        pytest.skip(missing)
    golden = subject.golden()
    trace = Trace(folder / "recording", subject.root, golden.snapshot(2))
    name = NAMES[subject.info.name]
    atomic(trace, name, (golden.snapshot(4) / name).read_bytes(), 4, skip)
    recorded = Recorded("second", trace.finish(), [(2, golden.snapshot(2))])
    result = engine.run(Explorer(subject, recorded, LIMITS), [filesystem], [filesystem])
    assert not result.unknown
    assert result.models[observed.row_of(filesystem)].recovered > 0
    return result


@pytest.mark.parametrize("filesystem", ["ext4", "xfs"])
def test_a_new_name_without_fsync_is_seen_empty(
    subjects: Callable[[str], Subject], tmp_path: Path, filesystem: str
) -> None:
    result = explored(subjects(PER_STEP), tmp_path, filesystem, ["fsync"])
    for row in (filesystem, observed.row_of(filesystem)):
        violation = result.models[row].worst[EMPTY[PER_STEP]]
        assert violation.grade == f"observed on {filesystem}, {real_fs.kernel()}"
    seen = result.models[observed.row_of(filesystem)].worst[EMPTY[PER_STEP]]
    assert filesystem in seen.case.state.why


@pytest.mark.parametrize("filesystem", ["ext4", "xfs"])
def test_a_replaced_file_without_fsync_is_whole_on_ext4_and_empty_on_xfs(
    subjects: Callable[[str], Subject], tmp_path: Path, filesystem: str
) -> None:
    result = explored(subjects(FIXED), tmp_path, filesystem, ["fsync"])
    worst = result.models[filesystem].worst[EMPTY[FIXED]]
    # On ext4 only while the flush that the rename began has not ended.
    assert ("whose flush the rename began" in worst.case.state.why) is (filesystem == "ext4")
    lost = result.models[observed.row_of(filesystem)].worst.get(EMPTY[FIXED])
    if filesystem == "xfs":
        assert lost is not None
    elif lost is not None:  # a sync(2) of anybody, at that moment: full size, and its bytes zeros
        assert all(content.size for content in lost.case.state.contents.values())


def test_a_careful_save_is_clean_on_images(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    result = explored(subjects(PER_STEP), tmp_path, "ext4")
    assert not result.violations
    assert set(result.models["ext4 image"].outcomes) == {"NEW", "PREVIOUS"}


def test_what_no_image_showed_is_allowed_by_the_model_only(
    subjects: Callable[[str], Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why: content alone is no evidence: at another moment something else was promised."""

    def early(recording: Recording, *_: object, **__: object) -> Iterator[State]:
        yield engine.complete(recording, 7)  # before the rename, so before the acknowledgement

    monkeypatch.setattr(real_states, "real_states", early)
    monkeypatch.setattr(real_fs, "unavailable", lambda _: "")
    result = explored(subjects(PER_STEP), tmp_path, "ext4", ["directory"])
    lost = result.models["ext4"].worst[Outcome.LOST_STEP]
    contents = {content for content, _ in result.seen}
    assert lost.case.content in contents, "the same content was seen, before the acknowledgement"
    assert lost.grade == BY_MODEL


def test_what_a_model_does_not_allow_and_was_seen_is_said(
    subjects: Callable[[str], Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed.MODELS["ext4"], "illegal", lambda *_: "a rule", raising=False)
    with pytest.raises(AssertionError, match="a rule"):
        explored(subjects(PER_STEP), tmp_path, "ext4", ["fsync"])


def test_a_file_without_a_name_is_unknown(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    if real_fs.unavailable("ext4"):
        pytest.skip(real_fs.unavailable("ext4"))
    trace = Trace(tmp_path / "recording", tmp_path / "root")
    trace.operations.append(Operation(0, Kind.CREATE, object=9, parent=ROOT))
    explorer = Explorer(subjects(PER_STEP), Recorded("first", trace.finish()), LIMITS)
    with pytest.raises(Unknown, match=r"without a name \(O_TMPFILE\); leave --real ext4 out"):
        engine.run(explorer, [], ["ext4"])


def test_what_is_larger_than_the_image_is_unknown(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    if real_fs.unavailable("ext4"):
        pytest.skip(real_fs.unavailable("ext4"))
    trace = Trace(tmp_path / "recording", tmp_path / "root")
    trace.create("large")
    trace.say(Kind.WRITE, "large", size=real_fs.SIZES["ext4"])  # zeros
    explorer = Explorer(subjects(PER_STEP), Recorded("first", trace.finish()), LIMITS)
    with pytest.raises(Unknown, match=r"image of 64 MiB is too small.*leave --real ext4 out"):
        engine.run(explorer, [], ["ext4"])


@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "btrfs"])
@pytest.mark.parametrize("sync", [True, False])
def test_a_file_that_is_moved_in_is_seen_on_images(
    tmp_path: Path, filesystem: str, *, sync: bool
) -> None:
    """As the models have it: none of what is seen breaks their rules."""
    if real_fs.unavailable(filesystem):
        pytest.skip(real_fs.unavailable(filesystem))
    trace = Trace(tmp_path / "recording", tmp_path / "root")
    made = {"object": 9, "parent": 0}
    trace.say(Kind.CREATE, **made, mode=0o644)
    trace.say(Kind.WRITE, **made, size=9000, data=0)
    trace.data += b"staged" * 1500
    if sync:
        trace.say(Kind.FSYNC, **made)
    trace.say(Kind.RENAME, **made, target="here", new_parent=ROOT)
    recording = trace.finish()
    points = range(len(recording.operations) + 1)
    sizes: set[int] = set()
    for state in real_states.real_states(recording, filesystem, points, rounds=1):
        assert MODELS[filesystem].illegal(recording, state) == ""
        sizes |= {state.contents[9].size for name in state.names if name == "here"}
    assert sizes <= {9000} if sync else sizes <= {0, 9000}
    assert sizes


def test_ctrl_c_leaves_nothing_mounted_and_keeps_what_was_seen(
    subjects: Callable[[str], Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if real_fs.unavailable("ext4"):
        pytest.skip(real_fs.unavailable("ext4"))
    subject = subjects(PER_STEP)
    trace = Trace(tmp_path / "recording", subject.root, subject.golden().snapshot(2))
    trace.rename("checkpoint-2.pt", "other")

    folders: list[Path] = []

    class Images(real_fs.Images):
        def __enter__(self) -> Self:
            folders.append(self.folder)
            return super().__enter__()

    monkeypatch.setattr(real_states.real_fs, "Images", Images)

    def stop(done: int, *_: object) -> None:
        if done >= 2:
            raise KeyboardInterrupt

    recorded = Recorded("second", trace.finish(), [(2, subject.golden().snapshot(2))])
    result = engine.run(Explorer(subject, recorded, LIMITS, stop), [], ["ext4"])
    assert result.interrupted
    assert len(result.seen) == 1
    assert str(folders[-1]) not in Path("/proc/self/mounts").read_text()
    assert not folders[-1].exists()


def test_missing_root_is_said_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_fs, "unavailable", lambda _: "no root")
    with pytest.raises(Unknown, match=r"no root.*--real xfs out"):
        observed.require(["xfs"])


@pytest.mark.parametrize("most", [1, 5, 40])
def test_few_crash_points_are_those_that_tell_most(most: int) -> None:
    writes = [Operation(at, Kind.WRITE, object=1, path="file") for at in range(100)]
    renames = [Operation(at, Kind.RENAME, object=1, path="file") for at in (100, 101)]
    recording = Recording("", Path(), [], [*writes, *renames])
    points = observed.points_of(recording, most)
    assert len(points) <= most
    assert 102 in points, "after the last operation"
    assert points == sorted(set(points))
