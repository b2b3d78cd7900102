"""The training job on ranks: FSDP2, tensor parallel, replicas and 2-D meshes, on one global batch.

Its run is the same, bit for bit, in every layout and world size (see `exact`), but for what is a
rank's own: the generators, and which samples of the global batch it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard
from torch.optim import lr_scheduler

from ckpt_conformance.contract import Feature, StepRecord
from ckpt_conformance.workload import digests, exact, old_fsdp
from ckpt_conformance.workload.loader import CLASSES, FEATURES, Batch, Samples
from ckpt_conformance.workload.rng import RngState
from ckpt_conformance.workload.state import Ema, Extra

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt_conformance.contract import Stateful
    from ckpt_conformance.workload.state import StateDict
    from ckpt_conformance.workload.values import (
        Box,
        ComponentLeaves,
        PayloadSample,
        RankLeaves,
        Ties,
    )

GLOBAL_BATCH = 24  # samples of one step over all ranks: shared out evenly by 1, 2, 3, 4 and 8
DATA = 120  # samples of an epoch: five steps
HIDDEN = 12


@dataclass(frozen=True)
class Layout:
    """How ranks share the model: the sizes of the mesh, and the dimension that FSDP2 shards.

    The world has replicate * fsdp * tp ranks. Two layouts with equal fields are the same layout.
    """

    fsdp: int = 1
    tp: int = 1
    replicate: int = 1
    dim: int = 0

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.replicate * self.fsdp * self.tp

    @cache  # noqa: B019  one world a child: the jobs of a child share its groups
    def mesh(self, device: str) -> DeviceMesh:
        """Make the mesh, once a child; every rank of the world takes part."""
        sizes = (self.replicate, self.fsdp, self.tp)
        return init_device_mesh(device, sizes, mesh_dim_names=("replicate", "fsdp", "tp"))


@dataclass(frozen=True)
class Tensors:
    """What a layout may meet in a model: sizes of the uneven matrix, and dtypes, by torch's names.

    By default no number of ranks but one and seven shares the matrix out evenly. At most `FEATURES`
    rows and columns. A matrix that is trained in another dtype than float32 is sharded by itself,
    as FSDP2 asks for; trained in bfloat16 its run depends on the layout. `without` names each
    `Feature` that the model leaves out.
    """

    rows: int = 7
    columns: int = 5
    trained: str = "float32"
    frozen: str = "bfloat16"
    without: tuple[str, ...] = ()


class ShardedModel(nn.Module):
    """One of each thing that sharding loses.

    Column and row parallel layers with bias, tied weights, an uneven matrix, a matrix of one row
    (empty on every rank but one), a vector, a frozen matrix of another dtype, a parameter that
    never gets a gradient, buffers that every rank keeps whole.
    """

    seen: Tensor
    constant: Tensor

    def __init__(self, tensors: Tensors) -> None:
        """Draw every tensor from the global generator: the same on every rank."""
        super().__init__()
        self.embed = nn.Embedding(CLASSES, FEATURES)
        self.column = exact.ExactLinear(FEATURES, HIDDEN)
        self.row = exact.ExactLinear(HIDDEN, FEATURES)
        trained: torch.dtype = getattr(torch, tensors.trained)
        self.odd = exact.ExactLinear(tensors.columns, tensors.rows, dtype=trained)
        self.head = exact.ExactLinear(FEATURES, CLASSES, bias=False)
        if Feature.TIED not in tensors.without:
            self.head.weight = self.embed.weight
        self.thin = nn.Parameter(torch.randn(1, FEATURES))
        if Feature.UNUSED not in tensors.without:
            self.lazy = nn.Parameter(torch.randn(6, 4))
        narrow = "float16" if tensors.frozen in tensors.without else tensors.frozen
        frozen = torch.randn(FEATURES, 6).to(getattr(torch, narrow))
        self.frozen = nn.ParameterList([nn.Parameter(frozen, requires_grad=False)])
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.randn(3))

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Map features [B, 8] and classes [B] to logits [B, 16], all on the grid."""
        with torch.no_grad():
            self.seen += GLOBAL_BATCH
        embedded = exact.weight(nn.functional.embedding(15 - classes, self.embed.weight))
        h = exact.activation(x + embedded + exact.weight(self.thin))
        h = exact.activation(self.row(exact.activation(self.column(h))))
        few = h[:, : self.odd.in_features].to(self.odd.weight.dtype)
        odd = exact.activation(cast("Tensor", self.odd(few)).float())
        h = exact.activation(h + nn.functional.pad(odd, (0, FEATURES - self.odd.out_features)))
        return exact.activation(cast("Tensor", self.head(h)))


def share_out(model: ShardedModel, layout: Layout, mesh: DeviceMesh) -> None:
    """Shard a model over a mesh: tensor parallel first, then FSDP2 with or without replicas."""
    if layout.tp > 1:
        plan: Any = {"column": ColwiseParallel(), "row": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    data = mesh["replicate", "fsdp"] if layout.replicate > 1 else mesh["fsdp"]
    place: Any = partial(_place, size=layout.fsdp) if layout.dim else None
    apart = [] if model.odd.weight.dtype == torch.float32 else [model.odd]
    for part in (model.frozen, *apart, model):
        wrapped = fully_shard(part, mesh=data, shard_placement_fn=place)
        _sum_gradients(wrapped)


def _sum_gradients(wrapped: Any) -> None:  # noqa: ANN401  an FSDPModule; not of every release
    """Let the ranks add gradients up: sums, not means, are exact for three ranks too.

    FSDP2 of torch 2.7 has no setting for it: see `old_fsdp`.
    """
    if hasattr(wrapped, "set_gradient_divide_factor"):
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
    else:
        old_fsdp.sum_gradients()


def _place(parameter: nn.Parameter, size: int) -> Shard:
    """Shard along the last dimension where torch can: it takes no uneven shards there.

    What is to be even is what tensor parallelism has left to this rank.
    """
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    last = parameter.ndim - 1
    return Shard(last if held.shape[last] % size == 0 else 0)


class GlobalPosition(TypedDict):
    """Where all ranks together are: the epoch, and the global batches of it that are consumed."""

    seed: int
    epoch: int
    position: int


class OwnPart(TypedDict):
    """Which part of each global batch a rank takes, of how many; samples that it took so far."""

    part: int
    parts: int
    taken: int


ShardedLoaderState = TypedDict("ShardedLoaderState", {"global": GlobalPosition, "own": OwnPart})


class ShardedLoader:
    """Yields this rank's part of each global batch.

    The position counts global batches. `part` is the rank's own: which samples of them it takes.
    State of a loader of the same number of parts is taken as it is; of another number only the
    global position is, and the rank keeps its own part.
    """

    def __init__(self, seed: int, part: int, parts: int, device: str) -> None:
        """Start at epoch 0; batches lie on a device."""
        self.samples, self.device = Samples(DATA), device
        self.seed, self.part, self.parts = seed, part, parts
        self.epoch, self.position, self.taken = 0, 0, 0

    def __len__(self) -> int:
        """Count the global batches of an epoch."""
        return DATA // GLOBAL_BATCH

    def next_batch(self) -> Batch:
        """Return ids [B], features [B, 8] and classes [B]; B is this rank's part of 24 samples."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + self.epoch)
        ids = torch.randperm(DATA, generator=generator)[self.position * GLOBAL_BATCH :]
        size = GLOBAL_BATCH // self.parts
        own = ids[self.part * size : (self.part + 1) * size]
        self.position, self.taken = self.position + 1, self.taken + size
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        features, classes = self.samples.features[own], self.samples.classes[own]
        return own, features.to(self.device), classes.to(self.device)

    def __iter__(self) -> ShardedLoader:
        """Iterate over this rank's batches, without an end."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch."""
        return self.next_batch()

    def state_dict(self) -> StateDict:
        """Return the global position and this rank's part, as `ShardedLoaderState`."""
        return {
            "global": {"seed": self.seed, "epoch": self.epoch, "position": self.position},
            "own": {"part": self.part, "parts": self.parts, "taken": self.taken},
        }

    def load_state_dict(self, state_dict: ShardedLoaderState) -> None:
        """Set the global position; the rank's own part only where the parts are as many."""
        where, own = state_dict["global"], state_dict["own"]
        self.seed, self.epoch, self.position = where["seed"], where["epoch"], where["position"]
        done = self.epoch * len(self) + self.position
        self.taken = done * GLOBAL_BATCH // self.parts
        if own["parts"] == self.parts:
            self.part, self.taken = own["part"], own["taken"]


class ShardedJob:
    """A job of kind `sharded` on one rank of an initialised default process group.

    The same seed gives the same global run in every layout. `variant` is `drift` (other
    hyper-parameters), `dtype` (the frozen matrix is float32, not bfloat16), or empty. Without a
    process group it is the job of one process that has every tensor whole; its layout is ignored.
    """

    def __init__(
        self,
        seed: int,
        layout: Layout,
        *,
        variant: str = "",
        tensors: Tensors | None = None,
        device: str = "cpu",
    ) -> None:
        """Seed, build the whole model on every rank, then share it out; a collective."""
        self.kind, self.seed, self.variant, self.layout = "sharded", seed, variant, layout
        self.step, self.device = 0, device
        self.is_alone = not dist.is_initialized()
        self.rank = 0 if self.is_alone else dist.get_rank()
        self.world_size = 1 if self.is_alone else dist.get_world_size()
        RngState.seed(seed)
        self.model = ShardedModel(tensors or Tensors())
        if variant == "dtype":
            self.model.frozen.float()
        self.model.to(device)
        at: tuple[int, ...] | list[int] = [0, 0, 0]
        if not self.is_alone:
            self.mesh = layout.mesh(device)
            share_out(self.model, layout, self.mesh)
            at = self.mesh.get_coordinate() or at
        self.optimizers = {"optimizer": _optimizer(self.model, variant)}
        self.schedulers = {
            "scheduler": lr_scheduler.LambdaLR(
                self.optimizers["optimizer"], lambda n: min(1.0, (n + 1) / 6) * 0.97**n
            )
        }
        self.scaler = GradScaler(device, init_scale=4.0, enabled=False)
        self.ema = Ema(self.model)
        part, parts = at[0] * layout.fsdp + at[1], layout.replicate * layout.fsdp
        parts = 1 if self.is_alone else parts
        self.loader = ShardedLoader(seed, part, parts, device)
        self.extra, self.gradients = Extra(seed), None
        self.rng = RngState()
        RngState.seed(seed * 1_000 + 1 + self.rank)  # from here on each rank's own
        self.on_loss: Callable[[Any], None] | None = None
        self.on_record: Callable[[StepRecord], None] | None = None
        self._batch: tuple[int, ...] = ()
        self._draws: tuple[str, ...] = ()

    @property
    def components(self) -> Mapping[str, Stateful]:
        """Every stateful part by name."""
        fixed: dict[str, Stateful] = {"model": self.model, **self.optimizers, **self.schedulers}
        fixed |= {"scaler": self.scaler, "ema": self.ema, "loader": self.loader}
        return fixed | {"rng": self.rng, "extra": self.extra}

    def loss(self, batch: Batch) -> Tensor:
        """Run the forward pass of this rank's part; the sum of its samples' losses, exact."""
        if self.on_loss:
            self.on_loss(self)
        ids, features, classes = batch
        self._batch, self._draws = tuple(cast("list[int]", ids.tolist())), RngState.draw()
        logits = self.model(exact.rounded(features), classes)
        targets = nn.functional.one_hot(classes, CLASSES).float()
        total: Tensor = ((logits - targets) ** 2).sum() / 8.0
        return total

    def optimize(self, loss: Tensor) -> None:
        """Run backward and step everything."""
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.schedulers.values():
            scheduler.step()

    def after_step(self, loss: Tensor) -> StepRecord:
        """Count the step; sum the loss over the ranks; update EMA and extra; record."""
        self.step += 1
        total = loss.detach().clone()
        for name in () if self.is_alone else ("replicate", "fsdp"):
            dist.all_reduce(total, group=self.mesh.get_group(name))
        self.ema.update()
        self.extra.update(self.step, total.item())
        record = StepRecord(
            step=self.step,
            loss=digests.tensor_bytes(total).hex(),
            learning_rates=tuple(
                float(g["lr"]).hex() for o in self.optimizers.values() for g in o.param_groups
            ),
            batch=self._batch,
            draws=self._draws,
            parameters=digests.digest(local_parts(self.model.state_dict())),
        )
        if self.on_record:
            self.on_record(record)
        return record

    def train(self, n: int) -> list[StepRecord]:
        """Train n steps with the job's own loop."""
        return [self._train_one() for _ in range(n)]

    def _train_one(self) -> StepRecord:
        loss = self.loss(self.loader.next_batch())
        self.optimize(loss)
        return self.after_step(loss)

    def leaves(self) -> RankLeaves:
        """Return each leaf of each component: a digest, or this rank's box of a sharded tensor.

        No collective: ranks that disagree must not hang the oracle. `joining.assemble` joins them.
        """
        return {name: leaves_of(part.state_dict()) for name, part in self.components.items()}

    def digest(self) -> Mapping[str, str]:
        """Return one digest for each component, of what this rank holds."""
        states = {name: part.state_dict() for name, part in self.components.items()}
        return {name: digests.digest(local_parts(state)) for name, state in states.items()}

    def ties(self) -> Ties:
        """Return the groups of parameter names that are one parameter."""
        groups: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        return sorted(sorted(names) for names in groups.values() if len(names) > 1)

    def overlaps(self) -> Ties:
        """Return the groups of leaves whose parts on this rank share memory."""
        parts = {name: part.state_dict() for name, part in self.components.items()}
        return digests.overlapping(digests.tensors(local_parts(parts)))

    def perturb(self) -> None:
        """Change this rank's part of every tensor in place; draw from every generator."""
        for part in self.components.values():
            for _, tensor in digests.tensors(local_parts(part.state_dict())):
                if tensor.is_floating_point() and tensor.numel():
                    tensor.add_(1)
        RngState.draw()

    def payload_samples(self) -> list[PayloadSample]:
        """Return no samples: a shard of this job is smaller than a sample."""
        return []


def _optimizer(model: nn.Module, variant: str) -> optim.Optimizer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    factor = 3.0 if variant == "drift" else 1.0
    matrices = [(name, p) for name, p in named if p.ndim > 1]
    vectors = [(name, p) for name, p in named if p.ndim == 1]
    return optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1 * factor},
            {"params": vectors, "weight_decay": 0.0},
        ],
        0.02 * factor,
    )


def layout_of(world: int) -> Layout:
    """Make the simplest layout of a world: FSDP2 over all of its ranks."""
    return Layout(fsdp=world)


# ---- what a rank holds of a sharded tensor -------------------------------------------------------


def leaves_of(state: object) -> ComponentLeaves:
    """Map the path of each leaf of a state tree to its digest, or to this rank's box of it."""
    leaves: ComponentLeaves = dict(digests.leaves(local_parts(state)))
    sharded = [(path, x) for path, x in digests.tensors(state) if hasattr(x, "placements")]
    return leaves | {path: box_of(x) for path, x in sharded}


def local_parts(state: object) -> Any:  # noqa: ANN401  the same tree
    """Copy a state tree; each sharded tensor is replaced by what this rank holds of it."""
    from torch.utils import _pytree as pytree

    def local(leaf: Any) -> Any:  # noqa: ANN401  whatever stands in the tree
        return leaf.to_local() if hasattr(leaf, "placements") else leaf

    return pytree.tree_map(local, state)


def box_of(tensor: Any) -> Box:  # noqa: ANN401  a DTensor
    """Describe this rank's part of a sharded tensor; no collective.

    Raises:
        ValueError: the rank does not hold what the tensor's placement says.

    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

    local = tensor.to_local()
    size, offset = place(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(size) != tuple(local.shape):
        msg = f"a rank holds {tuple(local.shape)} where its placement says {tuple(size)}"
        raise ValueError(msg)
    return {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "offset": list(offset),
        "size": list(size),
        "width": tensor.element_size(),
        "data": digests.tensor_bytes(local).hex(),
    }
