"""The reference trainer: a loop that owns its training, saves through the manager, resumes.

A job brings `model`, `optimizers`, `schedulers`, `scaler`, `loader`, `ema`, `extra`, `gradients`
and `accumulate`, `components`, `loss(batch)` and `after_step(loss)`. A journal notes when a save
begins, and whether it succeeded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    import torch

    from ckpt_conformance.reference_impl.manager import CheckpointManager
    from ckpt_conformance.reference_impl.train_state import JobParts


def parts(job: Any) -> JobParts:  # noqa: ANN401  whatever has the attributes above
    """Sort a job's components into the arguments of `CheckpointManager.save` and `.load`.

    The generators are not passed: the manager captures the process's own.
    """
    named = dict(job.components)
    model, loader = named.pop("model"), named.pop("loader")
    del named["rng"], named["extra"]
    optimizers = {name: named.pop(name) for name in list(named) if name.startswith("optimizer")}
    schedulers = {name: named.pop(name) for name in list(named) if name.startswith("scheduler")}
    return {
        "model": model,
        "optimizers": optimizers,
        "scheduler": schedulers,
        "dataloader": loader,
        "stateful": named,
    }


class Trainer:
    """Trains to a step, saves at the steps asked for, resumes before the first batch is drawn."""

    def __init__(self, manager: CheckpointManager) -> None:
        """Keep the manager."""
        self.manager = manager

    def fit(
        self,
        job: Any,  # noqa: ANN401
        until: int,
        save_at: Collection[int],
        resume: bool | int | Path,  # noqa: FBT001
        journal: Any,  # noqa: ANN401
    ) -> None:
        """Train; `resume` True means the latest, an int that step, a path that checkpoint."""
        if resume is not False:
            self.restore(job, resume)
        batches = self.batches(job)
        while job.step < until:
            loss = job.loss(next(batches))
            self.update(job, loss)
            job.after_step(loss)
            # Counters, scheduler and loader are past this step now: only then is it a checkpoint.
            if job.step in save_at:
                self.checkpoint(job, journal)

    def restore(self, job: Any, resume: bool | int | Path) -> None:  # noqa: ANN401, FBT001
        """Load before anything is drawn: an earlier iterator would stand at the wrong place."""
        if resume is True:
            result = self.manager.load(**parts(job))
        elif isinstance(resume, int):
            result = self.manager.load(step=resume, **parts(job))
        else:
            result = self.manager.load(reference=resume, **parts(job))
        job.extra.load_state_dict(result.extra)
        job.step = result.step

    def batches(self, job: Any) -> Iterator[Any]:  # noqa: ANN401
        """Yield batches for ever; the loader yields the rest of its epoch and steps to the next."""
        while True:
            yield from job.loader

    def update(self, job: Any, loss: torch.Tensor) -> None:  # noqa: ANN401
        """Backward; unless inside an accumulation, step optimizers, scaler and schedulers."""
        job.scaler.scale(loss).backward()
        if job.gradients:
            job.gradients.micro = (job.gradients.micro + 1) % job.accumulate
            if job.gradients.micro:
                return
        for optimizer in job.optimizers.values():
            job.scaler.step(optimizer)
        job.scaler.update()
        for optimizer in job.optimizers.values():
            optimizer.zero_grad()
        self.schedule(job)

    def schedule(self, job: Any) -> None:  # noqa: ANN401
        """Step every scheduler, after the optimizers."""
        for scheduler in job.schedulers.values():
            scheduler.step()

    def checkpoint(self, job: Any, journal: Any) -> None:  # noqa: ANN401
        """Save; an error of the disk reaches the caller as it is."""
        journal.begun(job.step)
        try:
            self.manager.save(job.step, **parts(job), extra=job.extra.state_dict())
        except Exception as error:
            journal.failed(job.step, error)
            raise
        journal.acknowledged(job.step)
