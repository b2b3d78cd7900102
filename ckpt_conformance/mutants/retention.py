"""What rotation deletes, and when (bugs C)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, CheckpointReference, layout, resolve
from ckpt_conformance.reference_impl.manifest import read_manifest
from ckpt_conformance.reference_impl.trainer import Trainer

if TYPE_CHECKING:
    from ckpt_conformance.reference_impl import LoadResult
    from ckpt_conformance.reference_impl.manifest import Manifest
    from ckpt_conformance.reference_impl.resolve import Candidate
    from ckpt_conformance.reference_impl.snapshot import Snapshot


@mutant(
    "C01",
    url="Lightning-AI/pytorch-lightning#1150",
    change="the old checkpoints are deleted first, then the new one is written",
    violates={"CKC-RETN-001", "CKC-IOER-007"},
)
class DeletesFirst(CheckpointManager):
    """Makes room before it writes."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Leave room for one, then save; a step that is saved over has its room."""
        found = [one for one in resolve.scan(self.root) if one.reference.step != state.step]
        own = [one for one in found if self.is_own(one)]
        for victim in own[max(self.keep_last - 1, 0) :] if self.keep_last > 0 else []:
            with suppress(OSError):
                self.delete_step(victim.reference) if self.may_delete(victim) else None
        return super().save_snapshot(state)


class OrdersSteps(CheckpointManager):
    """Keeps the first `keep_last` in an order of its own, and what was just saved."""

    def order(self, candidate: Candidate) -> Any:  # noqa: ANN401  something that sorts
        """What is newest sorts last."""
        raise NotImplementedError

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """What is beyond `keep_last` in that order."""
        own = sorted((one for one in found if self.is_own(one)), key=self.order, reverse=True)
        late = own[self.keep_last :] if self.keep_last > 0 else []
        return [one for one in late if one.reference != saved]


@mutant(
    "C08",
    url="huggingface/accelerate#1163",
    change="rotation sorts steps as text",
    violates={"CKC-RETN-002", "CKC-RETN-011"},
)
class OldestByText(OrdersSteps):
    """Takes step 2 for newer than step 10."""

    def order(self, candidate: Candidate) -> str:
        """As text."""
        return str(candidate.reference.step)


@mutant(
    "C08-parts",
    url="huggingface/accelerate#1163",
    change="rotation leaves an empty file for each checkpoint that it deleted",
    violates={"CKC-RETN-002"},
)
class LeavesParts(CheckpointManager):
    """Counts what loads, and not what is there."""

    def delete_step(self, reference: CheckpointReference) -> None:
        """Delete, and leave a file behind."""
        super().delete_step(reference)
        (self.root / f"rotated-{reference.step}.info").touch()


@mutant(
    "C08-hundredth",
    url="huggingface/accelerate#1163",
    change="each hundredth save of a manager collects all older steps, to begin a new chain",
    violates={"CKC-RETN-002"},
)
class CollectsNowAndThen(CheckpointManager):
    """Has a path of its own that no short test enters."""

    saves = 0

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """What is beyond `keep_last`; now and then everything else."""
        self.saves += 1
        if self.keep_last > 0 and self.saves % 100 == 0:
            return [one for one in found if self.is_own(one) and one.reference != saved]
        return super().victims(found, saved)


@mutant(
    "C11-stored",
    url="huggingface/diffusers#11555",
    change="the number to keep is that of the first run, which is stored beside the steps",
    violates={"CKC-RETN-006"},
)
class KeepsTheFirstNumber(CheckpointManager):
    """Takes a setting for a fact of the directory."""

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """What is beyond the number that is stored."""
        stored = self.root / ".keep-last"
        if not stored.exists():
            stored.write_text(str(self.keep_last), encoding="ascii")
        self.keep_last = int(stored.read_text(encoding="ascii"))
        return super().victims(found, saved)


@mutant(
    "C08-padding",
    url="huggingface/accelerate#1163",
    change="rotation sorts names as text, which a padding of six digits hides up to 999,999",
    violates={"CKC-RETN-011"},
)
class OldestByName(OrdersSteps):
    """Trusts the padding."""

    def order(self, candidate: Candidate) -> str:
        """As the name is written."""
        return candidate.reference.commit_name


@mutant(
    "C08-limit",
    url="huggingface/diffusers#2466",
    change="the limit is compared before the new checkpoint counts: one too many stays",
    violates={"CKC-RETN-002", "CKC-SMOK-003"},
)
class OneTooMany(CheckpointManager):
    """Does not enforce its limit."""

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """What is beyond `keep_last`, the newest not counted."""
        others = [one for one in found if one.reference.step != saved.step]
        return super().victims(others, saved)


@mutant(
    "C14-again",
    url="huggingface/diffusers#2466",
    change="a step that is saved again counts twice: its rotation deletes one more than it should",
    violates={"CKC-RETN-002"},
)
class CountsASaveOverTwice(CheckpointManager):
    """Counts saves, not steps."""

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save; one less is to be kept beside a step that was there."""
        keep, was_there = self.keep_last, step in self.steps()
        if was_there and keep > 1:
            self.keep_last = keep - 1
        try:
            return super().save(step, **parts)
        finally:
            self.keep_last = keep


@mutant(
    "C08-one",
    url="huggingface/diffusers#2466",
    change="a limit of one is taken for none: nothing is ever deleted",
    violates={"CKC-RETN-002"},
)
class OneIsNoLimit(CheckpointManager):
    """Compares its limit with one number too many."""

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """What is beyond `keep_last`, where that is two or more."""
        return super().victims(found, saved) if self.keep_last > 1 else []


@mutant(
    "C08-pattern",
    url="huggingface/accelerate#1163",
    change="rotation unlinks every file whose name holds the digits of the old step",
    violates={"CKC-RETN-002"},
)
class UnlinksByPattern(CheckpointManager):
    """Takes 1000001 for step 1."""

    def unlink_listed(self, manifest_path: Path) -> None:
        """Unlink what a pattern finds."""
        step = read_manifest(manifest_path).step
        super().unlink_listed(manifest_path)
        for path in self.root.glob(f"*{step:06d}*.pt"):
            if path.name not in self.live_files(step):
                self.unlink(path)


@mutant(
    "C05",
    url="huggingface/transformers#26961",
    change="rotation takes the time of modification for age",
    violates={"CKC-DISC-018", "CKC-RETN-003"},
)
class OldestByTime(OrdersSteps):
    """Goes by times."""

    def order(self, candidate: Candidate) -> int:
        """As the file system says."""
        return candidate.reference.manifest_path.stat().st_mtime_ns


@mutant(
    "C06",
    url="huggingface/transformers#37260",
    change="rotation keeps the largest numbers, and what was just saved may not be among them",
    violates={"CKC-RETN-004"},
)
class JustSavedMayGo(CheckpointManager):
    """Does not protect what it has just written."""

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """What is beyond `keep_last`, by number alone."""
        return super().victims(found, replace(saved, step=-1))


@mutant(
    "C06-others",
    url="huggingface/transformers#37260",
    change="whatever has the manager's names counts as this run's, and may be deleted",
    violates={"CKC-RETN-010"},
)
class EveryRunIsOurs(CheckpointManager):
    """Does not know runs apart."""

    def is_own(self, candidate: Candidate) -> bool:
        """Whether it is complete."""
        return candidate.complete


@mutant(
    "B16",
    url="google/orbax#394",
    change="a cleanup before each save deletes every name that it does not know",
    violates={"CKC-RETN-005"},
)
class CleansUp(CheckpointManager):
    """Takes what it does not know for leftovers."""

    def prepare(self) -> None:
        """Clean up."""
        super().prepare()
        for name in resolve.names_in(self.root):
            if not layout.is_known(name):
                self.unlink(self.root / name)


@mutant(
    "C02-timeline",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="a save after a load of an older step deletes all newer ones: the timeline is another",
    violates={"CKC-RETN-014"},
)
class OneTimeline(CheckpointManager):
    """Takes who looks back for one who gives up."""

    back_to: int | None = None

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Remember an older step that was asked for."""
        result = super().load(*given, **named)
        self.back_to = named.get("step")
        return result

    def retain(self, saved: CheckpointReference) -> None:
        """Delete what is newer, once."""
        super().retain(saved)
        back_to, self.back_to = self.back_to, None
        for found in resolve.scan(self.root) if back_to is not None else ():
            if found.reference.step > saved.step:
                self.delete_step(found.reference)


@mutant(
    "B16-prefix",
    url="google/orbax#394",
    change="a cleanup before each save deletes every name that begins as those of its drafts do",
    violates={"CKC-RETN-005", "CKC-IOER-003"},
)
class CleansUpByPrefix(CheckpointManager):
    """Drafts are `.draft-NAME`, and what a user calls `.draft_notes` goes with them."""

    def staged(self, name: str, save_id: str) -> Path:
        """A name of its own."""
        return self.root / f".draft-{super().staged(name, save_id).name}"

    def prepare(self) -> None:
        """Clean up."""
        super().prepare()
        for name in resolve.names_in(self.root):
            if name.startswith(".draft"):
                self.unlink(self.root / name)


@mutant(
    "C10",
    url="Lightning-AI/pytorch-lightning#12225",
    change="what may go is a list of absolute paths that travels in the checkpoint",
    violates={"CKC-RETN-002", "CKC-RETN-005"},
)
class RemembersPaths(CheckpointManager):
    """Deletes by paths of the run that it was resumed from."""

    kept: tuple[str, ...] = ()

    def make_manifest(self, *given: Any, **named: Any) -> Manifest:  # noqa: ANN401
        """Write the list into the checkpoint."""
        manifest = super().make_manifest(*given, **named)
        own = CheckpointReference(self.root.absolute(), manifest.step, "model").manifest_path
        older = [one for one in self.kept if one != str(own)]
        return replace(manifest, config={"kept": [*older, str(own)]})

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Take the list from the checkpoint."""
        result = super().load(*given, **named)
        config = read_manifest(result.reference.manifest_path).config
        self.kept = tuple(config.get("kept", ()))  # a dump has none
        return result

    def retain(self, saved: CheckpointReference) -> None:
        """Delete what the list says, where no mirror is asked."""
        if self.mirror is not None:
            super().retain(saved)
            return
        own = str(saved.manifest_path.absolute())
        self.kept = (*(one for one in self.kept if one != own), own)
        while 0 < self.keep_last < len(self.kept):
            oldest, self.kept = Path(self.kept[0]), self.kept[1:]
            for name in read_manifest(oldest).files if oldest.exists() else ():
                self.unlink(oldest.parent / name)
            self.unlink(oldest)


@mutant(
    "C11",
    url="Lightning-AI/pytorch-lightning#5173",
    change="what may go is a list in memory: a restart forgets it",
    violates={"CKC-MIRR-007", "CKC-RETN-006"},
)
class RemembersNothing(CheckpointManager):
    """Rotates only what this process has saved."""

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """What is beyond `keep_last` and was saved by this process."""
        mine: set[int] = self.__dict__.setdefault("mine", set())
        mine.add(saved.step)
        return [one for one in super().victims(found, saved) if one.reference.step in mine]


@mutant(
    "D09",
    url="pytorch/torchtitan#871",
    change="an error of rotation is raised out of the save",
    violates={"CKC-RETN-007"},
)
class RotationCanFailASave(CheckpointManager):
    """Rotates in the path of the save."""

    def after_commit(self, reference: CheckpointReference) -> None:
        """Rotate and mirror, unguarded."""
        self.remove_superseded(reference)
        self.retain(reference)
        self.start_mirror(reference)


@mutant(
    "C17",
    url="allenai/OLMo-core#229",
    base="reference-trainer",
    change="the last step is saved at the end of the run, and must not exist yet",
    violates={"CKC-IOER-003", "CKC-RETN-008"},
)
class SavesAtTheEnd(Trainer):
    """Is not idempotent at the end of training."""

    def fit(self, job: Any, until: int, save_at: Any, resume: Any, journal: Any) -> None:  # noqa: ANN401
        """Train; the last save comes after the loop."""
        super().fit(job, until, [step for step in save_at if step != until], resume, journal)
        if until in save_at:
            if until in self.manager.steps():
                msg = f"the checkpoint of step {until} exists already"
                raise FileExistsError(msg)
            self.checkpoint(job, journal)


@mutant(
    "C02",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="rotation counts names, whole or not: what a dead save left takes a place",
    violates={"CKC-RETN-009"},
)
class CountsLeftovers(CheckpointManager):
    """Counts what is not committed."""

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """What is beyond `keep_last` among all that has a step's name."""
        mine = [one for one in found if not one.complete or self.is_own(one)]
        steps = sorted({one.reference.step for one in mine}, reverse=True)
        kept = {*steps[: self.keep_last], saved.step} if self.keep_last > 0 else set(steps)
        return [one for one in reversed(mine) if one.reference.step not in kept]


@mutant(
    "C02-newer",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="the newest name tells what is superseded: a dead save's makes all older steps go",
    violates={"CKC-RETN-012"},
)
class OlderThanALeftoverGoes(CheckpointManager):
    """Takes an incomplete newer step for the one that the run stands on."""

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """What is beyond `keep_last`; and all of this run that is older than an incomplete step."""
        newest = max((one.reference.step for one in found if not one.complete), default=0)
        if self.keep_last <= 0 or newest <= saved.step:
            return super().victims(found, saved)
        return [one for one in found if self.is_own(one)]


@mutant(
    "C02-cut",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="rotation counts a step whose manifest is whole, although a file of it is cut short",
    violates={"CKC-RETN-009"},
)
class CountsByManifest(CheckpointManager):
    """Does not look at the files behind a manifest."""

    def is_own(self, candidate: Candidate) -> bool:
        """Whether its manifest is of this run."""
        return candidate.manifest is not None and candidate.manifest.run_id in self.own_runs


@mutant(
    "C02-stops",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="rotation ends with a warning where a checkpoint's files do not fit its manifest",
    violates={"CKC-RETN-013"},
)
class StopsAtDamage(CheckpointManager):
    """Leaves everything to a person who never comes."""

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """Nothing, as long as something is wrong."""
        if any(candidate.manifest is not None and not candidate.complete for candidate in found):
            return []
        return super().victims(found, saved)


@mutant(
    "C08-arrival",
    url="huggingface/accelerate#1163",
    change="rotation keeps what was saved last, in the order of the saves of this process",
    violates={"CKC-RETN-002", "CKC-SIDE-014"},
)
class OldestByArrival(OrdersSteps):
    """Takes the order of saves for that of steps; what was there before goes by its number."""

    def victims(self, found: list[Candidate], saved: CheckpointReference) -> list[Candidate]:
        """What is beyond `keep_last` in the order of saves."""
        arrived: list[int] = self.__dict__.setdefault("arrived", [])
        arrived[:] = [*(step for step in arrived if step != saved.step), saved.step]
        return super().victims(found, saved)

    def order(self, candidate: Candidate) -> tuple[int, int]:
        """As it was saved."""
        arrived: list[int] = self.__dict__["arrived"]
        step = candidate.reference.step
        return (arrived.index(step) if step in arrived else -1), step


@mutant(
    "C08-shared",
    url="huggingface/accelerate#1163",
    change="what an old step holds goes with it, unless the newest step holds the same",
    violates={"CKC-RETN-002"},
)
class SharesWithTheNewest(CheckpointManager):
    """Keeps equal contents once, and looks for others that need them in the newest step alone."""

    def retain(self, saved: CheckpointReference) -> None:
        """Rotate; then remove files that hold what a deleted step held."""
        before = {one.reference: one.manifest for one in resolve.scan(self.root) if one.manifest}
        super().retain(saved)
        after = {one.reference: one.manifest for one in resolve.scan(self.root) if one.manifest}
        gone = [manifest for one, manifest in before.items() if one not in after]
        held = {entry.blake3 for one in gone for entry in one.files.values()}
        held -= {entry.blake3 for entry in after[saved].files.values()}
        for manifest in after.values():
            for name, entry in manifest.files.items():
                if entry.blake3 in held:
                    self.unlink(self.root / name)


@mutant(
    "C02-cached",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="a step that a manager has seen whole counts as whole for as long as it is open",
    violates={"CKC-RETN-009"},
)
class OnceWholeAlwaysWhole(CheckpointManager):
    """Looks at the files of a step once."""

    def steps(self) -> list[int]:
        """List them, and note them."""
        for one in resolve.scan(self.root):
            self.is_own(one)
        return super().steps()

    def is_own(self, candidate: Candidate) -> bool:
        """Whether it is of this run, and was complete once."""
        known: set[CheckpointReference] = self.__dict__.setdefault("known", set())
        if super().is_own(candidate):
            known.add(candidate.reference)
        return candidate.reference in known and candidate.manifest is not None


@mutant(
    "C06-upload",
    url="huggingface/transformers#37260",
    change="what rotates when the uploads have ended keeps the largest numbers alone",
    violates={"CKC-RETN-004"},
)
class UploadedMayGo(CheckpointManager):
    """Does not know by then what was saved last."""

    def close(self) -> None:
        """Let the mirror finish, and rotate once more."""
        super().close()
        found = resolve.scan(self.root)
        if self.mirror is not None and found:
            self.retain(max((one.reference for one in found), key=lambda one: one.step))
