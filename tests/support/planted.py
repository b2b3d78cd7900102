"""A state of model, moments, generators and counters, and one step of the last bit drawn in it."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

PARTS = ("model", "moments", "generators", "counters")
SHARDED = ("model", "moments")
OF_EACH = 4  # plants


def state() -> dict[str, dict[str, Any]]:
    """Return the state of one job, the same for any number of ranks."""
    draw = torch.Generator().manual_seed(7)
    return {
        "model": {
            "rows": torch.randn(7, 3, generator=draw),
            "half": torch.randn(6, 2, generator=draw).bfloat16(),
            "wide": torch.randn(5, 4, generator=draw).double(),
        },
        "moments": {
            "first": torch.randn(7, 3, generator=draw),
            "second": torch.rand(6, 2, generator=draw).half(),
        },
        "generators": {"cpu": draw.get_state(), "seed": 11},
        "counters": {"step": 5, "seen": torch.tensor([10, 2**40]), "loss": 0.25},
    }


@dataclass(frozen=True)
class Plant:
    """A step of the last bit: in which entry, and at which index of a tensor."""

    name: str
    at: tuple[int, ...] | None
    is_float: bool
    number: int

    @property
    def folder(self) -> str:
        return f"planted-{self.number}"

    def into(self, whole: dict[str, dict[str, Any]]) -> None:
        part, _, key = self.name.partition(".")
        value = whole[part][key]
        if self.at is not None:
            bits = value.view(_INTEGERS[value.element_size()])
            bits[self.at] += 1
        elif isinstance(value, float):
            whole[part][key] = math.nextafter(value, math.inf)
        else:
            whole[part][key] = value + 1


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _drawn(number: int, part: str, draw: random.Random) -> Plant:
    key = draw.choice(sorted(state()[part]))
    value = state()[part][key]
    if not isinstance(value, torch.Tensor):
        return Plant(f"{part}.{key}", None, isinstance(value, float), number)
    at = tuple(draw.randrange(size) for size in value.shape)
    return Plant(f"{part}.{key}", at, value.is_floating_point(), number)


def _all() -> list[Plant]:
    draw = random.Random(20)  # noqa: S311  where to plant, no secret
    wanted = [part for part in PARTS for _ in range(OF_EACH)]
    return [_drawn(number, part, draw) for number, part in enumerate(wanted)]


PLANTS = _all()


def _divided(whole: dict[str, dict[str, Any]], world: int) -> dict[str, dict[str, Any]]:
    """Divide tensors between ranks by their rows, evenly or not."""
    mesh = init_device_mesh("cpu", (world,))

    def divide(value: torch.Tensor) -> DTensor:
        return distribute_tensor(value, mesh, [Shard(0)])

    return {
        part: {key: divide(one) for key, one in values.items()} if part in SHARDED else values
        for part, values in whole.items()
    }


def save(folder: str) -> None:
    """Save the original and every plant: what each rank of a world runs."""
    torch.set_num_threads(1)
    for plant in [None, *PLANTS]:
        whole = state()
        if plant:
            plant.into(whole)
        where = os.path.join(folder, plant.folder if plant else "original")  # noqa: PTH118
        dcp.save(_divided(whole, dist.get_world_size()), checkpoint_id=where)
    dist.barrier()
