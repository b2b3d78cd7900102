"""nvrx: a file of another name in its directory makes every save fail (CKC-DISC-005)."""

import os

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)


class OnCpu(BasicTensorAwareStateDict):
    """nvrx's class, without its demand for CUDA."""

    def __init__(self, state) -> None:
        self.state_dict, self._is_hollow = state, False

    def copy_tensors_to_cpu(self, non_blocking=False) -> None:
        """They are there."""


def main() -> None:
    """Save; put a copy of the file beside it, under a name that a user may choose; save again."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    manager = LocalCheckpointManager(os.path.abspath("root"))
    manager.save(OnCpu({"weight": torch.ones(3)}), 2)
    with open("root/0/iter_best_0_local.pt", "wb") as file:
        file.write(b"a copy that a user made")
    try:
        manager.save(OnCpu({"weight": torch.ones(3)}), 4)
    except ValueError as error:
        print(f"save(4) beside {sorted(os.listdir('root/0'))}: {error!r}", flush=True)
        # At an ordinary exit gloo's threads may abort the process.
        os._exit(1)
    print(f"save(4) went well; there is {sorted(os.listdir('root/0'))}")


main()
