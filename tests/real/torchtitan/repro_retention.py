"""torchtitan's keep_latest_k goes by names alone (CKC-RETN-004, CKC-RETN-012).

It counts directories that no load would choose, since they have no `.metadata`, and it deletes the
checkpoint that was just saved where larger steps are there.
"""

import logging
import os
import pathlib
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


def manager(folder: str) -> CheckpointManager:
    """Make a manager that keeps two."""
    return CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1, keep_latest_k=2, folder="kept"),
        dataloader=Nothing(),
        model_parts=[torch.nn.Linear(2, 2)],
        optimizers=Nothing(),
        lr_schedulers=Nothing(),
        states={},
        sd_adapter=None,
        base_folder=os.path.abspath(folder),
    )


def saved(folder: str, *steps: int) -> list[str]:
    """Save steps, close, and list what is there."""
    one = manager(folder)
    for step in steps:
        one.save(step)
    one.close()
    return sorted(os.listdir(f"{folder}/kept"))


def main() -> None:
    """Save beside what two killed saves left; save below newer steps."""
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saved("dead", 2, 4)
    for step in (6, 8):  # a save that is killed leaves files, and no .metadata
        left = pathlib.Path(f"dead/kept/step-{step}")
        left.mkdir()
        (left / "__0_0.distcp").write_bytes(b"")
    names = saved("dead", 5)
    fresh = not manager("dead").load()
    print(f"beside what two dead saves left, save(5) leaves {names}; a restart is fresh: {fresh}")
    saved("rerun", 100, 200)
    rerun = saved("rerun", 10)
    print(f"beside steps 100 and 200, save(10) leaves {rerun}")
    print(f"all whole checkpoints lost: {fresh}; saved and at once deleted: {len(rerun) == 2}")
    sys.stdout.flush()
    # At an ordinary exit gloo's threads may abort the process.
    os._exit(fresh and "step-10" not in rerun)


main()
