"""Several ranks in one process: torch's own stand-in for a group, in which nothing is sent."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

if TYPE_CHECKING:
    from collections.abc import Generator


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Generator[None]:
    """Be one of several ranks."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(full: torch.Tensor, rank: int, world: int) -> Any:  # noqa: ANN401  a DTensor
    """Return a rank's part of a tensor that is divided by its first dimension."""
    mesh = init_device_mesh("cpu", (world,))
    part = full.chunk(world)[rank].clone()
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
