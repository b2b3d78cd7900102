"""nvrx: a save that was killed, or failed, blocks each later save of its iteration.

CKC-ATOM-003, CKC-IOER-003, CKC-RTRP-020. The usage guide promises 'Automatic cleanup: Handles the
cleanup of broken or outdated checkpoints automatically.'
"""

import errno
import os
import signal
import sys

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


def run(root: str, *, is_killed: bool = False, error: OSError | None = None) -> str:
    """In a process of its own: save iteration 4, killed in the middle, or with a failing disk."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        manager = LocalCheckpointManager(root)
        manager.find_latest()

        def save(state, file, save=torch.save) -> None:
            save(state, file)
            file.flush()
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if error:
                raise error

        torch.save = save
        try:
            manager.save(OnCpu({"weight": torch.ones(3)}), 4)
            os.write(writer, b"saved")
        except Exception as problem:
            os.write(writer, repr(problem).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    said = os.read(reader, 4096).decode()
    return said or f"killed by signal {os.WTERMSIG(status)}"


def main() -> None:
    """After a kill, and after an error of the disk, save the same iteration twice more."""
    full = OSError(errno.ENOSPC, "No space left on device")
    blocked = []
    for how, first in (("kill", {"is_killed": True}), ("error", {"error": full})):
        root = os.path.abspath(how)
        print(f"{how}: {run(root, **first)}; {os.listdir(f'{root}/0')}")
        later = [run(root) for _ in range(2)]
        print(f"  the same save on a healthy disk, twice: {later}")
        blocked += [how] * ("saved" not in later)
    print(f"later saves of the iteration are blocked after: {blocked}")
    sys.exit(blocked == ["kill", "error"])


main()
