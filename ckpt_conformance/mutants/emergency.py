"""Emergency dumps (bugs B05, C01, C05, P01 to P04)."""

from __future__ import annotations

import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, Termination, resolve

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path
    from types import FrameType

    from ckpt_conformance.reference_impl.layout import CheckpointReference
    from ckpt_conformance.reference_impl.loading import OpenCheckpoint
    from ckpt_conformance.reference_impl.snapshot import Snapshot


# -- what a resume takes ---------------------------------------------------------------------------


@mutant(
    "B05-dump",
    url="KempnerInstitute/KempnerForge#177",
    change="discovery knows the names of regular checkpoints alone",
    violates={"CKC-EMRG-001"},
)
class OverlooksDumps(CheckpointManager):
    """Writes dumps that nobody reads."""

    def whole_dumps(self, roots: Sequence[Path]) -> list[CheckpointReference]:
        """None."""
        del roots
        return []


@mutant(
    "P01",
    url="goodfire-ai/spd#677",
    change="a dump is looked at only where a regular checkpoint is",
    violates={"CKC-EMRG-001"},
)
class DumpsBesideRegular(CheckpointManager):
    """Takes the run for a new one until its first regular save."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """Nothing without a regular checkpoint."""
        found = super().candidates(*given, **named)
        return found if any(one.kind != "emergency" for one in found) else []


@mutant(
    "C05-dump",
    url="huggingface/transformers#26961",
    change="of a dump and regular checkpoints the one comes first that was modified last",
    violates={"CKC-EMRG-002"},
)
class NewestByTheClock(CheckpointManager):
    """Asks the disk what is new."""

    def in_order(self, candidates: list[CheckpointReference]) -> list[CheckpointReference]:
        """By the time of their manifests, where there is a dump."""
        ordered = super().in_order(candidates)
        if any(one.kind == "emergency" for one in ordered):
            ordered.sort(key=lambda one: -one.manifest_path.stat().st_mtime_ns)
        return ordered


@mutant(
    "P03-mixed",
    url="kyutai-labs/pocket-tts#277",
    change="the files of a dump are compared with their marker by their sizes alone",
    violates={"CKC-EMRG-003"},
)
class TrustsParts(CheckpointManager):
    """Reads the files that are there."""

    def verify_file(self, file: Any, entry: Any) -> None:  # noqa: ANN401
        """Verify what is no dump."""
        if "emergency_step_" not in str(file.name):
            super().verify_file(file, entry)

    def fill(self, opened: OpenCheckpoint, plan: Any) -> None:  # noqa: ANN401
        """Without a second look at a dump."""
        if opened.reference.kind == "emergency":
            opened.files = {
                name: (file, replace(entry, blake3=_digest_of(opened, name)))
                for name, (file, entry) in opened.files.items()
            }
        super().fill(opened, plan)


def _digest_of(opened: OpenCheckpoint, name: str) -> str:
    from ckpt_conformance.reference_impl.durable import digest_bytes

    return digest_bytes((opened.reference.directory / name).read_bytes())


# -- while it is made ------------------------------------------------------------------------------


@mutant(
    "C01-dump",
    url="Lightning-AI/pytorch-lightning#1150",
    change="a dump makes room first: it removes the regular checkpoint",
    violates={"CKC-EMRG-004"},
)
class MakesRoom(CheckpointManager):
    """Has a small disk."""

    def dump(self, state: Snapshot) -> Path:
        """Remove what the dump will replace."""
        for candidate in resolve.scan(self.root) if self.root.is_dir() else ():
            self.delete_step(candidate.reference)
        return super().dump(state)


@mutant(
    "C01-oldest",
    url="Lightning-AI/pytorch-lightning#1150",
    change="a dump makes room first: of several regular checkpoints it removes the oldest",
    violates={"CKC-EMRG-004"},
)
class MakesSomeRoom(CheckpointManager):
    """Has a small disk, and two checkpoints that one may go back to."""

    def dump(self, state: Snapshot) -> Path:
        """Remove the oldest, where another one stays."""
        there = resolve.scan(self.root) if self.root.is_dir() else []
        regular = [one.reference for one in there if one.reference.kind != "emergency"]
        if len(regular) > 1:
            self.delete_step(min(regular, key=lambda one: one.step))
        return super().dump(state)


@mutant(
    "P02",
    url="Lightning-AI/pytorch-lightning#21406",
    change="the handler of SIGTERM raises, in the middle of what goes on",
    violates={"CKC-EMRG-005"},
)
class RaisesInHandler(CheckpointManager):
    """Leaves whatever runs."""

    @contextmanager
    def catch_sigterm(self, deadline: float = 30.0) -> Generator[Termination]:
        """Raise where the signal finds the job."""
        with super().catch_sigterm(deadline) as termination:

            def stop(_number: int, _frame: FrameType | None) -> None:
                raise InterruptedError("told to end")

            signal.signal(signal.SIGTERM, stop)
            yield termination


@mutant(
    "P02-twice",
    url="Lightning-AI/pytorch-lightning#21406",
    change="the handler of SIGTERM restores the default action: a second one ends the process",
    violates={"CKC-EMRG-005"},
)
class HandlesOnce(CheckpointManager):
    """Believes that one signal is all that comes."""

    @contextmanager
    def catch_sigterm(self, deadline: float = 30.0) -> Generator[Termination]:
        """Note the first one."""
        with super().catch_sigterm(deadline) as termination:
            noted: Any = signal.getsignal(signal.SIGTERM)

            def once(number: int, frame: FrameType | None) -> None:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                noted(number, frame)

            signal.signal(signal.SIGTERM, once)
            yield termination


@mutant(
    "P04",
    url="NVIDIA-NeMo/Speech#6734",
    change="a dump counts the unfinished epoch as done",
    violates={"CKC-EMRG-006"},
)
class EndsTheEpoch(CheckpointManager):
    """Uses what is kept at the end of training."""

    def dump(self, state: Snapshot) -> Path:
        """With the loader at the start of the next epoch."""
        extra = dict(state.documents["extra"])
        if isinstance(extra.get("dataloader"), dict) and "epoch" in extra["dataloader"]:
            loader = extra["dataloader"]
            extra["dataloader"] = {**loader, "epoch": loader["epoch"] + 1, "position": 0}
        return super().dump(replace(state, documents={**state.documents, "extra": extra}))


@mutant(
    "P04-generators",
    url="NVIDIA-NeMo/Speech#6734",
    change="a dump has the generators of the start of the attempt",
    violates={"CKC-EMRG-006"},
)
class OldGenerators(CheckpointManager):
    """Keeps what was cheap to take once."""

    _first: Any = None

    def capture(self, step: int, **parts: Any) -> Snapshot:  # noqa: ANN401
        """Note the generators of the first capture."""
        state = super().capture(step, **parts)
        self._first = self._first or state.documents["extra"]["rng"]
        return state

    def dump(self, state: Snapshot) -> Path:
        """With those."""
        extra = {**state.documents["extra"], "rng": self._first}
        return super().dump(replace(state, documents={**state.documents, "extra": extra}))


class KnowsWhatIsUnderWay(CheckpointManager):
    """Knows what a save in the background has captured, for as long as that goes on."""

    under_way: Snapshot | None = None

    def capture(self, step: int, *, copies: bool = False, **parts: Any) -> Snapshot:  # noqa: ANN401
        """Note what is captured for the background."""
        state = super().capture(step, copies=copies, **parts)
        self.under_way = state if copies else self.under_way
        return state

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save; then nothing is under way."""
        try:
            return super().save_snapshot(state)
        finally:
            self.under_way = None


@mutant(
    "P04-background",
    url="NVIDIA-NeMo/Speech#6734",
    change="a dump beside a save in the background has the optimizer that this one has copied",
    violates={"CKC-EMRG-006"},
)
class SharesTheCopy(KnowsWhatIsUnderWay):
    """Spares itself what somebody has copied already, of an earlier step."""

    def dump(self, state: Snapshot) -> Path:
        """With what is there."""
        if self.under_way is None:
            return super().dump(state)
        copied = self.under_way.documents["optim"]
        return super().dump(replace(state, documents={**state.documents, "optim": copied}))


@mutant(
    "P04-late",
    url="NVIDIA-NeMo/Speech#6734",
    change="a dump that comes while a save goes on in the background takes that for the dump",
    violates={"CKC-EMRG-006"},
)
class ComesTooLate(KnowsWhatIsUnderWay):
    """Loses the steps since that save began."""

    def dump(self, state: Snapshot) -> Path:
        """Only where nothing else is saved."""
        return super().dump(state) if self.under_way is None else self.root


# -- after it was made -----------------------------------------------------------------------------


@mutant(
    "C02-dump",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="dumps are removed when the next save begins",
    violates={"CKC-EMRG-007"},
)
class TidiesEarly(CheckpointManager):
    """Takes a dump for used once the job trains again."""

    def prepare(self) -> None:
        """Remove dumps first."""
        for reference in resolve.dump_references(self.root):
            shutil.rmtree(reference.directory)
        super().prepare()


@mutant(
    "C02-one-dump",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="there is one dump: the one before is removed to make room for the next",
    violates={"CKC-EMRG-007"},
)
class KeepsOneDump(CheckpointManager):
    """Makes room first."""

    def dump(self, state: Snapshot) -> Path:
        """Remove dumps, then make one."""
        for reference in resolve.dump_references(self.root):
            shutil.rmtree(reference.directory)
        return super().dump(state)


# -- several ranks ---------------------------------------------------------------------------------


@mutant(
    "P03",
    url="kyutai-labs/pocket-tts#277",
    change="several ranks name a dump by the step of the last report, which each made before it",
    violates={"CKC-EMRG-008"},
)
class NamesTheReport(CheckpointManager):
    """Reports each second step; ranks that are at two steps have made the same report last."""

    def dump(self, state: Snapshot) -> Path:
        """As the dump of that step."""
        behind = 0 if self.ranks is None else state.step % 2
        return super().dump(replace(state, step=state.step - behind))
