"""Steps of several parts that are not of one save (bugs C04, C07, C12, C13, A10)."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointReference,
    LoadResult,
    layout,
    resolve,
)
from ckpt_conformance.reference_impl.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl.encode import StateDict, Tree
    from ckpt_conformance.reference_impl.resolve import Candidate
    from ckpt_conformance.reference_impl.snapshot import Snapshot
    from ckpt_conformance.reference_impl.train_state import Stateful


@mutant(
    "C04",
    url="PrimeIntellect-ai/prime-rl#1251",
    change="the optimizer's files rotate by themselves, before the new step has any of its own",
    violates={"CKC-RETN-001", "CKC-IOER-007"},
)
class PartsRotateAlone(CheckpointManager):
    """Has no step of which all parts are there, for as long as a save takes."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Delete a part of what is too old, save, and delete the rest."""
        found = [one for one in resolve.scan(self.root) if one.reference.step != state.step]
        own = [one for one in found if self.is_own(one) and not one.reference.directory.is_file()]
        late = own[max(self.keep_last - 1, 0) :] if self.keep_last > 0 else []
        alone = [one.reference for one in late if self.may_delete(one)]
        for reference in alone:
            self.unlink(self.root / layout.optim_name(reference.step))
        saved = super().save_snapshot(state)
        for reference in alone:
            with suppress(OSError):
                self.delete_step(reference)
        return saved


@mutant(
    "C07",
    url="huggingface/transformers#11748",
    change="to protect the step that a run began from it changes places with the newest one",
    violates={"CKC-RETN-004", "CKC-RETN-006"},
)
class SwapsTheProtected(CheckpointManager):
    """Keeps what was loaded, and deletes what was saved last."""

    _protected: int | None = None

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Note from which step the run goes on."""
        result = super().load(*given, **named)
        self._protected = result.step
        return result

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """The first ones of a list in which two have changed places."""
        del saved
        own = [one for one in found if self.is_own(one)]
        steps = sorted({one.reference.step for one in own})
        if self._protected in steps:
            at = steps.index(self._protected)
            steps[at], steps[-1] = steps[-1], steps[at]
        late = steps[: -self.keep_last] if self.keep_last > 0 else []
        return [one for one in reversed(own) if one.reference.step in late]


@mutant(
    "C12",
    url="Lightning-AI/pytorch-lightning#2680",
    change="what a user's own dict held at the save before is written, and then it is noted anew",
    violates={"CKC-COMP-012", "CKC-DISC-008", "CKC-SIDE-008"},
)
class StateOfTheSaveBefore(CheckpointManager):
    """Takes a snapshot, and brings it up to date afterwards."""

    _before: Mapping[str, Tree] | None = None

    def capture_train_state(
        self,
        step: int,
        tokens_seen: int,
        scheduler: Stateful | Mapping[str, Stateful] | None,
        dataloader: Stateful | None,
        extra: Mapping[str, Tree] | None,
    ) -> StateDict:
        """With the dict as it was at the save before, if there was one."""
        before, self._before = self._before, copy.deepcopy(extra)
        held = extra if before is None else before
        return super().capture_train_state(step, tokens_seen, scheduler, dataloader, held)


@mutant(
    "C13",
    url="facebookresearch/fairchem#349",
    change="scores of a user's own dict, which are floats, begin anew after a restart",
    violates={"CKC-COMP-012"},
)
class ForgetsTheBest(CheckpointManager):
    """Has a best score of its own, which no checkpoint holds."""

    def capture_train_state(
        self,
        step: int,
        tokens_seen: int,
        scheduler: Stateful | Mapping[str, Stateful] | None,
        dataloader: Stateful | None,
        extra: Mapping[str, Tree] | None,
    ) -> StateDict:
        """With the score that a constructor has."""
        held = {
            key: math.inf if isinstance(value, float) else value
            for key, value in (extra or {}).items()
        }
        return super().capture_train_state(step, tokens_seen, scheduler, dataloader, held)


@mutant(
    "A10-metadata",
    url="ByteDance-Seed/VeOmni#1176",
    change="a save over a step replaces the train state first: it stands beside the old weights",
    violates={"CKC-ATOM-002", "CKC-DURA-002", "CKC-IOER-002"},
)
class TrainStateFirst(CheckpointManager):
    """Leaves the old metadata, which says that all is there."""

    def publish(self, staged: Path) -> CheckpointReference:
        """Put the new train state into the step that is there, then publish the rest."""
        if not staged.is_dir():
            manifest = read_manifest(staged)
            there = resolve.candidate_at(CheckpointReference(self.root, manifest.step, "model"))
            name = layout.extra_name(manifest.step)
            if there.complete and there.manifest is not None:
                link = self.root / layout.work_name(name, self.tag, "tmp")
                self.link(self.staged(name, manifest.save_id), link)
                self.rename(link, self.root / name)
                files = {**there.manifest.files, name: manifest.files[name]}
                mixed = replace(there.manifest, files=files, tensors=manifest.tensors)
                self.replace_small_file(there.reference.manifest_path.name, mixed.to_bytes())
        return super().publish(staged)
