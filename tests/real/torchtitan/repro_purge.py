"""torchtitan: a process that dies while a checkpoint is purged leaves one that load chooses.

The purge is `shutil.rmtree` of the directory under its own name, in the order in which the file
system lists it. What marks a checkpoint as whole, `.metadata`, is not deleted first: here it comes
last, as a file system may have it (CKC-ATOM-004). Ends with 1 where that shows.
"""

import logging
import os
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


def manager() -> CheckpointManager:
    """Make a manager that keeps two."""
    return CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1, keep_latest_k=2, folder="kept"),
        dataloader=Nothing(),
        model_parts=[torch.nn.Linear(2, 2)],
        optimizers=Nothing(),
        lr_schedulers=Nothing(),
        states={},
        sd_adapter=None,
        base_folder=os.path.abspath("purged"),
    )


class InOrder:
    """A listing of a directory, with `.metadata` at its end."""

    def __init__(self, path) -> None:
        with scandir(path) as entries:
            self.entries = sorted(entries, key=lambda entry: entry.name == ".metadata")

    def __enter__(self):  # noqa: D105
        return iter(self.entries)

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


def die_in_the_purge() -> None:
    """Save three steps; die when the first data file of the oldest is deleted."""

    def removed(path, **options) -> None:
        unlink(path, **options)
        if str(path).endswith(".distcp"):
            os.kill(os.getpid(), signal.SIGKILL)

    os.scandir, os.unlink = InOrder, removed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one = manager()
    for step in (1, 2, 3):
        one.save(step)
    one.close()


scandir, unlink = os.scandir, os.unlink
logging.disable(logging.CRITICAL)
process = os.fork()
if process == 0:
    die_in_the_purge()
    os._exit(0)
ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
names = sorted(os.listdir("purged/kept/step-1"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    told = f"gives {manager().load(1)}"
except BaseException as error:  # DCP's error is none of Exception
    told = f"raises {type(error).__name__}"
print(f"killed in the purge of step 1: {ended}; step-1 holds {names}; load(1) {told}")
sys.exit(ended == -signal.SIGKILL and ".metadata" in names and told.startswith("raises"))
