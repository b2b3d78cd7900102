"""`torch.distributed.checkpoint` as its tutorials use it, in one process and on ranks."""

from __future__ import annotations

from functools import partial

import torch

from ckpt_conformance.adapters.dcp_directories import Directories
from ckpt_conformance.adapters.recipes import ONE, PER_STEP, Recipe
from ckpt_conformance.contract import Capability

RECIPES = "docs.pytorch.org/tutorials/recipes"
TUTORIAL = f"{RECIPES}/distributed_checkpoint_recipe.html"
ASYNC = f"{RECIPES}/distributed_async_checkpoint_recipe.html"
RANKS = frozenset({Capability.RANKS, Capability.RESHARD})
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
    capabilities=PER_STEP | RANKS,
    recipe=f"dcp.async_save, waited for, a directory per step ({ASYNC})",
    manager=partial(Directories, in_background=True),
)
overwrite = recipe(
    name="dcp-overwrite",
    capabilities=ONE | RANKS,
    recipe=f"dcp.save, one directory saved over and over ({TUTORIAL})",
    manager=partial(Directories, per_step=False),
)
