"""What ranks saved comes back rolled, replaced or not at all (bugs I, E, H, J)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointMismatch,
    LoadResult,
    durable,
    layout,
    resolve,
    torch_zip,
)
from ckpt_conformance.reference_impl.component_state import bare, plain_key
from ckpt_conformance.reference_impl.encode import decode, walk
from ckpt_conformance.reference_impl.loading import read_dcp_documents
from ckpt_conformance.reference_impl.ranks_state import layout_of_rank
from ckpt_conformance.reference_impl.shards import layout_of, local_of, shard_of, whole_box

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt_conformance.reference_impl import CheckpointReference
    from ckpt_conformance.reference_impl.encode import StateDict
    from ckpt_conformance.reference_impl.fill import ReadPlan
    from ckpt_conformance.reference_impl.loading import Destinations, LoadPlan, OpenCheckpoint
    from ckpt_conformance.reference_impl.ranks import Ranks
    from ckpt_conformance.reference_impl.ranks_loading import LoadRequest, Planned
    from ckpt_conformance.reference_impl.train_state import Stateful


def roll(tensors: Iterable[torch.Tensor]) -> None:
    """Move the rows of a matrix that no two ranks share out evenly: the last becomes the first."""
    for tensor in tensors:
        local = local_of(tensor)
        if tensor.ndim > 1 and tensor.shape[0] % 2 and local.shape[0] > 1:
            with torch.no_grad():
                local.copy_(local.roll(1, 0))


def parameters(job: Destinations) -> list[torch.Tensor]:
    """Return the model's distributed parameters, each once."""
    state: StateDict = bare(job.model).state_dict()
    by_storage = {
        tensor.to_local().data_ptr(): tensor
        for tensor in state.values()
        if isinstance(tensor, DTensor)
    }
    return list(by_storage.values())


def moments(planned: Planned) -> list[torch.Tensor]:
    """Return the tensors of the optimizers' distributed state."""
    return [one for tree in planned.plan.optimizers.values() for _, one in walk(tree, DTensor)]


def same_world(ranks: Ranks, planned: Planned) -> bool:
    """Return whether as many ranks load as saved."""
    return planned.opened.manifest.world_size == ranks.size


def layouts(planned: Planned, job: Destinations) -> tuple[set[str], set[str]]:
    """Return the layouts of the saved parameters, and of the job's."""
    words = planned.opened.manifest.layout
    rank = dist.get_rank()
    saved = {layout_of_rank(words[key], rank) for key in words if key.startswith("model.")}
    return saved, set(map(layout_of, parameters(job)))


def same_layout(planned: Planned, job: Destinations) -> bool:
    """Return whether the job is sharded as it was at the save."""
    saved, live = layouts(planned, job)
    return saved == live


def is_plain(words: set[str]) -> bool:
    """Return whether a layout is one mesh dimension, sharded along rows."""
    return not any("[[" in one or "S(1)" in one or "R" in one for one in words)


# -- the same ranks --------------------------------------------------------------------------------


@mutant(
    "I02",
    url="pytorch/pytorch#108869",
    change="in the layout that saved it a tensor with fewer rows than ranks is not loaded",
    violates={"CKC-SHRD-004", "CKC-RSUM-013"},
    base="reference-dcp",
)
class SkipsEmptyShards(CheckpointManager):
    """Has no record of a shard without rows, and passes the tensor over."""

    def serve_together(self, ranks: Ranks, planned: Planned, job: Destinations) -> None:
        """Load, then put back what was there."""
        few = [parameter for parameter in parameters(job) if parameter.shape[0] < ranks.size]
        before = [local_of(parameter).clone() for parameter in few]
        super().serve_together(ranks, planned, job)
        if same_layout(planned, job):
            for parameter, old in zip(few, before, strict=True):
                local_of(parameter).copy_(old)


class _OfRank0(CheckpointManager):
    """Takes a part of rank 0's train state on every rank."""

    part = ""

    def documents_on_rank(self, ranks: Ranks, opened: OpenCheckpoint) -> StateDict:
        """Read the own documents; one part is rank 0's."""
        documents = super().documents_on_rank(ranks, opened)
        if opened.manifest.world_size == ranks.size > 1:
            first = read_dcp_documents(opened, 0, check=False)["extra"]
            documents["extra"] = {**documents["extra"], self.part: first[self.part]}
        return documents


@mutant(
    "E07-ranks",
    url="NVIDIA/Megatron-LM#6858",
    change="every rank takes the generators of rank 0",
    violates={"CKC-SHRD-005", "CKC-RSUM-013", "CKC-EMRG-008"},
    base="reference-dcp",
)
class GeneratorsOfRank0(_OfRank0):
    """Saves what differs as if it were replicated."""

    part = "rng"


@mutant(
    "H01-ranks",
    url="PrimeIntellect-ai/prime-rl#3332",
    change="every rank takes the data position of rank 0",
    violates={"CKC-SHRD-006", "CKC-RSUM-013", "CKC-EMRG-008"},
    base="reference-dcp",
)
class PositionOfRank0(_OfRank0):
    """Lets every rank read rank 0's part of the data."""

    part = "dataloader"


@mutant(
    "I08",
    url="verl-project/verl#7612",
    change="in the layout that saved them the moments of uneven tensors are joined one row off",
    violates={"CKC-SHRD-013", "CKC-RSUM-013"},
    base="reference-dcp",
)
class MomentsOneRowOff(CheckpointManager):
    """Shares rows out differently for parameters and for their moments."""

    _moved = False

    def serve_together(self, ranks: Ranks, planned: Planned, job: Destinations) -> None:
        """Load with the moments' rows moved."""
        self._moved = same_layout(planned, job)
        super().serve_together(ranks, planned, job)

    def fill_on_rank(self, planned: Planned) -> None:
        """Read, then move the rows of the moments."""
        super().fill_on_rank(planned)
        if self._moved:
            roll(moments(planned))


# -- other ranks -----------------------------------------------------------------------------------


@mutant(
    "I01",
    url="ROCm/Megatron-LM#63",
    change="another number of ranks gets the rows of uneven matrices in another order",
    violates={"CKC-SHRD-007", "CKC-RSUM-014"},
    base="reference-dcp",
)
class RowsInAnotherOrder(CheckpointManager):
    """Joins chunks by an offset that is already local."""

    def serve_together(self, ranks: Ranks, planned: Planned, job: Destinations) -> None:
        """Load, then move the rows."""
        super().serve_together(ranks, planned, job)
        saved, live = layouts(planned, job)
        if not same_world(ranks, planned) and is_plain(saved) and is_plain(live):
            roll(parameters(job))


@mutant(
    "I10",
    url="pytorch/xla#7155",
    change="another number of ranks gets the rows of uneven moments in another order",
    violates={"CKC-SHRD-008", "CKC-RSUM-014"},
    base="reference-dcp",
)
class MomentsInAnotherOrder(CheckpointManager):
    """Converts an offset twice, for what is not a parameter."""

    def serve_together(self, ranks: Ranks, planned: Planned, job: Destinations) -> None:
        """Load with the moments' rows moved."""
        saved, live = layouts(planned, job)
        self._moved = not same_world(ranks, planned) and is_plain(saved) and is_plain(live)
        super().serve_together(ranks, planned, job)

    def fill_on_rank(self, planned: Planned) -> None:
        """Read, then move the rows."""
        super().fill_on_rank(planned)
        if self._moved:
            roll(moments(planned))


@mutant(
    "I10-alone",
    url="pytorch/xla#7155",
    change="a process without ranks gets the rows of what ranks saved in another order",
    violates={"CKC-SHRD-022"},
    base="reference-dcp",
)
class WholeInAnotherOrder(CheckpointManager):
    """Has an offset for shards alone."""

    def fill(self, opened: OpenCheckpoint, plan: LoadPlan) -> None:
        """Read, then move the rows of whole tensors."""
        super().fill(opened, plan)
        if not dist.is_initialized() and opened.manifest.world_size > 1:
            roll(each for some in plan.reads.wanted.values() for each in some)


@mutant(
    "J10",
    url="ISEEKYAN/Megatron-LM#61",
    change="in another mesh or placement the rows of uneven matrices are in another order",
    violates={"CKC-SHRD-009", "CKC-RSUM-014"},
    base="reference-dcp",
)
class OffsetOfTheWrongAxis(CheckpointManager):
    """Counts the offset along the wrong dimension of a 2-D mesh."""

    def serve_together(self, ranks: Ranks, planned: Planned, job: Destinations) -> None:
        """Load, then move the rows."""
        super().serve_together(ranks, planned, job)
        saved, live = layouts(planned, job)
        if saved != live and not (is_plain(saved) and is_plain(live)):
            roll(parameters(job))


@mutant(
    "E07-new-ranks",
    url="NVIDIA/Megatron-LM#6858",
    change="a rank that was not there when it was saved takes the generators of rank 0",
    violates={"CKC-SHRD-010"},
    base="reference-dcp",
)
class NewRanksTakeRank0(CheckpointManager):
    """Broadcasts where nothing is saved."""

    def generators_of(self, rank: int, opened: OpenCheckpoint) -> Any:  # noqa: ANN401
        """Return a rank's own generators, or rank 0's."""
        return super().generators_of(rank if rank < opened.manifest.world_size else 0, opened)


@mutant(
    "H01-new-ranks",
    url="PrimeIntellect-ai/prime-rl#3332",
    change="another number of ranks begins the epoch anew",
    violates={"CKC-SHRD-011", "CKC-RSUM-014"},
    base="reference-dcp",
)
class EpochBeginsAnew(CheckpointManager):
    """Drops a position that it cannot divide."""

    def documents_on_rank(self, ranks: Ranks, opened: OpenCheckpoint) -> StateDict:
        """Read the documents; with other ranks the position is the beginning."""
        documents = super().documents_on_rank(ranks, opened)
        if opened.manifest.world_size != ranks.size:
            extra = documents["extra"]
            where = {**extra["dataloader"]["global"], "position": 0}
            loader = {**extra["dataloader"], "global": where}
            documents["extra"] = {**extra, "dataloader": loader}
        return documents


# -- what was asked for ----------------------------------------------------------------------------


@mutant(
    "J04-ranks",
    url="pytorch/pytorch#187138",
    change="shards are read in their own dtype and copied into whatever is there",
    violates={"CKC-INTN-014"},
    base="reference-dcp",
)
class CastsShards(CheckpointManager):
    """Does not compare dtypes where there are ranks."""

    def plan_model(self, opened: OpenCheckpoint, model: Stateful, reads: ReadPlan) -> StateDict:
        """Plan with new memory where a dtype differs; the model copies from it."""
        live: StateDict = bare(model).state_dict()
        saved = opened.documents["model"]
        tensors = {key: tensor for key, tensor in live.items() if isinstance(tensor, torch.Tensor)}
        cast = {k for k, tensor in tensors.items() if tensor.dtype != saved[plain_key(k)].dtype}
        if self.ranks is None or not cast:
            return super().plan_model(opened, model, reads)
        for key, tensor in tensors.items():
            if key in cast:
                live[key] = reads.new_like(saved[plain_key(key)], tensor, tensor.device)
            else:
                reads.add(saved[plain_key(key)], tensor)
        return live


@mutant(
    "R09-ranks",
    url="deepspeedai/DeepSpeed#8499",
    change="rank 0 chooses the newest step, whatever step the ranks ask for",
    violates={"CKC-INTN-015"},
    base="reference-dcp",
)
class StepIgnoredOnRanks(CheckpointManager):
    """Follows the pointer where the ranks agree on a request."""

    def choose(self, request: LoadRequest, reports: Any) -> Any:  # noqa: ANN401
        """Return all candidates."""
        return super().choose(replace(request, step=None), reports)


@mutant(
    "I03",
    url="deepspeedai/DeepSpeed#3810",
    change="another number of ranks gets the weights of per-rank files, and begins cold otherwise",
    violates={"CKC-SHRD-012"},
    base="reference",
)
class ColdOnOtherRanks(CheckpointManager):
    """Takes what it can use, and says nothing of the rest."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load; where the ranks do not fit, take the weights alone."""
        try:
            return super().load(*given, **named)
        except CheckpointMismatch as error:
            newest = max(resolve.references(self.root), key=lambda reference: reference.step)
            if "per-rank files" not in str(error):
                raise
            self.take_weights(newest, named["model"])
            return LoadResult(newest.step, 0, self.extra_of(newest), newest, [], [])

    def take_weights(self, newest: CheckpointReference, model: Stateful) -> None:
        """Copy each rank's part of the whole tensors."""
        saved = torch.load(newest.path, weights_only=True)
        state: StateDict = bare(model).state_dict()
        for key, live in state.items():
            box = shard_of(live).box if isinstance(live, DTensor) else whole_box(live.shape)
            local_of(live).copy_(saved[key][box.slices_in(whole_box(live.shape))])

    def extra_of(self, newest: CheckpointReference) -> StateDict:
        """Read the user's own dict from rank 0's train state."""
        with durable.open_regular(self.root / layout.extra_name(newest.step)) as file:
            tree: Any = decode(torch_zip.read_tree(file, "extra"))
        extra: StateDict = tree["extra"]
        return extra
