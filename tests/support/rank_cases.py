"""What the ranks of a world do: a job whose whole state is the same in every layout.

One process trains it on whole tensors, with gradients made from the step and the parameter's name.
Torch cuts the result for a layout: what a rank should hold is known without asking the others.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_conformance.reference_impl import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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


def placements_of(layout: str, dimensions: int) -> tuple[Any, list[Any]]:
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

    def __init__(self, layout: str, whole: Mapping[str, torch.Tensor]) -> None:
        """Begin."""
        super().__init__()
        self.layout = layout
        for name in SHAPES:
            self.register_parameter(name, torch.nn.Parameter(self.spread(whole[name])))
        self.tied, self.tied_row = self.wide, self.row  # of one row: most ranks hold none of it
        self.register_buffer("seen", torch.tensor(0))

    def spread(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor, cut for this layout by torch; without a word between the ranks."""
        if self.layout == "plain":
            return whole.detach().clone()
        mesh, placements = placements_of(self.layout, whole.ndim)
        return distribute_tensor(whole.detach().clone(), mesh, placements, src_data_rank=None)


class Position:
    """A data position that is this rank's own."""

    def __init__(self, at: int) -> None:
        """Begin."""
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]


class Average:
    """An average of the weights, distributed as they are."""

    def __init__(self, model: Model) -> None:
        """Begin."""
        self.shadow = {name: getattr(model, name).detach().clone() for name in ("wide", "bias")}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.shadow)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


def optimizer_of(model: Model) -> torch.optim.AdamW:
    """Three groups, one with another learning rate."""
    return torch.optim.AdamW(
        [
            {"params": [model.wide, model.row, model.bias], "lr": 0.1},
            {"params": [model.narrow, model.cube, model.scalar]},
            {"params": [model.empty, model.lazy]},
        ],
        lr=0.01,
    )


class Whole:
    """The job as one process trains it: the truth for every layout."""

    def __init__(self, steps: int) -> None:
        """Begin."""
        self.model = Model("plain", {name: values(name, 0) for name in SHAPES})
        self.optimizer = optimizer_of(self.model)
        self.average = Average(self.model)
        for step in range(1, steps + 1):
            for name, parameter in self.model.named_parameters():
                if name != "lazy":
                    parameter.grad = values(name, step)
            self.optimizer.step()
            for name, value in self.average.shadow.items():
                value.lerp_(getattr(self.model, name).detach(), 0.5)


class Job:
    """The same job in one layout, with what each rank has of its own."""

    def __init__(self, layout: str, steps: int = 0, seed: int = 0) -> None:
        """Begin."""
        self.rank, self.step = dist.get_rank(), steps
        whole = Whole(steps)
        self.model = Model(layout, dict(whole.model.named_parameters()))
        self.model.seen += steps
        self.optimizer = optimizer_of(self.model)
        for name, parameter in self.model.named_parameters():
            state = whole.optimizer.state.get(whole.model.get_parameter(name), {})
            for key, value in state.items():
                moment = value.clone() if key == "step" else self.model.spread(value)
                self.optimizer.state[parameter][key] = moment
        self.average = Average(self.model)
        for name, value in self.average.shadow.items():
            local(value).copy_(local(self.model.spread(whole.average.shadow[name])))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer has stepped, in the whole job
            for _ in range(steps):
                self.scheduler.step()
        self.loader = Position((10 + self.rank) * steps)
        for start in (random.seed, np.random.seed, torch.manual_seed):
            start(1000 * seed + self.rank)
        for _ in range(steps):
            self.draws()

    def draws(self) -> list[float]:
        """What the generators of this rank give next."""
        numpy = float(np.random.rand())  # noqa: NPY002  the generator that jobs use
        return [random.random(), numpy, float(torch.rand(()))]  # noqa: S311  no secret

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
        """Digests of what this rank holds of everything that is the same in every layout."""
        found: dict[str, Any] = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        names = {id(value): name for name, value in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                found[f"{names[id(parameter)]}.{key}"] = value
        found.update({f"average.{k}": v for k, v in self.average.shadow.items()})
        rest = [self.scheduler.state_dict(), [g["lr"] for g in self.optimizer.param_groups]]
        return {**{key: digest(value) for key, value in found.items()}, "rest": repr(rest)}


def local(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def digest(value: torch.Tensor) -> str:
    """Of what this rank holds of a tensor, bit for bit, with what it is a part of."""
    part = local(value).contiguous()
    data = part.reshape(-1).view(torch.uint8).numpy().tobytes()
    places = f"{value.placements}" if isinstance(value, DTensor) else "whole"
    facts = f"{part.dtype} {tuple(part.shape)} of {tuple(value.shape)} {places}"
    return f"{facts} {hashlib.sha256(data).hexdigest()[:16]}"


def digest_whole(value: torch.Tensor) -> str:
    """Of all of a tensor; every rank calls it."""
    return digest(value.full_tensor() if isinstance(value, DTensor) else value)


def save(root: str, layout: str, steps: int = 3, **settings: object) -> dict[str, Any]:
    """Train and save; what a load has to bring back."""
    job = Job(layout, steps)
    given: dict[str, Any] = {"use_dcp": True, "timeout": 20.0, **settings}
    manager = CheckpointManager(root, **given)
    path = manager.save(
        steps, **job.parts, tokens_seen=100 * steps, extra={"rank": job.rank, "at": steps}
    )
    manager.close()
    return {"path": str(path), "draws": job.draws(), "at": job.loader.at}


def save_and_scramble(root: str, layout: str, steps: int = 3, **settings: object) -> dict[str, Any]:
    """Save in the background, change everything at once, and let the job's own group speak."""
    job = Job(layout, steps)
    given: dict[str, Any] = {"use_dcp": True, "timeout": 20.0, **settings}
    manager = CheckpointManager(root, **given)
    extra = {"rank": job.rank, "at": steps}
    handle = manager.save_async(steps, **job.parts, tokens_seen=100 * steps, extra=extra)
    saved = {"draws": job.draws(), "at": job.loader.at}
    scramble(job)
    job.loader.at = -1
    dist.barrier()
    path = handle.wait()
    manager.close()
    return {"path": str(path), **saved}


def load(
    root: str, layout: str, allow_missing: Collection[str] = (), **settings: object
) -> dict[str, Any]:
    """Load into a job that is all different."""
    truth = {steps: Job(layout, steps).digest() for steps in (2, 3, 4, 5, 6)}
    job = Job(layout, 1, seed=7)
    scramble(job)
    places = [value.data_ptr() for value in locals_of(job)]
    given: dict[str, Any] = {"use_dcp": True, "timeout": 20.0, **settings}
    manager = CheckpointManager(root, **given)
    result = manager.load(**job.parts, allow_missing=allow_missing)
    manager.close()
    if [value.data_ptr() for value in locals_of(job)] != places:
        raise RuntimeError("the parameters have other memory now")
    report, found, expected = result.resharded, job.digest(), truth[result.step]
    return {
        "step": result.step,
        "extra": result.extra,
        "refused": [str(one.reason) for one in result.refused],
        "cold": result.cold,
        "resharded": report and vars(report),
        "wrong": {
            key: [expected.get(key), found.get(key)]
            for key in {**expected, **found}
            if expected.get(key) != found.get(key)
        },
        "draws": job.draws(),
        "at": job.loader.at,
    }


def locals_of(job: Job) -> list[torch.Tensor]:
    """The memory of the parameters of this rank."""
    return [local(value) for value in job.model.parameters()]


def scramble(job: Job) -> None:
    """Give every live tensor other values, so that what is not loaded shows."""
    moments = [value for state in job.optimizer.state.values() for value in state.values()]
    for value in (*locals_of(job), *moments, *job.average.shadow.values()):
        local(value).fill_(float("nan"))


class Real(torch.nn.Module):
    """A network as people shard it: FSDP2, tensor parallel, or both; with tied ends."""

    def __init__(self) -> None:
        """Begin."""
        super().__init__()
        torch.manual_seed(11)
        self.embed = torch.nn.Embedding(9, 6)
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)
        self.norm = torch.nn.BatchNorm1d(6, momentum=None)
        self.head = torch.nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.down(torch.relu(self.up(hidden))))


def real(layout: str) -> tuple[Real, Any]:
    """A network sharded as a job would do it, and its optimizer."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = Real()
    style, _, sizes = layout.partition(":")
    shape = tuple(map(int, sizes.split("x"))) if sizes else ()
    if style != "plain":
        names = ("data", "tensor")[-len(shape) :] if style == "tp" else ("data", "tensor")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])
        if style in ("tp", "both"):
            parallelize_module(
                model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        if style == "hybrid":
            fully_shard(model, mesh=mesh)
        elif style in ("fsdp", "both"):
            part = mesh["data"] if len(shape) > 1 else mesh
            fully_shard(model.up, mesh=part)
            fully_shard(model.down, mesh=part)
            fully_shard(model, mesh=part)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train_real(model: Real, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Real steps, forward and backward; every rank sees the same batch."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 9, (4,), generator=generator)
        torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def digest_real(model: Real, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of the whole model and the whole optimizer."""
    found = {f"model.{key}": digest_whole(value) for key, value in model.state_dict().items()}
    names = {id(value): name for name, value in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[id(parameter)]}.{key}"] = digest_whole(value)
    return found


def save_real(root: str, layout: str) -> dict[str, str]:
    """Train for real and save."""
    model, optimizer = real(layout)
    train_real(model, optimizer, 3)
    manager = CheckpointManager(root, use_dcp=True, timeout=20.0)
    manager.save(3, model=model, optimizers=optimizer)
    return digest_real(model, optimizer)


def load_real(root: str, layout: str) -> dict[str, str]:
    """Load into a fresh job, or into one that has trained on; it can be trained then."""
    model, optimizer = real(layout)
    if root.endswith("again"):
        train_real(model, optimizer, 1)
    manager = CheckpointManager(root, use_dcp=True, timeout=20.0)
    manager.load(model=model, optimizers=optimizer)
    found = digest_real(model, optimizer)
    train_real(model, optimizer, 1)
    return found


def save_golden(root: str, **settings: Any) -> dict[str, str]:  # noqa: ANN401
    """Save a small job of two ranks; every digest is of a whole tensor."""
    job = Job("2:S0", 2)
    CheckpointManager(root, **settings).save(2, **job.parts)
    return lasting(job)


def load_golden(root: str, layout: str) -> dict[str, str]:
    """What a golden checkpoint gives in a layout."""
    job = Job(layout, 1, seed=7)
    scramble(job)
    CheckpointManager(root).load(**job.parts)
    return lasting(job)


def lasting(job: Job) -> dict[str, str]:
    """What means the same in every release of torch and in every layout; every rank calls it."""
    found = {f"model.{key}": value for key, value in job.model.state_dict().items()}
    names = {id(value): name for name, value in job.model.named_parameters()}
    for parameter, state in job.optimizer.state.items():
        found.update({f"{names[id(parameter)]}.{key}": value for key, value in state.items()})
    found.update({f"average.{key}": value for key, value in job.average.shadow.items()})
    return {key: digest_whole(value) for key, value in found.items()}
