"""torchtitan: `CheckpointManager` over DCP on one rank, as its trainer makes it."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

FOLDER = "checkpoint"


class Optimizers:
    """The state of a job's optimizers as `OptimizersContainer` makes it, with its own functions.

    'optimizer flattening ... TorchTitan's OptimizersContainer flattens optimizer state dicts to
    FQN-keyed flat dicts' (docstring of CheckpointManager).
    """

    def __init__(self, job: TrainingJob) -> None:
        """Name the parameters, as an optimizer does that is built of (name, parameter)."""
        self.optimizers = job.optimizers.values()
        names = {parameter: name for name, parameter in job.model.named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["param_names"] = [names[parameter] for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return all states, flat."""
        from torchtitan.components.optimizer import utils

        flat: dict[str, Any] = {}
        for optimizer in self.optimizers:
            utils.init_optim_state(optimizer)
            flat |= utils.get_flat_optim_state_dict(optimizer)
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each optimizer's part."""
        from torchtitan.components.optimizer import utils

        for optimizer in self.optimizers:
            utils.init_optim_state(optimizer)
            utils.load_flat_optim_state_dict(optimizer, state_dict)


class Progress:
    """The step, as torchtitan's trainer saves itself under `train_state`."""

    def __init__(self, job: TrainingJob) -> None:
        """Watch the job."""
        self.job, self.loaded = job, -1

    def state_dict(self) -> dict[str, int]:
        """Return the step."""
        return {"step": self.job.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Keep the step."""
        self.loaded = state_dict["step"]


def start_group() -> None:
    """Start a process group of one rank: retention asks for the rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Titan:
    """The manager of the job that is alive: it is made of a job's parts."""

    mode = "disabled"

    def __init__(self, root: Path, keep: int | None) -> None:
        """Keep where, and how many; 0 keeps all."""
        self.root, self.keep = root, keep or 0
        self.job: TrainingJob | None = None
        self.manager: Any = None  # CheckpointManager

    def of(self, job: TrainingJob) -> Any:
        """Return the manager of a job; the first time it is made, as the trainer does."""
        if self.job is not job:
            self.make(job)
        return self.manager

    def make(self, job: TrainingJob) -> None:
        """Make the manager."""
        self.close()
        start_group()
        self.job = job
        from torchtitan.components.checkpointer import CheckpointManager

        own = {"model", "loader", "scheduler", "extra", "gradients", *job.optimizers}
        self.progress = Progress(job)
        states = {name: part for name, part in job.components.items() if name not in own}
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                enable=True,
                folder=FOLDER,
                interval=1,
                keep_latest_k=self.keep,
                async_mode=self.mode,
            ),
            dataloader=job.loader,
            model_parts=[job.model],
            optimizers=Optimizers(job),
            lr_schedulers=job.schedulers["scheduler"],
            states={"train_state": self.progress, **states},
            sd_adapter=None,
            base_folder=str(self.root),
        )

    def save(self, job: TrainingJob, step: int) -> None:
        """Save; `save` gives False where it did not."""
        if not self.of(job).save(step):
            msg = f"CheckpointManager.save({step}) gave False"
            raise RuntimeError(msg)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Load a step, or the latest; `load` gives False where there is none."""
        if not self.of(job).load(-1 if step is None else step):
            msg = "CheckpointManager.load() gave False: 'this is a fresh start'"
            raise FileNotFoundError(msg)
        return int(self.progress.loaded)

    def steps(self) -> list[int]:
        """Return the steps that `load` would choose from: 'only if it contains core metadata'."""
        paths = (self.root / FOLDER).glob("step-*/.metadata")
        names = (path.parent.name[len("step-") :] for path in paths)
        return sorted(int(name) for name in names if name.isdecimal())

    def close(self) -> None:
        """Close: what is to be deleted is deleted."""
        if self.manager is not None:
            self.manager.close()


class TorchTitan(AdapterBase):
    """Adapter of the manager that torchtitan's trainer uses by default."""

    def preload(self) -> None:
        """Import once, in the server."""
        import torchtitan.components.checkpointer  # noqa: F401

    def open(self, root: Path, options: OpenOptions) -> Titan:
        """Open on a folder."""
        return Titan(root, options.keep_last)


def make() -> TorchTitan:
    """Make the adapter."""
    version = metadata.version("torchtitan")
    return TorchTitan(
        name="torchtitan",
        version=version,
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}),
        # Not extra: DCP makes one name of the keys of nested dicts, so keys have to be strings.
        # Not gradients: torchtitan saves after whole steps.
        holds=EVERYTHING - {"extra"},
        library=f"torchtitan {version}",
        owner="library: torchtitan",
        # BaseCheckpointManager.Config: 'We need to maintain at least 2 checkpoint replicas, as the
        # last one may be in the process of being saved.'
        min_keep=2,
    )
