"""A child as one rank of a world: it joins a group of its own, and leaves when all have ended.

Every child of a world is forked from the same clean server and meets the others through a file
(FileStore), so nothing of an older world is left, and no port is taken.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from ckpt_conformance.workload import devices
from ckpt_conformance.workload.sharded import Layout, ShardedJob, Tensors

if TYPE_CHECKING:
    from ckpt_conformance.harness.messages import JobSpec, World

LEAVING = 5.0  # seconds that a rank waits for the others when its own work has ended well


def join(world: World) -> None:
    """Join the world of a program.

    On cpu by gloo; on cuda by NCCL, and gloo for what is on the CPU: there rank n has GPU n.
    """
    patience = dt.timedelta(seconds=world.timeout)
    on_gpu = world.device == devices.CUDA
    if on_gpu:
        torch.cuda.set_device(world.rank)
    store = FileStore(world.store, world.size)
    store.set_timeout(patience)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=patience
    )


def leave(world: World, *, well: bool) -> None:
    """Wait for the others, so that no rank sees a peer vanish; one that failed does not wait."""
    with contextlib.suppress(dist.DistError, RuntimeError):
        store = PrefixStore("leaving", FileStore(world.store, world.size))
        store.set(str(world.rank), "ended")
        if not well:
            return
        ranks = [str(rank) for rank in range(world.size)]
        store.wait(ranks, dt.timedelta(seconds=LEAVING))


def job(spec: JobSpec) -> ShardedJob:
    """Build the job of a program: its seed, variant and device, its layout and its tensors."""
    layout = Layout(**spec.layout or {})
    tensors = Tensors(**spec.tensors, without=spec.without)
    return ShardedJob(spec.seed, layout, tensors=tensors, variant=spec.variant, device=spec.device)


def together() -> None:
    """Wait until every rank is here."""
    dist.barrier()


def unequal(child: Any) -> int:  # noqa: ANN401  a Child
    """Make a buffer differ between ranks that should be equal on all; return the rank."""
    rank = dist.get_rank()
    child.job.model.constant.add_(rank)
    return rank


def linger(child: Any) -> None:  # noqa: ANN401  a Child
    """Stay until every rank has come here, or the deadline ends it: a job that lives on."""
    world: World = child.program.world
    store = PrefixStore("lingering", FileStore(world.store, world.size))
    store.set(str(world.rank), "here")
    ranks = [str(rank) for rank in range(world.size)]
    store.wait(ranks, dt.timedelta(seconds=child.program.deadline))
