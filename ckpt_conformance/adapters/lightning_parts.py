"""What a user of Lightning writes: a module for the job, a ModelCheckpoint for chosen steps.

The adapter imports this late, for the bases are Lightning's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ckpt_conformance.workload.job import Job
    from ckpt_conformance.workload.loader import Batch

BY_HOOK = ("extra", "ema")  # the user's own objects: through on_save_checkpoint, as documented
lightning: Any = importlib.import_module("lightning.pytorch")
callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")


class Module(lightning.LightningModule):  # type: ignore[misc]  # known at run time only
    """A job as Lightning sees it."""

    def __init__(self, job: Job) -> None:
        """Hold the job; several optimizers are stepped by hand, as Lightning demands."""
        super().__init__()
        self.job, self.model = job, job.model
        self.automatic_optimization = len(job.optimizers) == 1

    def configure_optimizers(self) -> object:
        """Return optimizers and schedulers, which step with every batch."""
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

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Add the user's objects."""
        checkpoint["own"] = {name: self.job.components[name].state_dict() for name in BY_HOOK}

    def on_load_checkpoint(self, checkpoint: Mapping[str, Mapping[str, object]]) -> None:
        """Hand the user's objects back."""
        for name in BY_HOOK:
            self.job.components[name].load_state_dict(checkpoint["own"][name])


class AtSteps(callbacks.ModelCheckpoint):  # type: ignore[misc]  # as above
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
        self.acknowledge(job.step)

    def acknowledge(self, step: int) -> None:
        """Tell the journal: the files of the step are there when the save has returned."""
        self.journal.acknowledged(step)

    def on_train_end(self, trainer: Any, module: Any) -> None:  # noqa: ANN401
        """Save nothing: Lightning would write `last` at a step that nobody chose."""


def step_by_hand(module: Any, loss: Tensor) -> None:  # noqa: ANN401
    """Step every optimizer and scheduler."""
    module.manual_backward(loss)
    for optimizer in module.optimizers():
        optimizer.step()
        optimizer.zero_grad()
    for scheduler in module.lr_schedulers():
        scheduler.step()
