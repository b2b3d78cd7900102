"""torchtitan: `close` returns while a save that was begun is not yet written (CKC-ASYN-004)."""

import logging
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torchtitan.components.checkpointer import CheckpointManager

slow = threading.Event()  # the disk: it writes once this is set
write = FileSystemWriter.write_data


def late(writer: FileSystemWriter, *given: object) -> object:
    """Write when the disk has come to it."""
    slow.wait()
    return write(writer, *given)


class Nothing:
    """A part of a training without state."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict) -> None:
        """Nothing."""


def main() -> None:
    """Begin to save, close, and look."""
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    FileSystemWriter.write_data = late
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True, interval=1, keep_latest_k=0, folder="kept", async_mode="async"
        ),
        dataloader=Nothing(),
        model_parts=[torch.nn.Linear(10, 10)],
        optimizers=Nothing(),
        lr_schedulers=Nothing(),
        states={},
        sd_adapter=None,
        base_folder=os.path.abspath("out"),
    )
    manager.save(2)
    threading.Timer(20, slow.set).start()  # who waits for the save gets it then
    manager.close()
    early = not slow.is_set() and not os.path.exists("out/kept/step-2/.metadata")
    print(f"close() returned, and step 2 was not written yet: {early}")
    sys.stdout.flush()
    # Nobody waits for the threads.
    os._exit(early)


main()
