"""The process's generators as one component: python, numpy, torch, and CUDA where there is one.

The state is tensors and plain types only, so that a safe load (`weights_only=True`) can read it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NotRequired, TypedDict, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from ckpt_conformance.workload.state import StateDict


class PythonGenerator(TypedDict):
    """The state of `random`: version, words int64 [625], the normal draw that is held back."""

    version: int
    words: torch.Tensor
    gauss: float | None


class NumpyGenerator(TypedDict):
    """The state of NumPy's global generator: keys are int64 [624]."""

    name: str
    keys: torch.Tensor
    position: int
    has_gauss: int
    cached: float


class GeneratorStates(TypedDict):
    """The states of all generators; torch's own are uint8 tensors, of CUDA one a device."""

    python: PythonGenerator
    numpy: NumpyGenerator
    torch_cpu: torch.Tensor
    torch_cuda: NotRequired[list[torch.Tensor]]


def own_devices() -> list[int]:
    """List the GPUs whose generators are this process's: of a rank the one that it computes on."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return [torch.cuda.current_device()]
    return list(range(torch.cuda.device_count()))


class RngState:
    """All global generators of the process."""

    def state_dict(self) -> StateDict:
        """Return every generator's state without loss, as `GeneratorStates`."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002  the global one
        state: GeneratorStates = {
            "python": {
                "version": version,
                "words": torch.tensor(words, dtype=torch.int64),
                "gauss": gauss,
            },
            "numpy": {
                "name": str(name),
                "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch_cpu": torch.random.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["torch_cuda"] = [torch.cuda.get_rng_state(device) for device in own_devices()]
        return dict(state)

    def load_state_dict(self, state_dict: GeneratorStates) -> None:
        """Set every generator."""
        python, numpy = state_dict["python"], state_dict["numpy"]
        words = cast("list[int]", python["words"].tolist())
        random.setstate((python["version"], tuple(words), python["gauss"]))
        keys = numpy["keys"].numpy().astype(np.uint32)
        np.random.set_state(  # noqa: NPY002
            (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
        )
        torch.random.set_rng_state(state_dict["torch_cpu"])
        if "torch_cuda" in state_dict and torch.cuda.is_available():
            for device, state in zip(own_devices(), state_dict["torch_cuda"], strict=False):
                torch.cuda.set_rng_state(state, device)

    @staticmethod
    def seed(seed: int) -> None:
        """Seed every generator."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        # Not `torch.manual_seed`: without CUDA it keeps a formatted traceback for a later start of
        # CUDA, a fifth of what an empty child costs.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)

    @staticmethod
    def draw(*, normal: bool = False) -> tuple[str, ...]:
        """Draw once from each generator; return each draw as `float.hex`.

        `normal` also draws from the two that make normal numbers in pairs, and hold one back.
        """
        drawn = [
            random.random().hex(),  # noqa: S311  a draw to compare, no secret
            float(np.random.random()).hex(),  # noqa: NPY002  the global one
            float(torch.rand(())).hex(),
        ]
        if normal:
            drawn.append(random.gauss(0.0, 1.0).hex())
            drawn.append(float(np.random.standard_normal()).hex())  # noqa: NPY002  the global one
        if torch.cuda.is_available():
            drawn.append(float(torch.rand((), device="cuda")).hex())
        return tuple(drawn)
