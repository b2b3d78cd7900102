"""Saves that go on while the job trains (bugs C02, C03, D04, D05, D10, D11)."""

from __future__ import annotations

import atexit
import os
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    LoadResult,
    SaveHandle,
    resolve,
)
from ckpt_conformance.reference_impl.background import BackgroundSaves
from ckpt_conformance.reference_impl.encode import walk
from ckpt_conformance.reference_impl.errors import BackgroundSaveFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.reference_impl.layout import CheckpointReference, Kind
    from ckpt_conformance.reference_impl.snapshot import Snapshot

    Asked = str | os.PathLike[str] | CheckpointReference | None


class Backgrounds(CheckpointManager):
    """Puts background saves of another class in the place of its own."""

    kind: type[BackgroundSaves] = BackgroundSaves

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """Begin with none."""
        super().__init__(*given, **named)
        self.background = self.kind()


# -- what is there meanwhile ----------------------------------------------------------------------


@mutant(
    "C02-background",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="a save in the background rotates at the call, and counts the step to come",
    violates={"CKC-ASYN-002", "CKC-ASYN-009"},
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


@mutant(
    "C02-busy",
    url="NVIDIA-NeMo/Megatron-Bridge#4678",
    change="while a save in the background goes on a file says so, and no load is served beside it",
    violates={"CKC-ASYN-002"},
)
class NoLoadBesideASave(CheckpointManager):
    """Takes the file for a process that lives."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """Make the file at the call, and remove it at the end, also after an error."""
        save = super().captured(step, parts)
        busy = self.root / "busy"
        busy.touch()

        def saved() -> Path:
            try:
                return save()
            finally:
                busy.unlink(missing_ok=True)

        return saved

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Refuse while there is a save."""
        if (self.root / "busy").exists():
            raise CheckpointDamaged(f"a save goes on in {self.root}")
        return super().load(*given, **named)


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
    buffers = 1
    _all: list[dict[tuple[str, object], torch.Tensor]] | None = None

    def capture(self, step: int, *, copies: bool = False, **parts: Any) -> Snapshot:  # noqa: ANN401
        """Copy into the buffers that are there."""
        state = super().capture(step, **parts, copies=copies)
        if not copies:
            return state
        self._all = self._all or [{} for _ in range(self.buffers)]
        self._all.append(buffers := self._all.pop(0))
        for document, tree in state.documents.items():
            for path, tensor in walk(tree, torch.Tensor):
                buffer = buffers.setdefault((document, path), torch.empty_like(tensor))
                if buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
                    tensor.set_(buffer.copy_(tensor))
        return state


@mutant(
    "D10-two-buffers",
    url="pytorch/pytorch#155192",
    change="saves in the background take turns with two buffers, free or not",
    violates={"CKC-ASYN-003"},
)
class TakesTurns(ReusesBuffers):
    """Takes two to be enough, whatever the queue."""

    buffers = 2


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


class CancelsTheRest(BackgroundSaves):
    """Raises the first error that close meets, and lets nothing of the queue be made after it."""

    def __init__(self, limit: int = 4) -> None:
        """Begin with none."""
        super().__init__(limit)

    def close(self) -> None:
        """Wait for one after the other, to the first error."""
        for handle in list(self._begun):
            error = handle.untold_error()
            if error is not None and self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None
                self._begun.clear()
                raise BackgroundSaveFailed([handle.step]) from error
        super().close()


@mutant(
    "D11-cancels",
    url="awslabs/hybrid-model-factory#4",
    change="close raises the first error, and cancels what is queued behind that save",
    violates={"CKC-ASYN-004"},
)
class CancelsAtClose(Backgrounds):
    """Loses good saves behind a failed one."""

    kind = CancelsTheRest


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


class Daemons(BackgroundSaves):
    """Saves in a daemon thread, which the interpreter does not wait for."""

    def __init__(self) -> None:
        """Let nobody look at what has not ended when the interpreter ends."""
        super().__init__()
        self._begun = []

    def begin(self, step: int, work: Callable[[], Path]) -> SaveHandle:
        """Start the thread."""
        future: Future[Path] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  the handle tells it
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        self._begun.append(SaveHandle(step, future))
        return self._begun[-1]

    def close(self) -> None:
        """Wait, as always."""
        self.finish()
        super().close()


@mutant(
    "D11-daemon",
    url="awslabs/hybrid-model-factory#4",
    change="a daemon thread marks the directory until its save ends, and a load wants no mark",
    violates={"CKC-ASYN-006"},
)
class MarksInADaemon(Backgrounds):
    """Dies with the interpreter, in the midst of it."""

    kind = Daemons

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """Keep a mark there while the thread saves, and take it away whatever comes of that."""
        save = super().captured(step, parts)

        def marked() -> Path:
            self.root.mkdir(parents=True, exist_ok=True)
            self.replace_small_file("unfinished", b"")
            try:
                return save()
            finally:
                (self.root / "unfinished").unlink()

        return marked

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """None while the mark is there."""
        return [] if (self.root / "unfinished").exists() else super().candidates(*given, **named)


# -- a save that fails -----------------------------------------------------------------------------


@mutant(
    "C01-background",
    url="Lightning-AI/pytorch-lightning#1150",
    change="the thread rotates before it writes, and counts the step to come",
    violates={"CKC-ASYN-009"},
)
class RotatesFirst(CheckpointManager):
    """Makes room before it knows that the new step will be there."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """Delete in the thread what would be beyond `keep_last` with this step."""
        save = super().captured(step, parts)

        def make_room() -> Path:
            if self.keep_last > 0 and self.root.is_dir():
                listed = [one.reference for one in resolve.scan(self.root) if self.is_own(one)]
                for reference in listed[self.keep_last - 1 :]:
                    self.delete_step(reference)
            return save()

        return make_room


@mutant(
    "C01-same-step",
    url="Lightning-AI/pytorch-lightning#1150",
    change="a save of a step that is there removes the old one in the thread, and then writes",
    violates={"CKC-ASYN-009"},
)
class RemovesTheSameStep(CheckpointManager):
    """Clears the place of what comes."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """Delete the step of this number first."""
        save = super().captured(step, parts)

        def replace_it() -> Path:
            for one in resolve.scan(self.root) if self.root.is_dir() else ():
                if one.reference.step == step and self.is_own(one):
                    self.delete_step(one.reference)
            return save()

        return replace_it


@mutant(
    "D06-background",
    url="mosaicml/composer#3376",
    change="the thread announces a step before it writes it, and a load wants what is announced",
    violates={"CKC-ASYN-003", "CKC-ASYN-009"},
)
class AnnouncesFirst(CheckpointManager):
    """Uploads the symlink before the files."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """Say in the thread what comes, and then save."""
        save = super().captured(step, parts)

        def announce() -> Path:
            self.root.mkdir(parents=True, exist_ok=True)
            self.replace_small_file("announced", str(step).encode())
            return save()

        return announce

    def candidates(
        self, reference: Asked = None, step: int | None = None, require_kind: Kind | None = None
    ) -> list[CheckpointReference]:
        """The announced step alone, if one is, and no other is asked for."""
        candidates = super().candidates(reference, step, require_kind)
        announced = self.root / "announced"
        if step is not None or not announced.exists():
            return candidates
        return [one for one in candidates if one.step == int(announced.read_text())]


# -- errors and handles ---------------------------------------------------------------------------


class Silent(BackgroundSaves):
    """Forgets at the next save what nobody asked for; what is there at close is raised."""

    def make_room(self) -> None:
        """Wait, and drop what has ended."""
        self._finish(self._begun)
        self._begun.clear()


@mutant(
    "D04-untold",
    url="google/orbax#605",
    change="the next save drops the error of one in the background that nobody asked for",
    violates={"CKC-ASYN-005"},
)
class DropsErrors(Backgrounds):
    """Tells those alone who ask, and who close at once."""

    kind = Silent


class Deaf(BackgroundSaves):
    """Drops what nobody asked for when it is closed."""

    def close(self) -> None:
        """Wait for all, and say nothing."""
        self.finish()
        self._begun.clear()
        super().close()


@mutant(
    "D04-close",
    url="google/orbax#605",
    change="close drops the error of a save in the background that nobody asked for",
    violates={"CKC-ASYN-004"},
)
class ClosesInSilence(Backgrounds):
    """Joins the thread."""

    kind = Deaf


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


class Running(SaveHandle):
    """Says that it is done as soon as the thread has begun."""

    def done(self) -> bool:
        """Whether it runs, or has run."""
        begun: Future[Path] = vars(self)["_future"]
        return begun.running() or begun.done()


@mutant(
    "D05-running",
    url="Lightning-AI/pytorch-lightning#17915",
    change="the handle of a save in the background is done once the thread has begun with it",
    violates={"CKC-ASYN-007"},
)
class DoneOnceItRuns(CheckpointManager):
    """Asks whether the thread has taken it up."""

    def save_async(self, step: int, **parts: Any) -> SaveHandle:  # noqa: ANN401
        """Begin; what is returned is done early."""
        handle = super().save_async(step, **parts)
        begun: Future[Path] = vars(handle)["_future"]
        return Running(step, begun)


class Written(SaveHandle):
    """Answers once the bytes of a save are written; its names come later."""

    def __init__(self, step: int, future: Future[Path], written: threading.Event) -> None:
        """Watch a save, and its bytes."""
        super().__init__(step, future)
        self.written = written

    def done(self) -> bool:
        """Whether the bytes are there, or it has failed."""
        return self.written.is_set() or super().done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the bytes are there; return what made it fail until then."""
        while not self.written.wait(0.01) and not super().done():
            pass
        return super().exception(timeout) if super().done() else None

    def wait(self, timeout: float | None = None) -> Path:
        """Block until the bytes are there; raise what `exception` gives."""
        if error := self.exception(timeout):
            raise error
        return Path()


@mutant(
    "A04-wait",
    url="NVIDIA/nvidia-resiliency-ext#359",
    change="the handle of a save in the background answers once its bytes are written, not named",
    violates={"CKC-ASYN-007"},
)
class AnswersBeforeTheRename(CheckpointManager):
    """Leaves the renames to a thread that nobody waits for."""

    written = threading.Event()

    def save_async(self, step: int, **parts: Any) -> SaveHandle:  # noqa: ANN401
        """Begin; what is returned answers early."""
        self.background.make_room()  # there is one event
        self.written = threading.Event()
        handle = super().save_async(step, **parts)
        begun: Future[Path] = vars(handle)["_future"]
        return Written(step, begun, self.written)

    def publish(self, staged: Path) -> CheckpointReference:
        """Say that all is written, then give it its names."""
        self.written.set()
        return super().publish(staged)


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


@mutant(
    "D04-swallowed",
    url="google/orbax#605",
    change="the thread catches what the save raises, and its handle says that it went well",
    violates={"CKC-ASYN-004", "CKC-ASYN-005", "CKC-ASYN-007"},
)
class Swallows(CheckpointManager):
    """Logs, and goes on."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """Save, or do not."""
        save = super().captured(step, parts)

        def save_if_possible() -> Path:
            try:
                return save()
            except Exception:  # noqa: BLE001  the bug
                return Path()

        return save_if_possible


class Unpolled(SaveHandle):
    """Knows its error once somebody has waited."""

    _waited = False

    def wait(self, timeout: float | None = None) -> Path:
        """As always."""
        self._waited = True
        return super().wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What made it fail, if somebody has waited."""
        error = super().exception(timeout)
        return error if self._waited else None


class TellsWhoWaits(BackgroundSaves):
    """Hands out such handles."""

    def begin(self, step: int, work: Callable[[], Path]) -> SaveHandle:
        """Begin as always."""
        begun: Future[Path] = vars(super().begin(step, work))["_future"]
        self._begun[-1] = Unpolled(step, begun)
        return self._begun[-1]


@mutant(
    "D04-polled",
    url="google/orbax#605",
    change="exception() of a handle is None, though its save failed, until wait() has been called",
    violates={"CKC-ASYN-007"},
)
class SilentToPolls(Backgrounds):
    """Fills in the error when somebody waits."""

    kind = TellsWhoWaits


class Sticky(BackgroundSaves):
    """Keeps its first error for every later save."""

    _first: BaseException | None = None

    def begin(self, step: int, work: Callable[[], Path]) -> SaveHandle:
        """Begin what fails for ever once it has failed."""

        def work_once() -> Path:
            if self._first is not None:
                raise self._first
            try:
                return work()
            except BaseException as error:
                self._first = error
                raise

        return super().begin(step, work_once)


@mutant(
    "D04-sticky",
    url="google/orbax#605",
    change="the error of one save in the background is that of every later one, and none is made",
    violates={"CKC-ASYN-008"},
)
class StaysBroken(Backgrounds):
    """Never clears what it was told."""

    kind = Sticky


class Unbalanced(BackgroundSaves):
    """Counts saves that went well, and waits in close for as many as were begun."""

    _failed = False

    def begin(self, step: int, work: Callable[[], Path]) -> SaveHandle:
        """Begin as always."""

        def note() -> Path:
            try:
                return work()
            except BaseException:
                self._failed = True
                raise

        return super().begin(step, note)

    def close(self) -> None:
        """Wait for a count that is not reached after a failure."""
        super().close()
        if self._failed:
            threading.Event().wait()


@mutant(
    "D04-hang",
    url="google/orbax#605",
    change="a save in the background that failed is never counted as done, so close waits for ever",
    violates={"CKC-ASYN-008"},
)
class HangsAfterAFailure(Backgrounds):
    """Misses a task_done()."""

    kind = Unbalanced


# -- a process that writes ------------------------------------------------------------------------


class Forks(CheckpointManager):
    """Lets a forked process write."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """Fork in the thread, and wait there."""
        save = super().captured(step, parts)

        def by_fork() -> Path:
            if not (child := os.fork()):
                try:
                    save()
                    for mirror in self.mirrors:  # its queue ends with this process
                        mirror.close()
                except BaseException:  # noqa: BLE001  the parent sees the status
                    os._exit(1)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            self.look_at(os.waitstatus_to_exitcode(status))
            return self.root

        return by_fork

    def look_at(self, code: int) -> None:
        """Raise for the exit code of a process that did not save."""
        if code:
            raise OSError(f"the writer ended with {code}")


@mutant(
    "D04-writer",
    url="google/orbax#605",
    change="a forked process writes; that a signal ended it is taken for a good end",
    violates={"CKC-ASYN-010"},
)
class DeafToSignals(Forks):
    """Looks at the status of an exit alone."""

    def look_at(self, code: int) -> None:
        """Pass over the number of a signal."""
        super().look_at(max(code, 0))


@mutant(
    "D04-slot",
    url="google/orbax#605",
    change="a forked process writes; once a signal has ended one, every later save is refused",
    violates={"CKC-ASYN-011"},
)
class KeepsTheSlot(Forks):
    """Never gives the place of a dead writer away."""

    _is_taken = False

    def look_at(self, code: int) -> None:
        """Keep the place."""
        self._is_taken = self._is_taken or code < 0
        super().look_at(-1 if self._is_taken else code)
