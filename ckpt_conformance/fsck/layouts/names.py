"""The names under which libraries write: they tell whose a folder is, and what a file should be.

Whatever its first bytes are: where they are none of a torch file, the file is damaged.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

# Only what no script of somebody's own would write by chance: their rules say what is missing.
_LAYOUTS = (
    (
        "transformers-trainer",
        re.compile(r"/trainer_state\.json$|/checkpoint-\d+/training_args\.bin$"),
    ),
    (
        "accelerate",
        re.compile(
            r"/random_states_\d+\.pkl$|"
            r"^checkpoints/checkpoint_\d+/(?:optimizer|scheduler)(?:_\d+)?\.bin$"
        ),
    ),
    ("deepspeed", re.compile(r"mp_rank_\d+(?:_.*)?_model_states\.pt$|_optim_states\.pt$")),
    ("verl-fsdp", re.compile(r"(?:model|optim)_world_size_\d+_rank_\d+\.pt$")),
)

_ACCELERATE = re.compile(r"random_states_\d+\.pkl")
_TRAINER = "trainer_state.json"
_BESIDE_STATE = re.compile(
    r"training_args\.bin|(?:optimizer|scheduler)\.pt|rng_state(?:_\d+)?\.pth|"
    r"(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors|pytorch_model(?:-\d+-of-\d+)?\.bin"
)
_SHARDS = re.compile(r"global_step\d+")  # DeepSpeed's

# No script of somebody's own writes anything else under these.
_ALWAYS = re.compile(
    r"(?:pytorch_model|adapter_model)(?:_\d+)?(?:-\d+-of-\d+)?\.bin|"
    r"pytorch_model_fsdp(?:_\d+)?\.bin|training_args\.bin|random_states_\d+\.pkl"
)
# These are common words: they are a library's only beside others of its files.
_AMONG_OTHERS = re.compile(
    r"(?:optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin|custom_checkpoint_\d+\.pkl"
)


def library(paths: Iterable[str]) -> str:
    """Name the library by files, each with its folder and the one above; nothing for none."""
    known = list(paths)
    return next((name for name, one in _LAYOUTS if any(map(one.search, known))), "")


def is_signed(names: Collection[str]) -> bool:
    """Tell whether the names in a folder are those of one checkpoint, whatever the folder's is.

    The Trainer writes its state into the folder of the whole run, too, without anything beside it.
    """
    is_trainers = _TRAINER in names and any(map(_BESIDE_STATE.fullmatch, names))
    return is_trainers or any(map(_ACCELERATE.fullmatch, names))


def is_sharded(folder: str) -> bool:
    """Tell whether a folder is one of shards, inside of a library's checkpoint."""
    return _SHARDS.fullmatch(folder) is not None


def is_torch(name: str, *, by_library: bool) -> bool:
    """Tell whether a name, without its folder, is one that a library writes by `torch.save`.

    `by_library` says that the folder is known as one that a library wrote.
    """
    return bool(_ALWAYS.fullmatch(name) or (by_library and _AMONG_OTHERS.fullmatch(name)))
