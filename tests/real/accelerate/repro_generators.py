"""accelerate: a file of generators that is missing, or cut short, is passed over without an error.

`load_state` then goes on with the generators of the new process. Ends with 1 where that shows.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator

SAVED, NEW = 5, 9  # seeds


def draws() -> tuple[float, float]:
    """Draw once from the generators of python and of torch."""
    return random.random(), float(torch.rand(()))  # noqa: S311  a draw to compare


def seed(number: int) -> None:
    """Seed both."""
    random.seed(number)
    torch.manual_seed(number)


accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 4)
accelerator.prepare(model, torch.optim.Adam(model.parameters()))
seed(NEW)
cold = draws()
with tempfile.TemporaryDirectory() as folder:
    seed(SAVED)
    accelerator.save_state(folder)
    saved = draws()
    file = Path(folder) / "random_states_0.pkl"
    drawn = {}
    for damage in ("whole", "cut to half", "missing"):
        if damage == "cut to half":
            os.truncate(file, file.stat().st_size // 2)
        elif damage == "missing":
            file.unlink()
        seed(NEW)
        accelerator.load_state(folder)  # raises nothing
        drawn[damage] = draws()
        print(f"{damage}: the next draws are those of the save: {drawn[damage] == saved}")
shows = drawn["whole"] == saved and drawn["cut to half"] == drawn["missing"] == cold
print(f"load_state passes over a generator file that is cut short or missing: {shows}")
sys.exit(shows)
