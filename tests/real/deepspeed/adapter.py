"""DeepSpeed: `save_checkpoint` and `load_checkpoint` of an engine of ZeRO stage 1, on the CPU."""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ckpt_conformance.contract import OpenOptions, TrainingJob

# What the launcher sets for one process, and: no GPU, no operators that are compiled.
os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

ENGINES: WeakKeyDictionary[TrainingJob, Any] = WeakKeyDictionary()  # a job is wrapped only once
OWN = ("model", "optimizer", "scheduler")  # what the engine saves without being told
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def import_library() -> Any:
    """Return DeepSpeed; that several ranks may share memory is compiled for minutes, and left."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def start_group() -> None:
    """Start a process group of one rank."""
    import torch.distributed as dist

    deepspeed = import_library()

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed("gloo", verbose=False)


class Engine:
    """The engine of the job that is alive."""

    def __init__(self, root: Path) -> None:
        """Keep the folder; the engine comes with the job."""
        self.root = root
        self.engine: Any = None  # DeepSpeedEngine

    def prepare(self, job: TrainingJob) -> None:
        """Hand model, optimizer and scheduler to the engine, which steps them from now on."""
        if len(job.optimizers) > 1:
            msg = "deepspeed.initialize takes one optimizer"
            raise NotImplementedError(msg)
        job.optimize = self.optimize
        if job in ENGINES:
            self.engine = ENGINES[job]
            return
        if job.optimizers["optimizer"].state:
            msg = "ZeRO replaces the parameters: state that an optimizer has before it is lost"
            raise NotImplementedError(msg)
        start_group()
        self.engine, *_ = import_library().initialize(
            model=job.model,
            optimizer=job.optimizers["optimizer"],
            lr_scheduler=job.schedulers["scheduler"],
            config=CONFIG,
            dist_init_required=False,
        )
        ENGINES[job] = self.engine

    def optimize(self, loss: torch.Tensor) -> None:
        """Run the backward pass and the step of optimizer and scheduler."""
        self.engine.backward(loss)
        self.engine.step()

    def save(self, job: TrainingJob, step: int) -> None:
        """Save what the engine has, and the rest as its client's state."""
        rest = {name: part.state_dict() for name, part in job.components.items() if name not in OWN}
        client = {"step": step, "rest": rest}
        self.engine.save_checkpoint(str(self.root), tag=f"global_step{step}", client_state=client)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Load a tag, or the one that the file `latest` names."""
        tag = None if step is None else f"global_step{step}"
        path, client = self.engine.load_checkpoint(str(self.root), tag=tag)
        if path is None:
            msg = "load_checkpoint gave None: 'loading the checkpoint failed'"
            raise FileNotFoundError(msg)
        for name, part in job.components.items():
            if name not in OWN:
                part.load_state_dict(client["rest"][name])
        return int(client["step"])

    def steps(self) -> list[int]:
        """Return the step that the file `latest` names: DeepSpeed has no other discovery."""
        latest = self.root / "latest"
        return [int(latest.read_text()[len("global_step") :])] if latest.is_file() else []

    def close(self) -> None:
        """Nothing is open."""


class DeepSpeed(AdapterBase):
    """Adapter of an engine's two calls."""

    def preload(self) -> None:
        """Import once, in the server."""
        import_library()

    def open(self, root: Path, options: OpenOptions) -> Engine:
        """Open on a folder; there are no options."""
        del options
        return Engine(root)


def make() -> DeepSpeed:
    """Make the adapter."""
    version = metadata.version("deepspeed")
    return DeepSpeed(
        name="deepspeed-zero1",
        version=version,
        # No STEPS: the file `latest` names one tag, and nothing lists the others.
        capabilities=frozenset({Capability.EXPLICIT_STEP}),
        holds=EVERYTHING,
        library=f"deepspeed {version}",
        owner="library: deepspeed",
        prepares=True,
        # https://www.deepspeed.ai/docs/config-json/#bfloat16-training-options. Without `bf16` or
        # `fp16` the precision of the whole model is float32.
        cannot_hold={
            "bfloat16": "config-json, 'bf16: Configuration for using bfloat16 floating-point "
            "format as an alternative to FP16': one precision for the whole model",
            "channels-last": "engine.py, _broadcast_model: 'p.data.view(torch.uint8)': the engine "
            "takes parameters alone that are contiguous",
        },
    )
