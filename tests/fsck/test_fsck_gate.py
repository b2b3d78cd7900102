"""A gate beside a job that saves and rotates: what it prints is whole when it is printed.

The job is a process of its own, which does what it is told where the gate stands still.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fsck_runs import Finished
from rotating import Trainer, value_of

from ckpt_conformance.fsck.judge import gate as gates
from ckpt_conformance.fsck.judge.gate import ROUNDS, Gate, Moment, judge_newest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.judge.judging import Judging
from ckpt_conformance.fsck.source.findings import State
from ckpt_conformance.reference_impl import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.fsck.judge.judging import Judgement


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with Trainer(tmp_path_factory.mktemp("gate") / "run") as one:
        yield one


@pytest.fixture
def job(process: Trainer) -> Trainer:
    """A job with two steps, each of another value."""
    shutil.rmtree(process.root)
    process.root.mkdir()
    process("save", "step_10", 1.0)
    process("save", "step_20", 2.0)
    return process


Command = tuple[Any, ...]


@dataclass
class Between:
    """What the job does at which moment: each time, or the first time only."""

    job: Trainer
    once: dict[tuple[Moment, str], list[Command]] = field(default_factory=dict)
    always: dict[tuple[Moment, str], Any] = field(default_factory=dict)
    seen: dict[tuple[Moment, str], int] = field(default_factory=lambda: defaultdict(int))

    def __call__(self, moment: Moment, name: str) -> None:
        name = name.rpartition("/")[2]
        for key in ((moment, name), (moment, "*")):
            self.seen[key] += 1
            for command in self.once.pop(key, ()):
                self.job(*command)
            if key in self.always:
                self.always[key](self.seen[key])


@pytest.fixture
def between(job: Trainer, monkeypatch: pytest.MonkeyPatch) -> Between:
    made = Between(job)
    monkeypatch.setattr(gates, "reached", made)
    return made


def printed(job: Trainer, *words: str) -> str:
    """Return the name that the gate prints, which is whole now: the job stands still."""
    done = Finished("fsck", job.root, "--newest-whole", *words)
    assert done.status == 0, done.err
    path = job.root / done.out.strip().rpartition("/")[2]
    assert str(path) == done.out.strip()
    assert judge(path).state is State.WHOLE
    assert len(value_of(path)) == 1
    return path.name


MOMENTS = [
    (Moment.LISTED, "*"),
    (Moment.JUDGING, "step_20"),
    (Moment.JUDGED, "step_20"),
    (Moment.CHOSEN, "step_20"),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ([("remove", "step_20")], "step_10"),
        ([("remove", "step_10"), ("save", "step_30", 3.0)], "step_30"),
        ([("save", "step_30", 3.0), ("remove", "step_10"), ("remove", "step_20")], "step_30"),
        ([("rename", "step_20", "step_25")], "step_25"),
        ([("rename", "step_20", "step_20.old"), ("rename", "step_10", "step_20")], "step_20"),
        ([("replace", "step_20", 2.5)], "step_20"),
        ([("tear", "step_20")], "step_10"),
        ([("cut", "step_20", "optimizer.pt")], "step_10"),
        ([("rename", "step_20", "best"), ("begin", "step_20", 9.0)], "step_10"),
    ],
    ids=lambda one: "+".join(two[0] for two in one) if isinstance(one, list) else one,
)
def test_what_is_printed_is_whole(
    moment: tuple[Moment, str], commands: list[Command], expected: str, between: Between
) -> None:
    between.once[moment] = commands
    assert printed(between.job) == expected
    assert not between.once


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
@pytest.mark.parametrize("keeps_time", [False, True])
def test_another_save_under_the_same_name_is_judged(
    moment: tuple[Moment, str], between: Between, *, keeps_time: bool
) -> None:
    """Of the same size, and with the time of the one before."""
    between.once[moment] = [("tear", "step_20", "optimizer.pt")]
    if keeps_time:
        between.job("tear", "step_20", "model.pt")  # so that nothing but the change of it tells
        between.job("replace", "step_20", 2.0)
        between.once[moment] = []
        between.always[moment] = lambda seen: (
            between.job("tear", "step_20", keeps_time=True) if seen == 1 else None
        )
    assert printed(between.job) == "step_10"


def test_one_file_of_another_save_is_not_mixed_in(between: Between) -> None:
    """While the gate reads, so that it has read one file of each."""
    between.once[Moment.JUDGED, "step_20"] = [("replace_file", "step_20", 9.0)]
    between.once[Moment.CHOSEN, "step_20"] = [("replace", "step_20", 2.5)]
    assert printed(between.job) == "step_20"
    assert value_of(between.job.root / "step_20") == {2.5}


def test_what_stays_as_it_was_is_read_once(
    between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    whole = Judging.close

    def close(self: Judging, opened: Any) -> Judgement | None:  # noqa: ANN401
        read.append(opened.job.found.name)
        return whole(self, opened)

    monkeypatch.setattr(Judging, "close", close)
    between.once[Moment.CHOSEN, "step_20"] = [("begin", "step_30", 3.0), ("save", "step_5", 0.5)]
    between.once[Moment.JUDGED, "step_30"] = [("tear", "step_10")]
    assert printed(between.job) == "step_20"
    assert read[:-1] == ["step_20", "step_30"]  # and what is printed, by the test


def test_a_save_in_place_that_goes_on_is_passed_over(between: Between) -> None:
    """It is written to whenever it is judged; the one before it is whole all the time."""
    between.job("begin", "step_30", 3.0)
    between.always[Moment.JUDGING, "step_30"] = lambda _: between.job("cut", "step_30")
    done = Finished("fsck", between.job.root, "--newest-whole")
    assert (done.status, done.out) == (0, f"{between.job.root / 'step_20'}\n")
    assert "passed over: " in done.err
    assert between.seen[Moment.JUDGING, "step_30"] == ROUNDS
    assert between.seen[Moment.JUDGING, "step_20"] == 1


def test_steps_that_come_all_the_time_are_told(between: Between) -> None:
    between.always[Moment.LISTED, "*"] = lambda seen: between.job("save", f"step_{20 + seen}", 4.0)
    done = Finished("fsck", between.job.root, "--newest-whole", "--json")
    assert done.status == 0
    assert '"change": "new"' in done.out


@pytest.mark.parametrize("moment", [Moment.JUDGING, Moment.JUDGED, Moment.CHOSEN])
def test_a_rotation_that_is_faster_is_told_and_nothing_printed(
    moment: Moment, between: Between
) -> None:
    between.job("remove", "step_10")
    newest = [20]

    def rotate(_: int) -> None:
        between.job("save", f"step_{newest[0] + 1}", float(newest[0]))
        between.job("remove", f"step_{newest[0]}")
        newest[0] += 1

    between.always[moment, "*"] = rotate
    done = Finished("fsck", between.job.root, "--newest-whole")
    assert (done.status, done.out) == (2, "")
    assert "--pin DIR" in done.err
    assert newest[0] == 20 + ROUNDS


@pytest.mark.parametrize(("file", "is_state"), [("state.json", True), ("train.log", False)])
def test_a_log_in_a_checkpoint_may_grow(file: str, between: Between, *, is_state: bool) -> None:
    """A text that nobody loads; of any other file nobody can say that it is whole."""
    between.job("append", "step_20", file)
    (between.job.root / "step_20" / file).write_text("[1]")
    between.always[Moment.JUDGING, "step_20"] = lambda _: between.job("append", "step_20", file)
    done = Finished("fsck", between.job.root, "--newest-whole")
    assert done.status == (2 if is_state else 0)
    assert ("step_20 could not be judged, and may be the newest whole" in done.err) == is_state


@pytest.mark.parametrize("moment", [Moment.JUDGED, Moment.CHOSEN])
def test_a_link_that_moves_is_judged_where_it_leads(moment: Moment, between: Between) -> None:
    """What is printed is no link: it may move again before anybody follows it."""
    root = between.job.root
    between.job("point", "latest", "step_10")
    between.once[moment, "*"] = [("point", "latest", "step_20"), ("tear", "step_10")]
    done = Finished("fsck", root / "latest", "--newest-whole")
    assert (done.status, done.out) == (0, f"{root / 'step_20'}\n")


def test_a_link_among_files_is_named_by_what_it_leads_to(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "best-weights.pt")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "last.ckpt").symlink_to("../best-weights.pt")
    newest = judge_newest(tmp_path).newest_whole
    assert newest is not None
    assert not newest.path.is_symlink()  # type: ignore[union-attr]


def test_hard_links_that_come_and_go_are_no_change(between: Between) -> None:
    """Of a job that shares files between its steps: only the inode changes."""
    root = between.job.root
    (root / "kept").mkdir()

    def link(seen: int) -> None:
        (root / "kept" / f"{seen}.bin").hardlink_to(root / "step_20" / "model.pt")

    between.always[Moment.JUDGED, "step_20"] = link
    assert printed(between.job) == "step_20"
    assert between.seen[Moment.JUDGED, "step_20"] == 1


def test_it_is_looked_at_once_more_when_it_is_printed(job: Trainer) -> None:
    gate = Gate(job.root)
    assert gate.run().newest_whole is not None
    assert gate.is_still_there()
    job("tear", "step_20", keeps_time=True)
    assert not gate.is_still_there()


# -- by chance -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_never_pauses(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is answered was whole at some moment from the last look at it on, by the job's notes."""
    looked: list[float] = []
    stands = Gate._stands

    def noted(self: Gate, one: Any) -> bool:  # noqa: ANN401
        if one is self._chosen:
            looked.append(time.monotonic())
        return stands(self, one)

    monkeypatch.setattr(Gate, "_stands", noted)
    answers: list[tuple[float, float, str]] = []
    notes: list[tuple[float, str, str]] = []
    with Trainer(tmp_path / "run", str(seed), "150") as job:
        thread = threading.Thread(target=lambda: notes.extend(job.notes()))
        thread.start()
        while thread.is_alive():
            looked.clear()
            newest = Gate(job.root).run().newest_whole
            now = time.monotonic()
            if newest is not None:
                answers.append((looked[-1] if looked else now, now, newest.path.name))
        thread.join()
    assert notes[-1][1] == "end"
    assert len(answers) > 5, len(answers)
    wrong = [one for one in answers if not _was_whole(notes, *one)]
    assert not wrong, (wrong, [one for one in notes if one[2] == wrong[0][2]])


def _was_whole(notes: list[tuple[float, str, str]], start: float, end: float, name: str) -> bool:
    """Return whether a step may have been whole at a moment in [start, end].

    "whole" is noted once it is, "broken" before anything is done to it, "torn" and "gone" after it.
    """
    own = [(at, what) for at, what, of in notes if of == name]
    if any(start <= at <= end for at, _ in own):
        return True  # something happened in between
    last = next((what for at, what in reversed(own) if at < start), "renamed, and not noted yet")
    return last not in ("torn", "gone")


def test_a_pointer_of_the_run_is_no_change(tmp_path: Path) -> None:
    """A name that was looked at and is no checkpoint is not one that came; one round is enough."""
    model = torch.nn.Linear(2, 2)
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, model=model)
    manager.close()
    (tmp_path / "latest.txt").write_text("2")
    done = Finished("fsck", tmp_path, "--newest-whole")
    assert (done.status, done.out) == (0, f"{tmp_path / 'model_000002.pt'}\n")
    assert done.err == ""
