"""FSDP2 of torch 2.7 on the CPU, where it adds gradients up as later releases do when asked.

Later releases have `set_gradient_divide_factor` and `set_force_sum_reduction_for_comms` for that
(pytorch/pytorch#155915). Torch 2.7 takes a mean, and where replicas are reduced it asserts an event
of a CUDA stream.
"""

from __future__ import annotations

import importlib
from typing import Any

INSIDE = "torch.distributed.fsdp._fully_shard"


def sum_gradients() -> None:
    """Replace two functions of this process; a second call changes nothing."""
    collectives: Any = importlib.import_module(f"{INSIDE}._fsdp_collectives")
    groups: Any = importlib.import_module(f"{INSIDE}._fsdp_param_group")
    # A factor before and one after the reduction: with any at all the reduction is a sum.
    collectives._get_gradient_divide_factors = factors  # noqa: SLF001

    def reduce(*given: Any) -> tuple[Any, ...]:  # noqa: ANN401
        """Reduce; of the CPU there is no event, and no input that must outlive a stream."""
        reduced = collectives.foreach_reduce(*given)
        *first, _input, _event, partial = reduced
        return (*first, None, None, partial)

    groups.foreach_reduce = reduce


def factors(*_given: Any) -> tuple[float, float]:  # noqa: ANN401
    """Return what gradients are divided by before and after they are reduced."""
    return 1.0, 1.0
