"""The data position is lost, and what only a second resume shows (bugs H, J)."""

# ruff: noqa: ANN401  the hooks of a manager take what a job brings: any type at all

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.reference_impl.encode import StateDict

POSITION = "CKC-COMP-011"
RUN = "CKC-RSUM-001"


@mutant(
    "H01",
    url="PrimeIntellect-ai/prime-rl#3332",
    change="with workers the iterator starts before the position is restored",
    violates={"CKC-RSUM-005"},
    base="reference-trainer",
)
class IteratorFirst(Trainer):
    """The workers have read the first rows before the load comes."""

    early: Iterator[Any] | None = None

    def restore(self, job: Any, resume: Any) -> None:
        """Start the workers, then load."""
        if job.loader.workers:
            started = iter(job.loader)
            self.early = iter([next(started), *started])
        super().restore(job, resume)

    def batches(self, job: Any) -> Iterator[Any]:
        """Yield what the early iterator has, then go on."""
        yield from self.early or ()
        yield from super().batches(job)


@mutant(
    "H01-live",
    url="PrimeIntellect-ai/prime-rl#3332",
    change="the position is set behind the back of an iterator that is under way",
    violates={"CKC-RSUM-008", "CKC-RTRP-020"},
)
class BehindItsBack(CheckpointManager):
    """A live iterator is not told of the load, and goes on with its own rows."""

    def restore_dataloader(self, dataloader: Any, state: Any) -> None:
        """Set the fields; the loader's own method is not called."""
        vars(dataloader).update(state)


@mutant(
    "H02",
    url="KempnerInstitute/KempnerForge#57",
    change="the position that is saved counts from the last resume",
    violates={"CKC-DISC-008", "CKC-RSUM-002", "CKC-RTRP-008"},
)
class CountedFromResume(CheckpointManager):
    """The load skips, and does not take the skipped batches into its own count."""

    resumed: tuple[int, int] = (-1, 0)

    def restore_dataloader(self, dataloader: Any, state: Any) -> None:
        """Load, and begin to count here."""
        super().restore_dataloader(dataloader, state)
        self.resumed = (state["epoch"], state["position"])

    def capture_train_state(self, *parts: Any, **named: Any) -> StateDict:
        """Count from the last resume, in the epoch of the resume."""
        state = super().capture_train_state(*parts, **named)
        position = dict(state["dataloader"])
        if position["epoch"] == self.resumed[0]:
            position["position"] -= self.resumed[1]
        return {**state, "dataloader": position}


@mutant(
    "H03",
    url="meta-pytorch/data#1437",
    change="a state of the epoch's end is loaded as the epoch's begin",
    violates={"CKC-RSUM-003"},
)
class EndIsBegin(CheckpointManager):
    """The epoch that was over is trained once more."""

    def restore_dataloader(self, dataloader: Any, state: Any) -> None:
        """Wrap the position around, and leave the epoch."""
        wrapped = {**state, "position": state["position"] % len(dataloader)}
        super().restore_dataloader(dataloader, wrapped)


@mutant(
    "H04",
    url="Lightning-AI/pytorch-lightning#18060",
    change="the save comes before the count of batches is increased",
    violates={POSITION, RUN},
    base="reference-trainer",
)
class SavedBeforeCount(Trainer):
    """The last batch is trained twice."""

    def checkpoint(self, job: Any, journal: Any) -> None:
        """Save with the count of the batch before."""
        job.loader.position -= 1
        super().checkpoint(job, journal)
        job.loader.position += 1


@mutant(
    "H05",
    url="Lightning-AI/pytorch-lightning#5325",
    change="the position is an epoch: the next one",
    violates={POSITION, RUN},
    base="reference-trainer",
)
class WholeEpochsOnly(Trainer):
    """A break in the middle of an epoch skips the rest of it."""

    def checkpoint(self, job: Any, journal: Any) -> None:
        """Save as if the epoch were over."""
        epoch, position = job.loader.epoch, job.loader.position
        job.loader.epoch, job.loader.position = epoch + 1, 0
        super().checkpoint(job, journal)
        job.loader.epoch, job.loader.position = epoch, position


@mutant(
    "H06",
    url="huggingface/accelerate#2016",
    change="the epoch of the sampler is not restored",
    violates={"CKC-RSUM-004", "CKC-RSUM-008"},
)
class EpochIsNotRestored(CheckpointManager):
    """Right in the first epoch of a fresh process, wrong in all others."""

    def restore_dataloader(self, dataloader: Any, state: Any) -> None:
        """Restore seed and position."""
        super().restore_dataloader(dataloader, {**state, "epoch": dataloader.epoch})


@mutant(
    "H07",
    url="huggingface/accelerate#4071",
    change="the wrapper that skips batches sets the sampler's epoch to 0",
    violates={"CKC-RSUM-004"},
)
class EpochIsReset(CheckpointManager):
    """A resume in a later epoch gets the order of the first."""

    def restore_dataloader(self, dataloader: Any, state: Any) -> None:
        """Restore, in epoch 0."""
        super().restore_dataloader(dataloader, {**state, "epoch": 0})


@mutant(
    "H08",
    url="huggingface/transformers#8624",
    change="under accumulation as many batches are skipped as optimizer steps were made",
    violates={"CKC-RSUM-006"},
    base="reference-trainer",
)
class StepsForBatches(Trainer):
    """Optimizer steps are taken for micro-batches."""

    def restore(self, job: Any, resume: Any) -> None:
        """Load, then skip by optimizer steps."""
        super().restore(job, resume)
        if job.accumulate > 1:
            job.loader.position = job.step // job.accumulate


@mutant(
    "H08-held",
    url="huggingface/transformers#8624",
    change="gradients that are held between micro-batches are not restored",
    violates={"CKC-COMP-013", "CKC-RSUM-006"},
)
class HeldIsLost(CheckpointManager):
    """The next update is made from a part of its batches."""

    def restore_stateful(self, component: Any, state: Any) -> None:
        """Restore all but held gradients."""
        if "held" not in state:
            super().restore_stateful(component, state)


@mutant(
    "H09",
    url="lhotse-speech/lhotse#785",
    change="the position that is saved is the producer's, workers times prefetch ahead",
    violates={"CKC-RSUM-005"},
)
class ProducersPosition(CheckpointManager):
    """What the workers have prefetched counts as trained."""

    prefetch = 2  # torch's default, per worker

    def capture_train_state(self, *parts: Any, **named: Any) -> StateDict:
        """Save the sampler's position."""
        state = super().capture_train_state(*parts, **named)
        _, _, _, dataloader, _ = parts
        position = dict(state["dataloader"])
        ahead = position["position"] + self.prefetch * dataloader.workers
        position["position"] = min(ahead, len(dataloader))
        return {**state, "dataloader": position}


@mutant(
    "H12",
    url="kyutai-labs/pocket-tts#287",
    change="the data loader has no state",
    violates={POSITION, RUN},
)
class NoPosition(CheckpointManager):
    """Each restart replays the permutation of a fresh loader."""

    def restore_dataloader(self, dataloader: Any, state: Any) -> None:
        """Restore nothing."""


@mutant(
    "H14",
    url="huggingface/datasets#8308",
    change="after a load the loader's public state is the loaded one for ever",
    violates={"CKC-RSUM-002"},
)
class StateStandsStill(CheckpointManager):
    """The load binds a new inner state; what is saved is the old one."""

    stale: StateDict | None = None

    def restore_dataloader(self, dataloader: Any, state: Any) -> None:
        """Load, and keep what was loaded."""
        super().restore_dataloader(dataloader, state)
        self.stale = dict(state)

    def capture_train_state(self, *parts: Any, **named: Any) -> StateDict:
        """Save what was kept."""
        state = super().capture_train_state(*parts, **named)
        return {**state, "dataloader": self.stale or state["dataloader"]}


@mutant(
    "H15",
    url="mosaicml/llm-foundry#1277",
    change="the samples seen are counted as batches times rows, although a row packs several",
    violates={"CKC-RSUM-012"},
)
class RowsForSamples(CheckpointManager):
    """The position in packed units is taken for one in raw samples."""

    def restore_dataloader(self, dataloader: Any, state: Any) -> None:
        """Skip as many samples as rows were seen."""
        seen = state["position"] * dataloader.batch
        position = seen // (dataloader.batch * dataloader.packing)
        super().restore_dataloader(dataloader, {**state, "position": position})


@mutant(
    "H16",
    url="mosaicml/streaming#700",
    change="a position at the end of the epoch is an error",
    violates={"CKC-RSUM-003"},
)
class EndIsAnError(CheckpointManager):
    """A resume from the last sample raises."""

    def restore_dataloader(self, dataloader: Any, state: Any) -> None:
        """Refuse a loader with nothing left."""
        if state["position"] >= len(dataloader):
            raise ValueError(f"{state['position']} of {len(dataloader)} batches are to be dropped")
        super().restore_dataloader(dataloader, state)


@mutant(
    "J03",
    url="pytorch/pytorch#138575",
    change="a load replaces the manager's schedulers by copies, and later saves write these",
    violates={"CKC-RSUM-002", "CKC-MIRR-014"},
    base="reference-dcp",
)
class ReplacedByCopies(CheckpointManager):
    """The manager's dict holds other objects than the training loop."""

    copies: dict[int, StateDict]

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load, then keep a copy."""
        super().restore_scheduler(scheduler, state)
        self.copies = {**getattr(self, "copies", {}), id(scheduler): copy.deepcopy(state)}

    def capture_train_state(self, *parts: Any, **named: Any) -> StateDict:
        """Save the copies."""
        state = super().capture_train_state(*parts, **named)
        _, _, scheduler, _, _ = parts
        kept = getattr(self, "copies", {})
        stale = {name: kept.get(id(one), one.state_dict()) for name, one in scheduler.items()}
        return {**state, "scheduler": stale}
