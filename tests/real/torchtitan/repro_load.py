"""torchtitan: a load casts a buffer, and drops an entry, without a word (CKC-INTN-004, 007)."""

import contextlib
import io
import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager


class Nothing:
    """A part of a training without state."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict) -> None:
        """Nothing."""


class Model(torch.nn.Linear):
    """A layer with a buffer."""

    def __init__(self, constant) -> None:
        super().__init__(2, 2)
        if constant is not None:
            self.register_buffer("constant", constant)


def manager(model) -> CheckpointManager:
    """Make a manager of a model."""
    return CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0),
        dataloader=Nothing(),
        model_parts=[model],
        optimizers=Nothing(),
        lr_schedulers=Nothing(),
        states={},
        sd_adapter=None,
        base_folder=os.path.abspath("kept"),
    )


def main() -> None:
    """Save a buffer in float32; load it into one in bfloat16, and into a model without it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    manager(Model(torch.tensor([1.001]))).save(1)
    narrow, without = Model(torch.zeros(1).bfloat16()), Model(None)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(said):
        warnings.simplefilter("always")
        loaded = [manager(narrow).load(), manager(without).load()]
    about = [str(one.message) for one in warned if "constant" in str(one.message)]
    silent = loaded == [True, True] and not about and "constant" not in said.getvalue()
    print(f"1.001 in float32 arrived as {narrow.constant.item()} in {narrow.constant.dtype}")
    print(f"cast, and dropped where there is no such buffer, without a word: {silent}")
    sys.stdout.flush()
    # At an ordinary exit gloo's threads may abort the process.
    os._exit(silent and narrow.constant.item() == 1.0)


main()
