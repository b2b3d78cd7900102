"""Small things that a life does for a check, by `op_probe`."""

from __future__ import annotations

import os
from typing import Any


def enter(_life: Any, folder: str) -> None:  # noqa: ANN401  a Life
    """Change the working directory of the life."""
    os.chdir(folder)


def reach(life: Any, step: int) -> None:  # noqa: ANN401  a Life
    """Train one step and count as if `step` steps had been trained."""
    life.job.train(1)
    life.job.step = step
