"""Bringing a step from a mirror into the root: verified, atomic, and never less than was there.

    manager.stage_checkpoint_step(200)                            # unless it is here already
    manager.stage_checkpoint_step(200, require_kind="dcp")        # in this format
    manager.stage_checkpoint_step(200, refresh=True)              # what the mirror has, now

What comes is written below a name of work in progress, each file compared with the mirror's
manifest while it is written. A fresh copy that replaces a stale one of the same step is committed
beside it first: `dcp_000200.TAG.ID.new` is whole, and served before all others of its step (M042,
MX10). Only then the stale one goes, and the fresh one gets its final name; the next save finishes
what a crash left of that.

Several processes may stage at once, and beside a save. Each has a place of its own and holds a lock
on it, which ends with the process: a place without one is left of a dead process.
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import contextmanager, suppress
from operator import index
from typing import TYPE_CHECKING

from ckpt_conformance.reference_impl import durable, layout, resolve
from ckpt_conformance.reference_impl.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotFound,
)
from ckpt_conformance.reference_impl.layout import CheckpointReference
from ckpt_conformance.reference_impl.manifest import MAX_BYTES, parse_manifest
from ckpt_conformance.reference_impl.retention import Retention

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from ckpt_conformance.reference_impl.layout import Kind
    from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest
    from ckpt_conformance.reference_impl.mirror import Mirror
    from ckpt_conformance.reference_impl.resolve import Candidate

logger = logging.getLogger(__name__)

TAG = "staging"
"""Of places in which something is staged: no run's, so no save takes them for its own leftovers."""


class Staging(Retention):
    """Find what a mirror has of a step, fetch it, and put it in its place."""

    def stage_checkpoint_step(
        self, step: int, *, refresh: bool = False, require_kind: Kind | None = None
    ) -> CheckpointReference:
        """Bring a step from a mirror, so that it can be loaded here.

        Args:
            step: which one.
            refresh: fetch what the mirror has although the step is here; a copy here that is
                another one is replaced, in whatever format it is, once the new one is whole
                (M042). Without it a whole local copy is enough.
            require_kind: this format and no other (M004); by default DCP before per-rank files.

        Returns:
            The whole local copy.

        Raises:
            CheckpointNotFound: neither here nor in a mirror, or not of that kind.
            CheckpointDamaged: what the mirror has is not what its manifest says. Nothing here has
                changed.
            CheckpointMismatch: what is here is of a run that is neither this one nor the mirror's.
            OSError: the disk's own error, or the mirror's.
        """
        step = int(index(step))
        here = self.local_copies(step)
        wanted = [one for one in here if require_kind in (None, one.reference.kind)]
        if wanted and not refresh:
            return wanted[0].reference
        mirror, manifest = self.find_remote(step, require_kind)
        stale = [one for one in here if refresh and not self.has_copy(mirror, one)]
        same = [one for one in wanted if one.manifest and one.manifest.digest == manifest.digest]
        if not same:
            return self.stage(mirror, manifest, stale)
        self.refuse_foreign(manifest, stale)
        self.remove_stale(stale)
        return same[0].reference

    def local_copies(self, step: int) -> list[Candidate]:
        """The whole copies of a step in the root, best first."""
        found = resolve.scan(self.root)
        return [one for one in found if one.reference.step == step and one.complete]

    # ---- what is there -------------------------------------------------------------------------

    def find_remote(self, step: int, kind: Kind | None) -> tuple[Mirror, Manifest]:
        """The first mirror that has a step, and the manifest there.

        Raises:
            CheckpointNotFound: none has it.
        """
        for mirror in self.mirrors:
            for one in ("dcp", "model") if kind is None else (kind,):
                with suppress(FileNotFoundError, NotADirectoryError):
                    return mirror, self.read_remote(
                        mirror, CheckpointReference(self.root, step, one)
                    )
        raise CheckpointNotFound(
            f"no mirror of {self.root} has {kind or 'a checkpoint'} of step {step}: "
            f"{len(self.mirrors)} mirrors were asked",
        )

    def has_copy(self, mirror: Mirror, one: Candidate) -> bool:
        """Whether a mirror has this very copy, in its own format."""
        final = CheckpointReference(self.root, one.reference.step, one.reference.kind)
        try:
            remote = self.read_remote(mirror, final)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return one.manifest is not None and one.manifest.digest == remote.digest

    def read_remote(self, mirror: Mirror, wanted: CheckpointReference) -> Manifest:
        """The manifest of a checkpoint in a mirror, seen to be of the step and kind that is wanted.

        Raises:
            FileNotFoundError: it is not there.
            CheckpointDamaged: it is no manifest, or that of another checkpoint.
        """
        name = remote_name(wanted.step, wanted.kind, wanted.manifest_path.name)
        data = bytearray()
        for piece in mirror.read(name):
            data += piece
            if len(data) > MAX_BYTES:
                raise CheckpointDamaged(f"{name} of the mirror is too long for a manifest")
        manifest = parse_manifest(bytes(data), name)
        resolve.check_identity(wanted, manifest)
        return manifest

    # ---- fetch ---------------------------------------------------------------------------------

    def stage(
        self, mirror: Mirror, manifest: Manifest, stale: list[Candidate]
    ) -> CheckpointReference:
        """Fetch a checkpoint, commit it, and bring it to its final name."""
        self.refuse_foreign(manifest, stale)
        for parent in durable.make_root(self.root):
            self.fsync_dir(parent)
        self.remove_dead_places()
        with self.place_for(manifest) as place:
            self.fetch(mirror, manifest, place)
            if not stale:
                return self.put_in_place(place, manifest)
            fresh = place.with_name(layout.work_name(final_of(manifest), self.tag, "new"))
            self.rename(place, fresh)
            self.fsync_dir(self.root)
            self.remove_stale(stale)
            return self.give_final_name(fresh, manifest)

    def refuse_foreign(self, manifest: Manifest, stale: list[Candidate]) -> None:
        """Check that what would be replaced is of this run, or of the run that replaces it.

        Raises:
            CheckpointMismatch: it is not.
        """
        for one in stale:
            if not self.may_replace(one, manifest):
                raise CheckpointMismatch(
                    f"{one.reference.path} is of another run than this one, and the mirror has "
                    f"step {manifest.step} of run {manifest.run_id}: nothing was replaced. Move it "
                    f"away, or stage into another root",
                )

    @contextmanager
    def place_for(self, manifest: Manifest) -> Generator[Path]:
        """A directory of its own below the root, locked as long as it is filled."""
        place, descriptor = self.locked_place(final_of(manifest))
        try:
            yield place
        finally:
            with suppress(OSError):
                self.unlink(place)  # it has another name if all went well
            os.close(descriptor)

    def locked_place(self, final: str) -> tuple[Path, int]:
        """A new directory, and the descriptor by which its lock is held.

        Between its making and its lock another process may take it for a dead one's: then one more
        is made.
        """
        while True:
            place = self.root / layout.work_name(final, TAG, "tmp")
            place.mkdir()
            with suppress(FileNotFoundError):
                descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if place.exists():
                    return place, descriptor
                os.close(descriptor)

    def fetch(self, mirror: Mirror, manifest: Manifest, place: Path) -> None:
        """Write the files, each compared with the manifest, then the manifest, all durably.

        Raises:
            CheckpointDamaged: a file is not there, or another one.
        """
        for name, entry in manifest.files.items():
            remote = remote_name(manifest.step, manifest.kind, name)
            found = self.fetch_file(mirror, remote, place / name)
            if found != entry:
                raise CheckpointDamaged(
                    f"{remote} of the mirror has {found.size} bytes and the digest "
                    f"{found.blake3[:12]}..., its manifest says {entry.size} and "
                    f"{entry.blake3[:12]}...: nothing here has changed",
                )
        reference = CheckpointReference(place, manifest.step, manifest.kind)
        self.write_bytes(reference.manifest_path, manifest.to_bytes())
        self.fsync_dir(place)

    def fetch_file(self, mirror: Mirror, remote: str, path: Path) -> FileEntry:
        """Write one file of a mirror under a new name, durably; return what was written."""
        return self.write_pieces(path, listed_file(mirror, remote))

    # ---- put in place --------------------------------------------------------------------------

    def put_in_place(self, place: Path, manifest: Manifest) -> CheckpointReference:
        """Bring a whole staged checkpoint to its final name; of the same content one is enough.

        It may be done again from any point, and by several processes at once: what they rename
        over each other has the same bytes.
        """
        if manifest.kind == "model":
            return self.put_files(place, manifest)
        final = self.root / layout.directory_name(manifest.step)
        reference = CheckpointReference(final, manifest.step, "dcp")
        try:
            self.rename(place, final)
        except OSError:
            there = resolve.candidate_at(reference)
            if not (there.manifest and there.manifest.digest == manifest.digest and there.complete):
                # Something that is no whole checkpoint has the name.
                self.rename(final, self.root / layout.work_name(final.name, self.tag, "old"))
                self.rename(place, final)
        self.fsync_dir(self.root)
        return reference

    def put_files(self, place: Path, manifest: Manifest) -> CheckpointReference:
        """Link each file under its final name, then the manifest: that is the commit."""
        reference = CheckpointReference(self.root, manifest.step, "model")
        for name in [*manifest.files, reference.manifest_path.name]:
            if name == reference.manifest_path.name:
                self.fsync_dir(self.root)
            link = place / layout.work_name(name, TAG, "tmp")
            self.link(place / name, link)
            self.rename(link, self.root / name)
        self.fsync_dir(self.root)
        return reference

    def finish_stage(self, fresh: Path) -> CheckpointReference:
        """Finish what a dead stage left of a fresh copy; the next save calls it.

        What it was to replace nobody knows any more: the mirror has what is removed, or had it.
        """
        work = layout.parse_work_name(fresh.name)
        reference = resolve.fresh_reference(fresh, work.final if work else "")
        manifest = resolve.candidate_at(reference).manifest
        if manifest is None:
            raise CheckpointDamaged(f"{fresh.name} has no manifest")
        others = [one for one in self.local_copies(manifest.step) if is_other(one, manifest)]
        self.remove_stale([one for one in others if self.may_replace(one, manifest)])
        return self.give_final_name(fresh, manifest)

    def give_final_name(self, fresh: Path, manifest: Manifest) -> CheckpointReference:
        """Bring a fresh copy to its final name; a save may have done it meanwhile."""
        try:
            placed = self.put_in_place(fresh, manifest)
        except FileNotFoundError:
            placed = self.resolve_final(manifest)
        self.unlink(fresh)
        return placed

    def may_replace(self, one: Candidate, manifest: Manifest) -> bool:
        """Whether a copy is of this run, or of the one whose checkpoint replaces it."""
        run = one.manifest.run_id if one.manifest else ""
        return run == manifest.run_id or run in self.own_runs

    def resolve_final(self, manifest: Manifest) -> CheckpointReference:
        """The copy under its final name; FileNotFoundError if it is not the one of a manifest."""
        for one in self.local_copies(manifest.step):
            if not is_other(one, manifest):
                return one.reference
        raise FileNotFoundError(f"step {manifest.step} was removed from {self.root} meanwhile")

    def remove_stale(self, found: list[Candidate]) -> None:
        """Remove copies of a step that a fresh one replaces; fresh ones of others stay."""
        for one in found:
            if not resolve.is_fresh(one.reference):
                logger.info("%s is replaced by what a mirror has", one.reference.path)
                with suppress(FileNotFoundError):  # another process stages it, too
                    self.delete_step(one.reference)

    # ---- what dead processes left --------------------------------------------------------------

    def remove_dead_places(self) -> None:
        """Remove places whose lock nobody holds."""
        for name in resolve.names_in(self.root):
            work = layout.parse_work_name(name)
            if work is not None and work.tag == TAG:
                with suppress(OSError):
                    self.remove_if_dead(self.root / name)

    def remove_if_dead(self, place: Path) -> None:
        """Remove a place, unless a live process holds its lock."""
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.unlink(place)
        finally:
            os.close(descriptor)


def listed_file(mirror: Mirror, remote: str) -> Iterator[bytes]:
    """Read a file that a manifest of the mirror lists.

    Raises:
        CheckpointDamaged: it is not there.
    """
    try:
        yield from mirror.read(remote)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointDamaged(f"{remote} is missing in the mirror") from error


def is_other(one: Candidate, manifest: Manifest) -> bool:
    """Whether a copy has another content than a manifest says, or another format."""
    return one.manifest is None or one.manifest.digest != manifest.digest


def final_of(manifest: Manifest) -> str:
    """The name whose rename commits a checkpoint."""
    if manifest.kind == "model":
        return layout.flat_manifest_name(manifest.step)
    return layout.directory_name(manifest.step)


def remote_name(step: int, kind: Kind, name: str) -> str:
    """The name of a file of a checkpoint in a mirror, below the mirror's own address."""
    return f"{layout.directory_name(step)}/{name}" if kind == "dcp" else name
