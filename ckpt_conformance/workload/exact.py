"""Arithmetic whose sums do not depend on their order, so that every layout trains bit for bit.

A sum of floating-point numbers depends on how ranks share it out. Here everything that is summed,
over samples, features or ranks, is a multiple of a power of two and small: then each partial sum
fits into float32, and no order of summation rounds. Activations, weights and what flows back are
multiples of 1/64 of at most 2 in size, 8 bits each; their products have 16 bits, and 24 samples of
them 21: less than the 24 bits of a float32.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

STEP = 64.0  # values are multiples of 1 / STEP
LIMIT = 2.0


def rounded(x: Tensor) -> Tensor:
    """Round to the grid and cut off what is too large; works on a DTensor's shards alike."""
    return (x * STEP).round().clamp(-LIMIT * STEP, LIMIT * STEP) / STEP


class _Weight(torch.autograd.Function):
    """Rounds forward, lets gradients through: the weight itself stays a full float32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:  # noqa: ANN401  torch's own signature
        del ctx
        return rounded(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ANN401
        del ctx
        return grads[0]


class _Activation(torch.autograd.Function):
    """Rounds what goes forward and what flows back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        del ctx
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ANN401
        del ctx
        return rounded(grads[0])


def weight(x: Tensor) -> Tensor:
    """Round a weight to the grid; its gradient passes unchanged."""
    on_grid: Any = _Weight.apply(x)  # type: ignore[no-untyped-call]  # torch declares no types
    return cast("Tensor", on_grid)


def activation(x: Tensor) -> Tensor:
    """Round an activation to the grid, and its gradient too."""
    on_grid: Any = _Activation.apply(x)  # type: ignore[no-untyped-call]  # torch declares no types
    return cast("Tensor", on_grid)


class ExactLinear(nn.Linear):
    """A linear layer of rounded weights; `input` is on the grid."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        """Map [B, in] to [B, out]; the result is exact and not yet rounded."""
        own = self._parameters["bias"]
        bias = None if own is None else weight(own)
        return functional.linear(input, weight(self.weight), bias)
