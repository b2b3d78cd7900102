"""A checkpoint that was opened and verified, and what a load will do with it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Self

from torch.distributed import is_initialized
from torch.distributed.tensor import DTensor

from ckpt_conformance.reference_impl import (
    dcp_format,
    dcp_metadata,
    durable,
    layout,
    snapshot,
    torch_zip,
)
from ckpt_conformance.reference_impl.encode import DTYPES, decode, is_dict, is_list, replace, walk
from ckpt_conformance.reference_impl.errors import CheckpointDamaged
from ckpt_conformance.reference_impl.fill import ReadPlan
from ckpt_conformance.reference_impl.torch_zip import ShardedRef, TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ckpt_conformance.reference_impl.encode import Path, StateDict, Tree
    from ckpt_conformance.reference_impl.layout import CheckpointReference, Refusal
    from ckpt_conformance.reference_impl.manifest import (
        FileEntry,
        Manifest,
        ShardedEntry,
        TensorEntry,
    )
    from ckpt_conformance.reference_impl.train_state import Stateful


@dataclass(frozen=True)
class ReshardReport:
    """What became of the state that each rank has of its own, at another number of ranks.

    Weights and moments are the same at any number. Generators are not: rank r goes on with those
    of saved rank r; a rank beyond the saved ones gets fresh ones, made from the save's id and its
    number, so that no two ranks draw the same (KX2). All else, the data position too, is what the
    first rank had saved: a loader whose position is its rank's own has to work it out from that.

    Attributes:
        saved: number of ranks at the save.
        now: number of ranks at the load.
        generators: `saved rank 1`, or `fresh`.
        others: `saved rank 0`: scheduler, data position, extra, further components.
    """

    saved: int
    now: int
    generators: str
    others: str


@dataclass(frozen=True)
class LoadResult:
    """What a load served.

    Attributes:
        step: optimizer steps done at the save.
        tokens_seen: cumulative, over all data-parallel ranks.
        extra: the user's own.
        reference: the checkpoint that was served.
        refused: newer or preferred ones that were not, each with its reason.
        cold: ids of components that were asked for and were not in it: they start anew.
        resharded: how what each rank owned was dealt out; None with the same number of ranks.
    """

    step: int
    tokens_seen: int
    extra: StateDict
    reference: CheckpointReference
    refused: list[Refusal]
    cold: list[str]
    resharded: ReshardReport | None = None


@dataclass
class OpenCheckpoint:
    """A verified checkpoint: its files stay open, so that what is read is what was verified.

    Attributes:
        reference: where it is.
        manifest: what it consists of.
        files: name -> open file and its entry in the manifest.
        documents: `model`, `optim`, `extra`, with a `TensorRef` for each tensor.
        absent: files that are missing, with leave (`allow_missing`).
    """

    reference: CheckpointReference
    manifest: Manifest
    files: dict[str, tuple[BinaryIO, FileEntry]] = field(
        default_factory=dict[str, "tuple[BinaryIO, FileEntry]"],
    )
    documents: dict[str, Tree] = field(default_factory=dict[str, "Tree"])
    absent: set[str] = field(default_factory=set[str])
    _stack: ExitStack = field(default_factory=ExitStack)

    def open(self, name: str, entry: FileEntry) -> BinaryIO:
        """Open a file of the checkpoint; it is closed with it."""
        file = self._stack.enter_context(durable.open_regular(self.reference.directory / name))
        self.files[name] = (file, entry)
        return file

    def __enter__(self) -> Self:
        """Use it in a with statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


@dataclass(frozen=True)
class Destinations:
    """The live objects of a job, by component id."""

    model: Stateful
    optimizers: Mapping[str, Stateful]
    scheduler: Mapping[str, Stateful]
    dataloader: Mapping[str, Stateful]
    stateful: Mapping[str, Stateful]

    @property
    def ids(self) -> list[str]:
        """All component ids but the model's."""
        return [*self.optimizers, *self.scheduler, *self.dataloader, *self.stateful]


@dataclass
class LoadPlan:
    """What a load will do, decided before anything is touched.

    Attributes:
        reads: bytes of files -> memory.
        model: key -> the live tensor, or a value.
        optimizers: id -> state_dict in the live optimizer's terms.
        extra: the train state and all further components.
        cold: ids that start anew.
    """

    reads: ReadPlan = field(default_factory=ReadPlan)
    model: dict[str, Tree] = field(default_factory=dict[str, "Tree"])
    optimizers: dict[str, Tree] = field(default_factory=dict[str, "Tree"])
    extra: dict[str, Tree] = field(default_factory=dict[str, "Tree"])
    cold: list[str] = field(default_factory=list[str])


def plan_extra(saved: Tree, job: Destinations, reads: ReadPlan) -> dict[str, Tree]:
    """Plan the train state into new memory; what a component has distributed, in its layout."""
    live: dict[Path, torch.Tensor] = {}
    for component, one in job.stateful.items() if is_initialized() else ():
        name = component.partition("/")[2]
        live.update(walk(one.state_dict(), DTensor, ("stateful", name)))

    def memory(path: Path, ref: TensorRef) -> torch.Tensor:
        like = live.get(path)
        return reads.new(ref) if like is None else reads.new_like(ref, like, like.device)

    extra: dict[str, Tree] = replace(saved, TensorRef, memory)
    return extra


def part_of(state: Tree, component: str) -> Tree:
    """The state of one of several, or of the only one."""
    _, slash, name = component.partition("/")
    return state[name] if slash else state


def read_flat_documents(opened: OpenCheckpoint) -> dict[str, Tree]:
    """The documents of a per-rank checkpoint, from its files."""
    trees = {
        layout.final_name(name).partition("_")[0]: torch_zip.read_tree(file, name)
        for name, (file, _) in opened.files.items()
    }
    listed = {
        key: entry
        for key, entry in opened.manifest.tensors.items()
        if entry.file not in opened.absent
    }
    if snapshot.index_trees(trees) != listed:
        raise CheckpointDamaged("its files and its manifest speak of different tensors")
    return {document: decode(tree) for document, tree in trees.items()}


def read_dcp_documents(
    opened: OpenCheckpoint,
    rank: int = 0,
    *,
    check: bool = True,
) -> dict[str, Tree]:
    """The documents of a DCP directory: the skeleton, with the tensors of the manifest's index.

    Args:
        opened: with its metadata (to check) and the files of the train states open.
        rank: whose train state.
        check: whether to hold the metadata against the manifest; of several ranks one does.
    """
    manifest = opened.manifest
    try:
        first, _ = opened.files[layout.DCP_EXTRA]
        own, _ = opened.files[layout.dcp_extra_name(rank)]
        if check:
            metadata, _ = opened.files[layout.DCP_METADATA]
            stored = dcp_metadata.read_metadata(metadata)
            dcp_format.check_index(stored, manifest.tensors, manifest.sharded)
    except KeyError as error:
        raise CheckpointDamaged(f"its manifest does not list {error}") from error
    extra = torch_zip.read_tree(first, layout.DCP_EXTRA)
    skeleton = decode(extra.pop("skeleton"), lambda key: reference_to(key, manifest))
    if rank:
        extra = torch_zip.read_tree(own, layout.dcp_extra_name(rank))
    return {**skeleton, "extra": decode(extra, lambda key: reference_to(key, manifest))}


def reference_to(key: str, manifest: Manifest) -> TensorRef:
    """The place of a tensor, whole or in parts."""
    sharded = manifest.sharded.get(key)
    return sharded_reference(sharded) if sharded else reference_of(manifest.tensors[key])


def sharded_reference(entry: ShardedEntry) -> ShardedRef:
    """The places of the parts of a tensor from its entry in the manifest."""
    dtype = DTYPES[entry.dtype]
    parts = tuple(
        (part.box, TensorRef(part.file, part.offset, part.nbytes, dtype, part.sizes))
        for part in entry.parts
    )
    nbytes = sum(part.nbytes for part in entry.parts)
    return ShardedRef("", 0, nbytes, dtype, entry.shape, parts)


def reference_of(entry: TensorEntry) -> TensorRef:
    """The place of a tensor from its entry in the manifest."""
    return TensorRef(entry.file, entry.offset, entry.nbytes, DTYPES[entry.dtype], entry.shape)


def check_documents(opened: OpenCheckpoint) -> None:
    """Every component of the manifest has a state of the right form in the documents.

    Raises:
        CheckpointDamaged: one is absent or malformed (KX5: there is no load without a train state).
    """
    documents, extra = opened.documents, opened.documents.get("extra")
    if not is_dict(extra) or not is_dict(documents.get("model")):
        raise CheckpointDamaged("it has no model or no train state")
    if not {"rng", "extra", "stateful"} <= set(extra):
        raise CheckpointDamaged("its train state is not whole")
    for component in opened.manifest.components:
        family, slash, name = component.partition("/")
        if family == "optimizer":
            whole = bool(opened.absent) or _is_optimizer(documents.get("optim"), component)
        elif family in ("scheduler", "dataloader", "stateful"):
            part = extra.get(family)
            whole = part is not None and (not slash or (is_dict(part) and name in part))
        else:
            whole = True
        if not whole:
            raise CheckpointDamaged(f"its manifest lists {component}, which is not in its files")


def _is_optimizer(documents: Tree, component: str) -> bool:
    """Whether the state of an optimizer is there; torch's own have groups of parameters."""
    if not is_dict(documents) or component not in documents:
        return False
    state: Tree = documents[component]
    groups: Tree = state.get("param_groups", []) if is_dict(state) else []
    return is_list(groups) and all(is_dict(group) for group in groups)
