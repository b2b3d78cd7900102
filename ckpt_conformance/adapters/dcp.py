"""`torch.distributed.checkpoint` as its tutorials use it, in one process and on ranks.

What is saved is Stateful objects, into a directory for each step or into a single one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as get_optimizers
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as set_optimizers

from ckpt_conformance.adapters.recipes import OVERWRITING, PER_STEP, Recipe, numbers
from ckpt_conformance.contract import Capability, FutureSave

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.state_dict import OptimizerStateType

    from ckpt_conformance.contract import Stateful, TrainingJob

RECIPES = "docs.pytorch.org/tutorials/recipes"
TUTORIAL = f"{RECIPES}/distributed_checkpoint_recipe.html"
ASYNC = f"{RECIPES}/distributed_async_checkpoint_recipe.html"
RANKS = frozenset({Capability.RANKS, Capability.RESHARD})


@dataclass(frozen=True)
class Optimizers:
    """The tutorial's wrapper: the state of a model's optimizers by the names of its parameters."""

    job: TrainingJob

    def state_dict(self) -> OptimizerStateType:
        """Return the state; DCP reads into its tensors."""
        return get_optimizers(self.job.model, list(self.job.optimizers.values()))

    def load_state_dict(self, state_dict: OptimizerStateType) -> None:
        """Set what DCP has read; not strict, as torch's own message advises for missing state."""
        given: Any = {"optim_state_dict": state_dict, "options": StateDictOptions(strict=False)}
        set_optimizers(self.job.model, list(self.job.optimizers.values()), **given)


@dataclass(frozen=True)
class Directories:
    """A directory per step, or one that every save overwrites."""

    root: Path
    per_step: bool = True
    threads: int = 1
    in_background: bool = False
    unfinished: list[FutureSave] = field(default_factory=list[FutureSave])

    def path(self, step: int) -> Path:
        """Name the directory of a step."""
        return self.root / (f"step-{step}" if self.per_step else "checkpoint")

    def parts(self, job: TrainingJob, step: int) -> dict[str, Stateful | int]:
        """Return what is saved, by name: the optimizers wrapped, other components as they are."""
        rest = {name: part for name, part in job.components.items() if name not in job.optimizers}
        return {"optim": Optimizers(job), **rest, "step": step}

    def save(self, job: TrainingJob, step: int) -> FutureSave | None:
        """Save everything and the step; return the future of what is written in the background."""
        self.finish()
        writer = FileSystemWriter(self.path(step), thread_count=self.threads)
        saver: Any = state_dict_saver
        if not self.in_background:
            saver.save(self.parts(job, step), storage_writer=writer)
            return None
        pending = FutureSave(saver.async_save(self.parts(job, step), storage_writer=writer))
        self.unfinished.append(pending)
        return pending

    def finish(self) -> None:
        """Wait for the save that goes on, as the tutorial does before the next one."""
        while self.unfinished:
            self.unfinished.pop().wait()

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Load in place; only what never had a gradient may lack optimizer state.

        `get_optimizer_state_dict` asks for that state too (pytorch/pytorch#192202), so optimizers
        are loaded by a planner of their own, as others do (PrimeIntellect-ai/prime-rl#3399).
        """
        path = self.path(max(self.steps()) if step is None else step)
        parts = self.parts(job, -1)
        optim = {"optim": parts.pop("optim")}
        planner = DefaultLoadPlanner(allow_partial_load=True)
        state_dict_loader.load(optim, checkpoint_id=path, planner=planner)
        state_dict_loader.load(parts, checkpoint_id=path)
        return int(cast("int", parts["step"]))

    def steps(self) -> list[int]:
        """List the directories that have their metadata, or read the step of the only one."""
        whole = [path.parent for path in self.root.glob("*/.metadata")]
        if self.per_step:
            return numbers(whole, r"step-(\d+)")
        state = {"step": -1}
        if whole == [self.path(0)]:
            state_dict_loader.load(state, checkpoint_id=self.path(0))
        return [step for step in state.values() if step >= 0]

    def close(self) -> None:
        """Wait for the save that goes on."""
        self.finish()


recipe = partial(
    Recipe,
    version=torch.__version__,
    library="torch.distributed.checkpoint",
    # Of what all ranks call alike one copy is kept, of which rank depends on the sizes
    # (pytorch/pytorch#116469): so no policy can be declared for the generators.
    resharding={"loader": "global"},
)
per_step = recipe(
    name="dcp-per-step",
    capabilities=PER_STEP | RANKS,
    recipe=f"dcp.save, a directory per step ({TUTORIAL})",
    manager=Directories,
)
threads = recipe(
    name="dcp-threads",
    capabilities=PER_STEP | RANKS,
    recipe=f"dcp.save with FileSystemWriter(thread_count=2), a directory per step ({TUTORIAL})",
    manager=partial(Directories, threads=2),
)
background = recipe(
    name="dcp-async",
    capabilities=PER_STEP | RANKS | {Capability.ASYNC},
    recipe=f"dcp.async_save, waited for before the next save, a directory per step ({ASYNC})",
    manager=partial(Directories, in_background=True),
)
overwrite = recipe(
    name="dcp-overwrite",
    capabilities=OVERWRITING | RANKS,
    recipe=f"dcp.save, one directory saved over and over ({TUTORIAL})",
    manager=partial(Directories, per_step=False),
)
