"""What is neither model nor optimizer: step, tokens, generators, scheduler, data position, extra.

The keys and the two entry points are those of KempnerForge's train state (K001-K004, K014-K016).
Two things differ from the document, on purpose: `extra` has a namespace of its own, because a
user's key named `step` replaced the step (KX4), and generators are written as tensors and plain
types, because a safe load refuses NumPy's (M01). The documented flat form is accepted on read.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import numpy as np
import torch
from torch.distributed import get_world_size, is_initialized

from ckpt_conformance.reference_impl.durable import digest_bytes
from ckpt_conformance.reference_impl.errors import CheckpointDamaged, SaveRefused

if TYPE_CHECKING:
    from ckpt_conformance.reference_impl.encode import StateDict, Tree

logger = logging.getLogger(__name__)

RESERVED = ("step", "tokens_seen", "rng", "scheduler", "dataloader")
"""Keys of the train state; in `extra` they are an error, or the flat form would lose them."""

VERSION = "train_state_version"
_PYTHON_WORDS = 625
_NUMPY_WORDS = 624


class Stateful(Protocol):
    """What can be saved: the two methods that torch's objects have."""

    def state_dict(self) -> Tree:
        """The state, as a dict."""
        ...

    def load_state_dict(self, state_dict: Tree, /) -> object:
        """Take a state back."""
        ...


class JobParts(TypedDict):
    """The parts of a job by the names that `CheckpointManager.save` and `.load` give them."""

    model: Stateful
    optimizers: Mapping[str, Stateful] | Stateful | None
    scheduler: Stateful | Mapping[str, Stateful] | None
    dataloader: Stateful | None
    stateful: Mapping[str, Stateful] | None


class SavedParts(JobParts):
    """The parts of a job, and what else `CheckpointManager.save` takes by name."""

    tokens_seen: int
    extra: Mapping[str, Tree] | None


def get_rng_state() -> StateDict:
    """Snapshot every generator of this process; draws nothing from any of them.

    Returns:
        `python`: {version, words int64 [625], gauss float or None};
        `numpy`: {kind "MT19937", words int64 [624], position, has_gauss, gauss};
        `torch_cpu`: uint8 [5056];
        `torch_cuda`, where there is CUDA: list of uint8, one for each of `own_devices` (KX3).

    Raises:
        SaveRefused: NumPy's global generator was replaced by one that is not MT19937.
    """
    state: StateDict = {
        "python": _python_state(random.getstate()),
        "numpy": _get_numpy(),
        "torch_cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["torch_cuda"] = [torch.cuda.get_rng_state(device) for device in own_devices()]
    return state


def _python_state(state: tuple[Any, ...]) -> StateDict:
    """What `Random.getstate()` gives, losslessly in plain types."""
    version, words, gauss = state
    return {
        "version": version,
        "words": torch.tensor(words, dtype=torch.int64),
        "gauss": gauss,
    }


def _get_numpy() -> StateDict:
    """`np.random.get_state()`, losslessly."""
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the one that jobs use
    if state["bit_generator"] != "MT19937":
        raise SaveRefused("numpy's global generator is not MT19937: restore the default one")
    return _numpy_state(state)


def _numpy_state(state: Any) -> StateDict:  # noqa: ANN401  what NumPy gives
    """A state of NumPy's MT19937 in plain types."""
    return {
        "kind": "MT19937",
        "words": torch.from_numpy(state["state"]["key"].astype(np.int64)),
        "position": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def fresh_rng_state(seed: str) -> StateDict:
    """Generators as `get_rng_state` returns them, seeded by a text alone; nothing is drawn.

    The same text gives the same generators, and each of them has a seed of its own.
    """

    def seed_of(what: str) -> int:
        return int(digest_bytes(f"{seed}/{what}".encode())[:15], 16)

    python = random.Random(seed_of("python"))  # noqa: S311 - no secret
    legacy: Any = np.random.RandomState(seed_of("numpy") % 2**32).get_state(legacy=False)
    state: StateDict = {
        "python": _python_state(python.getstate()),
        "numpy": _numpy_state(legacy),
        "torch_cpu": torch.Generator().manual_seed(seed_of("torch")).get_state(),
    }
    if torch.cuda.is_available():
        state["torch_cuda"] = [
            torch.Generator(f"cuda:{device}").manual_seed(seed_of(f"cuda{device}")).get_state()
            for device in own_devices()
        ]
    return state


def set_rng_state(state: Mapping[str, Tree]) -> None:
    """Restore every generator of a snapshot of `get_rng_state`.

    Each saved generator is set, by key (E05); a failure is an error, never a log line (E06).
    Policy for another number of devices (E09): devices that both have are restored, the others
    keep what they have, and a warning says so.

    Raises:
        CheckpointDamaged: a generator is missing or malformed. Nothing is set then.
    """
    try:
        python, numpy, torch_cpu = _decoded(state)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointDamaged(f"the saved generators are malformed: {error!r}") from error
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002 - the one that jobs use
    torch.random.set_rng_state(torch_cpu)
    _set_cuda(state.get("torch_cuda", []))


def _decoded(state: Mapping[str, Tree]) -> tuple[Any, Any, torch.Tensor]:
    """The states of the three CPU generators, each tried first on a generator that nobody uses."""
    words = state["python"]["words"].tolist()
    python = (state["python"]["version"], tuple(words), state["python"]["gauss"])
    random.Random().setstate(python)  # noqa: S311 - no secret; only to see whether it is taken
    saved = state["numpy"]
    words = saved["words"].numpy().astype(np.uint32)
    numpy = (saved["kind"], words, saved["position"], saved["has_gauss"], saved["gauss"])
    np.random.RandomState(0).set_state(numpy)
    torch_cpu = state["torch_cpu"].clone()
    torch.Generator().set_state(torch_cpu)
    return python, numpy, torch_cpu


def _set_cuda(states: list[torch.Tensor]) -> None:
    """Restore the generators of the devices that both runs have."""
    here = own_devices()
    if len(states) != len(here):
        logger.warning(
            "generators of %d CUDA devices were saved and %d are here: only the common ones "
            "are restored, so the trajectory will differ",
            len(states),
            len(here),
        )
    for device, state in zip(here, states, strict=False):
        torch.cuda.set_rng_state(state, device)


def own_devices() -> list[int]:
    """The CUDA devices whose generators are this process's: all, or the one of a rank (KX3).

    Every rank sees the devices of the others. To ask each for its state would start each rank on
    every device, and to set it would undo what its owner has set.
    """
    if not torch.cuda.is_available():
        return []
    if is_initialized() and get_world_size() > 1:
        return [torch.cuda.current_device()]
    return list(range(torch.cuda.device_count()))


def check_extra(extra: Mapping[str, Tree] | None) -> StateDict:
    """A copy of `extra`, once it is seen to hold none of the reserved keys (KX4).

    Raises:
        SaveRefused: a reserved key, by name.
    """
    extra = dict(extra or {})
    taken = sorted(set(extra) & {*RESERVED, VERSION})
    if taken:
        raise SaveRefused(f"extra has the reserved keys {taken}: rename them. Nothing was written")
    return extra


def build_train_state(
    step: int,
    tokens_seen: int,
    scheduler: Stateful | Mapping[str, Stateful] | None = None,
    dataloader: Stateful | Mapping[str, Stateful] | None = None,
    extra: Mapping[str, Tree] | None = None,
) -> StateDict:
    """The train state of this process, as it is written (K002, K003).

    Args:
        step: optimizer steps done.
        tokens_seen: cumulative, over all data-parallel ranks.
        scheduler: passed through verbatim; a mapping gives a mapping of states.
        dataloader: its position; without it a resumed job replays its epoch (K012).
        extra: numbers, strings, lists, dicts, tensors.

    Returns:
        step, tokens_seen, rng, extra, and scheduler and dataloader where given.

    Raises:
        SaveRefused: `extra` has a reserved key.
    """
    state: StateDict = {
        VERSION: 2,
        "step": step,
        "tokens_seen": tokens_seen,
        "rng": get_rng_state(),
        "extra": check_extra(extra),
    }
    if scheduler is not None:
        state["scheduler"] = state_of(scheduler)
    if dataloader is not None:
        state["dataloader"] = state_of(dataloader)
    return state


def state_of(component: Stateful | Mapping[str, Stateful]) -> Tree:
    """The state of one component, or of each of several by name."""
    if isinstance(component, Mapping):
        return {name: part.state_dict() for name, part in component.items()}
    return component.state_dict()


def extra_of(state: Mapping[str, Tree]) -> StateDict:
    """The user's `extra`, from its namespace or from the documented flat form (K015)."""
    if VERSION in state:
        return dict(state["extra"])
    return {key: value for key, value in state.items() if key not in RESERVED}


def restore_train_state(
    state: Mapping[str, Tree],
    scheduler: Stateful | Mapping[str, Stateful] | None = None,
    dataloader: Stateful | None = None,
) -> tuple[int, int, StateDict]:
    """Put a train state back, the generators last (E03): nothing after them may draw.

    Returns:
        step, tokens_seen, extra.

    Raises:
        CheckpointDamaged: a key that every train state has is absent, or the state of a
            component that was passed (KX5: never step 0 with trained weights).
    """
    wanted = {"scheduler": scheduler, "dataloader": dataloader}
    needed = {
        "step",
        "tokens_seen",
        "rng",
        *(key for key, part in wanted.items() if part is not None),
    }
    if missing := sorted(needed - set(state)):
        raise CheckpointDamaged(f"the train state lacks {missing}")
    for key, component in wanted.items():
        if component is not None:
            load_into(component, state[key])
    set_rng_state(state["rng"])
    return int(state["step"]), int(state["tokens_seen"]), extra_of(state)


def load_into(component: Stateful | Mapping[str, Stateful], state: Tree) -> None:
    """Hand a state to one component, or to each of several by name.

    Raises:
        CheckpointDamaged: several, and not those that were saved.
    """
    if isinstance(component, Mapping):
        if set(component) != set(state):
            raise CheckpointDamaged(f"saved for {sorted(state)}, asked for {sorted(component)}")
        for name, part in component.items():
            part.load_state_dict(state[name])
    else:
        component.load_state_dict(state)
