"""Small things that a child does for a check, by `op_probe`."""

from __future__ import annotations

import os
from typing import Any

from ckpt_conformance.contract import trees


def enter(_child: Any, folder: str) -> None:  # noqa: ANN401  a Child
    """Change the working directory of the child."""
    os.chdir(folder)


def reach(child: Any, step: int) -> None:  # noqa: ANN401  a Child
    """Train one step and count as if `step` steps had been trained."""
    child.prepare()
    child.job.train(1)
    child.job.step = step


def scribble(child: Any) -> int:  # noqa: ANN401  a Child
    """Invert every byte of every file of the manager, in place; return the number of bytes.

    Size and inode stay, so that a mapping of the file sees the new bytes and no signal.
    """
    total = 0
    for path in trees.files(child.root):
        with path.open("r+b", buffering=0) as file:
            data = file.read()
            file.seek(0)
            file.write(bytes(byte ^ 0xFF for byte in data))
        total += len(data)
    return total
