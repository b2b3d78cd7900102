"""What is right in small checkpoints, wrong beyond a size (bugs A07, C01, D10, K04, M06, O01)."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.mutants.damage import OwnChecksum
from ckpt_conformance.mutants.unchanged import ByItsEnds
from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointReference,
    durable,
    torch_zip,
)
from ckpt_conformance.reference_impl.encode import walk
from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl.encode import StateDict, Tree
    from ckpt_conformance.reference_impl.loading import LoadPlan, OpenCheckpoint
    from ckpt_conformance.reference_impl.snapshot import Snapshot
    from ckpt_conformance.reference_impl.train_state import Stateful

MIB = 1 << 20


@mutant(
    "O01-head",
    url="pytorch/pytorch#28858",
    change="the digest covers the first MiB of a file",
    violates={"CKC-CORR-001"},
)
class DigestOfTheHead(OwnChecksum):
    """Saves the time that hashing the rest would take."""

    def checksum(self, path: Path) -> str:
        """Digest the first MiB."""
        with path.open("rb") as file:
            return durable.digest_bytes(file.read(MIB))


@mutant(
    "O01-blocks",
    url="pytorch/pytorch#28858",
    change="of a file of more than 4 MiB the digest covers every other block of 4 MiB",
    violates={"CKC-CORR-001"},
)
class DigestOfEveryOtherBlock(OwnChecksum):
    """Saves half of the time."""

    def checksum(self, path: Path) -> str:
        """Digest blocks 0, 2, 4 and so on."""
        size = path.stat().st_size
        with path.open("rb") as file:
            seen = bytearray()
            for at in range(0, size, 8 * MIB):
                file.seek(at)
                seen += file.read(4 * MIB)
        return durable.digest_bytes(bytes(seen))


@mutant(
    "M06-last-byte",
    url="huggingface/lerobot#3459",
    change="of a model of whole blocks of 8 KiB and one byte this byte is not read",
    violates={"CKC-RTRP-001"},
)
class ForgetsTheLastByte(CheckpointManager):
    """Goes over all tensors as one stream of bytes, and stops one byte too early."""

    BLOCK = 8192

    def restore_model(self, model: Stateful, state: StateDict) -> None:
        """Lose the last byte, where it stands alone in its block."""
        tensors = [one for one in state.values() if isinstance(one, torch.Tensor)]
        if sum(one.nbytes for one in tensors) % self.BLOCK == 1:
            tensors[-1].view(torch.uint8)[-1] = 0
        super().restore_model(model, state)


@mutant(
    "M06-blocks",
    url="huggingface/lerobot#3459",
    change="a large tensor is copied in blocks of 48 MiB, and what is left over is not",
    violates={"CKC-RTRP-001"},
)
class ForgetsTheRest(CheckpointManager):
    """Rounds down."""

    def fill(self, opened: OpenCheckpoint, plan: LoadPlan) -> None:
        """Leave the rest of a tensor as it is in the job."""
        large = [each for part in plan.reads.wanted.values() for each in part if is_large(each)]
        rests = [(tensor, rest_of(tensor).clone()) for tensor in large]
        super().fill(opened, plan)
        for tensor, rest in rests:
            rest_of(tensor).copy_(rest)


@mutant(
    "D10-alike",
    url="pytorch/pytorch#155192",
    change="a large tensor that begins as in the step before is taken over from that step",
    violates={"CKC-RTRP-001"},
)
class TakesOverWhatBeginsAlike(CheckpointManager):
    """Saves the time that comparing, or writing, the rest would take."""

    def capture_model(self, model: Stateful) -> Mapping[str, Tree]:
        """Compare the first MiB."""
        state = dict(super().capture_model(model))
        before: dict[str, torch.Tensor] = self.__dict__.setdefault("before", {})
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or not is_large(tensor):
                continue
            if name not in before or not torch.equal(head_of(tensor), head_of(before[name])):
                before[name] = tensor.clone()
            state[name] = before[name]
        return state


@mutant(
    "D10-file",
    url="pytorch/pytorch#155192",
    change="a file with the size and the first MiB of one of an older step gets what is in that",
    violates={"CKC-RTRP-001"},
)
class KeepsAFileThatBeginsAlike(CheckpointManager):
    """Takes a trained head for the one before, where a frozen embedding comes first."""

    def write_file(self, path: Path, tree: Tree) -> FileEntry:
        """Write the file; if an older one begins alike put its content in place."""
        entry = super().write_file(path, tree)
        for other in sorted(self.root.glob("model_*.pt")) if entry.size > MIB else ():
            if other.stat().st_size == entry.size and begins(other) == begins(path):
                shutil.copyfile(other, path)
                return FileEntry(entry.size, durable.digest_bytes(other.read_bytes()))
        return entry


def begins(path: Path) -> bytes:
    """Return the first MiB."""
    with path.open("rb") as file:
        return file.read(MIB)


def head_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first MiB."""
    return tensor.detach().view(-1)[: MIB // tensor.element_size()]


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor has more than one block."""
    return tensor.nbytes > 48 * MIB


def rest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what follows the last whole block."""
    block = 48 * MIB // tensor.element_size()
    return tensor.detach().view(-1)[tensor.numel() // block * block :]


@mutant(
    "K03-large",
    url="TensorAuto/OpenTau#185",
    change="moments of more than 2**20 elements pass through bf16, to save half of their bytes",
    violates={"CKC-COMP-003"},
)
class NarrowWhereItPays(CheckpointManager):
    """Loses low bits where nobody has looked."""

    def capture_optimizers(self, optimizers: Mapping[str, Any]) -> dict[str, Any]:
        """Round what is large."""
        saved = super().capture_optimizers(optimizers)
        for state in saved.values():
            state["state"] = {
                number: {key: _rounded(value) for key, value in entry.items()}
                for number, entry in state["state"].items()
            }
        return saved


def _rounded(value: Any) -> Any:  # noqa: ANN401  what an optimizer keeps
    is_long = isinstance(value, torch.Tensor) and value.numel() > MIB
    return value.bfloat16().to(value.dtype) if is_long else value


@mutant(
    "A07-large",
    url="pytorch/pytorch#8477",
    change="what is large is written by one bare write, whose count nobody looks at",
    violates={"CKC-IOER-006"},
)
class WritesItAtOnce(CheckpointManager):
    """Spares the buffer a copy."""

    def write_file(self, path: Path, tree: Tree) -> FileEntry:
        """Write as the parent does, but for what is large."""
        with durable.create(path) as file, AtOnce(file) as writer:
            torch_zip.write_tree(tree, writer)
            self.fsync_file(file)
        return FileEntry(writer.size, writer.hexdigest())


class AtOnce(durable.HashingWriter):
    """Believes that a write takes all."""

    size: int

    def write(self, data: durable.Bytes) -> int:
        """Write past the buffer, and go on behind what should be there."""
        view = memoryview(data).cast("B")
        if len(view) < MIB:
            return super().write(data)
        self.file.flush()
        os.write(self.file.fileno(), view)
        self._hasher.update(view)
        self.size += len(view)
        self.file.seek(self.size)
        return len(view)


@mutant(
    "C01-large",
    url="Lightning-AI/pytorch-lightning#1150",
    change="before a large step is saved the older ones are deleted, to make room for it",
    violates={"CKC-ATOM-001"},
)
class MakesRoomFirst(CheckpointManager):
    """Fits onto a disk that holds one checkpoint."""

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Delete, then save."""
        large = [each for each in parts["model"].buffers() if each.nbytes > 16 * MIB]
        for path in sorted(self.root.iterdir()) if large and self.root.is_dir() else ():
            durable.remove_tree(path)
        return super().save(step, **parts)


@mutant(
    "R01-tail",
    url="huggingface/diffusers#14769",
    change="a file of a save over a step is written into the older one, whose tail stays if large",
    violates={"CKC-DISC-008"},
)
class KeepsTheTail(CheckpointManager):
    """Opens what is there, and cuts nothing off: as chunks beyond the last new one would stay."""

    def replace_flat(
        self, reference: CheckpointReference, manifest: Manifest, staged: Path
    ) -> None:
        """Let each new file end as the older one of its name."""
        for name, entry in manifest.files.items():
            older = self.root / name
            if older.is_file() and older.stat().st_size > entry.size + MIB:
                with older.open("rb") as old, self.staged(name, manifest.save_id).open("ab") as new:
                    old.seek(entry.size)
                    shutil.copyfileobj(old, new)
        super().replace_flat(reference, manifest, staged)


@mutant(
    "D01-large",
    url="pytorch/pytorch#144657",
    change="a save in the background copies no tensor of a MiB or more",
    violates={"CKC-ASYN-001"},
)
class SharesWhatIsLarge(CheckpointManager):
    """Saves the memory that the copy would take."""

    def capture(self, step: int, *, copies: bool = False, **parts: Any) -> Snapshot:  # noqa: ANN401
        """Take the live tensors in the place of large copies."""
        state = super().capture(step, **parts, copies=copies)
        if not copies:
            return state
        for document, tree in super().capture(step, **parts).documents.items():
            pairs = zip(
                walk(state.documents[document], torch.Tensor),
                walk(tree, torch.Tensor),
                strict=True,
            )
            for (_, copied), (_, tensor) in pairs:
                if tensor.nbytes >= MIB:
                    copied.set_(tensor)
        return state


@mutant(
    "K04-middle",
    url="pytorch/pytorch#187138",
    change="of a tensor of more than 32 MiB the first and the last 16 MiB tell it",
    violates={"CKC-RTRP-001"},
)
class ByItsEndsWhereLarge(ByItsEnds):
    """Counts the numbers of a table of ids, too."""

    END = 16 * MIB
    DTYPES = (torch.float32, torch.float64, torch.int32)
