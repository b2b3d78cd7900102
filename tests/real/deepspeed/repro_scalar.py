"""DeepSpeed takes no model that has a parameter without dimensions (CKC-RTRP-012)."""

import os
import sys

os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import deepspeed
import torch
import torch.distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is to be compiled


class Scaled(torch.nn.Linear):
    """A layer with a factor of shape []."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))


def main() -> None:
    """Initialize an engine of ZeRO-1 with two models."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    failed = {}
    for model in (torch.nn.Linear(4, 4), Scaled()):
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        except RuntimeError as error:
            failed[type(model).__name__] = str(error)
    print(f"deepspeed.initialize failed for {failed}")
    sys.stdout.flush()
    # At an ordinary exit gloo's threads may abort the process.
    os._exit(failed.keys() == {"Scaled"})


main()
