"""The saving half of the manager: capture, write, publish.

The order of these steps is the commit protocol. A crash between any two of them leaves either the
old checkpoint or the new one, whole (A01 to A14).
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.reference_impl import (
    component_state,
    dcp_format,
    durable,
    layout,
    snapshot,
    torch_zip,
    train_state,
)
from ckpt_conformance.reference_impl.base import ManagerBase
from ckpt_conformance.reference_impl.component_state import bare, plain_state
from ckpt_conformance.reference_impl.encode import TAG, Encoder, memory_groups
from ckpt_conformance.reference_impl.layout import CheckpointReference
from ckpt_conformance.reference_impl.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    framework,
    read_manifest,
)
from ckpt_conformance.reference_impl.resolve import candidate_at
from ckpt_conformance.reference_impl.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl.encode import StateDict, Tree
    from ckpt_conformance.reference_impl.manifest import ComponentFacts
    from ckpt_conformance.reference_impl.train_state import Stateful


class Saving(ManagerBase):
    """Capture, write, publish."""

    # ---- capture -------------------------------------------------------------------------------

    def capture(  # noqa: PLR0913 - these are the parts of a job
        self,
        step: int,
        *,
        model: Stateful,
        optimizers: Mapping[str, Stateful] | Stateful | None = None,
        scheduler: Stateful | Mapping[str, Stateful] | None = None,
        dataloader: Stateful | None = None,
        tokens_seen: int = 0,
        extra: Mapping[str, Tree] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        copies: bool = False,
    ) -> Snapshot:
        """Take the state of a job, checked, before anything is written.

        Nothing of the job changes: state is read, never initialised, stepped or drawn (G02). With
        `copies` it shares no memory with the job, which may train on while it is written.

        Raises:
            SaveRefused: a value that a safe load would refuse, by key and type.
            ValueError: a negative step or number of tokens.
        """
        step, tokens_seen = int(index(step)), int(index(tokens_seen))
        if step < 0 or tokens_seen < 0:
            raise ValueError(f"step {step} and tokens_seen {tokens_seen} are counts")
        encoder = Encoder(
            copies=copies, pinned=copies and self.async_mode == "async_with_pinned_mem"
        )
        by_id = snapshot.by_id(optimizers, "optimizer")
        model_state = self.capture_model(model)
        extra_state = self.capture_train_state(step, tokens_seen, scheduler, dataloader, extra)
        extra_state["stateful"] = self.capture_stateful(stateful or {})
        documents = {"model": encoder.encode(model_state, ("model",))}
        if by_id:
            documents["optim"] = encoder.encode(self.capture_optimizers(by_id))
        documents["extra"] = encoder.encode(extra_state)
        encoder.finish()
        components: dict[str, ComponentFacts] = {
            **{name: {} for name in snapshot.ALWAYS_SAVED},
            **{
                name: self.describe_optimizer(optimizer, model) for name, optimizer in by_id.items()
            },
            **{name: {} for name in snapshot.by_id(scheduler, "scheduler")},
            **{name: {} for name in snapshot.by_id(dataloader, "dataloader")},
            **{f"stateful/{name}": {} for name in stateful or {}},
        }
        ties = self.find_ties(model_state)
        return Snapshot(step, tokens_seen, documents, components, ties, encoder.shards)

    def capture_model(self, model: Stateful) -> Mapping[str, Tree]:
        """The model's state_dict under the keys of the bare model (M04)."""
        return plain_state(bare(model).state_dict())

    def capture_optimizers(self, optimizers: Mapping[str, Stateful]) -> StateDict:
        """The state_dict of each optimizer, by id."""
        return {component: optimizer.state_dict() for component, optimizer in optimizers.items()}

    def describe_optimizer(self, optimizer: Stateful, model: Stateful) -> ComponentFacts:
        """Facts that a load needs: the names of the parameters, and what is kept on the CPU."""
        return {
            "param_names": component_state.parameter_names(optimizer, bare(model)),
            "host_state": component_state.host_state(optimizer),
        }

    def capture_train_state(
        self,
        step: int,
        tokens_seen: int,
        scheduler: Stateful | Mapping[str, Stateful] | None,
        dataloader: Stateful | None,
        extra: Mapping[str, Tree] | None,
    ) -> StateDict:
        """Step, tokens, generators, scheduler, data position and extra."""
        return train_state.build_train_state(step, tokens_seen, scheduler, dataloader, extra)

    def capture_stateful(self, stateful: Mapping[str, Stateful]) -> StateDict:
        """The state_dict of each further component, by name."""
        return {name: part.state_dict() for name, part in stateful.items()}

    def find_ties(self, model_state: Mapping[str, Tree]) -> list[list[str]]:
        """Groups of model keys whose tensors share memory (S01)."""
        return memory_groups(
            {key: item for key, item in model_state.items() if isinstance(item, torch.Tensor)},
        )

    # ---- write ---------------------------------------------------------------------------------

    def write(self, state: Snapshot, save_id: str) -> Path:
        """Write a snapshot under staging names, each file synced, the manifest last.

        Returns:
            The staged manifest (per-rank files) or the staging directory (DCP).
        """
        return self.write_dcp(state, save_id) if self.use_dcp else self.write_flat(state, save_id)

    def staged(self, name: str, save_id: str) -> Path:
        """Where a save puts a file or directory before it is committed."""
        return self.root / layout.work_name(name, self.tag, "tmp", save_id)

    def write_flat(self, state: Snapshot, save_id: str) -> Path:
        """Write the per-rank files; the staged manifest lists them under their final names."""
        names = {
            "model": layout.model_name(state.step),
            "optim": layout.optim_name(state.step),
            "extra": layout.extra_name(state.step),
        }
        files: dict[str, FileEntry] = {}
        written: StateDict = {}
        for document, tree in state.documents.items():
            name = names[document]
            files[name] = self.write_file(self.staged(name, save_id), tree)
            with durable.open_regular(self.staged(name, save_id)) as file:
                written[document] = torch_zip.read_tree(file, name)
        manifest = self.make_manifest(state, save_id, files, snapshot.index_trees(written))
        staged = self.staged(layout.flat_manifest_name(state.step), save_id)
        self.write_bytes(staged, manifest.to_bytes())
        return staged

    def write_dcp(self, state: Snapshot, save_id: str) -> Path:
        """Write the DCP directory under its staging name, and sync the directory itself."""
        staged = self.staged(layout.directory_name(state.step), save_id)
        staged.mkdir()
        tensors: dict[str, torch.Tensor] = {}

        def placeholder(key: str, tensor: torch.Tensor) -> Tree:
            tensors[key] = tensor
            return {TAG: "tensor", "value": key}

        split = {key: tree for key, tree in state.documents.items() if key != "extra"}
        skeleton = snapshot.replace_tensors(split, placeholder)
        extra = {**state.documents["extra"], "skeleton": skeleton}
        files = dcp_format.write_tensors(staged, tensors, save_id, self.fsync_file)
        files[layout.DCP_EXTRA] = self.write_file(staged / layout.DCP_EXTRA, extra)
        manifest = self.make_manifest(state, save_id, files, index_directory(staged))
        self.write_bytes(staged / layout.DCP_MANIFEST, manifest.to_bytes())
        self.fsync_dir(staged)
        return staged

    def write_file(self, path: Path, tree: Tree) -> FileEntry:
        """Write one tree as a torch file under a new name, durably."""
        tensors = snapshot.tensor_keys({"": tree}, torch.Tensor)
        expected = sum(tensor.nbytes for tensor in tensors.values())
        with durable.create(path) as file, durable.HashingWriter(file, expected) as writer:
            torch_zip.write_tree(tree, writer)
            self.fsync_file(file)
        return FileEntry(writer.size, writer.hexdigest())

    def write_pieces(self, path: Path, pieces: Iterable[bytes]) -> FileEntry:
        """Write bytes under a new name, durably; return what was written."""
        with durable.create(path) as file, durable.HashingWriter(file) as writer:
            for piece in pieces:
                writer.write(piece)
            self.fsync_file(file)
        return FileEntry(writer.size, writer.hexdigest())

    def make_manifest(
        self,
        state: Snapshot,
        save_id: str,
        files: Mapping[str, FileEntry],
        tensors: Mapping[str, TensorEntry],
    ) -> Manifest:
        """Build the manifest of what this process alone has written."""
        return Manifest(
            run_id=self.ensure_run_id(),
            save_id=save_id,
            framework=framework(),
            kind="dcp" if self.use_dcp else "model",
            step=state.step,
            tokens_seen=state.tokens_seen,
            world_size=1,
            config=self.config,
            components=state.components,
            files=files,
            tensors=tensors,
            ties=state.ties,
        )

    # ---- publish -------------------------------------------------------------------------------

    def publish(self, staged: Path) -> CheckpointReference:
        """Commit what was staged. When this returns, the checkpoint survives a power loss.

        Raises:
            WriterFenced: another process writes here since; nothing was committed.
        """
        self.require_claim()
        if staged.is_dir():
            return self.publish_directory(staged)
        manifest = read_manifest(staged)
        reference = CheckpointReference(self.root, manifest.step, "model")
        if candidate_at(reference).complete:
            self.replace_flat(reference, manifest, staged)
        else:
            self.publish_flat(reference, manifest, staged)
        return reference

    def publish_directory(self, staged: Path) -> CheckpointReference:
        """Rename the staging directory to its final name.

        A directory cannot be renamed over another one. An older save of the step is set aside
        first, under a name that discovery serves too, so that one of them always loads (A02).
        """
        step = read_manifest(staged / layout.DCP_MANIFEST).step
        final = self.root / layout.directory_name(step)
        if os.path.lexists(final):
            self.rename(final, self.root / layout.work_name(final.name, self.tag, "old"))
            self.fsync_dir(self.root)
        self.rename(staged, final)
        self.fsync_dir(self.root)
        return CheckpointReference(final, step, "dcp")

    def publish_flat(
        self,
        reference: CheckpointReference,
        manifest: Manifest,
        staged: Path,
    ) -> None:
        """Rename each file, sync the names, then rename the manifest: that is the commit."""
        for name in manifest.files:
            self.rename(self.staged(name, manifest.save_id), self.root / name)
        self.fsync_dir(self.root)
        self.rename(staged, reference.manifest_path)
        self.fsync_dir(self.root)

    def replace_flat(
        self,
        reference: CheckpointReference,
        manifest: Manifest,
        staged: Path,
    ) -> None:
        """Replace a whole checkpoint of the same step.

        Four files with fixed names cannot be exchanged in one step: after the first rename the
        old manifest would not match. So the commit is a manifest that lists the staged names,
        and the files get their final names after it (A02, A10).
        """
        names = {name: self.staged(name, manifest.save_id).name for name in manifest.files}
        self.unlink(staged)
        self.fsync_dir(self.root)
        renamed = manifest.with_names(names)
        self.replace_small_file(reference.manifest_path.name, renamed.to_bytes())
        self.finish_replacement(reference, renamed)

    def finish_replacement(self, reference: CheckpointReference, manifest: Manifest) -> None:
        """Bring the files of a committed replacement under their final names.

        A save calls it, and the next one after a crash: it can be repeated from any point.
        """
        names = {
            name: work.final for name in manifest.files if (work := layout.parse_work_name(name))
        }
        for staged, final in names.items():
            link = self.root / layout.work_name(final, self.tag, "tmp")
            self.link(self.root / staged, link)
            self.rename(link, self.root / final)
        self.fsync_dir(self.root)
        final_manifest = manifest.with_names(names)
        self.replace_small_file(reference.manifest_path.name, final_manifest.to_bytes())
        for staged in names:
            self.unlink(self.root / staged)

    def link(self, source: Path, target: Path) -> None:
        """Hard-link a file under a second name; where the file system has no links, copy it."""
        with suppress(OSError):
            os.link(source, target)
            return
        with source.open("rb") as old, durable.create(target) as new:
            shutil.copyfileobj(old, new, durable.CHUNK)
            self.fsync_file(new)

    def set_latest(self, reference: CheckpointReference) -> None:
        """Point `latest` at a committed checkpoint, by its relative name (B13)."""
        self.replace_small_file(layout.LATEST, f"{reference.commit_name}\n".encode())


def index_directory(directory: Path) -> dict[str, TensorEntry]:
    """Where each tensor of a DCP directory lies, by key; read back from what was written."""
    with durable.open_regular(directory / layout.DCP_EXTRA) as file:
        tensors = snapshot.index_trees({"extra": torch_zip.read_tree(file, layout.DCP_EXTRA)})
    with durable.open_regular(directory / layout.DCP_METADATA) as file:
        stored = dcp_format.read_metadata(file)
    return {**tensors, **dcp_format.index_tensors(directory, stored)}
