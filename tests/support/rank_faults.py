"""What goes wrong on one rank of several, in worlds of real processes."""

from __future__ import annotations

import errno
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, TypedDict

import rank_cases
import torch
import torch.distributed as dist
from rank_cases import Job, locals_of, scramble

from ckpt_conformance.reference_impl import (
    CheckpointError,
    CheckpointManager,
    CheckpointReference,
    resolve,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def inject(fault: str) -> None:
    """Let this rank fail, in one way."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang":
        threading.Event().wait(3)
    elif fault == "disk full":
        raise OSError(errno.ENOSPC, "No space left on device")
    elif fault == "interrupt":
        raise KeyboardInterrupt
    else:
        raise RuntimeError(fault)


class Injected(TypedDict):
    """Which method of a manager fails, how, and on which rank."""

    at: str
    fault: str
    rank: int


class Faulty(CheckpointManager):
    """A manager that fails the first time it comes to a method, on one rank."""

    def __init__(self, root: str, injected: Injected, **settings: Any) -> None:  # noqa: ANN401
        """Break the method on the rank that is hit."""
        super().__init__(root, **settings)
        if dist.get_rank() == injected["rank"]:
            self._wrap(injected["at"], injected["fault"])

    def _wrap(self, at: str, fault: str) -> None:
        real: Callable[..., Any] = getattr(self, at)

        def injected(*given: object, **named: object) -> object:
            setattr(self, at, real)
            inject(fault)
            return real(*given, **named)

        setattr(self, at, injected)


def outcome(action: Callable[[], object], job: Job) -> dict[str, Any]:
    """What a rank saw of an action, and whether its memory is as it was."""
    before = [value.clone() for value in locals_of(job)]
    try:
        action()
    except (CheckpointError, OSError, RuntimeError, KeyboardInterrupt) as error:
        found = {
            "kind": type(error).__name__,
            "bases": [one.__name__ for one in type(error).__mro__],
            "message": str(error),
            "cause": type(error.__cause__).__name__,
        }
    else:
        found = {"kind": ""}
    after = locals_of(job)
    untouched = all(
        torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for one, other in zip(before, after, strict=True)
    )
    return {**found, "untouched": untouched}


def save_faulty(root: str, layout: str, injected: Injected, **settings: object) -> dict[str, Any]:
    """Save, with one rank that fails at a method; then what another attempt gives."""
    step = 4
    job = Job(layout, step)
    given: dict[str, Any] = {"use_dcp": True, "timeout": 20.0, **settings}
    manager = Faulty(root, injected, **given)
    found = outcome(lambda: manager.save(step, **job.parts), job)
    if injected["fault"] == "disk full":
        found["again"] = outcome(lambda: manager.save(step + 1, **job.parts), job)["kind"]
    return found


def save_faulty_in_background(root: str, layout: str, injected: Injected) -> dict[str, Any]:
    """Save in the background, with one rank that fails at a method; then save once more."""
    job = Job(layout, 4)
    manager = Faulty(root, injected, use_dcp=True, timeout=20.0)
    handles = [manager.save_async(4, **job.parts)]
    found = outcome(handles[0].wait, job)
    if injected["fault"] == "disk full":
        found["again"] = outcome(lambda: manager.save_async(5, **job.parts).wait(), job)["kind"]
        manager.close()
    return found


def load_faulty(
    root: str, layout: str, injected: Injected | None = None, step: int | None = None
) -> dict[str, Any]:
    """Load into a scrambled job, with one rank that may fail at a method."""
    job = Job(layout, 1, seed=7)
    scramble(job)
    manager = Faulty(root, injected or {"at": "", "fault": "", "rank": -1}, timeout=20.0)
    served: list[int] = []
    found = outcome(lambda: served.append(manager.load(step=step, **job.parts).step), job)
    return {**found, "served": served}


def load_damaged(root: str, layout: str) -> dict[str, Any]:
    """What step 3 gives by its name, and then what a load of the newest gives."""
    named = load_faulty(root, layout, step=3)
    return {"named": named, "newest": rank_cases.load(root, layout)}


def load_with_stale_listing(root: str, layout: str, rank: int) -> dict[str, Any]:
    """Load where one rank sees no checkpoint at all."""
    if dist.get_rank() == rank:

        def nothing(root: Path) -> list[Any]:
            del root
            return []

        resolve.references = nothing  # type: ignore[assignment]
    return rank_cases.load(root, layout)


def save_unequal(root: str, layout: str, what: str) -> dict[str, Any]:
    """Save where rank 1 holds another value of something that should be the same."""
    job = Job(layout, 2)
    step = 2
    if dist.get_rank() == 1:
        if what == "replica":
            locals_of(job)[0].view(-1)[:1] += 1
        elif what == "learning rate":
            job.optimizer.param_groups[1]["lr"] = 0.125
        elif what == "shape":
            job.model.seen = torch.zeros(3, dtype=torch.int64)
        elif what == "step":
            step = 3
    manager = CheckpointManager(root, use_dcp=True, timeout=20.0)
    return outcome(lambda: manager.save(step, **job.parts), job)


def disagree(root: str, layout: str) -> dict[str, Any]:
    """One rank saves while the others load."""
    job = Job(layout, 2)
    manager = CheckpointManager(root, use_dcp=True, timeout=20.0)
    if dist.get_rank() == 1:
        return outcome(lambda: manager.save(2, **job.parts), job)
    return outcome(lambda: manager.load(**job.parts), job)


def save_on_one(root: str, layout: str) -> dict[str, Any]:
    """Only rank 0 calls save."""
    job = Job(layout, 1)
    if dist.get_rank():
        threading.Event().wait(2)
        return {}
    manager = CheckpointManager(root, use_dcp=True, timeout=1.0)
    return outcome(lambda: manager.save(1, **job.parts), job)


def in_subgroups(root: str) -> dict[str, Any]:
    """Two groups of two ranks save and load, each its own run, at the same time."""
    half = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = Job("plain", 2 + half)
    place = f"{root}/{half}"
    manager = CheckpointManager(place, use_dcp=True, timeout=20.0, group=groups[half])
    manager.save(job.step, **job.parts)
    other = Job("plain", 1)
    step = manager.load(**other.parts).step
    return {"step": step, "same": other.digest() == job.digest() != Job("plain", 1).digest()}


def load_with_stock_dcp(root: str) -> dict[str, Any]:
    """What torch's own reader makes of a directory, on however many ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import distribute_tensor

    job = Job("plain", 3)
    state = {f"model.{key}": torch.zeros_like(one) for key, one in job.model.state_dict().items()}
    mesh, places = rank_cases.placements_of(f"{dist.get_world_size()}:S1", 2)
    state["model.wide"] = distribute_tensor(state["model.wide"], mesh, places)
    state["optimizer.state.0.exp_avg"] = torch.zeros(7, 5)
    dcp.load(state, checkpoint_id=f"{root}/dcp_000003")
    expected = {**job.digest(), "model.tied": job.digest()["model.wide"]}
    cut = rank_cases.Model(f"{dist.get_world_size()}:S1", dict(job.model.named_parameters()))
    expected["model.wide"] = rank_cases.digest(cut.wide)
    wrong = [
        key
        for key, value in state.items()
        if key in expected and rank_cases.digest(value) != expected[key]
    ]
    moment = rank_cases.digest(state["optimizer.state.0.exp_avg"])
    return {"wrong": wrong, "moment": moment == expected["wide.exp_avg"]}


def load_by_name(root: str, name: str) -> dict[str, Any]:
    """Load what a path below the root names, and by its reference."""
    job = Job("plain", 1)
    manager = CheckpointManager(root, timeout=20.0)
    first = manager.load(f"{root}/{name}", **job.parts)
    second = manager.load(first.reference, **job.parts)
    return {"steps": [first.step, second.step], "kind": second.reference.kind}


def ask_differently(root: str) -> dict[str, Any]:
    """One rank asks for another step than the others."""
    job = Job("plain", 1)
    manager = CheckpointManager(root, timeout=20.0)
    return outcome(lambda: manager.load(step=2 + dist.get_rank(), **job.parts), job)


def rotate_everywhere(root: str) -> list[int]:
    """Every rank calls for a rotation, at the same time."""
    manager = CheckpointManager(root, use_dcp=True, keep_last=1, timeout=20.0)
    dist.barrier()
    manager.retain(CheckpointReference(manager.root / "dcp_000003", 3, "dcp"))
    dist.barrier()
    return manager.steps()
