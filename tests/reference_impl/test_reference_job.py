"""A small job that shows every hole, for the tests of the reference manager; and that it does."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pytest
import torch

from ckpt_conformance.reference_impl import CheckpointManager, LoadResult

if TYPE_CHECKING:
    from pathlib import Path

KINDS = pytest.mark.parametrize("kind", ["model", "dcp"])


class Model(torch.nn.Module):
    """Tied, bf16, 0-dim, empty, frozen and never updated parameters, buffers, dropout."""

    def __init__(self) -> None:  # noqa: D107
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.body = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.narrow = torch.nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
        self.scalar = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.randn(4))
        self.drop = torch.nn.Dropout(0.3)
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.drop(self.norm(self.body(self.embed(x))))
        return self.head(hidden * self.narrow.float() * self.scalar)


class Loader:
    """A shuffled stream with a position."""

    def __init__(self) -> None:  # noqa: D107
        self.epoch, self.position = 0, 0

    def __iter__(self) -> Loader:  # noqa: D105
        return self

    def __next__(self) -> torch.Tensor:  # noqa: D105
        order = torch.randperm(44, generator=torch.Generator().manual_seed(self.epoch))
        batch = order[self.position : self.position + 4]
        self.position += 4
        if self.position == 44:
            self.epoch, self.position = self.epoch + 1, 0
        return batch % 11

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class Average:
    """An EMA of the model's floating-point parameters, with a plain counter."""

    def __init__(self, model: torch.nn.Module) -> None:  # noqa: D107
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}
        self.updates = 0

    def update(self, model: torch.nn.Module) -> None:
        self.updates += 1
        for name, one in model.named_parameters():
            self.shadow[name].lerp_(one.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


@dataclass
class Job:
    seed: int = 0
    model: Model = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:  # noqa: D105
        for draw in (random.seed, np.random.seed, torch.manual_seed):
            draw(self.seed)
        self.model = Model()
        wanted = [one for one in self.model.parameters() if one.requires_grad]
        groups = [{"params": wanted[:3], "weight_decay": 0.1}, {"params": wanted[3:]}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.05, total_steps=1000
        )
        self.loader = Loader()
        self.average = Average(self.model)

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizers": self.optimizer,
            "scheduler": self.scheduler,
            "dataloader": self.loader,
            "stateful": {"average": self.average},
        }

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for batch in (next(self.loader) for _ in range(steps)):
            noise = random.random() + float(np.random.rand())  # noqa: NPY002, S311 - the job's own
            loss = torch.nn.functional.cross_entropy(self.model(batch), batch) * (1 + noise)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.average.update(self.model)
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """Everything, copied."""
        states = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loader": self.loader.state_dict(),
            "average": self.average.state_dict(),
            "random": [random.getstate(), np.random.get_state()[1], torch.get_rng_state()],  # noqa: NPY002
        }
        return copy.deepcopy(states)


def same(a: Any, b: Any) -> bool:  # noqa: ANN401 - any tree of plain values
    """Bit for bit: dtypes, shapes, NaN payloads, types and order of keys."""
    if isinstance(a, torch.Tensor | np.ndarray):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        raw = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class Quick(CheckpointManager):
    """Does not wait for the disk, which the tests of the commit's order do."""

    def fsync_file(self, file: BinaryIO) -> None:
        file.flush()

    def fsync_dir(self, path: Path) -> None:
        """Nothing to wait for."""


def save(root: Path, job: Job, step: int, kind: str = "model", **given: Any) -> Path:  # noqa: ANN401
    manager = Quick(root, use_dcp=kind == "dcp", **given)
    return manager.save(step, tokens_seen=step * 100, extra={"phase": step}, **job.parts)


def resume(root: Path, seed: int = 99, trained: int = 2, **given: Any) -> tuple[Job, LoadResult]:  # noqa: ANN401
    """Load into another job, whose whole state was something else."""
    job = Job(seed)
    job.train(trained)
    return job, CheckpointManager(root).load(**job.parts, **given)


def listing(root: Path) -> dict[str, bytes]:
    """Every file below a directory, with its content."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
        os.fsync(file.fileno())


def test_the_job_is_deterministic_and_every_part_of_it_moves() -> None:
    """Two jobs of one seed agree to the bit, and training changes each part of the state."""
    one, before = Job(), Job().state()
    losses = one.train(5)
    assert Job().train(5) == losses
    assert [key for key in before if same(before[key], one.state()[key])] == []
    assert one.model.head.weight is one.model.embed.weight
