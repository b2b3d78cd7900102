"""nvidia-resiliency-ext: `LocalCheckpointManager`, one rank on the CPU, without replication."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
    BasicTensorAwareStateDict,
    dict_list_map_inplace,
)

from ckpt_conformance.contract import EVERYTHING, AdapterBase

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob


class OnCpu(BasicTensorAwareStateDict):
    """nvrx's own class but for one thing: it demands CUDA tensors, and here they are on the CPU."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        """Keep the state in containers of its own: tensors are replaced in them."""
        from torch.utils._pytree import tree_map

        self.state_dict, self._is_hollow = tree_map(lambda leaf: leaf, state_dict), False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Copy each tensor, as a copy from a GPU does."""
        del non_blocking
        dict_list_map_inplace(lambda x: x.clone() if hasattr(x, "clone") else x, self.state_dict)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Nothing is to be moved."""


def start_group() -> None:
    """Start a process group of one rank: each call of the manager is a collective."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Local:
    """One manager."""

    def __init__(self, root: Path) -> None:
        """Open a manager on a folder."""
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
            LocalCheckpointManager,
        )

        start_group()
        self.manager = LocalCheckpointManager(root)

    def save(self, job: TrainingJob, step: int) -> None:
        """Save every component, with the step."""
        state = {name: part.state_dict() for name, part in job.components.items()}
        self.manager.save(OnCpu({"step": step, "state": state}), step, is_async=False)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Load what `find_latest` names; no other step can be asked for."""
        del step
        if self.manager.find_latest() == -1:
            msg = "find_latest() gave -1: no checkpoints are available"
            raise FileNotFoundError(msg)
        content, _ = self.manager.load()
        for name, part in job.components.items():
            part.load_state_dict(content.state_dict["state"][name])
        return int(content.state_dict["step"])

    def steps(self) -> list[int]:
        """Return the one that `find_latest` names."""
        latest = self.manager.find_latest()
        return [] if latest == -1 else [latest]

    def close(self) -> None:
        """Nothing is open."""


class NvrxLocal(AdapterBase):
    """Adapter of local checkpointing."""

    def open(self, root: Path, options: OpenOptions) -> Local:
        """Open on a folder; each save removes every older checkpoint: nothing can be set."""
        del options
        return Local(root)


def make() -> NvrxLocal:
    """Make the adapter."""
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import base_manager

    version = metadata.version("nvidia-resiliency-ext")
    return NvrxLocal(
        name="nvrx-local",
        version=version,
        # No STEPS: find_latest names one checkpoint, and nothing lists the others.
        capabilities=frozenset(),
        holds=EVERYTHING | {"gradients"},
        refusals=(base_manager.CheckpointingException,),
        library=f"nvidia-resiliency-ext {version}",
        owner="library: nvidia-resiliency-ext",
        # BaseCheckpointManager.save: 'A newer checkpoint is already available'; and of _save:
        # 'Should raise a SameMachineReplicationException if the checkpoint already exists'.
        saves_over=False,
    )
