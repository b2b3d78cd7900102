"""Lightning: `ModelCheckpoint` in a `Trainer`, which owns the loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckpt_conformance.contract import Journal, OpenOptions, TrainingJob

OWN = ("extra", "ema")  # the user's objects: saved by the module's documented hooks


class Batches:
    """The job's loader for Lightning, which never asks a sized loader for the end of its epoch."""

    def __init__(self, loader: Any) -> None:  # noqa: ANN401  the job's stateful loader
        """Share the loader's state."""
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict
        self.loader = loader

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Step to the next epoch if this one is read, then yield the rest."""
        if self.loader.position == len(self):
            next(iter(self.loader), None)
        yield from self.loader


@cache
def classes() -> tuple[Any, Any, Any]:
    """Give Lightning's Trainer, and our module and callback: made late, for they derive from its own."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        """The job as Lightning sees it."""

        def __init__(self, job: TrainingJob) -> None:
            super().__init__()
            self.job, self.model = job, job.model
            self.automatic_optimization = len(job.optimizers) == 1

        def configure_optimizers(self) -> Any:
            schedulers = [{"scheduler": s, "interval": "step"} for s in self.job.schedulers.values()]
            return list(self.job.optimizers.values()), schedulers

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.job.step = self.trainer.fit_loop.total_batch_idx
            self.log("global_step", float(self.job.step + 1))
            self.last = loss = self.job.loss(batch)
            if not self.automatic_optimization:  # as Lightning asks for with several optimizers
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
                for scheduler in self.lr_schedulers():
                    scheduler.step()
            return loss

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["job"] = {name: self.job.components[name].state_dict() for name in OWN}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for name in OWN:
                self.job.components[name].load_state_dict(checkpoint["job"][name])

    class AtSteps(ModelCheckpoint):
        """Saves at chosen steps, after the job has counted the step; tells the journal."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            job = pl_module.job
            job.after_step(pl_module.last)
            if job.step in self.save_at:
                self.journal.begun(job.step)
                try:
                    super().on_train_batch_end(trainer, pl_module, *rest)
                except Exception as error:
                    self.journal.failed(job.step, error)
                    raise
                self.journal.acknowledged(job.step)

    return pl.Trainer, Module, AtSteps


class LightningTrainer:
    """Fits a job with `Trainer.fit`."""

    def __init__(self, root: Path, keep_last: int | None) -> None:
        """Keep where and how many."""
        self.root, self.keep_last = root, keep_last

    def fit(
        self,
        job: TrainingJob,
        until: int,
        save_at: Collection[int],
        resume: bool | int | Path,  # noqa: FBT001  the frameworks' own word
        journal: Journal,
    ) -> None:
        """Train; resume from `last`, or from the file of a step."""
        trainer_class, module_class, callback_class = classes()
        callback = callback_class(
            self.root,
            "{global_step:.0f}",
            monitor="global_step",
            mode="max",
            save_top_k=-1 if self.keep_last is None else self.keep_last,
            save_last=True,
            every_n_train_steps=1,
            enable_version_counter=False,
        )
        callback.save_at, callback.journal = save_at, journal
        trainer = trainer_class(
            accelerator="cpu",
            devices=1,
            max_steps=until * len(job.optimizers),
            default_root_dir=self.root,
            accumulate_grad_batches=job.accumulate,
            callbacks=[callback],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        if isinstance(resume, bool):
            path: Any = "last" if resume else None
        else:
            path = resume if isinstance(resume, Path) else self.root / f"global_step={resume}.ckpt"
        trainer.fit(module_class(job), Batches(job.loader), ckpt_path=path)


@dataclass(frozen=True)
class Lightning(AdapterBase):
    """Adapter of Lightning's documented way to save the last steps and resume."""

    def preload(self) -> None:
        """Import once, in the server."""
        classes()

    def open(self, root: Path, options: OpenOptions) -> LightningTrainer:
        """Open on a directory."""
        return LightningTrainer(root, options.keep_last)


def make() -> Lightning:
    """Make the adapter; raises PackageNotFoundError without lightning."""
    return Lightning(
        name="lightning",
        version=metadata.version("lightning"),
        shape="trainer",
        capabilities=frozenset({Capability.EXPLICIT_STEP, Capability.RETENTION}),
        holds=frozenset({"model", "optimizer", "scheduler", "loader", "ema", "extra"}),
        refusals=(FileNotFoundError,),
        library="lightning",
        recipe="",
    )
