"""Saves of the reference manager that go on while the job trains."""

from __future__ import annotations

import errno
import gc
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_reference_job import KINDS, Job, resume, same

from ckpt_conformance.reference_impl import (
    BackgroundSaveFailed,
    CheckpointError,
    CheckpointManager,
    SaveRefused,
    WriterDied,
    find_local_checkpoint_steps,
)

if TYPE_CHECKING:
    from rank_worlds import Worlds

    from ckpt_conformance.reference_impl import SaveHandle


class Held(CheckpointManager):
    """Stands before it writes, until the test lets it go; fails at the steps of `fails`."""

    def __init__(self, root: Path, **given: Any) -> None:  # noqa: ANN401, D107
        super().__init__(root, **given)
        self.go = threading.Event()
        self.fails: set[int] = set()
        self.written: list[int] = []

    def write(self, state: Any, save_id: str) -> Path:  # noqa: ANN401
        assert self.go.wait(60)
        if state.step in self.fails:
            raise OSError(28, "No space left on device")
        self.written.append(state.step)
        return super().write(state, save_id)


def begin(manager: CheckpointManager, job: Job, step: int) -> SaveHandle:
    return manager.save_async(step, tokens_seen=step * 100, extra={"phase": step}, **job.parts)


def pointer(root: Path) -> str | None:
    path = root / "latest"
    return path.read_text() if path.exists() else None


@KINDS
def test_what_the_job_does_after_the_call_changes_nothing(tmp_path: Path, kind: str) -> None:
    """The whole state is that of the call, although all of it was trained over (B02, C12)."""
    job = Job()
    job.train(3)
    manager = Held(tmp_path, use_dcp=kind == "dcp")
    handle = begin(manager, job, 3)
    saved = job.state()
    job.train(4)
    for parameter in job.model.parameters():
        parameter.data.fill_(7)
    assert not handle.done()
    manager.go.set()
    assert handle.wait().exists()
    manager.close()
    other, result = resume(tmp_path)
    assert same(other.state(), saved)
    assert (result.step, result.tokens_seen, result.extra) == (3, 300, {"phase": 3})


def test_a_value_that_can_be_changed_in_place_is_copied(tmp_path: Path) -> None:
    """Of `extra` too: lists, dicts, a bytearray, a tensor."""
    extra: dict[str, Any] = {"l": [1], "d": {"a": 1}, "b": bytearray(b"x"), "t": torch.ones(2)}
    job, manager = Job(), Held(tmp_path)
    handle = manager.save_async(1, extra=extra, **job.parts)
    extra["l"].append(2)
    extra["d"]["a"] = 2
    extra["b"][0] = 0
    extra["t"].zero_()
    manager.go.set()
    handle.wait()
    saved = CheckpointManager(tmp_path).load(**job.parts).extra
    assert same(saved, {"l": [1], "d": {"a": 1}, "b": bytearray(b"x"), "t": torch.ones(2)})


@KINDS
def test_tied_weights_stay_tied_and_take_the_room_of_one(tmp_path: Path, kind: str) -> None:
    """A copy of each key would cut the tie (S01)."""
    job = Job()
    job.train(1)
    with CheckpointManagers(tmp_path / "a", tmp_path / "b", kind) as (now, later):
        now.save(1, **job.parts)
        begin(later, job, 1).wait()
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        for name in "ab"
    ]
    assert abs(sizes[0] - sizes[1]) < 200  # of ids and of what `extra` holds


class CheckpointManagers:
    """Two managers that are closed at the end."""

    def __init__(self, first: Path, second: Path, kind: str) -> None:  # noqa: D107
        self.both = [CheckpointManager(root, use_dcp=kind == "dcp") for root in (first, second)]

    def __enter__(self) -> list[CheckpointManager]:  # noqa: D105
        return self.both

    def __exit__(self, *_: object) -> None:  # noqa: D105
        for manager in self.both:
            manager.close()


@KINDS
def test_async_save_defers_latest_until_flush_durable(tmp_path: Path, kind: str) -> None:
    """Neither `latest` nor discovery names a step that is still being written (K018, K019)."""
    job, manager = Job(), Held(tmp_path, use_dcp=kind == "dcp")
    manager.go.set()
    begin(manager, job, 1).wait()
    first = pointer(tmp_path)
    manager.go.clear()
    handle = begin(manager, job, 2)
    assert (pointer(tmp_path), manager.steps()) == (first, [1])
    manager.go.set()
    handle.wait()
    assert manager.steps() == [1, 2]
    assert pointer(tmp_path) != first


def test_latest_invariant_holds_every_cycle(tmp_path: Path) -> None:
    """Whenever a handle has ended, `latest` names its step, and that step loads (K019)."""
    job, manager = Job(), CheckpointManager(tmp_path, keep_last=2)
    for step in range(1, 6):
        job.train(1)
        begin(manager, job, step).wait()
        assert f"{step:06d}" in str(pointer(tmp_path))
        assert find_local_checkpoint_steps(tmp_path) == list(range(max(1, step - 1), step + 1))
        assert resume(tmp_path)[1].step == step


def test_sync_mode_commits_latest_immediately(tmp_path: Path) -> None:
    """With the mode `disabled` the save has ended when the call returns (K018, K019)."""
    job, manager = Job(), CheckpointManager(tmp_path, async_mode="disabled")
    handle = begin(manager, job, 1)
    assert handle.done()
    assert handle.exception() is None
    assert "000001" in str(pointer(tmp_path))


def test_back_to_back_async_saves_do_not_deadlock(tmp_path: Path) -> None:
    """Ten saves of which nobody waits for one: all are there, in their order (K019)."""
    job, manager = Job(), Held(tmp_path, keep_last=0)
    manager.go.set()
    handles = []
    for step in range(1, 11):
        job.train(1)
        handles.append(begin(manager, job, step))
    manager.close()
    assert all(handle.done() for handle in handles)
    assert manager.written == list(range(1, 11)) == find_local_checkpoint_steps(tmp_path)


def test_one_save_is_under_way_unless_more_are_allowed(tmp_path: Path) -> None:
    """With room for two the third call waits for the first save, and for no other (C15)."""
    job, manager = Job(), Held(tmp_path, max_pending=2, keep_last=0)
    first, second = begin(manager, job, 1), begin(manager, job, 2)
    assert not first.done()
    third: list[SaveHandle] = []
    caller = threading.Thread(target=lambda: third.append(begin(manager, job, 3)))
    caller.start()
    assert not third
    manager.go.set()
    caller.join(60)
    assert first.done()
    manager.close()
    assert second.done()
    assert manager.written == [1, 2, 3]


def test_no_call_waits_while_there_is_room(tmp_path: Path) -> None:
    """With room for four, four begin; none of them has ended (C15)."""
    job, manager = Job(), Held(tmp_path, max_pending=4, keep_last=0)
    handles = [begin(manager, job, step) for step in range(1, 5)]
    assert not any(handle.done() for handle in handles)
    manager.go.set()
    manager.close()
    assert manager.written == [1, 2, 3, 4]


def test_two_saves_of_one_step_end_in_their_order(tmp_path: Path) -> None:
    """The later call wins."""
    job, manager = Job(), Held(tmp_path, max_pending=2)
    begin(manager, job, 1)
    job.train(2)
    saved = job.state()
    begin(manager, job, 1)
    manager.go.set()
    manager.close()
    assert same(resume(tmp_path)[0].state(), saved)


# ---- errors ------------------------------------------------------------------------------------


def failed(tmp_path: Path, **given: Any) -> tuple[Job, Held, SaveHandle]:  # noqa: ANN401
    """Begin step 2, whose save fails, after a whole step 1."""
    job, manager = Job(), Held(tmp_path, **given)
    manager.go.set()
    begin(manager, job, 1).wait()
    manager.fails = {2}
    return job, manager, begin(manager, job, 2)


def test_an_error_is_told_by_wait_and_exception_each_time(tmp_path: Path) -> None:
    """As the disk raised it; and who has been told is not told again by the next save."""
    job, manager, handle = failed(tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            handle.wait()
        assert isinstance(handle.exception(), OSError)
    begin(manager, job, 3).wait()
    manager.close()
    assert find_local_checkpoint_steps(tmp_path) == [1, 3]


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_an_error_that_nobody_asked_for_is_raised_by_the_next_save(
    tmp_path: Path, how: str
) -> None:
    """Once; the save that raised it did not begin, and can be made again (PX12, C03)."""
    job, manager, _ = failed(tmp_path)
    with pytest.raises(BackgroundSaveFailed, match="step 2") as raised:
        getattr(manager, how)(3, **job.parts)
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.steps == (2,)
    assert find_local_checkpoint_steps(tmp_path) == [1]
    getattr(manager, how)(3, **job.parts)
    manager.close()
    assert find_local_checkpoint_steps(tmp_path) == [1, 3]


def test_an_error_that_nobody_asked_for_is_raised_by_close(tmp_path: Path) -> None:
    """Also where other saves came after it; the mirror and the ranks are closed all the same."""
    job, manager, _ = failed(tmp_path, max_pending=3)
    with pytest.raises(BackgroundSaveFailed, match="step 2"):
        manager.close()
    manager.close()
    begin(manager, job, 3).wait()
    manager.close()
    assert find_local_checkpoint_steps(tmp_path) == [1, 3]


def test_a_load_waits_for_what_is_under_way_and_leaves_its_error(tmp_path: Path) -> None:
    """It serves the step that was being saved; an error goes on to the next save."""
    job, manager = Job(), Held(tmp_path)
    begin(manager, job, 1)
    threading.Thread(target=manager.go.set).start()
    assert manager.load(**job.parts).step == 1
    manager.fails = {2}
    begin(manager, job, 2)
    assert manager.load(**job.parts).step == 1
    with pytest.raises(BackgroundSaveFailed):
        manager.close()


def test_a_manager_that_is_dropped_takes_its_thread_along(tmp_path: Path) -> None:
    """Nobody has to close it for that: a job makes many, one after the other, in its tests."""
    before = set(threading.enumerate())
    job, manager = Job(), CheckpointManager(tmp_path)
    begin(manager, job, 1).wait()
    (thread,) = set(threading.enumerate()) - before
    del manager
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_what_cannot_be_saved_is_refused_by_the_call(tmp_path: Path) -> None:
    """Nothing was begun, so the job learns it at once (K017)."""
    job, manager = Job(), Held(tmp_path)
    with pytest.raises(SaveRefused, match=r"extra\.logger"):
        manager.save_async(1, extra={"logger": object()}, **job.parts)
    manager.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [({"async_mode": "later"}, "async_mode is 'later'"), ({"max_pending": 0}, "max_pending is 0")],
)
def test_settings_that_are_none(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    """A value that makes no sense is named."""
    with pytest.raises(ValueError, match=words):
        CheckpointManager(tmp_path, **given)


# ---- rotation ----------------------------------------------------------------------------------


def test_cleanup_never_deletes_latest_or_in_flight(tmp_path: Path) -> None:
    """Until a step is there its save deletes nothing; what a failed one replaces stays (K019)."""
    job, manager = Job(), Held(tmp_path, keep_last=1)
    manager.go.set()
    begin(manager, job, 1).wait()
    manager.go.clear()
    handle = begin(manager, job, 2)
    assert find_local_checkpoint_steps(tmp_path) == [1]
    manager.fails = {2}
    manager.go.set()
    assert handle.exception()
    assert find_local_checkpoint_steps(tmp_path) == [1]
    begin(manager, job, 3).wait()
    manager.close()
    assert find_local_checkpoint_steps(tmp_path) == [3]


# ---- the end of the process --------------------------------------------------------------------

SCRIPT = """
import sys, torch
from ckpt_conformance.reference_impl import CheckpointManager

class Slow(CheckpointManager):
    def publish(self, staged):
        if {fails} and self.steps():
            raise OSError(28, "No space left on device")
        return super().publish(staged)

manager = Slow(sys.argv[1], keep_last=0, max_pending=2)
for step in (1, 2):
    manager.save_async(step, model=torch.nn.Linear(2, 2))
{end}
"""


def process(root: Path, *, fails: bool = False, end: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(fails=fails, end=end), str(root)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise KeyError", 1)])
def test_a_process_that_ends_finishes_its_saves(tmp_path: Path, end: str, code: int) -> None:
    """By its last line, by `sys.exit` and by an error (C07)."""
    done = process(tmp_path, end=end)
    assert done.returncode == code, done.stderr
    assert find_local_checkpoint_steps(tmp_path) == [1, 2]


def test_at_the_end_an_error_that_nobody_asked_for_is_logged(tmp_path: Path) -> None:
    """With its traceback, on standard error; the step before is there."""
    done = process(tmp_path, fails=True)
    assert "the save of step 2 in the background failed, and nobody asked" in done.stderr
    assert "No space left on device" in done.stderr
    assert find_local_checkpoint_steps(tmp_path) == [1]


def test_a_process_that_is_killed_leaves_the_step_before(tmp_path: Path) -> None:
    """SIGKILL in the middle of a save in the background costs that step alone."""
    done = process(
        tmp_path,
        end="manager.background.finish()\n"
        "type(manager).publish = lambda self, staged: __import__('os').kill(0 or "
        "__import__('os').getpid(), 9)\n"
        "manager.save_async(3, model=torch.nn.Linear(2, 2)).wait()",
    )
    assert done.returncode == -9
    assert find_local_checkpoint_steps(tmp_path) == [1, 2]
    model = torch.nn.Linear(2, 2)
    assert CheckpointManager(tmp_path).load(model=model).step == 2


# ---- several ranks -----------------------------------------------------------------------------


@pytest.mark.xdist_group("ranks")
@KINDS
def test_ranks_change_everything_while_they_save(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    """What each rank copied is what is there; a barrier of the job goes on meanwhile."""
    given: dict[str, Any] = {"root": str(tmp_path), "layout": "2:S0", "use_dcp": kind == "dcp"}
    saved = worlds.results(2, "rank_cases:save_and_scramble", **given)
    loaded = worlds.results(2, "rank_cases:load", **given)
    for one, other in zip(saved, loaded, strict=True):
        assert not other["wrong"]
        assert (one["draws"], one["at"], 3) == (other["draws"], other["at"], other["step"])


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("at", "rank", "fault"), [("bring", 1, "disk full"), ("write_own", 0, "disk full")]
)
def test_an_error_of_one_rank_is_told_by_the_handle_of_each(
    worlds: Worlds, tmp_path: Path, at: str, rank: int, fault: str
) -> None:
    """Also one of the copy, which other ranks have left behind; the next save of all goes well."""
    injected = {"at": at, "fault": fault, "rank": rank}
    given: dict[str, Any] = {"root": str(tmp_path), "layout": "2:S0", "injected": injected}
    found = worlds.results(2, "rank_faults:save_faulty_in_background", **given)
    assert {one["kind"] for one in found} == {"RankFailed"}
    assert all(f"rank {rank}: OSError" in one["message"] for one in found)
    assert {one["again"] for one in found} == {""}
    assert find_local_checkpoint_steps(tmp_path) == [5]


# ---- a process of its own ----------------------------------------------------------------------


@KINDS
def test_a_process_of_its_own_writes_what_the_job_had(tmp_path: Path, kind: str) -> None:
    """Ties and all; the job's process rotates."""
    job = Job()
    with CheckpointManagers(tmp_path, tmp_path / "b", kind) as (manager, _):
        manager.async_mode, manager.keep_last = "process", 2
        for step in range(1, 4):
            job.train(1)
            handle, saved = begin(manager, job, step), job.state()
            for parameter in job.model.parameters():
                parameter.data.add_(1)
            assert handle.wait().exists()
        other, result = resume(tmp_path)
        assert same(other.state(), saved)
        assert (result.step, manager.steps()) == (3, [2, 3])
        assert str(pointer(tmp_path)).find("000003") >= 0


def killed(manager: CheckpointManager, root: Path) -> None:
    """Kill the writer as soon as it has written a part of a file."""
    process = vars(manager)["_writer"]._process
    while not any(path.stat().st_size for path in root.rglob("*.tmp") if path.is_file()):
        process.join(0.001)
    process.kill()


def test_the_death_of_the_writer_is_an_error_of_its_save_alone(tmp_path: Path) -> None:
    """At once; nothing names what it wrote, and the next save has a writer of its own."""
    job, manager = Job(), CheckpointManager(tmp_path, async_mode="process")
    begin(manager, job, 1).wait()
    big = {"t": torch.zeros(50_000_000)}
    handle = manager.save_async(2, extra=big, **job.parts)
    killed(manager, tmp_path)
    for _ in range(2):
        with pytest.raises(WriterDied, match="exit code -9") as raised:
            handle.wait(60)
        assert (raised.value.step, raised.value.code) == (2, -9)
    assert manager.steps() == [1]
    assert "000001" in str(pointer(tmp_path))
    begin(manager, job, 3).wait()
    manager.close()
    assert find_local_checkpoint_steps(tmp_path) == [1, 3]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_writer_that_runs_out_of_memory_costs_its_save_alone(tmp_path: Path) -> None:
    """It says so, or dies of it."""
    job, manager = Job(), CheckpointManager(tmp_path, async_mode="process")
    begin(manager, job, 1).wait()
    process = vars(manager)["_writer"]._process
    used = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_AS)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (used + (100 << 20), hard))
    handle = manager.save_async(2, extra={"t": torch.zeros(100_000_000)}, **job.parts)
    with pytest.raises(CheckpointError, match="wrote step 2"):
        handle.wait(60)
    begin(manager, job, 3).wait()
    manager.close()
    assert find_local_checkpoint_steps(tmp_path) == [1, 3]


def test_an_error_of_the_disk_that_the_writer_met_is_one(tmp_path: Path) -> None:
    """With its number."""
    job, manager = Job(), CheckpointManager(tmp_path, async_mode="process")
    begin(manager, job, 1).wait()
    process = vars(manager)["_writer"]._process
    limit = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, limit[1]))
    with pytest.raises(OSError, match="File too large") as raised:
        begin(manager, job, 2).wait()
    assert raised.value.errno == errno.EFBIG
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limit)
    begin(manager, job, 3).wait()
    manager.close()
