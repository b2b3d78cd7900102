"""torchtitan: of a checkpoint of step 0 `load` gives the model alone (CKC-INTN-001, CKC-RSUM-008).

What was saved beside it at step 0 is in the file; after load(0) it is what it was before, and no
message says so. The same at step 1 comes back. Ends with 1 where that shows.
"""

import logging
import os
import sys

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager


class Nothing:
    """A part of a training without state."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict) -> None:
        """Nothing."""


class Counter:
    """A part with one number, such as a data position."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict:
        return {"number": torch.tensor(self.number)}

    def load_state_dict(self, state_dict) -> None:
        self.number = int(state_dict["number"])


def manager(counter: Counter, bias: float) -> tuple:
    """Make a manager of a model and a counter."""
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.bias, bias)
    config = CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0, folder="steps")
    return model, CheckpointManager(
        config,
        dataloader=Nothing(),
        model_parts=[model],
        optimizers=Nothing(),
        lr_schedulers=Nothing(),
        states={"counter": counter},
        sd_adapter=None,
        base_folder=os.path.abspath("kept"),
    )


def arrives(step: int) -> tuple:
    """Save 7 and a bias of 0.5 as a step; return what another job has after it loaded that."""
    manager(Counter(7), 0.5)[1].save(step)
    counter = Counter(-1)
    model, loading = manager(counter, 0.0)
    loading.load(step)
    return float(model.bias.detach()), counter.number


logging.disable(logging.CRITICAL)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
first, later = arrives(0), arrives(1)
print(f"saved: (0.5, 7); load(0) gives {first}, load(1) gives {later}")
sys.stdout.flush()
# At an ordinary exit gloo's threads may abort the process.
os._exit(first == (0.5, -1) and later == (0.5, 7))
