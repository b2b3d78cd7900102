"""Saves that go on while the job trains (bugs C02, C03, D01, D02, D04, D05, D10, D11)."""

from __future__ import annotations

import atexit
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, SaveHandle, resolve
from ckpt_conformance.reference_impl.background import BackgroundSaves
from ckpt_conformance.reference_impl.encode import walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.reference_impl.snapshot import Snapshot


class Backgrounds(CheckpointManager):
    """Puts background saves of another class in the place of its own."""

    kind: type[BackgroundSaves] = BackgroundSaves

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """Begin with none."""
        super().__init__(*given, **named)
        self.background = self.kind()


# -- what is saved --------------------------------------------------------------------------------


@mutant(
    "D01",
    url="pytorch/pytorch#144657",
    change="a save in the background copies no tensor that is on the CPU",
    violates={"CKC-ASYN-001"},
)
class SharesMemory(CheckpointManager):
    """Hands the live tensors to the thread."""

    def capture(self, step: int, **parts: Any) -> Snapshot:  # noqa: ANN401
        """As a save does that ends before it returns."""
        return super().capture(step, **{**parts, "copies": False})


@mutant(
    "D02",
    url="Lightning-AI/pytorch-lightning#21079",
    change="the thread takes the state when it comes to it",
    violates={"CKC-ASYN-001"},
)
class TakesItLater(CheckpointManager):
    """Begins the thread first."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """All of a save, in the thread."""
        return lambda: self.save_parts(step, parts)


@mutant(
    "D01-counters",
    url="pytorch/pytorch#144657",
    change="a save in the background copies tensors of one element when it writes them",
    violates={"CKC-ASYN-001"},
)
class SharesCounters(CheckpointManager):
    """Copies what is large."""

    def capture(self, step: int, *, copies: bool = False, **parts: Any) -> Snapshot:  # noqa: ANN401
        """With the live memory of tensors without dimensions, such as the steps of Adam."""
        state = super().capture(step, **parts, copies=copies)
        if not copies:
            return state
        live = super().capture(step, **parts)
        for document, tree in state.documents.items():
            tensors = walk(live.documents[document], torch.Tensor)
            for (_, copy), (_, tensor) in zip(walk(tree, torch.Tensor), tensors, strict=True):
                if not copy.ndim:
                    copy.set_(tensor)
        return state


@mutant(
    "D02-generators",
    url="Lightning-AI/pytorch-lightning#21079",
    change="weights are copied at the call, generators are read by the thread",
    violates={"CKC-ASYN-001"},
)
class ReadsGeneratorsLater(CheckpointManager):
    """Takes the train state when it writes."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """The snapshot of the call, with the generators of the thread's time."""
        early = self.capture(step, **parts, copies=True)

        def save() -> Path:
            late = self.capture(step, **parts)
            extra = {**early.documents["extra"], "rng": late.documents["extra"]["rng"]}
            documents = {**early.documents, "extra": extra}
            return self.save_snapshot(replace(early, documents=documents)).path

        return save


# -- what is there meanwhile ----------------------------------------------------------------------


@mutant(
    "C02-background",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="a save in the background rotates at the call, and counts the step to come",
    violates={"CKC-ASYN-002"},
)
class RotatesAtTheCall(CheckpointManager):
    """Makes room for the step to come."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """Delete what would be beyond `keep_last` with this step."""
        save = super().captured(step, parts)
        if self.keep_last > 0 and self.root.is_dir():
            listed = [one.reference for one in resolve.scan(self.root) if self.is_own(one)]
            for reference in listed[self.keep_last - 1 :]:
                self.delete_step(reference)
        return save


# -- saves that overlap ---------------------------------------------------------------------------


class Several(BackgroundSaves):
    """Lets several saves wait for their turn."""

    def __init__(self, limit: int = 4) -> None:
        """With room for some."""
        super().__init__(limit)


class TwoThreads(Several):
    """Lets two saves go on side by side."""

    def begin(self, step: int, work: Callable[[], Path]) -> SaveHandle:
        """In a pool of two threads."""
        self._pool = self._pool or ThreadPoolExecutor(2)
        return super().begin(step, work)


@mutant(
    "C03",
    url="NVIDIA-NeMo/Megatron-Bridge#5184",
    change="two saves in the background go on side by side: of one step the first may end last",
    violates={"CKC-ASYN-003"},
)
class SideBySide(Backgrounds):
    """Keeps no order."""

    kind = TwoThreads


@mutant(
    "D10-buffers",
    url="pytorch/pytorch#155192",
    change="the copies of a save in the background go into the buffers of the one before",
    violates={"CKC-ASYN-003"},
)
class ReusesBuffers(Backgrounds):
    """Allocates page-locked memory once, and forgets that a save may still read it."""

    kind = Several
    _buffers: dict[tuple[str, object], torch.Tensor] | None = None

    def capture(self, step: int, *, copies: bool = False, **parts: Any) -> Snapshot:  # noqa: ANN401
        """Copy into the buffers that are there."""
        state = super().capture(step, **parts, copies=copies)
        self._buffers = {} if self._buffers is None else self._buffers
        for document, tree in state.documents.items() if copies else ():
            for path, tensor in walk(tree, torch.Tensor):
                buffer = self._buffers.setdefault((document, path), torch.empty_like(tensor))
                if buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
                    tensor.set_(buffer.copy_(tensor))
        return state


# -- the end --------------------------------------------------------------------------------------


class Dropped(BackgroundSaves):
    """Drops what has not begun."""

    def close(self) -> None:
        """Wait for nothing."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        self._begun.clear()


@mutant(
    "D11-close",
    url="awslabs/hybrid-model-factory#4",
    change="close does not wait for saves in the background",
    violates={"CKC-ASYN-004"},
)
class ClosesAtOnce(Backgrounds):
    """Lets go."""

    kind = Dropped


@mutant(
    "D11-exit",
    url="awslabs/hybrid-model-factory#4",
    change="an exit handler removes the steps before the one that was being saved, there or not",
    violates={"CKC-ASYN-006"},
)
class CleansAtExit(CheckpointManager):
    """Rotates once more at the end, and writes in a pool, which takes nothing up any more then."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """Note what to remove unless the save has ended by then."""
        save = super().captured(step, parts)
        older = [one.reference for one in resolve.scan(self.root)] if self.root.is_dir() else []

        def clean() -> None:
            for reference in older:
                shutil.rmtree(reference.directory, ignore_errors=True)

        atexit.register(clean)

        def in_a_pool() -> Path:
            with ThreadPoolExecutor(1) as pool:
                path = pool.submit(save).result()
            atexit.unregister(clean)
            return path

        return in_a_pool


# -- errors and handles ---------------------------------------------------------------------------


class Silent(BackgroundSaves):
    """Forgets what nobody asked for."""

    def raise_untold(self) -> None:
        """Drop what has ended."""
        self._begun[:] = [handle for handle in self._begun if not handle.done()]


@mutant(
    "D04-untold",
    url="google/orbax#605",
    change="the error of a save in the background whose handle nobody asks is dropped",
    violates={"CKC-ASYN-005"},
)
class DropsErrors(Backgrounds):
    """Tells those alone who ask."""

    kind = Silent


class Impatient(SaveHandle):
    """Says that it is done as soon as the thread has it."""

    def done(self) -> bool:
        """Whether it was begun."""
        return True


@mutant(
    "D05-handle",
    url="Lightning-AI/pytorch-lightning#17915",
    change="the handle of a save in the background is done once it was handed to the thread",
    violates={"CKC-ASYN-007"},
)
class DoneOnceBegun(CheckpointManager):
    """Answers for the queue, not for the disk."""

    def save_async(self, step: int, **parts: Any) -> SaveHandle:  # noqa: ANN401
        """Begin; what is returned is done."""
        handle = super().save_async(step, **parts)
        begun: Future[Path] = vars(handle)["_future"]
        return Impatient(step, begun)


class Once(SaveHandle):
    """Tells an error to the first who asks."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What made it fail, the first time."""
        was_told = self.is_told
        error = super().exception(timeout)
        return None if was_told else error

    def wait(self, timeout: float | None = None) -> Path:
        """Block until it has ended; raise what `exception` gives."""
        if error := self.exception(timeout):
            raise error
        return Path()


class TellsOnce(BackgroundSaves):
    """Hands out such handles."""

    def begin(self, step: int, work: Callable[[], Path]) -> SaveHandle:
        """Begin as always."""
        begun: Future[Path] = vars(super().begin(step, work))["_future"]
        self._begun[-1] = Once(step, begun)
        return self._begun[-1]


@mutant(
    "D04-handle",
    url="google/orbax#605",
    change="a handle tells the error of its save to the first who asks, and to nobody else",
    violates={"CKC-ASYN-007"},
)
class ForgetsItsError(Backgrounds):
    """Clears what was read."""

    kind = TellsOnce
