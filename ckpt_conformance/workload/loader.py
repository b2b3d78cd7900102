"""A shuffled, stateful data loader that can stop in the middle of an epoch.

Its state is (seed, epoch, batches that the training step consumed). A batch that a worker has
prefetched is not consumed. Its generators are its own: it draws nothing from the global ones, but
for one that draws while it takes its state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypedDict, cast

import torch
from torch.utils.data import DataLoader, Dataset

from ckpt_conformance.workload.rng import RngState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.workload.state import StateDict

DATA_SEED = 20_011
FEATURES = 8
CLASSES = 16

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Samples(Dataset[Batch]):
    """`size` samples: id (int64 scalar), features (float32, [8]), class (int64 scalar)."""

    def __init__(self, size: int) -> None:
        """Draw the table from a fixed seed: the data set never depends on the run."""
        generator = torch.Generator().manual_seed(DATA_SEED)
        self.features = torch.randn(size, FEATURES, generator=generator)
        self.classes = torch.randint(CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.classes)

    def __getitem__(self, index: int) -> Batch:
        """Return id, features and class of one sample."""
        return torch.tensor(index), self.features[index], self.classes[index]


class LoaderState(TypedDict):
    """Where the consumer is: the epoch, and the batches of it that are consumed."""

    seed: int
    epoch: int
    position: int


class ShuffledLoader:
    """Yields what is left of the current epoch; `len` is the number of batches of a whole one.

    A batch has `batch` rows of `packing` samples each; positions count batches.
    """

    def __init__(  # noqa: PLR0913  what a loader may be told
        self,
        seed: int,
        *,
        size: int = 20,
        batch: int = 4,
        workers: int = 0,
        packing: int = 1,
        is_drawing: bool = False,
    ) -> None:
        """Start at epoch 0, batch 0."""
        self.samples, self.batch, self.workers = Samples(size), batch, workers
        self.packing, self.is_drawing = packing, is_drawing
        self.seed, self.epoch, self.position, self.generation = seed, 0, 0, 0

    def __len__(self) -> int:
        """Count the batches of an epoch; the last one may be short."""
        return math.ceil(len(self.samples) / (self.batch * self.packing))

    def order(self) -> list[list[int]]:
        """Return the sample ids of each batch of the current epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + self.epoch)
        drawn = torch.randperm(len(self.samples), generator=generator)
        ids = cast("list[int]", drawn.tolist())
        samples = self.batch * self.packing
        return [ids[at : at + samples] for at in range(0, len(ids), samples)]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of this epoch, then step to the next."""
        rest = self.order()[self.position :]
        for batch in self._batches(rest):
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def _batches(self, rest: list[list[int]]) -> Iterator[Batch]:
        if not self.workers:
            return (
                (torch.tensor(ids), self.samples.features[ids], self.samples.classes[ids])
                for ids in rest
            )
        # A generator of its own: else DataLoader draws a base seed from the global one.
        own = torch.Generator().manual_seed(0)
        loader = DataLoader(
            self.samples,
            batch_sampler=rest,
            num_workers=min(self.workers, len(rest)),
            generator=own,
        )
        return iter(loader)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch anew, as torch's samplers do; a live iterator is stale from now on."""
        self.epoch, self.position = epoch, 0
        self.generation += 1

    def state_dict(self) -> StateDict:
        """Return the position of the consumer, as `LoaderState`."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state_dict: LoaderState) -> None:
        """Set the position; a live iterator is stale from now on.

        One that draws takes a number from each global generator, as for the seed of its workers.
        """
        if self.is_drawing:
            RngState.draw(normal=True)
        self.seed, self.epoch = state_dict["seed"], state_dict["epoch"]
        self.position = state_dict["position"]
        self.generation += 1
