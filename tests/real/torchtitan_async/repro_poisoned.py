"""One failed save of torchtitan's async mode makes every later save fail (CKC-IOER-003).

`_wait_for_saving` clears `save_future` after `result()` has returned; where that raises, the future
stays, and each further `save` and `maybe_wait_for_saving` raises the old error again.
"""

import logging
import os
import resource
import signal
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


def attempt(manager: CheckpointManager, step: int) -> str:
    """Save, wait, and say what came of it."""
    try:
        manager.save(step)
        manager.maybe_wait_for_saving()
    except BaseException as error:  # DCP's error is none of Exception
        return type(error).__name__
    return "saved"


def main() -> None:
    """Save, save where files may have no more than 100 bytes, save twice more."""
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True, interval=1, keep_latest_k=0, folder="kept", async_mode="async"
        ),
        dataloader=Nothing(),
        model_parts=[torch.nn.Linear(100, 100)],
        optimizers=Nothing(),
        lr_schedulers=Nothing(),
        states={},
        sd_adapter=None,
        base_folder=os.path.abspath("out"),
    )
    ends = {2: attempt(manager, 2)}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    ends[4] = attempt(manager, 4)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    ends |= {step: attempt(manager, step) for step in (6, 8)}
    print(f"saves end so: {ends}; there is {sorted(os.listdir('out/kept'))}")
    failed = ends[2] == "saved" and ends[4] != "saved" and ends[6] != "saved" != ends[8]
    sys.stdout.flush()
    os._exit(failed)


main()
