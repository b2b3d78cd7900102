"""What a user of transformers writes: a PreTrainedModel, a Trainer with `compute_loss`, a callback.

The adapter imports this late: the bases are transformers' own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Sampler
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    import torch

    from ckpt_conformance.contract import Journal
    from ckpt_conformance.workload.job import Job
    from ckpt_conformance.workload.loader import ShuffledLoader


class Config(PretrainedConfig):  # type: ignore[misc]  # known at run time only
    """The configuration of a job's model: it has none."""

    model_type = "ckc-job"


class Model(PreTrainedModel):  # type: ignore[misc]  # as above
    """A job's model; what is tied in it is named, as `save_pretrained` demands."""

    config_class = Config

    def __init__(self, config: Config, inner: torch.nn.Module, ties: dict[str, str]) -> None:
        """Hold the model."""
        super().__init__(config)
        self.inner = inner
        self._tied_weights_keys = ties
        self.all_tied_weights_keys = ties

    def forward(self, *arguments: object) -> object:
        """Run the model."""
        return self.inner(*arguments)


class Order(Sampler):  # type: ignore[type-arg]
    """The batches of an epoch, by the job's own order; the position follows what is trained on."""

    def __init__(self, loader: ShuffledLoader) -> None:
        """Watch the job's loader."""
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample ids of each batch of the epoch."""
        return iter(self.loader.order())

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, as torch's samplers do."""
        self.loader.set_epoch(epoch)

    def take(self, batch: list[int]) -> None:
        """Note that a batch is trained on."""
        self.loader.position = self.loader.order().index(batch) + 1


class JobTrainer(Trainer):  # type: ignore[misc]  # as above
    """A Trainer of a job's own loss and order of data."""

    job: Job
    order: Order

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the job's samples, prepared as Trainer's own is."""
        loader = self.job.loader
        batches = DataLoader(loader.samples, batch_sampler=self.order, num_workers=loader.workers)
        return self.accelerator.prepare(batches)  # type: ignore[no-any-return]

    def compute_loss(self, model: object, inputs: Any, **_: object) -> torch.Tensor:
        """Run one batch at the step that Trainer counts."""
        del model
        self.order.take(inputs[0].tolist())
        self.job.step = self.state.global_step
        self.last_loss = self.job.loss(inputs)
        return self.last_loss


class Saves(TrainerCallback):  # type: ignore[misc]  # as above
    """Counts the steps, asks for a save at chosen ones and tells the journal."""

    def __init__(self, trainer: JobTrainer, save_at: Collection[int], journal: Journal) -> None:
        """Keep what to do."""
        self.trainer, self.save_at, self.journal, self.under_way = trainer, save_at, journal, 0

    def on_step_end(self, _: object, state: Any, control: Any, **__: object) -> None:
        """Record the step; ask for a save."""
        self.trainer.job.after_step(self.trainer.last_loss)
        if state.global_step in self.save_at:
            self.under_way = state.global_step
            self.journal.begun(self.under_way)
            control.should_save = True

    def on_save(self, *_: object, **__: object) -> None:
        """Trainer says so after the last file, and after rotation."""
        self.journal.acknowledged(self.under_way)
        self.under_way = 0


def model_of(job: Job) -> Model:
    """Wrap the model; of each group of tied names all but the first are tied to the first."""
    groups = [[f"inner.{name}" for name in group] for group in job.ties()]
    ties = {name: first for first, *rest in groups for name in rest}
    return Model(Config(tie_word_embeddings=bool(ties)), job.model, ties)


def trainer_of(job: Job, root: Path, until: int, keep: int | None) -> JobTrainer:
    """Make a Trainer that saves only where it is asked to."""
    arguments = TrainingArguments(
        output_dir=str(root),
        max_steps=until,
        save_total_limit=keep,
        save_strategy="no",
        logging_strategy="no",
        max_grad_norm=0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = JobTrainer(
        model=model_of(job),
        args=arguments,
        train_dataset=job.loader.samples,
        optimizers=(job.optimizers["optimizer"], job.schedulers["scheduler"]),
    )
    trainer.job, trainer.order = job, Order(job.loader)
    return trainer
