"""Small things that a life does for a check, by `op_probe`."""

from __future__ import annotations

import os
from typing import Any

from ckpt_conformance.contract import trees


def enter(_life: Any, folder: str) -> None:  # noqa: ANN401  a Life
    """Change the working directory of the life."""
    os.chdir(folder)


def reach(life: Any, step: int) -> None:  # noqa: ANN401  a Life
    """Train one step and count as if `step` steps had been trained."""
    life.job.train(1)
    life.job.step = step


def scribble(life: Any) -> int:  # noqa: ANN401  a Life
    """Invert every byte of every file of the manager, in place; give how many bytes that were.

    Size and inode stay, so that a mapping of the file sees the new bytes and no signal.
    """
    total = 0
    for path in trees.files(life.root):
        with path.open("r+b", buffering=0) as file:
            data = file.read()
            file.seek(0)
            file.write(bytes(byte ^ 0xFF for byte in data))
        total += len(data)
    return total
