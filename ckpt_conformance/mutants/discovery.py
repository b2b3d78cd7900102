"""What a restart takes, and what a resumed run writes over (bugs B, C14, A10)."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointReference,
    LoadResult,
    layout,
    resolve,
)
from ckpt_conformance.reference_impl.layout import Refusal
from ckpt_conformance.reference_impl.loading import OpenCheckpoint
from ckpt_conformance.reference_impl.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.reference_impl.loading import Destinations, LoadPlan
    from ckpt_conformance.reference_impl.manifest import Manifest
    from ckpt_conformance.reference_impl.snapshot import Snapshot

logger = logging.getLogger(__name__)
EIGHT = 8


def is_latest(given: tuple[object, ...], named: Mapping[str, object]) -> bool:
    """Whether a load asks for the newest checkpoint, and for none by name."""
    asked = (*given, named.get("reference"), named.get("step"))
    return all(one is None for one in asked)


def cold(root: Path) -> LoadResult:
    """Return the result of a load without a checkpoint to resume from."""
    return LoadResult(0, 0, {}, CheckpointReference(root, 0, "model"), [], [])


@mutant(
    "B10",
    url="nvidia-cosmos/cosmos-rl#232",
    change="the newest step is the last one in the order of text",
    violates={"CKC-DISC-001"},
)
class NewestByText(CheckpointManager):
    """Sorts steps as text."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """Newest first, as text."""
        candidates = super().candidates(*given, **named)
        return sorted(candidates, key=lambda candidate: str(candidate.step), reverse=True)


@mutant(
    "B10-digits",
    url="nvidia-cosmos/cosmos-rl#232",
    change="names are read with exactly the eight digits or less that they were padded to",
    violates={"CKC-DISC-001"},
)
class EightDigits(CheckpointManager):
    """Saves a step of nine digits, and never finds it."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """Those whose name fits the pattern."""
        candidates = super().candidates(*given, **named)
        return [candidate for candidate in candidates if len(str(candidate.step)) <= EIGHT]


@mutant(
    "B07",
    url="huggingface/transformers#35782",
    change="the step with the largest number is the only candidate, whole or not",
    violates={"CKC-CORR-006", "CKC-DISC-010", "CKC-EMRG-003"},
)
class OnlyTheNewest(CheckpointManager):
    """Does not fall back."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """The newest by number."""
        return super().candidates(*given, **named)[:1]


@mutant(
    "B05",
    url="KempnerInstitute/KempnerForge#177",
    change="without a pointer the step with the largest number is taken, whole or not",
    violates={"CKC-DISC-010"},
)
class WeakFallback(CheckpointManager):
    """Its fallback is weaker than its main rule."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """All with a pointer, the newest without."""
        candidates = super().candidates(*given, **named)
        return candidates if resolve.read_latest(self.root) else candidates[:1]


@mutant(
    "B08",
    url="marin-community/marin#8760",
    change="a newest checkpoint that cannot be read counts as none: the run starts at step 0",
    violates={
        "CKC-CORR-001",
        "CKC-CORR-002",
        "CKC-CORR-003",
        "CKC-CORR-004",
        "CKC-CORR-005",
        "CKC-CORR-006",
        "CKC-DISC-002",
        "CKC-IOER-005",
        "CKC-SHRD-001",
        "CKC-EMRG-003",
    },
)
class UnreadableIsAbsent(OnlyTheNewest):
    """Takes a read error for absence."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, or begin anew."""
        try:
            return super().load(*given, **named)
        except CheckpointDamaged:
            if not is_latest(given, named):
                raise
            return cold(self.root)


@mutant(
    "B09",
    url="Lightning-AI/pytorch-lightning#7072",
    change="a load that finds nothing warns and lets the run begin from scratch",
    violates={"CKC-DISC-007"},
)
class NothingIsFine(CheckpointManager):
    """Makes an explicit wish to resume optional."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load if there is something."""
        try:
            return super().load(*given, **named)
        except CheckpointNotFound:
            if not is_latest(given, named):
                raise
            return cold(self.root)


@mutant(
    "B01",
    url="KempnerInstitute/KempnerForge#102",
    change="what the pointer names is loaded, however old it is",
    violates={"CKC-DISC-003", "CKC-RTRP-020", "CKC-EMRG-001"},
)
class PointerDecides(CheckpointManager):
    """Trusts the pointer more than the directory."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """The candidate that the pointer names first."""
        latest = resolve.read_latest(self.root)
        candidates = super().candidates(*given, **named)
        return sorted(candidates, key=lambda candidate: candidate.commit_name != latest)


class RecordsItsPlace(CheckpointManager):
    """Reads the files of a checkpoint where the manifest says that they were written."""

    def place(self) -> str:
        """What is recorded."""
        raise NotImplementedError

    def make_manifest(self, *given: Any, **named: Any) -> Manifest:  # noqa: ANN401
        """Record the place."""
        return replace(super().make_manifest(*given, **named), config={"root": self.place()})

    def open_verified(self, reference: CheckpointReference, allowed: set[str]) -> OpenCheckpoint:
        """Open the files at the recorded place."""
        place = self.read_manifest(reference).config.get(
            "root", reference.directory
        )  # not of dumps
        return super().open_verified(replace(reference, directory=Path(place)), allowed)


@mutant(
    "B12",
    url="huggingface/transformers#48319",
    change="the absolute path of the root is kept in the checkpoint and used at load",
    violates={"CKC-DISC-004", "CKC-MIRR-003", "CKC-SMOK-003", "CKC-STAG-004"},
)
class AbsolutePaths(RecordsItsPlace):
    """Keeps absolute paths."""

    def place(self) -> str:
        """Absolute."""
        return str(self.root.resolve())


@mutant(
    "B13",
    url="mosaicml/composer#1037",
    change="the path of the root is kept as it was given, relative to the working directory",
    violates={"CKC-DISC-004", "CKC-MIRR-003", "CKC-SMOK-003", "CKC-MIRR-002", "CKC-STAG-004"},
)
class RelativeToTheWorkingDirectory(RecordsItsPlace):
    """Keeps paths that depend on where the job runs."""

    def place(self) -> str:
        """As the user wrote it."""
        return str(self.root)


@mutant(
    "B14",
    url="Lightning-AI/pytorch-lightning#21110",
    change="every name in the root is looked at through its links, which may have no end",
    violates={"CKC-DISC-005"},
)
class FollowsLinks(CheckpointManager):
    """Resolves what it does not know."""

    def prepare(self) -> None:
        """Take stock of the root before a save."""
        super().prepare()
        sorted(self.root.iterdir(), key=lambda path: path.stat().st_mtime)


@mutant(
    "B10-foreign",
    url="strands-labs/robots#3165",
    change="every name that begins like a manifest's must hold a number, or the save raises (KX8)",
    violates={"CKC-DISC-005"},
)
class EveryNameIsANumber(CheckpointManager):
    """Takes every name for its own."""

    def prepare(self) -> None:
        """Sort what is there by number before a save."""
        super().prepare()
        sorted(int(path.stem.split("_")[1]) for path in self.root.glob("meta_*.json"))


@mutant(
    "C05-latest",
    url="huggingface/transformers#26961",
    change="the newest checkpoint is the one that was modified last",
    violates={"CKC-DISC-006", "CKC-DISC-018", "CKC-RTRP-020", "CKC-EMRG-002"},
)
class NewestByTime(CheckpointManager):
    """Takes the time of modification for age."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """Last modified first."""
        candidates = super().candidates(*given, **named)

        def modified(candidate: CheckpointReference) -> int:
            with suppress(OSError):
                return candidate.manifest_path.stat().st_mtime_ns
            return 0

        return sorted(candidates, key=modified, reverse=True)


@mutant(
    "C05-archive",
    url="huggingface/transformers#26961",
    change="of checkpoints that are older than a day the one that was modified last is the newest",
    violates={"CKC-DISC-006"},
)
class OldOnesByTime(CheckpointManager):
    """Trusts the times of a store that was mounted or restored."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """Last modified first, where all are old."""
        candidates = super().candidates(*given, **named)
        modified = {one: one.manifest_path.stat().st_mtime for one in candidates}
        if all(at < time.time() - 86_400 for at in modified.values()):
            return sorted(candidates, key=modified.__getitem__, reverse=True)
        return candidates


@mutant(
    "A10",
    url="vllm-project/speculators#1026",
    change="a second save of a step writes the train state of the first beside the new weights",
    violates={"CKC-DISC-008", "CKC-SIDE-020"},
)
class StaleSidecar(CheckpointManager):
    """Does not write one part again."""

    def capture(self, step: int, **named: Any) -> Snapshot:  # noqa: ANN401
        """Take the train state once per step."""
        known: dict[int, Any] = self.__dict__.setdefault("known", {})
        state = super().capture(step, **named)
        extra = known.setdefault(step, state.documents["extra"])
        return replace(state, documents={**state.documents, "extra": extra})


@mutant(
    "R01",
    url="huggingface/diffusers#14769",
    change="a save of a step that is there already leaves it as it is and reports success",
    violates={"CKC-DISC-008", "CKC-SMOK-003"},
)
class FirstSaveWins(CheckpointManager):
    """Keeps the older save of a step."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save unless the step is there."""
        for candidate in resolve.scan(self.root):
            if candidate.complete and candidate.reference.step == state.step:
                return candidate.reference
        return super().save_snapshot(state)


@mutant(
    "R01-weights",
    url="huggingface/diffusers#14769",
    change="a save of a step that is there with the same weights leaves it as it is",
    violates={"CKC-DISC-008"},
)
class SameWeightsSameStep(CheckpointManager):
    """Takes the weights for all of a step."""

    def publish(self, staged: Path) -> CheckpointReference:
        """Publish unless the step is there, and its model file has the same bytes."""
        new = read_manifest(staged)
        older = CheckpointReference(self.root, new.step, "model")
        if resolve.candidate_at(older).complete:
            name = layout.model_name(new.step)
            if read_manifest(older.manifest_path).files[name] == new.files[name]:
                self.abandon()
                return older
        return super().publish(staged)


@mutant(
    "R01-loaded",
    url="huggingface/diffusers#14769",
    change="a manager keeps what it has loaded of a step, also when the step is saved over",
    violates={"CKC-DISC-008"},
)
class KeepsWhatItLoaded(CheckpointManager):
    """Keeps the files of a step open; a save over the step gives its names to others."""

    def open_verified(self, reference: CheckpointReference, allowed: set[str]) -> OpenCheckpoint:
        """Open a step once."""
        known: dict[int, OpenCheckpoint] = self.__dict__.setdefault("known", {})
        if reference.step not in known:
            opened = super().open_verified(reference, allowed)
            known[reference.step] = StaysOpen(**vars(opened))
        return known[reference.step]


class StaysOpen(OpenCheckpoint):
    """An open checkpoint that is not closed."""

    def close(self) -> None:
        """Do nothing."""


@mutant(
    "R01-damaged",
    url="huggingface/diffusers#14769",
    change="a save that would write the bytes which are listed for the step leaves it as it is",
    violates={"CKC-DISC-008"},
)
class SameBytesAreThere(CheckpointManager):
    """Trusts the list of an older save, and the sizes of its files."""

    def publish(self, staged: Path) -> CheckpointReference:
        """Publish unless a manifest lists the same files, and these have their sizes."""
        new = read_manifest(staged)
        older = CheckpointReference(self.root, new.step, "model")
        is_there = resolve.candidate_at(older).complete
        if is_there and read_manifest(older.manifest_path).files == new.files:
            self.abandon()
            return older
        return super().publish(staged)


@mutant(
    "R01-parts",
    url="huggingface/diffusers#14769",
    change="of a step that is there a save keeps the weights, if the listed ones have its bytes",
    violates={"CKC-DISC-008"},
)
class SamePartsAreThere(CheckpointManager):
    """Trusts a list and its digests, and does not look at the bytes, as a store of contents may."""

    def replace_flat(
        self, reference: CheckpointReference, manifest: Manifest, staged: Path
    ) -> None:
        """Put the weights that are listed already in the place of those that were staged."""
        name = layout.model_name(manifest.step)
        if read_manifest(reference.manifest_path).files[name] == manifest.files[name]:
            own = self.staged(name, manifest.save_id)
            own.unlink()
            own.hardlink_to(self.root / name)
        super().replace_flat(reference, manifest, staged)


@mutant(
    "R01-refused",
    url="huggingface/diffusers#14769",
    change="a step that a manager found damaged is passed over from then on, also when saved anew",
    violates={"CKC-DISC-008"},
)
class OnceDamagedAlwaysDamaged(CheckpointManager):
    """Keeps a list of what it refused."""

    def try_open(
        self,
        candidate: CheckpointReference,
        job: Destinations,
        allowed: set[str],
        refused: list[Refusal],
    ) -> tuple[OpenCheckpoint, LoadPlan] | None:
        """Open what was not refused before."""
        known: set[int] = self.__dict__.setdefault("known", set())
        if candidate.step in known:
            refused.append(Refusal(candidate, "it was refused before"))
            return None
        opened = super().try_open(candidate, job, allowed, refused)
        if opened is None:
            known.add(candidate.step)
        return opened


@mutant(
    "B04",
    url="NVIDIA-NeMo/Megatron-Bridge#5964",
    change="steps() names what the pointer names, load takes what the directory holds",
    violates={
        "CKC-ATOM-004",
        "CKC-DISC-009",
        "CKC-DISC-015",
        "CKC-MIRR-001",
        "CKC-MIRR-002",
        "CKC-MIRR-007",
        "CKC-RETN-002",
        "CKC-RETN-003",
        "CKC-RETN-009",
        "CKC-SHRD-002",
        "CKC-SMOK-003",
    },
)
class TwoRules(CheckpointManager):
    """Has a second rule of discovery for its listing."""

    def steps(self) -> list[int]:
        """The step in the pointer."""
        latest = resolve.read_latest(self.root) or ""
        steps = (layout.flat_manifest_step(latest), layout.directory_step(latest))
        return [step for step in steps if step is not None]


@mutant(
    "B04-once",
    url="NVIDIA-NeMo/Megatron-Bridge#5964",
    change="a manager lists the directory once, and again only after its own saves",
    violates={"CKC-DISC-017", "CKC-SIDE-012"},
)
class ListsOnce(CheckpointManager):
    """Does not see what another process saves."""

    first_look: list[int] | None = None

    def steps(self) -> list[int]:
        """The steps of the first look."""
        if self.first_look is None:
            self.first_look = super().steps()
        return list(self.first_look)

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """Of the newest, what was there at the first look."""
        candidates = super().candidates(*given, **named)
        if not is_latest(given, named):
            return candidates
        newest = max(self.steps(), default=-1)
        return [candidate for candidate in candidates if candidate.step <= newest]

    def after_commit(self, reference: CheckpointReference) -> None:
        """Look again."""
        super().after_commit(reference)
        self.first_look = None


@mutant(
    "B04-second",
    url="NVIDIA-NeMo/Megatron-Bridge#5964",
    change="the list of steps is read again where the directory was changed in another second",
    violates={"CKC-DISC-017", "CKC-EMRG-001"},
)
class ListsBySeconds(CheckpointManager):
    """Does not see what another process saves within a second."""

    seen: tuple[int, list[CheckpointReference]] | None = None

    def steps(self) -> list[int]:
        """Those of the list."""
        steps = {one.step for one in self.names_seen() if resolve.candidate_at(one).complete}
        return sorted(steps)

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """Those of the list; what is asked for by name is looked for."""
        found = super().candidates(*given, **named)
        if not is_latest(given, named):
            return found
        known = set(self.names_seen())
        return [one for one in found if one in known]

    def names_seen(self) -> list[CheckpointReference]:
        """Read the directory, unless it has been read in the second of its last change."""
        second = int(self.root.stat().st_mtime)
        if self.seen is None or self.seen[0] != second:
            self.seen = second, list(resolve.references(self.root))
        return self.seen[1]

    def after_commit(self, reference: CheckpointReference) -> None:
        """Do what is due after a save of one's own, and read the directory anew."""
        super().after_commit(reference)
        self.seen = None


@mutant(
    "B10-steps",
    url="isaac-sim/IsaacLab#3933",
    change="steps() comes in the order of text; whoever takes the last one goes back",
    violates={"CKC-DISC-009"},
)
class StepsByText(CheckpointManager):
    """Sorts its listing as text."""

    def steps(self) -> list[int]:
        """Every step, as text."""
        return sorted(super().steps(), key=str)


@mutant(
    "A09",
    url="vllm-project/speculators#739",
    change="steps() goes by names; nothing asks whether the files are there",
    violates={"CKC-ATOM-004", "CKC-DISC-013", "CKC-SHRD-002"},
)
class AdvertisesNames(CheckpointManager):
    """Has no marker of completeness in its listing."""

    def steps(self) -> list[int]:
        """Every number among the names."""
        names = resolve.names_in(self.root)
        steps = (layout.flat_data_step(name) or layout.flat_manifest_step(name) for name in names)
        return sorted({step for step in steps if step is not None})


def has_empty_manifest(candidate: CheckpointReference) -> bool:
    """Whether a step's manifest is there and holds nothing: a name, and no checkpoint."""
    path = candidate.manifest_path
    return path.is_file() and not path.stat().st_size


@mutant(
    "B07-skips",
    url="huggingface/transformers#35782",
    change="the fallback from an empty newest checkpoint skips the one before it, too",
    violates={"CKC-DISC-014"},
)
class SkipsOneTooMany(CheckpointManager):
    """Goes back one step further than it has to, without a word."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """All but the one after an empty newest."""
        candidates = super().candidates(*given, **named)
        if len(candidates) > 2 and has_empty_manifest(candidates[0]):  # noqa: PLR2004  one is left
            del candidates[1]
        return candidates


@mutant(
    "B04-listing",
    url="NVIDIA-NeMo/Megatron-Bridge#5964",
    change="steps() raises where the manifest of one step is empty",
    violates={"CKC-DISC-015", "CKC-RETN-009"},
)
class ListingRaises(CheckpointManager):
    """One dead save's name hides every whole step from who asks."""

    def steps(self) -> list[int]:
        """The steps, if every manifest reads."""
        for candidate in resolve.references(self.root):
            if has_empty_manifest(candidate):
                raise CheckpointDamaged(f"{candidate.manifest_path.name} is empty")
        return super().steps()


@mutant(
    "C14",
    url="TheLastBen/fast-stable-diffusion#1198",
    change="the name of a checkpoint comes from a counter that starts at 0 in each process",
    violates={
        *("CKC-DISC-008", "CKC-DISC-012", "CKC-MIRR-006", "CKC-RETN-003", "CKC-RSUM-002"),
        "CKC-RTRP-009",
        "CKC-SMOK-002",
    },
)
class LocalCounter(CheckpointManager):
    """Counts from where this process began."""

    began = 0

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load; the counter stays at 0."""
        result = super().load(*given, **named)
        self.began = result.step
        return result

    def save(self, step: int, **named: Any) -> Path:  # noqa: ANN401
        """Save under the counter's number."""
        return super().save(step - self.began, **named)


@mutant(
    "D08",
    url="one-covenant/templar#607",
    change="the listing of the root stops after its first page, here of 100 names",
    violates={"CKC-DISC-011", "CKC-RETN-011"},
)
class FirstPage(CheckpointManager):
    """Takes the first page of a listing for all of it."""

    page = 100  # names

    def steps(self) -> list[int]:
        """The steps that are committed by a name on the first page."""
        page = set(resolve.names_in(self.root)[: self.page])
        candidates = (one for one in resolve.scan(self.root) if one.complete)
        references = [candidate.reference for candidate in candidates]
        return sorted({reference.step for reference in references if reference.commit_name in page})


@mutant(
    "D08-store",
    url="one-covenant/templar#607",
    change="the listing of the root stops after 5,000 names",
    violates={"CKC-DISC-011", "CKC-RETN-011"},
)
class FirstLargePage(FirstPage):
    """Takes a page that few jobs fill for all of a listing."""

    page = 5_000


@mutant(
    "C14-rollback",
    url="TheLastBen/fast-stable-diffusion#1198",
    change="a load of an older step that was asked for deletes every newer one",
    violates={
        "CKC-DISC-012",
        "CKC-INTN-001",
        "CKC-RETN-002",
        "CKC-SIDE-002",
        "CKC-SIDE-012",
        "CKC-RTRP-020",
        "CKC-RETN-014",
    },
)
class RollbackDeletes(CheckpointManager):
    """Takes what comes after the step that was asked for as abandoned, before anything is saved."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load; then make the step that was asked for the newest one."""
        result = super().load(*given, **named)
        asked: int | None = named.get("step")
        if asked is not None:
            for newer in filter(self.is_own, resolve.scan(self.root)):
                if newer.reference.step > asked:
                    self.delete_step(newer.reference)
        return result


@mutant(
    "R09-rollback",
    url="deepspeedai/DeepSpeed#8499",
    change="the latest is what was saved last; its optimizers are of the largest step",
    violates={"CKC-DISC-012", "CKC-IOER-005", "CKC-RTRP-020", "CKC-EMRG-001"},
)
class TwoRulesOfTheLatest(CheckpointManager):
    """Both rules name the same step until a run goes back and saves."""

    largest: CheckpointReference | None = None
    latest: CheckpointReference | None = None

    def make_manifest(self, *given: Any, **named: Any) -> Manifest:  # noqa: ANN401
        """Number the saves."""
        manifest = super().make_manifest(*given, **named)
        number = 1 + max(map(saves_of, resolve.references(self.root)), default=0)
        return replace(manifest, config={**manifest.config, "saves": number})

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """What was saved last comes first."""
        candidates = super().candidates(*given, **named)
        self.largest = self.latest = None
        if not candidates or not is_latest(given, named):
            return candidates
        by_saves = sorted(candidates, key=saves_of, reverse=True)
        self.largest, self.latest = candidates[0], by_saves[0]
        return by_saves

    def open_verified(self, reference: CheckpointReference, allowed: set[str]) -> OpenCheckpoint:
        """Open a checkpoint; the optimizers of the latest are those of the largest step."""
        opened = super().open_verified(reference, allowed)
        if self.largest is not None and reference == self.latest != self.largest:
            with suppress(CheckpointDamaged, OSError):
                other = super().open_verified(self.largest, allowed)
                opened.files |= other.files
                opened.documents["optim"] = other.documents["optim"]
        return opened


def saves_of(reference: CheckpointReference) -> int:
    """Return how many saves there were up to this one; 0 where nothing says so."""
    with suppress(CheckpointDamaged, OSError):
        return int(read_manifest(reference.manifest_path).config.get("saves", 0))
    return 0


@mutant(
    "B07-one",
    url="huggingface/transformers#35782",
    change="the fallback from a damaged newest checkpoint tries one older step and no more",
    violates={"CKC-CORR-006"},
)
class FallsBackOnce(CheckpointManager):
    """Thinks of one damaged checkpoint at a time."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """The newest two."""
        return super().candidates(*given, **named)[:2]


@mutant(
    "B13-live",
    url="mosaicml/composer#1037",
    change="the root stays as it was given: after a change of directory saves go elsewhere",
    violates={"CKC-DISC-016"},
)
class RootIsRelative(CheckpointManager):
    """Is right until the job changes its working directory."""

    def __init__(self, root: Any, **named: Any) -> None:  # noqa: ANN401
        """Keep the path as it was given."""
        super().__init__(root, **named)
        self.asked = str(root)

    def prepare(self) -> None:
        """Save to where the path leads by now."""
        self.root = Path(os.path.abspath(self.asked))  # noqa: PTH100  as the manager does
        super().prepare()


@mutant(
    "A10-clock",
    url="vllm-project/speculators#1026",
    change="a save over a step is passed over where the one that is there has a later time",
    violates={"CKC-DISC-018"},
)
class LaterTimeWins(CheckpointManager):
    """Takes the time of day for the order of saves."""

    def make_manifest(self, *given: Any, **named: Any) -> Manifest:  # noqa: ANN401
        """Note the time."""
        manifest = super().make_manifest(*given, **named)
        return replace(manifest, config={**manifest.config, "saved": time.time_ns()})

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save, unless a later save of the step is there."""
        place = CheckpointReference(self.root, state.step, "model")
        with suppress(CheckpointDamaged, OSError):
            if read_manifest(place.manifest_path).config.get("saved", 0) > time.time_ns():
                logger.info("a later save of step %d is there", state.step)
                return place
        return super().save_snapshot(state)
