"""accelerate: one folder without a digit in its name, beside the checkpoints, stops every load.

With a limit it stops every save, too. Ends with 1 where that shows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

with tempfile.TemporaryDirectory() as folder:
    naming = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=naming)
    model = torch.nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.save_state()
    accelerator.save_state()
    accelerator.load_state()
    print("two checkpoints, and the latest loads")
    (Path(folder) / "checkpoints" / ".ipynb_checkpoints").mkdir()
    errors = []
    for action in (accelerator.load_state, accelerator.save_state):
        try:
            action()
        except IndexError as error:
            errors.append(f"{action.__name__}: {error!r}")
print(f"beside a folder .ipynb_checkpoints: {errors or 'both go well'}")
sys.exit(bool(errors))
