"""The process's generators as one component: python, numpy, torch, and CUDA where there is one.

The state is tensors and plain types only, so that a safe load (`weights_only=True`) can read it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def own_devices() -> list[int]:
    """List the GPUs whose generators are this process's: of a rank the one that it computes on."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return [torch.cuda.current_device()]
    return list(range(torch.cuda.device_count()))


class RngState:
    """All global generators of the process."""

    def state_dict(self) -> dict[str, Any]:
        """Give every generator's state, losslessly."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002  the global one
        state: dict[str, Any] = {
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
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator."""
        python, numpy = state_dict["python"], state_dict["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        keys = numpy["keys"].numpy().astype(np.uint32)
        np.random.set_state(  # noqa: NPY002
            (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
        )
        torch.random.set_rng_state(state_dict["torch_cpu"])
        if "torch_cuda" in state_dict and torch.cuda.is_available():
            for device, one in zip(own_devices(), state_dict["torch_cuda"], strict=False):
                torch.cuda.set_rng_state(one, device)

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
    def draw() -> tuple[str, ...]:
        """Draw once from each generator and give the bits."""
        drawn = [
            random.random().hex(),  # noqa: S311  a draw to compare, no secret
            float(np.random.random()).hex(),  # noqa: NPY002  the global one
            float(torch.rand(())).hex(),
        ]
        if torch.cuda.is_available():
            drawn.append(float(torch.rand((), device="cuda")).hex())
        return tuple(drawn)
