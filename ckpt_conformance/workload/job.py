"""The training job: deterministic to the bit on CPU, small, and built so that every hole shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from ckpt_conformance.contract import StepRecord
from ckpt_conformance.workload import digests, kinds, models
from ckpt_conformance.workload.rng import RngState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from ckpt_conformance.contract import Stateful
    from ckpt_conformance.workload.loader import Batch
    from ckpt_conformance.workload.values import Leaves, PayloadSample, Ties

SAMPLE_BYTES = 64


class Job:
    """A job of a kind (see `kinds.KINDS`), from a seed.

    The same kind and seed give the same run, bit for bit. Another seed gives other weights, other
    generators and another data order: loading into it shows whatever is not put back. `variant`
    alters the destination: `drift` (other hyper-parameters), `dtype`, `shape`, `missing` (a
    parameter that no checkpoint holds), `unexpected` (a parameter less), `reordered` and `swapped`
    (parameters of a group in another order, all or two of one shape); those from `dtype` to
    `unexpected` also as `dtype-buffer` and so on. What fits by its size alone: `width` and
    `width-buffer` (another dtype, as many bytes), `count-buffer` (another shape, as many elements),
    `turned-buffer` (a matrix that is transposed, of kind `pairs`). `counter-buffer` is a counter of
    batches that no checkpoint holds. `apart`: of kind `sharing`, each parameter has state of its
    own from the start. `another`: an optimizer and its scheduler more. `regrouped`: an optimizer
    with one group of parameters for two. `without` names each `Feature` that the model leaves out.
    """

    def __init__(
        self, kind: str, seed: int, *, variant: str = "", without: Collection[str] = ()
    ) -> None:
        """Seed every generator, then build; raises KeyError for an unknown kind."""
        self.kind, self.seed, self.variant = kind, seed, variant
        self.step, self.rank, self.world_size, self.device = 0, 0, 1, "cpu"
        RngState.seed(seed)
        parts = kinds.build(kind, seed, variant, without)
        self.model, self.optimizers, self.schedulers = (
            parts.model,
            parts.optimizers,
            parts.schedulers,
        )
        self.scaler, self.ema, self.loader = parts.scaler, parts.ema, parts.loader
        self.extra, self.gradients, self.accumulate = parts.extra, parts.gradients, parts.accumulate
        self.rng, self._is_normal = RngState(), parts.is_normal
        if self._is_normal:  # so that one is held back after each even number of steps
            RngState.draw(normal=True)
        self.on_loss: Callable[[Job], None] | None = None
        self.on_record: Callable[[StepRecord], None] | None = None
        self._iterator: Iterator[Batch] | None = None
        self._generation = -1
        self._batch: tuple[int, ...] = ()
        self._draws: tuple[str, ...] = ()

    @property
    def components(self) -> Mapping[str, Stateful]:
        """Every stateful part by name; several optimizers are `optimizer`, `optimizer.second`."""
        fixed: dict[str, Stateful] = {"model": self.model, **self.optimizers, **self.schedulers}
        fixed |= {"scaler": self.scaler, "ema": self.ema, "loader": self.loader}
        fixed |= {"rng": self.rng, "extra": self.extra}
        return fixed | ({"gradients": self.gradients} if self.gradients else {})

    def next_batch(self) -> Batch:
        """Return ids [B], features [B, 8] and classes [B] of the next batch.

        A loader whose state was loaded starts a new iterator.
        """
        while True:
            if self._iterator is None or self._generation != self.loader.generation:
                self._iterator, self._generation = iter(self.loader), self.loader.generation
            batch = next(self._iterator, None)
            if batch is not None:
                return batch
            self._iterator = None

    def loss(self, batch: Batch) -> torch.Tensor:
        """Run the forward pass of a batch: ids [B], features [B, 8], classes [B]."""
        if self.on_loss:
            self.on_loss(self)
        ids, features, classes = batch
        self._batch = tuple(cast("list[int]", ids.tolist()))
        self._draws = RngState.draw(normal=self._is_normal)
        noise = sum(float.fromhex(draw) for draw in self._draws) * 0.01
        return models.cross_entropy(self.model(features + noise, classes), classes)

    def optimize(self, loss: torch.Tensor) -> None:
        """Run backward and, unless in the middle of an accumulation, step everything."""
        self.scaler.scale(loss).backward()
        if self.gradients:
            self.gradients.micro = (self.gradients.micro + 1) % self.accumulate
            if self.gradients.micro:
                return
        for optimizer in self.optimizers.values():
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        for scheduler in self.schedulers.values():
            scheduler.step()

    def after_step(self, loss: torch.Tensor) -> StepRecord:
        """Count the step; update EMA and extra; record."""
        self.step += 1
        self.ema.update()
        self.extra.update(self.step, loss.detach().item())
        record = StepRecord(
            step=self.step,
            loss=digests.tensor_bytes(loss).hex(),
            learning_rates=tuple(
                float(g["lr"]).hex() for o in self.optimizers.values() for g in o.param_groups
            ),
            batch=self._batch,
            draws=self._draws,
            parameters=digests.digest(self.model.state_dict()),
        )
        if self.on_record:
            self.on_record(record)
        return record

    def train(self, n: int) -> list[StepRecord]:
        """Train n steps with the job's own loop."""
        return [self._train_one() for _ in range(n)]

    def _train_one(self) -> StepRecord:
        loss = self.loss(self.next_batch())
        self.optimize(loss)
        return self.after_step(loss)

    def leaves(self) -> Leaves:
        """Return the digest of every leaf of every component."""
        return {name: digests.leaves(part.state_dict()) for name, part in self.components.items()}

    def digest(self) -> Mapping[str, str]:
        """Return one digest for each component, bit for bit."""
        return {name: digests.combine(leaves) for name, leaves in self.leaves().items()}

    def ties(self) -> Ties:
        """Return the groups of parameter names that share one storage."""
        groups: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter.numel():
                groups.setdefault(parameter.data_ptr(), []).append(name)
        return sorted(sorted(names) for names in groups.values() if len(names) > 1)

    def overlaps(self) -> Ties:
        """Return the groups of leaves, of any component, whose elements share memory."""
        parts = {name: part.state_dict() for name, part in self.components.items()}
        return digests.overlapping(digests.tensors(parts))

    def perturb(self) -> None:
        """Change model, optimizers and EMA in place; draw from every generator.

        Tensors that are not contiguous are left as they are.
        """
        tensors = [*self.model.state_dict().values(), *self.ema.shadow.values()]
        tensors += [
            v for o in self.optimizers.values() for s in o.state.values() for v in s.values()
        ]
        with torch.no_grad():
            for tensor in tensors:
                is_filled = isinstance(tensor, torch.Tensor) and tensor.numel()
                if is_filled and tensor.is_contiguous():
                    tensor.detach().reshape(-1).view(torch.uint8).bitwise_xor_(1)
        RngState.draw()

    def realign(self) -> None:
        """Lay every parameter out in fresh, aligned storage; no bit of it changes.

        The address alone can change what a BLAS computes: with this, it is no longer the manager's.
        """
        for parameter in self.model.parameters():
            parameter.data = parameter.detach().clone()

    def payload_samples(self) -> list[PayloadSample]:
        """Return the first bytes of each large tensor: they stand in any uncompressed payload.

        Short tensors, and those that begin with zeros, are left out: they would match by chance.
        """
        samples: list[PayloadSample] = []
        for name, part in self.components.items():
            for path, tensor in digests.tensors(part.state_dict()):
                if not digests.has_plain_memory(tensor):
                    continue
                data = digests.tensor_view(tensor)
                head = bytes(data[:SAMPLE_BYTES])
                if len(head) == SAMPLE_BYTES and any(head):
                    size = len(data)
                    samples.append({"name": f"{name}/{path}", "bytes": head.hex(), "size": size})
        return samples
