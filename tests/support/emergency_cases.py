"""Jobs that are preempted: real processes that get real signals in the middle of what they do."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from typing import TYPE_CHECKING, Any, BinaryIO

import rank_cases
import torch
import torch.distributed as dist

from ckpt_conformance.reference_impl import CheckpointManager, DirectoryMirror

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.reference_impl import Termination


def small(step: int, seed: int = 0) -> dict[str, Any]:
    """A job of a few bytes whose state is a matter of its step."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(step):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizers": optimizer}


def digest(job: dict[str, Any]) -> str:
    """Of all of such a job, bit for bit."""
    moments = job["optimizers"].state_dict()["state"]
    named = {
        **job["model"].state_dict(),
        **{f"{k}.{n}": v for k in moments for n, v in moments[k].items()},
    }
    plain = {key: value.numpy().tobytes().hex() for key, value in named.items()}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class Struck(CheckpointManager):
    """Gets signals when it comes to one of its own operations for the n-th time."""

    at, signals, nth = "", (), 1

    def strike(self, name: str) -> None:
        """Send the signals to this process, if this is where they are due."""
        if name == self.at or (self.at == "any" and name):
            self.nth -= 1
            if self.nth == 0:
                for number in self.signals:
                    os.kill(os.getpid(), number)

    def fsync_file(self, file: BinaryIO) -> None:
        """A kill before it leaves a file whose second half was never written."""
        if self.at == "any" and self.nth == 1 and signal.SIGKILL in self.signals:
            file.flush()
            os.truncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
        self.strike("fsync_file")
        super().fsync_file(file)

    def fsync_dir(self, path: Path) -> None:
        """A name of a directory."""
        self.strike("fsync_dir")
        super().fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        """A commit, or a part of one."""
        self.strike("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        """Rotation, or what is cleaned up."""
        self.strike("unlink")
        super().unlink(path)

    def write_file(self, path: Path, tree: Any) -> Any:  # noqa: ANN401
        """A file of a checkpoint."""
        self.strike("write_file")
        return super().write_file(path, tree)

    def delete_step(self, reference: Any) -> None:  # noqa: ANN401
        """A step that rotation takes."""
        self.strike("delete_step")
        super().delete_step(reference)


def preempted(
    root: str, at: str, signals: list[int], nth: int = 1, until: int = 6, **settings: object
) -> dict[str, Any]:
    """Train; save each second step; get signals in between; dump at the next step and end."""
    given: dict[str, Any] = {"keep_last": 1, **settings}
    manager = Struck(root, **given)
    saved: list[int] = []
    with manager.catch_sigterm() as termination:
        manager.at, manager.signals, manager.nth = at, tuple(signals), nth
        for step in range(1, until + 1):
            job = small(step)
            manager.strike(f"step {step}")
            if termination.came:
                return told(manager, step, job, saved, termination)
            if step % 2 == 0:
                manager.save(step, **job)
                saved.append(step)
    return {"saved": saved}


def told(
    manager: Struck, step: int, job: dict[str, Any], saved: list[int], termination: Termination
) -> dict[str, Any]:
    """Dump, and say what was done."""
    path = manager.save_emergency_checkpoint(step, **job)
    return {"saved": saved, "dumped": step, "path": str(path), "left": termination.time_left()}


def killed_in_dump(root: str, nth: int, **settings: object) -> dict[str, Any]:
    """Save step 2; die by SIGKILL at the n-th operation of the dump of step 3."""
    given: dict[str, Any] = dict(settings)
    manager = Struck(root, **given)
    manager.save(2, **small(2))
    with manager.catch_sigterm():
        manager.at, manager.signals, manager.nth = "any", (signal.SIGKILL,), nth
        manager.save_emergency_checkpoint(3, **small(3))
    return {"dumped": 3}


def dump_beside_a_save(root: str) -> dict[str, Any]:
    """Dump step 3 while step 2 is still saved in the background; it is let go on afterwards."""
    import threading

    class Held(CheckpointManager):
        go = threading.Event()

        def write(self, state: Any, save_id: str) -> Path:  # noqa: ANN401
            self.go.wait(60)
            return super().write(state, save_id)

    manager = Held(root)
    with manager.catch_sigterm():
        handle = manager.save_async(2, **small(2))
        manager.save_emergency_checkpoint(3, **small(3))
        goes_on = not handle.done()
        manager.go.set()
        handle.wait()
    manager.close()
    return {"goes_on": goes_on}


# ---- several ranks -------------------------------------------------------------------------------


def dump_on_ranks(
    root: str,
    layout: str,
    steps: list[int] | int = 4,
    reached: list[int] | None = None,
    roots: list[str] | None = None,
    **settings: object,
) -> dict[str, Any]:
    """Every rank gets SIGTERM, or those of `reached` do, and dumps at its own step, alone.

    `steps` may be another one for each rank; `roots` gives each rank a disk of its own.
    """
    rank = dist.get_rank()
    step = steps if isinstance(steps, int) else steps[rank]
    own = root if roots is None else roots[rank]
    given: dict[str, Any] = {"timeout": 20.0, **settings}
    manager = CheckpointManager(own, **given)
    with manager.catch_sigterm() as termination:
        job = rank_cases.Job(layout, step)
        if reached is None or rank in reached:
            os.kill(os.getpid(), signal.SIGTERM)
        path = None
        if termination.came:
            extra = {"rank": rank, "at": step}
            path = str(
                manager.save_emergency_checkpoint(
                    step, **job.parts, tokens_seen=100 * step, extra=extra
                )
            )
    return {"path": path, "draws": job.draws()}


def load_own(roots: list[str], layout: str, **settings: object) -> dict[str, Any]:
    """Load from this rank's own disk."""
    return rank_cases.load(roots[dist.get_rank()], layout, use_dcp=False, **settings)


def dump_unprepared(root: str, layout: str) -> None:
    """Dump without having agreed on an attempt."""
    CheckpointManager(root, timeout=20.0).save_emergency_checkpoint(
        4, **rank_cases.Job(layout, 4).parts
    )


# ---- staging -------------------------------------------------------------------------------------


def killed_in_stage(root: str, mirror: str, nth: int) -> str:
    """Die by SIGKILL at the n-th operation of a stage of step 4 that replaces what is there."""
    manager = Struck(root, run_id="run", mirror=DirectoryMirror(mirror))
    manager.at, manager.signals, manager.nth = "any", (signal.SIGKILL,), nth
    return str(manager.stage_checkpoint_step(4, refresh=True).path)


def stage_together(root: str, mirror: str, at: str) -> list[Any]:
    """Stage step 4 in two processes; both stand at each call of one of their operations."""

    class Together(CheckpointManager):
        met = 0
        holds_a_lock = False

        def remove_if_dead(self, place: Path) -> None:
            """Hold the lock of a place of the other one, which may be waiting for it."""
            self.holds_a_lock = True
            try:
                super().remove_if_dead(place)
            finally:
                self.holds_a_lock = False

        def meet(self, name: str) -> None:
            """Wait for the other one, as long as it comes as often, and never with its lock."""
            if name == at and self.met < 3 and not self.holds_a_lock:
                self.met += 1
                dist.monitored_barrier(wait_all_ranks=True)

        def rename(self, source: Path, target: Path) -> None:
            """A commit, or a part of one."""
            self.meet("rename")
            super().rename(source, target)

        def fsync_dir(self, path: Path) -> None:
            """The names in a directory."""
            self.meet("fsync_dir")
            super().fsync_dir(path)

        def unlink(self, path: Path) -> None:
            """What is removed."""
            self.meet("unlink")
            super().unlink(path)

    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    manager = Together(root, run_id="run", mirror=DirectoryMirror(mirror), group=group)
    reference = manager.stage_checkpoint_step(4, refresh=True)
    while manager.met < 3:
        manager.meet(at)
    return [reference.step, reference.kind]
