"""Collecting state: the `state_dict` of one component raises.

Models: no memory left for the copy of a tensor, or an error inside a component, while a save
gathers what it will write.
Does not model: an allocation that fails inside torch's own serialisation.
Proof: `fired`, and an event in the journal.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable


class Collecting(Injector):
    """Hits at the N-th call of a component's `state_dict` during a save."""

    name = "collecting"

    def install(self) -> None:
        """Replace the method in every class that a component of a job has."""
        self._depth = 0
        for owner in _owners():
            original = vars(owner)["state_dict"]
            self.patch(owner, "state_dict", self._method(owner.__name__, original))

    def _method(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def state_dict(part: object, *args: object, **given: object) -> object:
            # A module asks its children, and a class its parent: that is one call of ours.
            if self._depth:
                return real(part, *args, **given)
            self._depth += 1
            try:
                return self.around(f"{what}.state_dict", what, partial(real, part, *args, **given))
            finally:
                self._depth -= 1

        return state_dict


def _owners() -> list[type]:
    """List the classes that define a component's `state_dict`; a subclass may define its own."""
    from torch import nn, optim
    from torch.amp.grad_scaler import GradScaler

    from ckpt_conformance.workload import loader, rng, state

    schedulers = optim.lr_scheduler.LRScheduler
    bases: list[type] = [nn.Module, optim.Optimizer, schedulers, GradScaler]
    owners = {owner for base in bases for owner in (base, *_subclasses(base))}
    owners |= {loader.ShuffledLoader, rng.RngState, state.Ema, state.Extra, state.Gradients}
    defining = (owner for owner in owners if "state_dict" in vars(owner))
    return sorted(defining, key=lambda owner: owner.__qualname__)


def _subclasses(base: type) -> list[type]:
    children: list[type] = base.__subclasses__()
    return [heir for child in children for heir in (child, *_subclasses(child))]
