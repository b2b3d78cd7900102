"""Emergency dumps: what each rank holds, written at once and without a word to the others.

    with manager.catch_sigterm() as termination:      # every rank, before it trains
        for batch in batches:
            ...
            if termination.came:                      # between two steps
                manager.save_emergency_checkpoint(step, model=model, ...)
                break

A preempted job has seconds (M005). So nothing is gathered, and no rank waits for another: each
writes its files, and then its marker, which is the manifest of these files. A dump is whole where
every rank's marker is there and all of them are of one step and one attempt (MX12). Regular
checkpoints are not touched. The first one that is committed after a dump, at its step or a later
one, removes it.

What the ranks have in common they have agreed on before: the id of the run, and that and the time
of this attempt, when each of them called `catch_sigterm`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.reference_impl import durable, layout, resolve, snapshot, torch_zip
from ckpt_conformance.reference_impl.errors import CheckpointDamaged, SaveRefused
from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest, framework, read_manifest
from ckpt_conformance.reference_impl.ranks_saving import RankSaving
from ckpt_conformance.reference_impl.ranks_state import layouts
from ckpt_conformance.reference_impl.termination import DEADLINE, Termination

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from ckpt_conformance.reference_impl.encode import StateDict
    from ckpt_conformance.reference_impl.layout import CheckpointReference
    from ckpt_conformance.reference_impl.manifest import Json
    from ckpt_conformance.reference_impl.snapshot import Snapshot

logger = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """What the ranks of one start of a job have agreed on: its id, and when it began, in ms."""

    id: str
    time: int


class EmergencySaving(RankSaving):
    """Dump, and remove dumps that a regular checkpoint has made old."""

    _attempt: Attempt | None = None
    _termination: Termination | None = None
    _dumping: Path | None = None  # a save in the background leaves it alone

    # ---- before ----------------------------------------------------------------------------------

    @contextmanager
    def catch_sigterm(self, deadline: float = DEADLINE) -> Generator[Termination]:
        """Note SIGTERM instead of dying of it, and agree on what a dump needs.

        On several ranks every one calls it, at the same place.

        Args:
            deadline: seconds from SIGTERM to the SIGKILL that is expected.

        Yields:
            What says whether the signal has come.

        Raises:
            RuntimeError: this is not the main thread.
        """
        self.agree_on_attempt()
        with Termination(deadline) as self._termination:
            yield self._termination

    def agree_on_attempt(self) -> Attempt:
        """Agree on the run's id and on the attempt, once; every rank calls it."""
        if self._attempt is None:
            made = self.make_attempt
            run_id, *attempt = made() if self.ranks is None else self.ranks.lead("attempt", made)
            self._run_id = str(run_id)
            self._attempt = Attempt(*attempt)
            self._dumped = Counter[int]()
        return self._attempt

    def make_attempt(self) -> Json:
        """The run's id, which is kept in the root, and a new attempt."""
        for parent in durable.make_root(self.root):
            self.fsync_dir(parent)
        return [self.ensure_run_id(), layout.new_id(), time.time_ns() // 10**6]

    # ---- dump ------------------------------------------------------------------------------------

    def dump(self, state: Snapshot) -> Path:
        """Write what this rank holds, then its marker; when this returns they are durable.

        Raises:
            SaveRefused: several ranks that have not agreed before.
            OSError: the disk's own error. What was written of the dump is removed.
        """
        if self.ranks is not None and self._attempt is None:
            raise SaveRefused(
                "a dump is made without a word to the other ranks: let every rank call "
                "catch_sigterm before it trains. Nothing was written",
            )
        attempt = self.agree_on_attempt()
        # A second dump of one step is one of its own: the first one stays whole.
        at = attempt.time + self._dumped[state.step]
        self._dumped[state.step] += 1
        folder = self._dumping = self.root / layout.emergency_name(state.step, at)
        manifest = self.write_part(folder, state, attempt)
        self._dumping = None
        self.point_to_dump(folder)
        if self.persistent_dir is not None:
            self.try_copy(folder, self.persistent_dir / folder.name, manifest)
        return folder

    def point_to_dump(self, folder: Path) -> None:
        """Point to a dump, in one step (M016); nothing here follows it, so an error costs nothing.

        A save in the background may tidy the root at this very moment.
        """
        try:
            self.replace_small_file(layout.EMERGENCY, f"{folder.name}\n".encode())
        except OSError:
            logger.exception("%s does not name %s", self.root / layout.EMERGENCY, folder.name)

    def write_part(self, folder: Path, state: Snapshot, attempt: Attempt) -> Manifest:
        """Write this rank's part of a dump: its files, then the marker that lists them."""
        rank = 0 if self.ranks is None else self.ranks.rank
        names = {
            document: layout.dump_name(document, state.step, rank) for document in state.documents
        }
        with self.in_dump(folder, [*names.values(), layout.marker_name(rank)]) as owned:
            files: dict[str, FileEntry] = {}
            written: StateDict = {}
            for document, tree in state.documents.items():
                name = names[document]
                staged = folder / layout.work_name(name, self.tag, "tmp")
                files[name] = self.write_file(staged, tree)
                with durable.open_regular(staged) as file:
                    written[document] = torch_zip.read_tree(file, name)
                self.rename(staged, folder / name)
            self.fsync_dir(folder)
            manifest = self.make_marker(state, attempt, rank, files)
            manifest = replace(manifest, tensors=snapshot.index_trees(written))
            self.put_marker(folder, manifest, owned)
        return manifest

    def make_marker(
        self, state: Snapshot, attempt: Attempt, rank: int, files: dict[str, FileEntry]
    ) -> Manifest:
        """The manifest of one rank's part."""
        return Manifest(
            run_id=self.ensure_run_id(),
            save_id=attempt.id,
            framework=framework(),
            kind="emergency",
            step=state.step,
            tokens_seen=state.tokens_seen,
            world_size=1 if self.ranks is None else self.ranks.size,
            config=self.config,
            components=state.components,
            files=files,
            tensors={},
            ties=state.ties,
            layout=layouts(state),
            rank=rank,
            host=self.host,
        )

    @contextmanager
    def in_dump(self, folder: Path, names: list[str]) -> Generator[Path]:
        """Make the folder of a dump; remove this rank's names from it where an error comes.

        Yields:
            A name that is there until the marker is: by its tag a later process sees whose a dump
            is that was never finished.
        """
        folder.mkdir(parents=True, exist_ok=True)
        owned = folder / layout.work_name("rank", self.tag, "tmp")
        try:
            self.write_bytes(owned, b"")
            self.fsync_dir(folder)
            self.fsync_dir(folder.parent)
            yield owned
        except BaseException:
            with suppress(OSError):
                for name in resolve.names_in(folder):
                    if layout.final_name(name) in [*names, "rank"]:
                        self.unlink(folder / name)
                folder.rmdir()
            raise

    def put_marker(self, folder: Path, manifest: Manifest, owned: Path) -> None:
        """Put the marker there, durably: that is the commit of this rank's part."""
        name = layout.marker_name(manifest.rank)
        staged = folder / layout.work_name(name, self.tag, "tmp")
        self.write_bytes(staged, manifest.to_bytes())
        self.rename(staged, folder / name)
        self.fsync_dir(folder)
        self.unlink(owned)

    # ---- the persistent copy ---------------------------------------------------------------------

    def try_copy(self, folder: Path, target: Path, manifest: Manifest) -> None:
        """Copy this rank's part, as long as there is time; what fails costs the copy alone."""
        try:
            self.copy_part(folder, target, manifest)
        except (OSError, CheckpointDamaged, TimeoutError):
            logger.exception("%s was not copied to %s: it loads on this host", folder, target)

    def copy_part(self, folder: Path, target: Path, manifest: Manifest) -> None:
        """Copy the files, compare them with the manifest, then put a marker that holds anywhere.

        Raises:
            TimeoutError: the deadline has passed.
            CheckpointDamaged: a file is not what the manifest says any more.
        """
        names = [*manifest.files, layout.marker_name(manifest.rank)]
        with self.in_dump(target, names) as owned:
            for name, entry in manifest.files.items():
                self.require_time(name)
                staged = target / layout.work_name(name, self.tag, "tmp")
                with durable.open_regular(folder / name) as source:
                    copied = self.write_pieces(staged, durable.pieces_of(source))
                if copied != entry:
                    raise CheckpointDamaged(f"{name} changed while it was copied")
                self.rename(staged, target / name)
            self.fsync_dir(target)
            self.put_marker(target, replace(manifest, anywhere=True), owned)

    def require_time(self, name: str) -> None:
        """Raise TimeoutError if the deadline after SIGTERM has passed."""
        if self._termination is not None and self._termination.time_left() <= 0:
            raise TimeoutError(f"the deadline after SIGTERM passed before {name} was copied")

    # ---- after -----------------------------------------------------------------------------------

    def after_commit(self, reference: CheckpointReference) -> None:
        """Rotation and mirroring; then the dumps that this checkpoint has made old."""
        super().after_commit(reference)
        try:
            self.remove_older_dumps(reference)
        except Exception:
            logger.exception("dumps that are older than %s were not removed", reference.path)

    def remove_older_dumps(self, saved: CheckpointReference) -> None:
        """Remove this run's dumps up to the step that is durable now, whole or not."""
        for root in self.dump_roots:
            for reference in resolve.dump_references(root):
                if reference.directory == self._dumping or reference.step > saved.step:
                    continue
                if self.is_own_dump(reference):
                    self.delete_dump(root, reference)
        named = durable.read_small_file(self.root / layout.EMERGENCY)
        if (
            named is not None
            and not (self.root / named.decode("utf-8", "replace").strip()).exists()
        ):
            self.unlink(self.root / layout.EMERGENCY)

    def is_own_dump(self, reference: CheckpointReference) -> bool:
        """Whether a dump is of this run or a declared parent, by a marker or by a tag in it."""
        tags = {layout.tag_of(run) for run in self.own_runs}
        for name in resolve.names_in(reference.directory):
            work = layout.parse_work_name(name)
            if work is not None and work.tag in tags:
                return True
            with suppress(CheckpointDamaged, OSError):
                path = reference.directory / name
                if path.suffix == ".json" and read_manifest(path).run_id in self.own_runs:
                    return True
        return False

    def delete_dump(self, root: Path, reference: CheckpointReference) -> None:
        """Withdraw a dump by a rename, durably; then unlink what it held."""
        logger.info("deleting %s: a later checkpoint is durable", reference.path)
        withdrawn = root / layout.work_name(reference.directory.name, self.tag, "del")
        self.rename(reference.directory, withdrawn)
        self.fsync_dir(root)
        self.unlink(withdrawn)
