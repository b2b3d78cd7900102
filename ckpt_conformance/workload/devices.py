"""Where ranks compute: which processes see GPUs, and whether there are enough of them.

What has started CUDA can't fork children that use it, so the fork server sees no GPU, and children
do not either. A world on CUDA has children with an interpreter of their own, which see them all;
each rank takes the one of its number.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpt_conformance.contract.requests import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

CPU, CUDA = "cpu", "cuda"
FEWEST = 2  # GPUs: what is tested is more than one rank
SLOWER = 4.0  # times as long as on a CPU: a rank imports torch, and starts CUDA and NCCL
VISIBLE, KEPT = "CUDA_VISIBLE_DEVICES", "CKPT_CONFORMANCE_CUDA_VISIBLE_DEVICES"


def hidden(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set so that a process sees no GPU; `show` undoes it."""
    visible = environment.get(VISIBLE)
    return {VISIBLE: "", **({} if visible is None else {KEPT: visible})}


def show() -> None:
    """Let this process see GPUs again; before it has asked for any."""
    os.environ.pop(VISIBLE, None)
    if KEPT in os.environ:
        os.environ[VISIBLE] = os.environ[KEPT]


def count(child: object) -> int:
    """Count the GPUs that this child process sees; the probe of that name calls it."""
    del child
    import torch

    return int(torch.cuda.device_count())


def check(gpus: int) -> None:
    """Refuse to run on CUDA where not even two ranks have a GPU each.

    Raises:
        RequestError: says how many there are, and what to do.

    """
    if gpus < FEWEST:
        raise RequestError(
            f"device cuda needs a GPU for each rank, {FEWEST} or more, and torch sees {gpus}: "
            f"leave the device out, install a torch that is built for CUDA, or see what "
            f"{VISIBLE} names"
        )
