"""The deleting half of the manager: what may go, and how it goes.

Retention works from the directory, not from memory, so it survives restarts (C11, VX10). It only
deletes what it can prove to be its own: a complete checkpoint whose manifest bears this run's id
or a declared parent's, and, with a mirror, one that was verified there. All else is kept and
reported: better run out of disk than lose the only copy (M014).
"""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ckpt_conformance.reference_impl import durable, layout, resolve
from ckpt_conformance.reference_impl.errors import CheckpointDamaged
from ckpt_conformance.reference_impl.layout import CheckpointReference
from ckpt_conformance.reference_impl.manifest import read_manifest
from ckpt_conformance.reference_impl.saving import Saving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ckpt_conformance.reference_impl.layout import WorkName
    from ckpt_conformance.reference_impl.resolve import Candidate

logger = logging.getLogger(__name__)


class Retention(Saving):
    """What is done before and after a save: rotation, deletion, reclaiming what a dead one left."""

    # ---- around a save -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the root and the run's id, and reclaim what a dead save left (A12)."""
        self.make_place()
        self.claim_root()
        # Names of work in progress are unique, so leftovers that cannot be removed today block
        # nothing. Were this an error, a deletion that is denied would end every later save (D09).
        self.abandon()

    def make_place(self) -> None:
        """Make the root and the run's id."""
        for parent in durable.make_root(self.root):
            self.fsync_dir(parent)
        self.ensure_run_id()

    def alone(self) -> AbstractContextManager[None]:
        """Hold off saves of other processes: what one has staged is litter to another (B16).

        Not where the root is exclusive: there who hangs in a save is replaced, not waited for.
        """
        if self._claim is not None:
            return nullcontext()
        self.make_place()
        named = self.root / layout.RUN_ID  # there is none where the caller gives the id
        return durable.alone(named if named.exists() else self.root)

    def abandon(self) -> None:
        """Remove what failed and dead saves staged, so that a full disk gets room (O03)."""
        try:
            self.reclaim()
        except Exception:
            logger.exception("what a failed save left in %s could not be removed", self.root)

    def after_commit(self, reference: CheckpointReference) -> None:
        """Rotation and mirroring. An error here never fails a save that is committed (D09)."""
        for action in (self.remove_superseded, self.retain, self.start_mirror):
            try:
                action(reference)
            except Exception:
                logger.exception("%s after %s failed", action.__name__, reference.path)

    def start_mirror(self, reference: CheckpointReference) -> None:
        """Begin the upload of every step of this run that has no receipt yet.

        Not only of the step just saved: an upload that a crash or an error ended is taken up
        again, since the directory is the truth and the queue in memory is not.
        """
        del reference
        for candidate in reversed(resolve.scan(self.root)) if self.mirrors else ():
            manifest = candidate.manifest
            if manifest is None or not self.is_own(candidate):
                continue
            for mirror in self.mirrors:
                if not mirror.has_receipt(candidate.reference, manifest.digest):
                    mirror.upload(candidate.reference, manifest)

    # ---- rotation ------------------------------------------------------------------------------

    def retain(self, saved: CheckpointReference) -> None:
        """Delete what is beyond `keep_last`; called after the new checkpoint is committed (C01).

        Of several ranks the first one does it, whoever calls: two would race each other (C09).
        """
        if self.ranks is not None and not self.ranks.leads:
            return
        candidates = resolve.scan(self.root)
        self.report_unparsed()
        for victim in self.victims(candidates, saved):
            if self.may_delete(victim):
                self.delete_step(victim.reference)

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """The checkpoints beyond `keep_last`, oldest first; `found` is what is in the root.

        Newest by step number (C08), never by mtime (C05). The step just saved always stays (C06).
        Incomplete directories, other runs and milestones do not count towards `keep_last` (KX8,
        K018).
        """
        own = [candidate for candidate in found if self.is_own(candidate)]
        own = [candidate for candidate in own if not self.is_milestone(candidate.reference.step)]
        steps = sorted({candidate.reference.step for candidate in own}, reverse=True)
        if self.keep_last <= 0:
            return []
        kept = {*steps[: self.keep_last], saved.step}
        return [candidate for candidate in reversed(own) if candidate.reference.step not in kept]

    def is_own(self, candidate: Candidate) -> bool:
        """Whether a checkpoint is complete and of this run or a declared parent."""
        own = candidate.manifest is not None and candidate.manifest.run_id in self.own_runs
        if not (own and candidate.complete):
            logger.info(
                "kept, and not counted: %s (%s)",
                candidate.reference.path,
                candidate.problem or "of another run",
            )
        return own and candidate.complete

    def may_delete(self, candidate: Candidate) -> bool:
        """Whether each mirror that is required has a receipt for this content (M013, MX7)."""
        manifest = candidate.manifest
        if manifest is None or all(
            mirror.has_receipt(candidate.reference, manifest.digest)
            for mirror in self.mirrors
            if mirror.required
        ):
            return True
        logger.error(
            "%s is kept: it has no receipt from the mirror. Waiting for an upload never blocks a "
            "save; the next rotation asks again",
            candidate.reference.path,
        )
        return False

    def report_unparsed(self) -> None:
        """Name what nobody here wrote; it is left alone (K018)."""
        for name in resolve.names_in(self.root):
            if not layout.is_known(name):
                logger.info("left alone: %s is no name of a checkpoint", self.root / name)

    # ---- deletion ------------------------------------------------------------------------------

    def delete_step(self, reference: CheckpointReference) -> None:
        """Withdraw the commit first, durably; then unlink. A crash leaves no half checkpoint."""
        logger.info("deleting %s", reference.path)
        target = reference.manifest_path if reference.kind == "model" else reference.directory
        final = layout.final_name(target.name)
        withdrawn = self.root / layout.work_name(final, self.tag, "del")
        self.rename(target, withdrawn)
        self.fsync_dir(self.root)
        self.finish_deletion(withdrawn)
        for mirror in self.mirrors:
            mirror.forget(reference)

    def finish_deletion(self, withdrawn: Path) -> None:
        """Unlink the files of a withdrawn commit, and last the name that lists them."""
        if withdrawn.is_file():
            self.unlink_listed(withdrawn)
        self.unlink(withdrawn)

    def unlink_listed(self, manifest_path: Path) -> None:
        """Unlink the files that a manifest lists, unless a live manifest lists them too."""
        try:
            manifest = read_manifest(manifest_path)
        except (CheckpointDamaged, OSError) as error:
            logger.warning("%s cannot be read, its files stay: %s", manifest_path.name, error)
            return
        # Names carry their step: only files of this very step are ours to unlink, and only this
        # step's manifest can list them. So a long rotation reads each manifest once.
        live = self.live_files(manifest.step)
        for name in manifest.files:
            if name not in live and layout.data_step_of(name) == manifest.step:
                self.unlink(self.root / name)

    def live_files(self, of_step: int | None = None) -> set[str]:
        """Names that the manifests in the root, or one step's, list: files that are in use."""
        names = resolve.names_in(self.root) if of_step is None else []
        steps = {of_step, *map(layout.flat_manifest_step, names)}
        return {name for step in steps if step is not None for name in self.listed(step)}

    def listed(self, step: int) -> set[str]:
        """Files that a step's manifest lists. One that cannot be read protects all of its step."""
        path = self.root / layout.flat_manifest_name(step)
        if not os.path.lexists(path):
            return set()
        try:
            return set(read_manifest(path).files)
        except (CheckpointDamaged, OSError):
            names = resolve.names_in(self.root)
            return {name for name in names if layout.data_step_of(name) == step}

    # ---- what a dead save left -----------------------------------------------------------------

    def reclaim(self) -> None:
        """Finish or undo what a dead save of this run left. Complete checkpoints are not touched.

        Only names that carry the tag of this run or of a declared parent are looked at (B16).
        """
        works = dict(self.own_works())
        if not works:
            return
        self.resume_replacements()
        live = self.live_files()
        # Data before manifests: as long as a staged manifest is there, it tells what else is.
        for name, work in sorted(works.items(), key=lambda item: ".json" in item[1].final):
            path = self.root / name
            if work.state == "old":
                self.settle_aside(path, work)
            elif work.state == "del":
                self.finish_deletion(path)
            elif work.state == "new":
                self.finish_stage(path)
            elif name not in live:
                self.drop_staged(path, work)

    def own_works(self) -> Iterator[tuple[str, WorkName]]:
        """Names of work in progress of this run or a parent, or of making the run's id."""
        tags = {layout.tag_of(run) for run in self.own_runs}
        for name in resolve.names_in(self.root):
            work = layout.parse_work_name(name)
            if work and (work.tag in tags or work.final == layout.RUN_ID):
                yield name, work

    def finish_stage(self, fresh: Path) -> CheckpointReference:
        """Give a fresh copy its final name; `staging` does it."""
        raise NotImplementedError(fresh)

    def resume_replacements(self) -> None:
        """Rename committed replacements to their final names, where a crash came before that."""
        for candidate in resolve.scan(self.root):
            manifest = candidate.manifest
            if manifest is None or candidate.reference.kind != "model" or not candidate.complete:
                continue
            if any(layout.parse_work_name(name) for name in manifest.files):
                self.finish_replacement(candidate.reference, manifest)

    def settle_aside(self, path: Path, work: WorkName) -> None:
        """Put a directory that was set aside back, or delete it if its replacement is complete."""
        final = self.root / work.final
        step = layout.directory_step(work.final)
        if step is None:
            return
        if not final.exists():
            self.rename(path, final)
            self.fsync_dir(self.root)
        elif resolve.candidate_at(CheckpointReference(final, step, "dcp")).complete:
            self.delete_step(CheckpointReference(path, step, "dcp"))

    def drop_staged(self, path: Path, work: WorkName) -> None:
        """Remove what was staged; a staged manifest also names files that were renamed already."""
        step = layout.flat_manifest_step(work.final)
        if step is not None and not (self.root / work.final).exists():
            self.unlink_listed(path)
        self.unlink(path)

    def remove_superseded(self, saved: CheckpointReference) -> None:
        """Remove older saves of the step just saved: set aside, or of the other kind (R01)."""
        for reference in list(resolve.references(self.root)):
            superseded = reference.step == saved.step and reference != saved
            if superseded and self.is_own(resolve.candidate_at(reference)):
                self.delete_step(reference)
