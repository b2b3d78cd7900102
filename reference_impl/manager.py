"""The checkpoint manager: save, load, steps.

    manager = CheckpointManager("run/checkpoints", keep_last=2)
    manager.save(step, model=model, optimizers=optimizer, scheduler=scheduler, dataloader=loader)
    ...
    result = manager.load(model=model, optimizers=optimizer, scheduler=scheduler, dataloader=loader)

The parts are in `saving`, `loading` and `retention`; here is the order in which they are called.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt_conformance.reference_impl import layout, resolve, snapshot
from ckpt_conformance.reference_impl.background import SaveHandle, ended, outcome_of
from ckpt_conformance.reference_impl.config import added_keys, patch_missing_config_keys
from ckpt_conformance.reference_impl.dumps_loading import DumpLoading
from ckpt_conformance.reference_impl.emergency import EmergencySaving
from ckpt_conformance.reference_impl.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    DumpElsewhere,
)
from ckpt_conformance.reference_impl.layout import CheckpointReference, Kind, Refusal
from ckpt_conformance.reference_impl.loading import Destinations, LoadResult, ReshardReport
from ckpt_conformance.reference_impl.ranks_loading import LoadRequest
from ckpt_conformance.reference_impl.staging import Staging
from ckpt_conformance.reference_impl.writer_process import Settings, WriterProcess

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl.encode import Tree
    from ckpt_conformance.reference_impl.loading import LoadPlan, OpenCheckpoint
    from ckpt_conformance.reference_impl.ranks import Ranks
    from ckpt_conformance.reference_impl.snapshot import Snapshot
    from ckpt_conformance.reference_impl.train_state import SavedParts, Stateful

logger = logging.getLogger(__name__)


class CheckpointManager(Staging, EmergencySaving, DumpLoading):
    """Saves and resumes one training run in one directory.

    A job calls `save`, `load`, `steps` and `close`; these call the other methods.
    """

    def save(  # noqa: PLR0913 - these are the parts of a job
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
    ) -> Path:
        """Save a job. When this returns, the checkpoint survives a power loss.

        Args:
            step: optimizer steps done; a step that exists is replaced.
            model: an nn.Module, or anything stateful.
            optimizers: one, or several by name.
            scheduler: one, or several by name.
            dataloader: its position; without it a resumed job replays its epoch (KX1).
            tokens_seen: cumulative, over all data-parallel ranks.
            extra: numbers, strings, lists, dicts and tensors; no key of the train state.
            stateful: further components by name: grad scaler, EMA, ...

        Returns:
            The model file, or the DCP directory.

        Raises:
            SaveRefused: the state holds what a safe load would refuse; nothing was written.
            OSError: the disk's own error. The older checkpoints are still there.
        """
        parts: SavedParts = {
            "model": model,
            "optimizers": optimizers,
            "scheduler": scheduler,
            "dataloader": dataloader,
            "tokens_seen": tokens_seen,
            "extra": extra,
            "stateful": stateful,
        }
        self.background.finish()
        self.background.raise_untold()
        return self.save_parts(step, parts)

    def save_async(  # noqa: PLR0913 - these are the parts of a job
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
    ) -> SaveHandle:
        """Copy the state of a job, return, and save the copy while the job trains on.

        Nothing that the job does after the call changes what is saved. `latest` and rotation come
        after the commit, as in `save`. With as many saves under way as `max_pending` says it waits
        for the oldest first. On several ranks every one calls it.

        Args:
            step: as of `save`, and so are all others.

        Returns:
            The handle of this save: `wait()` returns once the checkpoint survives a power loss.

        Raises:
            BackgroundSaveFailed: an earlier one failed, and nobody was told; this one did not
                begin.
            SaveRefused: the state holds what a safe load would refuse; of several ranks `wait` and
                `exception` of every one tell it.
        """
        parts: SavedParts = {
            "model": model,
            "optimizers": optimizers,
            "scheduler": scheduler,
            "dataloader": dataloader,
            "tokens_seen": tokens_seen,
            "extra": extra,
            "stateful": stateful,
        }
        self.background.make_room()
        if self.async_mode == "disabled":
            return ended(step, self.save_parts(step, parts))
        return self.background.begin(step, self.captured(step, parts))

    def save_emergency_checkpoint(  # noqa: PLR0913 - these are the parts of a job
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
    ) -> Path:
        """Dump what this rank holds, at once: no rank waits for another, nothing is gathered.

        For the seconds between SIGTERM and SIGKILL (M005): call it between two steps, once what
        `catch_sigterm` gave says that the signal has come. Regular checkpoints stay as they are,
        and a save in the background goes on. A resume takes the dump if it is newer than each
        regular checkpoint, and every rank's part is there; on this host alone, unless the manager
        has a `persistent_dir`.

        Args:
            step: as of `save`, and so are all others.

        Returns:
            The directory of the dump.

        Raises:
            SaveRefused: the state holds what a safe load would refuse, or this is one of several
                ranks that have not called `catch_sigterm`.
            OSError: the disk's own error. What was written of the dump is removed.
        """
        state = self.capture(
            step,
            model=model,
            optimizers=optimizers,
            scheduler=scheduler,
            dataloader=dataloader,
            tokens_seen=tokens_seen,
            extra=extra,
            stateful=stateful,
        )
        if self.ranks is None:
            state.refuse_parts()
        return self.dump(state)

    def load(  # noqa: PLR0913 - these are the parts of a job
        self,
        reference: str | os.PathLike[str] | CheckpointReference | None = None,
        *,
        step: int | None = None,
        require_kind: Kind | None = None,
        model: Stateful,
        optimizers: Mapping[str, Stateful] | Stateful | None = None,
        scheduler: Stateful | Mapping[str, Stateful] | None = None,
        dataloader: Stateful | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        allow_missing: Collection[str] = (),
    ) -> LoadResult:
        """Resume a job in place, from the newest whole checkpoint or from the one that is named.

        Args:
            reference: a model file, a DCP directory, or their parent.
            step: this step and no other.
            require_kind: this format and no other.
            model: gets its parameters and buffers in place.
            optimizers: as at the save.
            scheduler: as at the save.
            dataloader: as at the save.
            stateful: as at the save.
            allow_missing: components, by id, family or name, that may be absent on one side:
                `{"optimizer"}` asks for a cold optimizer where none is saved (M027).

        Returns:
            What was served, and what was refused on the way.

        Raises:
            CheckpointNotFound: nothing on disk, or not what was named. The one case in which a
                job may start at step 0.
            CheckpointDamaged: there is something, and none of it is whole.
            CheckpointMismatch: a whole checkpoint does not fit this job. Nothing was touched.
        """
        job = Destinations(
            model,
            snapshot.by_id(optimizers, "optimizer"),
            snapshot.by_id(scheduler, "scheduler"),
            snapshot.by_id(dataloader, "dataloader"),
            {f"stateful/{name}": component for name, component in (stateful or {}).items()},
        )
        refused: list[Refusal] = []
        self.background.finish()
        if self.ranks is not None:
            request = LoadRequest(reference, step, require_kind, set(allow_missing))
            return self.load_on_ranks(self.ranks, job, request, refused)
        listed: list[CheckpointReference] | None = None
        while (candidates := self.candidates(reference, step, require_kind)) != listed:
            refused.clear()
            for candidate in candidates:
                opened = self.try_open(candidate, job, set(allow_missing), refused)
                if opened is not None:
                    return self.serve(*opened, job, refused)
            if reference is not None or step is not None:
                break
            # Nothing of it is there: rotation in another process may have taken all of it (A12).
            listed = candidates
        raise self.nothing_served(reference, step, require_kind, refused)

    def steps(self) -> list[int]:
        """The complete steps, ascending: manifest well-formed, every file of its size."""
        steps = set(resolve.find_local_checkpoint_steps(self.root, host=self.host))
        if self.persistent_dir is not None:
            steps.update(dump.step for dump in self.whole_dumps([self.persistent_dir]))
        return sorted(steps)

    def close(self) -> None:
        """Finish saves in the background, let the mirror finish, end connections to other ranks.

        Raises:
            BackgroundSaveFailed: a save in the background failed, and nobody was told.
        """
        try:
            self.background.close()
        finally:
            if self._writer is not None:
                self._writer.close()
            for mirror in self.mirrors:
                mirror.close()
            if self._ranks is not None:
                self._ranks.close()

    # ---- the order of a save ---------------------------------------------------------------------

    def save_parts(self, step: int, parts: SavedParts) -> Path:
        """Capture and save, in this thread."""
        if self.ranks is not None:
            return self.save_on_ranks(self.ranks, step, lambda: self.bring(step, parts))
        state = self.capture(step, **parts)
        state.refuse_parts()
        return self.save_snapshot(state).path

    def captured(self, step: int, parts: SavedParts) -> Callable[[], Path]:
        """Copy the state in this thread; return what saves the copy, in another one.

        On several ranks an error of one is told to all of them by that: none may miss the exchange.
        """
        ranks = self.ranks
        if ranks is None:
            state = self.capture(step, **parts, copies=True)
            state.refuse_parts()
            by_process = self.async_mode == "process"
            return lambda: (self.hand_over if by_process else self.save_snapshot)(state).path
        if self.async_mode == "process":
            raise ValueError("async_mode is 'process': of several ranks give each 'async'")
        ranks.connect(f"save of step {step}")  # no other thread may use the job's store for that
        brought = outcome_of(lambda: self.bring(step, parts, copies=True))
        return lambda: self.save_on_ranks(ranks, step, brought.result)

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Write, publish, update `latest`, and only then rotate and mirror (C01, C02, B01)."""
        with self.alone():
            reference = self.commit_snapshot(state)
            self.after_commit(reference)
        return reference

    def commit_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Write, publish and update `latest`."""
        self.prepare()
        try:
            reference = self.publish(self.write(state, layout.new_id()))
            self.set_latest(reference)
        except BaseException:
            self.abandon()
            raise
        return reference

    def hand_over(self, state: Snapshot) -> CheckpointReference:
        """Have another process write, publish and update `latest`; rotate and mirror here."""
        if self._writer is None:
            self._writer = WriterProcess(self.for_a_writer())
        with self.alone():
            name = self._writer.commit(state)
            found = resolve.references(self.root)
            reference = next(one for one in found if one.commit_name == name)
            self.after_commit(reference)
        return reference

    def for_a_writer(self) -> Settings:
        """What a process needs to write as this manager does: nothing that rotates or mirrors."""
        return Settings(
            type(self),
            {
                "root": self.root,
                "use_dcp": self.use_dcp,
                "keep_last": 0,
                "run_id": self._run_id,
                "parents": self.parents,
                "config": self.config,
            },
        )

    # ---- the order of a load ---------------------------------------------------------------------

    def try_open(
        self,
        candidate: CheckpointReference,
        job: Destinations,
        allowed: set[str],
        refused: list[Refusal],
    ) -> tuple[OpenCheckpoint, LoadPlan] | None:
        """Verify and plan one candidate; if it is damaged, add it to `refused` and return None."""
        try:
            opened = self.open_verified(candidate, allowed)
            try:
                return opened, self.plan(opened, job, allowed)
            except BaseException:
                opened.close()
                raise
        except (CheckpointDamaged, OSError) as error:
            refused.append(Refusal(candidate, str(error)))
            logger.warning("%s is REFUSED: %s", candidate.path, error)
            return None

    def serve(
        self,
        opened: OpenCheckpoint,
        plan: LoadPlan,
        job: Destinations,
        refused: list[Refusal],
    ) -> LoadResult:
        """Fill and hand over a verified, planned checkpoint."""
        with opened:
            self.fill(opened, plan)
            self.apply(plan, job)
        return self.result(opened, plan, refused)

    def load_on_ranks(
        self,
        ranks: Ranks,
        job: Destinations,
        request: LoadRequest,
        refused: list[Refusal],
    ) -> LoadResult:
        """Load on several ranks: all serve the same checkpoint, or all raise the same error."""
        planned = self.find_on_ranks(ranks, job, request, refused)
        if planned is None:
            raise self.nothing_on_ranks(ranks, request, refused)
        with planned.opened:
            self.serve_together(ranks, planned, job)
        return self.result(planned.opened, planned.plan, refused)

    def nothing_on_ranks(
        self,
        ranks: Ranks,
        request: LoadRequest,
        refused: list[Refusal],
    ) -> CheckpointNotFound | CheckpointDamaged:
        """The error of `nothing_served` on every rank, as the first rank sees it."""

        def reason() -> list[str | bool]:
            error = self.nothing_served(request.reference, request.step, request.kind, refused)
            return [isinstance(error, CheckpointDamaged), str(error)]

        damaged, message = ranks.lead(f"{request}: nothing", reason)
        return CheckpointDamaged(message, refused) if damaged else CheckpointNotFound(message)

    def result(
        self,
        opened: OpenCheckpoint,
        plan: LoadPlan,
        refused: list[Refusal],
    ) -> LoadResult:
        """Log what was served, and return it."""
        self.report_served(opened, refused)
        return LoadResult(
            step=opened.manifest.step,
            tokens_seen=opened.manifest.tokens_seen,
            extra=plan.extra["extra"],
            reference=opened.reference,
            refused=refused,
            cold=plan.cold,
            resharded=self.report_resharding(opened.manifest.world_size),
            config=patch_missing_config_keys(opened.manifest.config),
            config_added=added_keys(opened.manifest.config),
        )

    def report_resharding(self, saved: int) -> ReshardReport | None:
        """Log and return what became of each rank's own state; None with as many ranks as saved."""
        rank, now = (self.ranks.rank, self.ranks.size) if self.ranks else (0, 1)
        if saved == now:
            return None
        generators = f"saved rank {rank}" if rank < saved else "fresh"
        report = ReshardReport(saved, now, generators, "saved rank 0")
        logger.warning(
            "saved by %d ranks and loaded by %d: rank %d has the generators of: %s; scheduler, "
            "data position, extra and further components of: %s",
            saved,
            now,
            rank,
            report.generators,
            report.others,
        )
        return report

    def report_served(self, opened: OpenCheckpoint, refused: list[Refusal]) -> None:
        """Log what was served, and how its run and configuration differ from this run's.

        Newer steps that have files and no manifest are added to `refused`.
        """
        manifest = opened.manifest
        with suppress(OSError):
            orphans = resolve.orphans(opened.reference.root)
            refused += [orphan for orphan in orphans if orphan.reference.step > manifest.step]
            refused += self.newer_dumps(manifest.step)
        logger.info("resumed from %s, step %d", opened.reference.path, manifest.step)
        if self.run_id is not None and manifest.run_id not in self.own_runs:
            logger.warning("%s was written by run %s", opened.reference.path, manifest.run_id)
        for key, off in added_keys(manifest.config).items():
            logger.info("config.%s is younger than the checkpoint: taken as %r there", key, off)
        there_now = {**added_keys(manifest.config), **manifest.config}
        for key in sorted(set(self.config) | set(manifest.config)):
            here, there = self.config.get(key), there_now.get(key)
            if self.config and here != there:
                logger.warning("config.%s is %r here and %r in the checkpoint", key, here, there)

    def newer_dumps(self, step: int) -> list[Refusal]:
        """Dumps that are newer than what was served, and cannot be; of a process alone."""
        if self.ranks is not None:
            return []
        found = [dump for root in self.dump_roots for dump in resolve.dumps(root, self.host)]
        return [
            Refusal(dump.reference, str(dump.problem))
            for dump in found
            if dump.reference.step > step and dump.problem is not None
        ]

    def elsewhere(self, kind: Kind | None) -> list[Refusal]:
        """Dumps that are whole and may not be served here: to start at step 0 would lose them."""
        if kind not in (None, "emergency"):
            return []
        found = [dump for root in self.dump_roots for dump in resolve.dumps(root, self.host)]
        return [
            Refusal(dump.reference, str(dump.problem))
            for dump in found
            if isinstance(dump.problem, DumpElsewhere)
        ]

    def nothing_served(
        self,
        reference: str | os.PathLike[str] | CheckpointReference | None,
        step: int | None,
        kind: Kind | None,
        refused: list[Refusal],
    ) -> CheckpointNotFound | CheckpointDamaged:
        """The error of a load that could serve nothing: not found, or damaged with each reason."""
        refused = [*refused, *self.elsewhere(kind)]
        if reference is None and step is None:
            return resolve.nothing_whole(self.root, refused, kind)
        what = f"{reference or self.root}" + (f", step {step}" if step is not None else "")
        if not refused:
            return CheckpointNotFound(f"there is no {kind or ''} checkpoint for {what}")
        reasons = resolve.reasons_of(refused)
        return CheckpointDamaged(f"{what} cannot be served: {reasons}", refused)
