"""A job whose whole state is known, with one step of the last bit planted anywhere in it, as saved.

Ranks save it in each way that people do: the two formats of the reference manager, torch's DCP with
the optimizer under the names of the parameters, and one file that the first rank gathers.
"""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from rank_cases import Job, local
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as torch_names
from torch.distributed.tensor import DTensor

from ckpt_conformance.reference_impl import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SEEN = 200  # tokens
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS = 24  # where the words of torch's generator begin: 64 bits each, of which 32 are used


def save(root: str, layout: str, kind: str, plant: Mapping[str, Any] | None) -> None:
    """Save step 1 below `root`; `plant` has the place (`of`), a draw and the rank."""
    job, tokens = Job(layout, 2), SEEN
    if plant:
        tokens += _plant(job, plant)
    _KINDS[kind](root, job, tokens)


def _plant(job: Job, plant: Mapping[str, Any]) -> int:
    """Change one bit, or count one on; give how much is to be added to the tokens."""
    of, key, draw = plant["of"], plant["key"], plant["draw"]
    is_here = job.rank == plant["rank"]
    if of == "model":
        _step(job, job.model.get_parameter(key), draw)
    elif of == "moment":
        whose, which = key.split(".")
        _step(job, job.optimizer.state[job.model.get_parameter(whose)][which], draw)
    elif of == "average":
        _step(job, job.average.shadow[key], draw)
    elif of == "count":
        job.optimizer.state[job.model.get_parameter(key)]["step"] += 1
    elif of == "seen":
        job.model.seen += 1
    elif of == "tokens":
        return 1
    elif of == "rate":
        group = job.optimizer.param_groups[draw % 3]
        group["lr"] = math.nextafter(group["lr"], 1)
    elif is_here:
        _OWN[of](job, draw)
    return 0


def _step(job: Job, value: torch.Tensor, draw: int) -> None:
    """Change the last bit of one element, wherever a rank has it."""
    value = value.detach()
    whole = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    flat = whole.view(_CARRIERS[whole.element_size()]).view(-1)
    flat[draw % flat.numel()] ^= 1
    local(value).copy_(local(job.model.spread(whole)))


def _torch_generator(_: Job, draw: int) -> None:
    state = torch.get_rng_state()
    state[_WORDS + 8 * (draw % 624)] ^= 1
    torch.set_rng_state(state)


def _numpy_generator(_: Job, draw: int) -> None:
    kind, words, *rest = np.random.get_state()  # noqa: NPY002  the generator that jobs use
    words = words.copy()
    words[draw % len(words)] ^= 1
    np.random.set_state((kind, words, *rest))  # noqa: NPY002  as above


def _python_generator(_: Job, draw: int) -> None:
    version, words, gauss = random.getstate()
    at = draw % 624
    random.setstate((version, (*words[:at], words[at] ^ 1, *words[at + 1 :]), gauss))


def _position(job: Job, _: int) -> None:
    job.loader.at += 1


def _scheduler(job: Job, _: int) -> None:
    job.scheduler.last_epoch += 1


_OWN: dict[str, Callable[[Job, int], None]] = {
    "torch": _torch_generator,
    "numpy": _numpy_generator,
    "python": _python_generator,
    "position": _position,
    "scheduler": _scheduler,
}


# -- ways to save ----------------------------------------------------------------------------------


def _by_manager(root: str, job: Job, tokens: int, *, use_dcp: bool) -> None:
    manager = CheckpointManager(root, use_dcp=use_dcp, timeout=20.0)
    manager.save(1, **job.parts, tokens_seen=tokens)
    manager.close()


def _per_rank(root: str, job: Job, tokens: int) -> None:
    _by_manager(root, job, tokens, use_dcp=False)


def _by_dcp(root: str, job: Job, tokens: int) -> None:
    _by_manager(root, job, tokens, use_dcp=True)


def _own(job: Job) -> dict[str, Any]:
    """Return what a rank has of its own, under the names of the manager."""
    version, words, gauss = random.getstate()
    kind, numbers, position, has_gauss, second = np.random.get_state()  # noqa: NPY002  as above
    generators = {
        "torch_cpu": torch.get_rng_state(),
        "numpy": {
            "kind": kind,
            "words": torch.from_numpy(numbers.astype(np.int64)),
            "position": position,
            "has_gauss": has_gauss,
            "gauss": second,
        },
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    loader, scheduler = job.loader.state_dict(), job.scheduler.state_dict()
    return {"rng": generators, "dataloader": loader, "scheduler": scheduler}


def _by_torch(root: str, job: Job, tokens: int) -> None:
    """Save as torch's own recipe does: the state of the optimizer is under names of parameters."""
    moments = torch_names.get_optimizer_state_dict(job.model, job.optimizer)
    own = _own(job)
    state = {
        "model": job.model.state_dict(),
        "optim": {"optimizer": moments},
        "stateful": {"average": job.average.state_dict()},
        "tokens_seen": tokens,
        **(own if not job.rank else {f"rank{job.rank}": own}),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=Path(root) / "step_1")


def _in_one_file(root: str, job: Job, tokens: int) -> None:
    """Gather everything in the first rank, which writes it by `torch.save`."""
    state = {
        "model": _gathered(job.model.state_dict()),
        "optim": {"optimizer": _gathered(job.optimizer.state_dict())},
        "stateful": {"average": _gathered(job.average.state_dict())},
        "tokens_seen": tokens,
    }
    own: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(own, _own(job))
    if not job.rank:
        others = {f"rank{rank}": one for rank, one in enumerate(own) if rank}
        Path(root).mkdir(parents=True)
        torch.save({**state, **own[0], **others}, Path(root) / "step_1.pt")


def _gathered(state: Any) -> Any:  # noqa: ANN401  a state has no narrower type
    if isinstance(state, dict):
        return {key: _gathered(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_gathered(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


_KINDS: dict[str, Callable[[str, Job, int], None]] = {
    "per-rank": _per_rank,
    "dcp": _by_dcp,
    "torch": _by_torch,
    "file": _in_one_file,
}
PATHS = {
    "per-rank": "model_000001.pt",
    "dcp": "dcp_000001",
    "torch": "step_1",
    "file": "step_1.pt",
}
"""Where each kind is, below its root."""
