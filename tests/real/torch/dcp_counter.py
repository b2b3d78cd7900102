"""torch.distributed.checkpoint names what is in a dict by letters: a Counter comes back with both.

Of a `MultiStepLR` the key `3` is saved as `scheduler.milestones.3`. A load into the `state_dict` of
another one fills the number, and puts `'3'` beside it; sorting the two ends `step(epoch)`.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

EPOCH, FOLDER = 4, "checkpoint"
warnings.simplefilter("ignore")


def scheduler() -> MultiStepLR:
    """Make a job's scheduler."""
    return MultiStepLR(SGD(torch.nn.Linear(2, 2).parameters(), 1.0), [3, 5], 0.5)


dcp.save({"scheduler": scheduler()}, checkpoint_id=FOLDER)
loaded, never_saved = scheduler(), scheduler()
dcp.load({"scheduler": loaded}, checkpoint_id=FOLDER)
never_saved.step(EPOCH)
print(f"milestones after the load: {loaded.milestones}")
try:
    loaded.step(EPOCH)
except TypeError as error:
    print(f"step({EPOCH}) after the load: {error}; without one: {never_saved.get_last_lr()}")
    sys.exit(1)
print("the scheduler goes on as one that was never saved")
