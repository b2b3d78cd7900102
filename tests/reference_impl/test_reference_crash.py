"""The reference manager when it is killed, when the disk is full, and when the disk fails."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, BinaryIO

import pytest
import torch
from test_reference_job import KINDS, Job, Quick, listing, resume, same, save

from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointNotFound,
    find_local_checkpoint_steps,
    layout,
    torch_zip,
)
from ckpt_conformance.reference_impl.resolve import candidate_at, explicit_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class KilledError(BaseException):
    """Stands for SIGKILL: no handler of the manager may catch it and go on."""


class Mortal(Quick):
    """Dies at the n-th operation on the disk, half way through it if it writes."""

    left = 10**9

    def _tick(self) -> None:
        if self.left <= 0:
            raise KilledError
        self.left -= 1

    def fsync_file(self, file: BinaryIO) -> None:
        """A kill before it leaves a file whose second half was never written."""
        if self.left == 0:
            file.flush()
            os.truncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
        self._tick()
        super().fsync_file(file)

    def fsync_dir(self, path: Path) -> None:
        self._tick()
        super().fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._tick()
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._tick()
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._tick()
        super().unlink(path)

    def abandon(self) -> None:
        """The dead clean up nothing."""


def small(seed: int) -> dict[str, Any]:
    """A job of a few bytes, for sweeps over many points."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizers": optimizer}


def state_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [job["model"].state_dict(), job["optimizers"].state_dict()]


def lives(root: Path, kind: str, steps: list[int], keep_last: int, left: int) -> list[int] | None:
    """Save steps until killed; gives the acknowledged ones, or None if all were."""
    acknowledged: list[int] = []
    manager = Mortal(root, use_dcp=kind == "dcp", keep_last=keep_last)
    manager.left = left
    try:
        for seed, step in enumerate(steps):
            manager.save(step, **small(seed), extra={"seed": seed})
            acknowledged.append(seed)
    except KilledError:
        return acknowledged
    return None


HISTORIES = {"first": [5], "second": [5, 6], "again": [5, 5], "rotation": [5, 6, 7]}
OFTEN = {"first", "second"}  # the suites kill such saves, too


@KINDS
@pytest.mark.parametrize(
    "history",
    [pytest.param(name, marks=pytest.mark.slow if name in OFTEN else []) for name in HISTORIES],
)
def test_a_kill_at_any_operation_leaves_old_or_new(tmp_path: Path, kind: str, history: str) -> None:
    """After a kill anywhere the newest acknowledged save loads whole, or its successor.

    And the run goes on: the same step is saved again, then the next, and nothing of the dead save
    is left (A01, A02, A09, A12, C01, M016, M038, M039).
    """
    states = {seed: state_of(small(seed)) for seed in range(3)}
    for left in range(200):
        root = tmp_path / str(left)
        acknowledged = lives(root, kind, HISTORIES[history], keep_last=1, left=left)
        if acknowledged is None:
            break
        job = small(50)
        try:
            served = CheckpointManager(root).load(**job).extra["seed"]
        except CheckpointNotFound:
            assert acknowledged == []
        else:
            assert served in (len(acknowledged) - 1, len(acknowledged)), left
            assert same(state_of(job), states[served])
            assert find_local_checkpoint_steps(root)[-1] == HISTORIES[history][served]
        again = HISTORIES[history][len(acknowledged)]
        for step in (again, again + 1):
            Quick(root, use_dcp=kind == "dcp", keep_last=1).save(step, **job)
        other = small(60)
        result = CheckpointManager(root).load(**other)
        assert (result.step, result.refused) == (again + 1, [])
        assert same(state_of(other), state_of(job))
        assert CheckpointManager(root).steps() == [again + 1]
        assert not [name for name in listing(root) if layout.parse_work_name(name)]
    else:
        pytest.fail("the save did not end within 200 operations")
    assert left > 5


def test_a_replaced_step_always_loads_by_its_names(tmp_path: Path) -> None:
    """After a replacement the files have their final names again, and one content (A02, A10)."""
    save(tmp_path, Job(1), 7)
    before = set(listing(tmp_path))
    save(tmp_path, Job(2), 7)
    assert set(listing(tmp_path)) == before
    model = torch.load(tmp_path / "model_000007.pt", weights_only=True)
    assert same(dict(model), dict(Job(2).model.state_dict()))


def test_replacement_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links gets a copy; the result is the same (A02)."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    for seed in (1, 2):
        save(tmp_path, Job(seed), 7)
    other, _ = resume(tmp_path)
    assert same(other.state(), Job(2).state())
    assert not [name for name in listing(tmp_path) if layout.parse_work_name(name)]


def crash_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the write of one file end half way with a full disk, as in the source's test."""
    original: Callable[..., None] = torch_zip.write_tree

    def crashing(tree: Any, stream: Any) -> None:  # noqa: ANN401
        if f"/{name}" in stream.name:
            stream.write(b"partial garbage")
            raise OSError(errno.ENOSPC, "Simulated disk full")
        original(tree, stream)

    monkeypatch.setattr(torch_zip, "write_tree", crashing)


def test_crash_during_save_leaves_no_final_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the model file: the error is the disk's own, no final file appears (M018)."""
    job = Job()
    save(tmp_path, job, 100)
    before = listing(tmp_path)
    crash_in(monkeypatch, "model_000200.pt")
    with pytest.raises(OSError, match="Simulated disk full") as caught:
        save(tmp_path, job, 200)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "model_000200.pt").exists()
    assert listing(tmp_path) == before  # what was staged is gone, so that the disk has room (O03)
    assert resume(tmp_path)[1].step == 100


def test_crash_during_dcp_save_leaves_no_final_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in a sidecar of the DCP format: the directory never appears (M019)."""
    job = Job()
    save(tmp_path, job, 100, "dcp")
    before = listing(tmp_path)
    crash_in(monkeypatch, "extra_state.pt")
    with pytest.raises(OSError, match="Simulated disk full"):
        save(tmp_path, job, 200, "dcp")
    assert not (tmp_path / "dcp_000200").exists()
    assert listing(tmp_path) == before
    assert resume(tmp_path)[1].step == 100


@KINDS
def test_no_tmp_files_after_save(tmp_path: Path, kind: str) -> None:
    """Nothing that was staged survives a successful save, nor what a dead one left (M020)."""
    job = Job()
    for step in range(3):
        save(tmp_path, job, step, kind)
    assert not [name for name in listing(tmp_path) if ".tmp" in name or ".old" in name]


@KINDS
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from_there_on"])
def test_an_error_at_any_operation_reaches_the_caller(
    tmp_path: Path, kind: str, persistent: object
) -> None:
    """The n-th operation fails, for every n: the save raises, and the older step still loads (O03).

    What fails after the commit, in rotation, never fails the save (D09).
    """
    job = small(1)
    quick = {"use_dcp": kind == "dcp", "keep_last": 1}
    for at in range(100):
        root = tmp_path / str(at)
        Quick(root, **quick).save(1, **job)
        manager = Failing(root, **quick)
        manager.left, manager.persistent = at, bool(persistent)
        try:
            manager.save(2, **job)
        except OSError as error:
            assert error.errno == errno.EIO  # noqa: PT017 - success is an outcome too
            assert CheckpointManager(root).load(**job).step in (1, 2)
        else:
            assert CheckpointManager(root).load(**job).step == 2
        if manager.left > 0:
            break
        Quick(root, **quick).save(3, **job)
        assert CheckpointManager(root).steps() == [3]


class Failing(Mortal):
    """Fails with EIO at the n-th operation, once or from there on."""

    persistent = False

    def _tick(self) -> None:
        self.left -= 1
        if self.left == -1 or (self.left < 0 and self.persistent):
            raise OSError(errno.EIO, "Input/output error")

    def fsync_file(self, file: BinaryIO) -> None:
        self._tick()
        Quick.fsync_file(self, file)

    def abandon(self) -> None:
        """The living clean up."""
        CheckpointManager.abandon(self)


class Traced(CheckpointManager):
    """Writes down what it does."""

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401, D107
        self.trace: list[tuple[str, str]] = []
        super().__init__(*given, **named)

    def fsync_file(self, file: BinaryIO) -> None:
        self.trace.append(("fsync", os.path.basename(str(file.name))))  # noqa: PTH119
        super().fsync_file(file)

    def fsync_dir(self, path: Path) -> None:
        self.trace.append(("fsync", path.name + "/"))
        super().fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self.trace.append(("rename", target.name))
        super().rename(source, target)


def test_order_of_the_per_rank_commit(tmp_path: Path) -> None:
    """Files, names, manifest, pointer: each durable before the next (M016, MX2, A04)."""
    manager = Traced(tmp_path / "r", run_id="run")
    manager.save(1, **Job().parts)
    done = [(act, layout.final_name(name)) for act, name in manager.trace]
    data = ["model_000001.pt", "optim_000001_rank0.pt", "extra_000001.pt"]  # as written
    assert done[1:] == [
        *(("fsync", name) for name in [*data, "meta_000001.json"]),
        *(("rename", name) for name in sorted(data)),
        ("fsync", "r/"),
        ("rename", "meta_000001.json"),
        ("fsync", "r/"),
        ("fsync", "latest"),
        ("rename", "latest"),
        ("fsync", "r/"),
    ]


def test_order_of_the_dcp_commit(tmp_path: Path) -> None:
    """Files, manifest, staging directory, rename, root, pointer (MX4, MX2)."""
    manager = Traced(tmp_path / "r", run_id="run", use_dcp=True)
    manager.save(1, **Job().parts)
    done = [(act, layout.final_name(name.rstrip("/"))) for act, name in manager.trace]
    assert done[1:] == [
        ("fsync", "__0_0.distcp"),
        ("fsync", ".metadata.tmp"),
        ("fsync", "extra_state.pt"),
        ("fsync", "meta.json"),
        ("fsync", "dcp_000001"),
        ("rename", "dcp_000001"),
        ("fsync", "r"),
        ("fsync", "latest"),
        ("rename", "latest"),
        ("fsync", "r"),
    ]


def test_the_dead_saves_of_others_are_left_alone(tmp_path: Path) -> None:
    """Only names with this run's tag are reclaimed; another run may be alive (B16)."""
    foreign = tmp_path / layout.work_name("model_000009.pt", "feedbeef0123", "tmp")
    foreign.write_bytes(b"being written")
    save(tmp_path, Job(), 1)
    assert foreign.read_bytes() == b"being written"


class Watching(CheckpointManager):
    """Looks at the pointer after every rename."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        latest = self.root / layout.LATEST
        if latest.exists():
            found = candidate_at(explicit_reference(self.root / latest.read_text().strip()))
            assert found.complete


@KINDS
def test_latest_only_resolves_to_durable_checkpoints(tmp_path: Path, kind: str) -> None:
    """`latest` names a whole checkpoint at every moment of every save (B01, K019)."""
    manager = Watching(tmp_path, use_dcp=kind == "dcp", keep_last=1)
    for step in range(4):
        manager.save(step, **small(step))


@KINDS
def test_latest_invariant_holds_every_cycle(tmp_path: Path, kind: str) -> None:
    """After each save, each failed save and each restart `latest` names the newest (K019, B03)."""
    for step in range(1, 4):
        Quick(tmp_path, use_dcp=kind == "dcp").save(step, **small(step))
        failing = Failing(tmp_path, use_dcp=kind == "dcp")
        failing.left = 0
        with pytest.raises(OSError, match="Input/output error"):
            failing.save(step + 10, **small(step))
        reference = explicit_reference(tmp_path / (tmp_path / "latest").read_text().strip())
        assert reference is not None
        assert reference.step == step


def test_sync_mode_commits_latest_immediately(tmp_path: Path) -> None:
    """When a synchronous save returns, the pointer names it, relative to the root (K019, B13)."""
    manager = CheckpointManager(tmp_path)
    manager.save(7, **small(0))
    assert (tmp_path / layout.LATEST).read_text() == "meta_000007.json\n"
    manager.use_dcp = True
    manager.save(8, **small(0))
    assert (tmp_path / layout.LATEST).read_text() == "dcp_000008\n"
