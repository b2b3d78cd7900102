"""torch's own load of a module that refuses ties: the counterfactual of a value that was lost so.

Models: `nn.Module.load_state_dict` that raises where two entries of the module share memory and are
given two values.
Does not model: a manager that fills memory by itself, or brings both entries to one value first:
there nothing fires, so what is lost is the manager's.
Proof: `fired` counts the entries that torch would have written over, and the log names them.
"""

# ruff: noqa: ANN401  state dicts, and torch's own arguments: any type at all

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch


class TorchTie(Injector):
    """Replaces `load_state_dict`; a subclass that has its own calls this, or is none."""

    name = "torch-tie"

    def install(self) -> None:
        """Replace the method."""
        from torch import nn

        self.patch(nn.Module, "load_state_dict", self._refusing(nn.Module.load_state_dict))

    def _refusing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(
            module: torch.nn.Module, state_dict: Any, *args: Any, **given: Any
        ) -> Any:
            self.calls += 1
            is_assigned = given.get("assign", args[1:2] == (True,))
            for name in () if is_assigned else _written_over(module, state_dict):
                self.note("Module.load_state_dict", name)
                raise ValueError(f"{name} shares its memory here with an entry of another value")
            return real(module, state_dict, *args, **given)

        return load_state_dict


def _written_over(module: torch.nn.Module, state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of entries whose place an earlier entry of another value has taken."""
    import torch

    taken: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for name, live in module.state_dict().items():
        saved = state_dict.get(name)
        if not isinstance(live, torch.Tensor) or not isinstance(saved, torch.Tensor):
            continue
        first = taken.setdefault((live.data_ptr(), live.shape), saved) if live.numel() else saved
        if first is not saved and not torch.equal(first, saved):
            yield name
