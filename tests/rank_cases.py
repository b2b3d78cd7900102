"""What the ranks of a world do: a job whose whole state is the same in every layout.

Every gradient is made from the step and the parameter's name, and AdamW works element by element:
so weights and moments of any layout are, put together, bit for bit those of one process.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_conformance.reference_impl import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "wide": ((7, 5), torch.float32),
    "row": ((1, 6), torch.float32),
    "bias": ((7,), torch.float32),
    "narrow": ((6, 8), torch.bfloat16),
    "cube": ((3, 4, 5), torch.float64),
    "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32),
    "lazy": ((5, 4), torch.float32),
}
"""`lazy` never gets a gradient."""


def values(name: str, step: int) -> torch.Tensor:
    """The same numbers for a name and a step in every process."""
    shape, dtype = SHAPES[name]
    seed = int.from_bytes(hashlib.sha256(f"{name}/{step}".encode()).digest()[:6], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def placements_of(layout: str, name: str, dimensions: int) -> tuple[Any, list[Any]]:
    """Mesh and placements of a parameter; dimensions beyond its own are not sharded.

    A layout is `2x2:S0,S1` or `4:S0`; `R` replicates.
    """
    sizes, _, words = layout.partition(":")
    shape = tuple(map(int, sizes.split("x")))
    names = tuple(f"axis{at}" for at in range(len(shape)))
    mesh = _meshes.get(sizes) or init_device_mesh("cpu", shape, mesh_dim_names=names)
    _meshes[sizes] = mesh
    found: list[Any] = []
    for word in words.split(","):
        at = int(word[1:]) if word.startswith("S") else -1
        found.append(Shard(at) if 0 <= at < dimensions else Replicate())
    return mesh, found


_meshes: dict[str, Any] = {}


class Model(torch.nn.Module):
    """Parameters of every awkward kind, one of them tied, in one layout."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        for name, (shape, _) in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(self.spread(name, values(name, 0))))
            del shape
        self.tied = self.wide
        self.register_buffer("seen", torch.tensor(0))

    def spread(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor in this layout."""
        if self.layout == "plain":
            return whole
        mesh, placements = placements_of(self.layout, name, whole.ndim)
        return distribute_tensor(whole, mesh, placements)


class Position:
    """A data position that is this rank's own."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]


class Average:
    """An average of the weights, distributed as they are."""

    def __init__(self, model: Model) -> None:
        self.shadow = {"wide": model.wide.detach().clone(), "bias": model.bias.detach().clone()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.shadow)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


class Job:
    """A job in one layout, trained to a step."""

    def __init__(self, layout: str, steps: int = 0, seed: int = 0) -> None:
        self.rank = dist.get_rank()
        self.model = Model(layout)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [self.model.wide, self.model.row, self.model.bias], "lr": 0.1},
                {"params": [self.model.narrow, self.model.cube, self.model.scalar]},
                {"params": [self.model.empty, self.model.lazy]},
            ],
            lr=0.01,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loader = Position(0)
        self.average = Average(self.model)
        for value in (random.seed, np.random.seed, torch.manual_seed):
            value(1000 * seed + self.rank)
        self.step = 0
        for _ in range(steps):
            self.train()

    def train(self) -> None:
        """One step, from gradients that are the same in every layout."""
        self.step += 1
        for name, parameter in self.model.named_parameters():
            if name not in ("lazy", "tied"):
                parameter.grad = self.model.spread(name, values(name, self.step))
        self.optimizer.step()
        self.scheduler.step()
        self.model.seen += 1
        self.loader.at += 10 + self.rank
        for name, value in self.average.shadow.items():
            value.lerp_(self.model.get_parameter(name).detach(), 0.5)
        self.draws()

    def draws(self) -> list[float]:
        """What the generators of this rank give next."""
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    @property
    def parts(self) -> dict[str, Any]:
        """Arguments of save and load."""
        return {
            "model": self.model,
            "optimizers": self.optimizer,
            "scheduler": self.scheduler,
            "dataloader": self.loader,
            "stateful": {"average": self.average},
        }

    def digest(self) -> dict[str, str]:
        """Digests of everything that is the same in every layout; a collective call."""
        found: dict[str, Any] = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        names = {id(value): name for name, value in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                found[f"{names[id(parameter)]}.{key}"] = value
        found.update({f"average.{k}": v for k, v in self.average.shadow.items()})
        digests = {key: digest(value) for key, value in found.items()}
        rest = [self.scheduler.state_dict(), [g["lr"] for g in self.optimizer.param_groups]]
        return {**digests, "rest": repr(rest)}


def digest(value: torch.Tensor) -> str:
    """Of all of a tensor, bit for bit."""
    whole = value.detach()
    whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).contiguous()
    data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def save(root: str, layout: str, steps: int = 3, **settings: Any) -> dict[str, Any]:
    """Train and save; what a load has to bring back."""
    job = Job(layout, steps)
    manager = CheckpointManager(root, **{"use_dcp": True, "timeout": 20.0, **settings})
    path = manager.save(
        steps, **job.parts, tokens_seen=100 * steps, extra={"rank": job.rank, "at": steps}
    )
    manager.close()
    return {"path": str(path), "digest": job.digest(), "draws": job.draws(), "at": job.loader.at}


def load(root: str, layout: str, **settings: Any) -> dict[str, Any]:
    """Load into a job that is all different."""
    job = Job(layout, 1, seed=7)
    scramble(job)
    places = [value.data_ptr() for value in locals_of(job)]
    manager = CheckpointManager(root, **{"use_dcp": True, "timeout": 20.0, **settings})
    result = manager.load(**job.parts)
    manager.close()
    assert [value.data_ptr() for value in locals_of(job)] == places, "the memory is another one"
    report = result.resharded
    return {
        "step": result.step,
        "extra": result.extra,
        "refused": [str(one.reason) for one in result.refused],
        "cold": result.cold,
        "resharded": report and vars(report),
        "digest": job.digest(),
        "draws": job.draws(),
        "at": job.loader.at,
    }


def locals_of(job: Job) -> list[torch.Tensor]:
    """The memory of the parameters of this rank."""
    found = [value.detach() for value in job.model.parameters()]
    return [value.to_local() if isinstance(value, DTensor) else value for value in found]


def scramble(job: Job) -> None:
    """Give every live tensor other values, so that what is not loaded shows."""
    for value in (*locals_of(job), *job.optimizer.state[job.model.wide].values()):
        local = value.to_local() if isinstance(value, DTensor) else value
        local.detach().fill_(float("nan"))


def written(root: Path) -> list[str]:
    """Every file below a root, by its name relative to it."""
    return sorted(str(one.relative_to(root)) for one in root.rglob("*") if one.is_file())
