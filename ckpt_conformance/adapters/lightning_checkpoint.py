"""Lightning: `ModelCheckpoint` in a `Trainer`, which owns the loop."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from ckpt_conformance.contract import Journal, OpenOptions
    from ckpt_conformance.job import Job
    from ckpt_conformance.loader import Batch

PROMISES = {
    "CKC-ATOM-001": "cloud_io._atomic_save: 'Saves a checkpoint atomically, avoiding the creation "
    "of incomplete checkpoints.'",
    "CKC-RETN-003": "the page of the recipe: 'saves last-K checkpoints based on \"global_step\"'",
}
BY_HOOK = ("extra", "ema")  # the user's own objects: through on_save_checkpoint, as documented
LAST_K = {"filename": "{global_step:.0f}", "monitor": "global_step", "mode": "max"}
# With the counter a step that is saved again goes to another file, and its old one stays.
SAVE = LAST_K | {"every_n_train_steps": 1, "save_last": True, "enable_version_counter": False}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@cache
def module_class() -> type[Any]:
    """Make the module's class: late, for its base is Lightning's."""
    base: Any = importlib.import_module("lightning.pytorch").LightningModule

    class Module(base):  # type: ignore[misc]  # known at run time only
        """A job as Lightning sees it."""

        def __init__(self, job: Job) -> None:
            """Hold the job; several optimizers are stepped by hand, as Lightning demands."""
            super().__init__()
            self.job, self.model = job, job.model
            self.automatic_optimization = len(job.optimizers) == 1

        def configure_optimizers(self) -> object:
            """Give optimizers and schedulers, which step with every batch."""
            schedules = self.job.schedulers.values()
            every_step = [{"scheduler": schedule, "interval": "step"} for schedule in schedules]
            return list(self.job.optimizers.values()), every_step

        def training_step(self, batch: Batch) -> Tensor:
            """Run one batch at the step that Lightning's own loop counts."""
            self.job.step = self.trainer.fit_loop.total_batch_idx
            self.log("global_step", self.job.step + 1.0)
            self.last_loss = self.job.loss(batch)
            if not self.automatic_optimization:
                step_by_hand(self, self.last_loss)
            return self.last_loss

        def on_train_epoch_end(self) -> None:
            """Step the loader to its next epoch: Lightning counts and never asks for more."""
            if self.job.loader.position == len(self.job.loader):
                next(iter(self.job.loader), None)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            """Add the user's objects."""
            checkpoint["own"] = {name: self.job.components[name].state_dict() for name in BY_HOOK}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            """Hand the user's objects back."""
            for name in BY_HOOK:
                self.job.components[name].load_state_dict(checkpoint["own"][name])

    return Module


@cache
def callback_class() -> type[Any]:
    """Make the callback's class: late, for its base is Lightning's."""
    base: Any = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint

    class AtSteps(base):  # type: ignore[misc]  # as above
        """A ModelCheckpoint for chosen steps, which counts the step first and tells the journal."""

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:  # noqa: ANN401
            """Save if the step is chosen; in the middle of an accumulation there is no save."""
            job, whole = module.job, (rest[-1] + 1) % trainer.accumulate_grad_batches == 0
            job.after_step(module.last_loss)
            trainer.should_stop = job.step >= self.until
            if job.step not in self.save_at or not (whole or trainer.is_last_batch):
                return
            self.journal.begun(job.step)
            try:
                super().on_train_batch_end(trainer, module, *rest)
            except Exception as error:
                self.journal.failed(job.step, error)
                raise
            self.journal.acknowledged(job.step)

        def on_train_end(self, trainer: Any, module: Any) -> None:  # noqa: ANN401
            """Save nothing: Lightning would write `last` at a step that nobody chose."""

    return AtSteps


def step_by_hand(module: Any, loss: Tensor) -> None:  # noqa: ANN401
    """Step every optimizer and scheduler."""
    module.manual_backward(loss)
    for optimizer in module.optimizers():
        optimizer.step()
        optimizer.zero_grad()
    for scheduler in module.lr_schedulers():
        scheduler.step()


class LightningTrainer:
    """Fits jobs by `Trainer.fit`."""

    def __init__(self, root: Path, keep_last: int | None) -> None:
        """Keep the directory and how many of the last steps stay; -1 is all."""
        self.root, self.save_top_k = root, -1 if keep_last is None else keep_last

    def fit(
        self,
        job: Job,
        until: int,
        save_at: Collection[int],
        resume: bool | int | Path,  # noqa: FBT001  the contract's own
        journal: Journal,
    ) -> None:
        """Train; resume from the last checkpoint, or from the file of a step."""
        callback = callback_class()(self.root, save_top_k=self.save_top_k, **SAVE)
        callback.until, callback.save_at, callback.journal = until, save_at, journal
        trainer = importlib.import_module("lightning.pytorch").Trainer(
            accelerator="cpu",
            max_steps=until * len(job.optimizers),  # Lightning counts the steps of all optimizers
            accumulate_grad_batches=job.accumulate,
            callbacks=[callback],
            default_root_dir=self.root,
            **QUIET,
        )
        trainer.fit(module_class()(job), job.loader, ckpt_path=self.path(resume))

    def path(self, resume: bool | int | Path) -> Path | str | None:  # noqa: FBT001  as above
        """Give what `ckpt_path` asks for: nothing, the last, the file of a step, a path."""
        if isinstance(resume, bool):
            return "last" if resume else None
        return resume if isinstance(resume, Path) else self.root / f"global_step={resume}.ckpt"


@dataclass(frozen=True)
class Lightning(AdapterBase):
    """Adapter of what Lightning documents: keep the last K steps, resume from `last`."""

    def preload(self) -> None:
        """Import Lightning once, before lives are forked."""
        module_class()
        callback_class()

    def open(self, root: Path, options: OpenOptions) -> Any:  # noqa: ANN401  its fit takes a Job
        """Open on a directory."""
        return LightningTrainer(root, options.keep_last)


def make() -> Lightning:
    """Make the adapter; raises PackageNotFoundError (an ImportError) without lightning."""
    return Lightning(
        name="lightning",
        version=metadata.version("lightning"),
        shape="trainer",
        capabilities=frozenset({Capability.EXPLICIT_STEP, Capability.RETENTION}),
        holds=frozenset({"model", "optimizer", "scheduler", "loader", "ema", "extra"}),
        refusals=(FileNotFoundError,),  # TorchCheckpointIO.load_checkpoint, "Raises"
        library="lightning",
        recipe="lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html: "
        "'saves last-K checkpoints based on \"global_step\" metric'; save_last=True and "
        "fit(ckpt_path='last'); the user's own objects through on_save_checkpoint",
        promises=PROMISES,
    )
