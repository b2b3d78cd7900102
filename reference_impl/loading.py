"""The loading half of the manager: find, verify, plan, fill, hand over.

Everything that can be wrong is found before the first byte of the job is changed: the files are
verified against the manifest, and the plan against the job.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

import torch
from torch.distributed import is_initialized
from torch.distributed.tensor import DTensor

from ckpt_conformance.reference_impl import (
    component_state,
    dcp_format,
    durable,
    layout,
    resolve,
    snapshot,
    torch_zip,
    train_state,
)
from ckpt_conformance.reference_impl.base import ManagerBase
from ckpt_conformance.reference_impl.component_state import (
    bare,
    check_tensor,
    plain_key,
    plain_state,
)
from ckpt_conformance.reference_impl.config import check_experts
from ckpt_conformance.reference_impl.encode import (
    DTYPES,
    decode,
    is_dict,
    is_list,
    memory_groups,
    replace,
    walk,
)
from ckpt_conformance.reference_impl.errors import CheckpointDamaged, CheckpointMismatch
from ckpt_conformance.reference_impl.fill import ReadPlan, fill
from ckpt_conformance.reference_impl.layout import CheckpointReference, Kind
from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest, read_manifest
from ckpt_conformance.reference_impl.torch_zip import LocalRef, ShardedRef, TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.reference_impl.encode import Path as TreePath
    from ckpt_conformance.reference_impl.encode import StateDict, Tree
    from ckpt_conformance.reference_impl.layout import Refusal
    from ckpt_conformance.reference_impl.manifest import Json, ShardedEntry, TensorEntry
    from ckpt_conformance.reference_impl.train_state import Stateful


logger = logging.getLogger(__name__)


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
        refused: checkpoints that come before it in order and were refused, each with its reason.
        cold: ids of components that were asked for and were not in it: they start anew.
        resharded: what became of the state of each rank; None with the same number of ranks.
        config: of the checkpoint, with the keys that it is too old to have (M037).
        config_added: those keys, and what they were set to.
    """

    step: int
    tokens_seen: int
    extra: StateDict
    reference: CheckpointReference
    refused: list[Refusal]
    cold: list[str]
    resharded: ReshardReport | None = None
    config: dict[str, Json] = field(default_factory=dict[str, "Json"])
    config_added: dict[str, Json] = field(default_factory=dict[str, "Json"])


@dataclass
class OpenCheckpoint:
    """A verified checkpoint: its files stay open, so that what is read is what was verified.

    Attributes:
        reference: where it is.
        manifest: what it consists of.
        files: name -> open file and its entry in the manifest.
        documents: `model`, `optim`, `extra`, with a `TensorRef` for each tensor.
        absent: files that are missing, which `allow_missing` permits.
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


class Loading(ManagerBase):
    """Find, verify, plan, fill, hand over."""

    # ---- find ----------------------------------------------------------------------------------

    def candidates(
        self,
        reference: str | os.PathLike[str] | CheckpointReference | None = None,
        step: int | None = None,
        require_kind: Kind | None = None,
    ) -> list[CheckpointReference]:
        """What a load may serve, best first. An explicit request is the only candidate.

        Without one: newest step first, as numbers; of one step this run's own before others', and
        DCP before per-rank files, and an emergency dump last: it is served where it is newer than
        each of the others that is whole. `latest` is not consulted: it may be stale or garbage
        (B05).

        Raises:
            CheckpointNotFound: an explicit request for what is not there (B09).
        """
        root = self.root
        if reference is not None:
            explicit = self.explicit(reference, require_kind)
            if isinstance(explicit, CheckpointReference):
                return [explicit]
            root = explicit
        try:
            candidates = [
                candidate
                for candidate in resolve.references(root)
                if step in (None, candidate.step) and require_kind in (None, candidate.kind)
            ]
        except OSError as error:
            raise CheckpointDamaged(f"{root} cannot be listed: {error}") from error
        if require_kind in (None, "emergency"):
            roots = self.dump_roots if reference is None else [root]
            candidates += [dump for dump in self.whole_dumps(roots) if step in (None, dump.step)]
        return self.in_order(candidates)

    def whole_dumps(self, roots: Sequence[Path]) -> list[CheckpointReference]:
        """The emergency dumps that may be served; the others are named in the log."""
        found = [dump for root in roots for dump in resolve.dumps(root, self.host)]
        for dump in found:
            if dump.problem is not None:
                logger.warning("%s is passed over: %s", dump.reference.path, dump.problem)
        return [dump.reference for dump in found if dump.problem is None]

    def in_order(self, candidates: list[CheckpointReference]) -> list[CheckpointReference]:
        """Sort candidates into the order in which they are tried.

        Their names tell it, unless several are of one step. Then their manifests are read: this
        run's own come first, and a warning says which of two complete ones is used (MX10).
        """
        count = Counter(candidate.step for candidate in candidates)
        twins = {
            candidate: resolve.candidate_at(candidate)
            for candidate in candidates
            if count[candidate.step] > 1
        }

        def key(candidate: CheckpointReference) -> tuple[int, bool, int, str]:
            step, rank, name = resolve.preference(candidate)
            manifest = twins[candidate].manifest if candidate in twins else None
            own_first = manifest is None or manifest.run_id not in self.own_runs
            return step, own_first and not resolve.is_fresh(candidate), rank, name

        ordered = sorted(candidates, key=key)
        newest = [twin for twin in ordered if twin in twins and twin.step == ordered[0].step]
        resolve.warn_of_two_kinds([twin for twin in newest if twins[twin].complete])
        return ordered

    def explicit(
        self,
        reference: str | os.PathLike[str] | CheckpointReference,
        kind: Kind | None,
    ) -> CheckpointReference | Path:
        """The one checkpoint that a request names, or the parent directory that it names."""
        if isinstance(reference, CheckpointReference):
            return resolve.resolve_checkpoint_reference(reference, kind)
        path = Path(reference)
        if resolve.explicit_reference(path) is None and path.is_dir():
            return path
        return resolve.resolve_checkpoint_reference(path, kind)

    # ---- verify --------------------------------------------------------------------------------

    def open_verified(
        self,
        reference: CheckpointReference,
        allowed: set[str],
    ) -> OpenCheckpoint:
        """Open a checkpoint and verify all of it: manifest, sizes, digests, structure.

        Raises:
            CheckpointDamaged: anything in it is not as it was saved.
            CheckpointMismatch: per-rank files of another number of ranks (M034, I03).
        """
        manifest = self.read_manifest(reference)
        opened = OpenCheckpoint(reference, manifest)
        try:
            for name, entry in manifest.files.items():
                if self.may_lack(opened, name, allowed):
                    opened.absent.add(name)
                else:
                    file = opened.open(name, entry)
                    durable.check_owner(Path(name), os.fstat(file.fileno()), self.owners)
                    self.verify_file(file, entry)
            self.read_documents(opened)
        except BaseException:
            opened.close()
            raise
        return opened

    def read_manifest(self, reference: CheckpointReference) -> Manifest:
        """Read the manifest, and check its place, its owner and the number of ranks.

        Raises:
            CheckpointDamaged: it is not of the step and kind that its place promises.
            CheckpointMismatch: per-rank files of another number of ranks (M034, I03).
        """
        resolve.check_place(reference)
        path = reference.manifest_path
        manifest = read_manifest(path)
        durable.check_owner(path, path.lstat(), self.owners)
        durable.report_mode(path, path.lstat())
        resolve.check_identity(reference, manifest)
        if reference.kind == "emergency":
            resolve.check_place_of_dump(resolve.read_dump(reference), self.host, world_size=1)
        now = self.ranks.size if self.ranks else 1
        if manifest.world_size != now and manifest.kind == "model":
            raise CheckpointMismatch(
                f"{reference.path} holds the per-rank files of {manifest.world_size} ranks, this "
                f"is {now}: another number of ranks goes through the DCP format. Load it with "
                f"{manifest.world_size} ranks and save it with use_dcp=True",
            )
        return manifest

    def may_lack(self, opened: OpenCheckpoint, name: str, allowed: set[str]) -> bool:
        """Whether a file is missing, and a cold optimizer was asked for on purpose (M027)."""
        optimizers = optimizer_ids(opened.manifest)
        return (
            name == layout.optim_name(opened.manifest.step)
            and all(snapshot.is_allowed(component, allowed) for component in optimizers)
            and not (opened.reference.directory / name).exists()
        )

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """Check a file's size and digest; every byte of it is read (O01).

        Raises:
            CheckpointDamaged: it is not what the manifest says.
        """
        name, size = Path(str(file.name)).name, durable.file_size(file)
        if size != entry.size:
            raise CheckpointDamaged(f"{name} has {size} bytes instead of {entry.size}")
        digest = durable.hash_file(file)
        if digest != entry.blake3:
            raise CheckpointDamaged(
                f"{name} has the digest {digest[:12]}..., the manifest says {entry.blake3[:12]}...",
            )

    def read_documents(self, opened: OpenCheckpoint) -> None:
        """Read the structure of a verified checkpoint; no tensor is read yet."""
        read = read_dcp_documents if opened.manifest.kind == "dcp" else read_flat_documents
        try:
            opened.documents = read(opened)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointDamaged(f"its structure is malformed: {error!r}") from error
        check_documents(opened)

    # ---- plan ----------------------------------------------------------------------------------

    def plan(self, opened: OpenCheckpoint, job: Destinations, allowed: set[str]) -> LoadPlan:
        """Decide where every byte goes; nothing of the job is changed.

        Raises:
            CheckpointMismatch: keys, shapes, dtypes, ties, components or the number of experts do
                not fit the job.
        """
        check_experts(self.config, opened.manifest.config)
        plan = LoadPlan()
        plan.cold = self.check_components(opened, job, allowed)
        plan.model = self.plan_model(opened, job.model, plan.reads)
        for component, optimizer in job.optimizers.items():
            if component not in plan.cold:
                plan.optimizers[component] = self.plan_optimizer(
                    opened, component, optimizer, job.model, plan.reads
                )
        plan.extra = plan_extra(opened.documents["extra"], job, plan.reads)
        return plan

    def check_components(
        self,
        opened: OpenCheckpoint,
        job: Destinations,
        allowed: set[str],
    ) -> list[str]:
        """Check that every saved component has a destination, and the reverse (G13, H10).

        Returns:
            Ids that start cold: an optimizer or a loader that was never saved, with a warning
            (M027, KX1), and what `allow_missing` names.

        Raises:
            CheckpointMismatch: any other component that only one side has.
        """
        saved = set(opened.manifest.components) - set(snapshot.ALWAYS_SAVED)
        if opened.absent:
            saved -= set(optimizer_ids(opened.manifest))
        unused = sorted(
            component
            for component in saved - set(job.ids)
            if not snapshot.is_allowed(component, allowed)
        )
        missing = [component for component in job.ids if component not in saved]
        fatal = [
            component
            for component in missing
            if not component.startswith(("optimizer", "dataloader"))
            and not snapshot.is_allowed(component, allowed)
        ]
        if unused or fatal:
            raise CheckpointMismatch(
                f"{opened.reference.path.name}: saved but not asked for {unused}, asked for but "
                f"not saved {fatal}. Pass the component, or name it in allow_missing",
            )
        for component in missing:
            logger.warning(
                "%s holds no %s: it starts COLD%s",
                opened.reference.path,
                component,
                ", the epoch begins anew" if component.startswith("dataloader") else "",
            )
        return missing

    def plan_model(
        self,
        opened: OpenCheckpoint,
        model: Stateful,
        reads: ReadPlan,
    ) -> dict[str, Tree]:
        """The model's own state_dict, its tensors to be filled in place."""
        saved: Mapping[str, Tree] = opened.documents["model"]
        live: dict[str, Tree] = bare(model).state_dict()
        self.check_model(saved, plain_state(live), opened.manifest)
        for key, value in live.items():
            saved_value = saved[plain_key(key)]
            if isinstance(value, torch.Tensor):
                reads.add(saved_value, value)
            else:
                live[key] = replace(saved_value, TensorRef, lambda _, ref: reads.new(ref))
        return live

    def check_model(
        self,
        saved: Mapping[str, Tree],
        live: Mapping[str, Tree],
        manifest: Manifest,
    ) -> None:
        """Check keys, shapes, dtypes and ties: nothing is cast, cut or left out.

        Raises:
            CheckpointMismatch: something is not the same on both sides.
        """
        missing, unexpected = sorted(set(live) - set(saved)), sorted(set(saved) - set(live))
        if missing or unexpected:
            raise CheckpointMismatch(
                f"model: missing in the checkpoint {missing[:8]} ({len(missing)}), "
                f"unexpected in it {unexpected[:8]} ({len(unexpected)})",
            )
        for key, value in live.items():
            check_tensor(key, saved[key], value)
        ties = self.live_ties(live)
        if ties != manifest.ties:
            raise CheckpointMismatch(
                f"model: the checkpoint ties {manifest.ties[:4]}, the job ties {ties[:4]}",
            )

    def live_ties(self, tensors: Mapping[str, Tree]) -> list[list[str]]:
        """Groups of the model's keys whose tensors share memory in this job."""
        return memory_groups(
            {key: item for key, item in tensors.items() if isinstance(item, torch.Tensor)},
        )

    def plan_optimizer(
        self,
        opened: OpenCheckpoint,
        component: str,
        optimizer: Stateful,
        model: Stateful,
        reads: ReadPlan,
    ) -> Tree:
        """The state_dict to hand to one optimizer, in the order of its own parameters."""
        saved = opened.documents["optim"][component]
        if not isinstance(optimizer, torch.optim.Optimizer):
            return replace(saved, TensorRef, lambda _, ref: reads.new(ref))
        facts = opened.manifest.components[component]
        names = component_state.parameter_names(optimizer, bare(model))
        matches = component_state.match_groups(
            saved["param_groups"], facts.get("param_names"), optimizer, names or []
        )
        host = {(int(place), str(key)) for place, key in facts.get("host_state", [])}
        return component_state.plan_state(saved, matches, optimizer, host, reads)

    # ---- fill and hand over --------------------------------------------------------------------

    def fill(self, opened: OpenCheckpoint, plan: LoadPlan) -> None:
        """Read the bytes into the job's memory, and hash again what is served.

        Raises:
            CheckpointDamaged: the disk fails now. The job's memory is not to be used.
        """
        try:
            fill(plan.reads, opened.files)
        except OSError as error:
            raise CheckpointDamaged(
                f"{opened.reference.path} failed while it was read, after its verification: "
                f"{error}. The state in memory is not to be used: load again",
            ) from error

    def apply(self, plan: LoadPlan, job: Destinations) -> None:
        """Hand the filled states to their owners; the generators last (E03, E08)."""
        self.restore_model(job.model, plan.model)
        for component, state in plan.optimizers.items():
            self.restore_optimizer(job.optimizers[component], state)
        for component, stateful in job.stateful.items():
            if component not in plan.cold:
                self.restore_stateful(stateful, part_of(plan.extra["stateful"], component))
        for component, scheduler in job.scheduler.items():
            if component not in plan.cold:
                self.restore_scheduler(scheduler, part_of(plan.extra["scheduler"], component))
        for component, dataloader in job.dataloader.items():
            if component not in plan.cold:
                self.restore_dataloader(dataloader, part_of(plan.extra["dataloader"], component))
        self.restore_rng(plan.extra["rng"])

    def restore_model(self, model: Stateful, state: dict[str, Tree]) -> None:
        """Let the model take its state.

        Its tensors hold the loaded bytes already. The call runs its hooks, refreshes what modules
        derive from their state (K05), and takes what is not a tensor.
        """
        bare(model).load_state_dict(state)

    def restore_optimizer(self, optimizer: Stateful, state: Tree) -> None:
        """Let an optimizer take its state, exactly."""
        if isinstance(optimizer, torch.optim.Optimizer):
            component_state.put_state(optimizer, state)
        else:
            optimizer.load_state_dict(state)

    def restore_stateful(self, component: Stateful, state: Tree) -> None:
        """Let a further component take its state."""
        component.load_state_dict(state)

    def restore_scheduler(self, scheduler: Stateful, state: Tree) -> None:
        """Let a scheduler take its state, once (F08)."""
        scheduler.load_state_dict(state)

    def restore_dataloader(self, dataloader: Stateful, state: Tree) -> None:
        """Let a loader take its position."""
        dataloader.load_state_dict(state)

    def restore_rng(self, state: Mapping[str, Tree]) -> None:
        """Restore every generator."""
        train_state.set_rng_state(state)


def plan_extra(saved: Tree, job: Destinations, reads: ReadPlan) -> dict[str, Tree]:
    """Plan the train state into new memory; what a component has distributed, in its layout."""
    live: dict[TreePath, torch.Tensor] = {}
    for component, stateful in job.stateful.items() if is_initialized() else ():
        name = component.partition("/")[2]
        live.update(walk(stateful.state_dict(), DTensor, ("stateful", name)))

    def memory(path: TreePath, ref: TensorRef) -> torch.Tensor:
        like = live.get(path)
        return reads.new(ref) if like is None else reads.new_like(ref, like, like.device)

    extra: dict[str, Tree] = replace(saved, TensorRef, memory)
    return extra


def part_of(state: Tree, component: str) -> Tree:
    """The state of a component in that of its family: `scheduler/main` is one of several."""
    _, slash, name = component.partition("/")
    return state[name] if slash else state


def optimizer_ids(manifest: Manifest) -> list[str]:
    """The ids of the optimizers that were saved."""
    return [component for component in manifest.components if component.startswith("optimizer")]


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
    if opened.manifest.layout:
        trees = marked_local(trees, opened.manifest.layout, ("model.", *OWN_PARTS))
    return {document: decode(tree) for document, tree in trees.items()}


OWN_PARTS = ("optimizer", "extra.stateful.")
"""Begins of keys under which a rank's own file has what it held of distributed tensors.

What the user has in `extra` has no live tensor to be compared with: it stays as it was."""


def marked_local(
    trees: Mapping[str, Tree], layout_of: Mapping[str, str], own: tuple[str, ...]
) -> dict[str, Tree]:
    """Mark what one rank held of distributed tensors, by the layout of each key."""

    def marked(key: str, ref: TensorRef) -> TensorRef:
        return LocalRef(**vars(ref)) if key.startswith(own) and key in layout_of else ref

    return snapshot.replace_tensors(trees, marked, TensorRef)


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
        check: whether to compare the metadata with the manifest; of several ranks one does.
    """
    manifest = opened.manifest
    try:
        first, _ = opened.files[layout.DCP_EXTRA]
        own, _ = opened.files[layout.dcp_extra_name(rank)]
        if check:
            metadata, _ = opened.files[layout.DCP_METADATA]
            stored = dcp_format.read_metadata(metadata)
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
    """Check that every component of the manifest has a state of the right form in the documents.

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
