"""torch's own loads without their cast: the counterfactual of a state that was cast.

Models: `Optimizer.load_state_dict` that keeps the dtype of each tensor of state it is given, and
`nn.Module.load_state_dict` that refuses an entry of another dtype.
Does not model: a cast that a manager makes before it calls these, or without them: there the result
stays wrong, so the cast is the manager's.
Proof: `fired` counts the tensors that torch would have cast, and the log names them.
"""

# ruff: noqa: ANN401  state dicts, and torch's own arguments: any type at all

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch


class TorchCast(Injector):
    """Replaces both `load_state_dict`; a subclass that has its own calls these, or is none."""

    name = "torch-cast"

    def install(self) -> None:
        """Replace the methods of the two classes."""
        from torch import nn, optim

        self.patch(nn.Module, "load_state_dict", self._of_module(nn.Module.load_state_dict))
        loads = optim.Optimizer.load_state_dict
        self.patch(optim.Optimizer, "load_state_dict", self._of_optimizer(loads))

    def _of_module(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(
            module: torch.nn.Module,
            state_dict: Any,
            *args: Any,
            **given: Any,
        ) -> Any:
            self.calls += 1
            is_assigned = given.get("assign", args[1:2] == (True,))
            for name in () if is_assigned else _other_dtypes(module, state_dict):
                self.note("Module.load_state_dict", name)
                raise TypeError(f"{name} has another dtype here than in the checkpoint")
            return real(module, state_dict, *args, **given)

        return load_state_dict

    def _of_optimizer(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(
            optimizer: torch.optim.Optimizer,
            state_dict: Any,
            *args: Any,
            **given: Any,
        ) -> Any:
            self.calls += 1
            result = real(optimizer, state_dict, *args, **given)
            for parameter, saved in _by_parameter(optimizer, state_dict):
                self._keep_dtypes(optimizer.state[parameter], saved)
            return result

        return load_state_dict

    def _keep_dtypes(self, live: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
        """Put what was cast back as it was given, on the device where torch has put it."""
        for key, value in saved.items():
            if key in live:
                live[key] = self._uncast(live[key], value, str(key))

    def _uncast(self, now: Any, value: Any, path: str) -> Any:
        """Return what was loaded, with each tensor of it in the dtype in which it was given."""
        both = (now, value)
        if all(isinstance(one, dict) for one in both):
            return {k: self._uncast(v, value.get(k), f"{path}.{k}") for k, v in now.items()}
        if all(isinstance(one, list) for one in both):
            pairs = enumerate(zip(*both, strict=True))
            return [self._uncast(a, b, f"{path}.{at}") for at, (a, b) in pairs]
        dtypes = getattr(now, "dtype", None), getattr(value, "dtype", None)
        if None in dtypes or dtypes[0] == dtypes[1]:
            return now
        self.note("Optimizer.load_state_dict", path)
        return value.detach().clone().to(device=now.device)


def _other_dtypes(module: torch.nn.Module, state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of entries whose dtype is not the one of the module's own."""
    for name, live in module.state_dict().items():
        saved = state_dict.get(name)
        dtypes = getattr(live, "dtype", None), getattr(saved, "dtype", None)
        if None not in dtypes and dtypes[0] != dtypes[1]:
            yield name


def _by_parameter(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, Mapping[Any, Any]]]:
    """Pair parameters with the state that was given for them, in the order of the groups."""
    ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    live = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for identifier, parameter in zip(ids, live, strict=False):
        if identifier in state_dict["state"]:
            yield parameter, state_dict["state"][identifier]
