"""The optimizers of the job step as torch's do: trainers leave the gradients to a closure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpt_conformance.workload.job import Job
from ckpt_conformance.workload.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable


def stepped(kind: str, step: Callable[[Any, Callable[[], torch.Tensor]], Any]) -> list[bytes]:
    """Step each optimizer of a fresh job once; return the bytes of what it then trains on."""
    job = Job(kind, 3)
    trained = [p for o in job.optimizers.values() for g in o.param_groups for p in g["params"]]

    def gradients() -> torch.Tensor:
        loss = torch.stack([p.float().square().sum() for p in trained]).sum()
        job.model.zero_grad()
        loss.backward()
        return loss

    for optimizer in job.optimizers.values():
        step(optimizer, gradients)
    return [p.detach().float().numpy().tobytes() for p in trained]


def by_closure(optimizer: Any, gradients: Callable[[], torch.Tensor]) -> None:  # noqa: ANN401
    assert optimizer.step(gradients) is not None  # the loss


def by_hand(optimizer: Any, gradients: Callable[[], torch.Tensor]) -> None:  # noqa: ANN401
    gradients()
    optimizer.step()


@pytest.mark.parametrize("kind", sorted({KINDS[name].optimizer: name for name in KINDS}.values()))
def test_a_closure_gives_the_gradients(kind: str) -> None:
    assert stepped(kind, by_closure) == stepped(kind, by_hand)
