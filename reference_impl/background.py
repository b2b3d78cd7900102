"""Saves that go on while the job trains: one after the other, in a thread, errors never lost.

    handle = manager.save_async(step, model=model, ...)   # returns once the state is copied
    ...                                                   # train on
    handle.wait()                                         # now the checkpoint survives a power loss

An error that nobody asked for is raised by the next save and by `close`; at the exit of the
interpreter it is logged. A process that exits finishes its saves first (PX12, K019).
"""

from __future__ import annotations

import logging
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from ckpt_conformance.reference_impl.errors import BackgroundSaveFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SaveHandle:
    """One save in the background; its step and its state were fixed when it began.

    Attributes:
        step: what is saved.
        is_told: whether somebody has learned how it ended.
    """

    def __init__(self, step: int, future: Future[Path]) -> None:
        """Watch a save."""
        self.step, self.is_told = step, False
        self._future = future

    def wait(self, timeout: float | None = None) -> Path:
        """Block until the checkpoint is durable, and return its path as `save` does.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: it goes on still.
            BaseException: what made it fail, each time that this is called.
        """
        self.exception(timeout)
        return self._future.result()

    def done(self) -> bool:
        """Whether it has ended, well or not; returns at once."""
        return self._future.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until it has ended; return what made it fail, None if nothing did.

        Args:
            timeout: seconds, as of `wait`.

        Raises:
            TimeoutError: it goes on still.
        """
        error = self._future.exception(timeout)
        self.is_told = True
        return error

    def untold_error(self) -> BaseException | None:
        """Block until it has ended; return what made it fail, if nobody has learned that."""
        error = self._future.exception()
        return None if self.is_told else error


def ended(step: int, path: Path) -> SaveHandle:
    """The handle of a save that ended well before anybody could ask."""
    future: Future[Path] = Future()
    future.set_result(path)
    return SaveHandle(step, future)


def outcome_of(work: Callable[[], T]) -> Future[T]:
    """What work gives, or raises, now: for another thread to find."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
        future.set_exception(error)
    return future


class BackgroundSaves:
    """Runs saves in their order, in one thread that the first of them starts."""

    def __init__(self, limit: int = 1) -> None:
        """Begin with none.

        Args:
            limit: how many may wait or go on at a time.

        Raises:
            ValueError: a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"max_pending is {limit}: at least one save has to be allowed")
        self._limit = limit
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[SaveHandle] = []  # less those that ended, and whose error is told
        # At the exit of the interpreter: an error keeps its frames, and so the manager, until then.
        weakref.finalize(self, log_untold, self._begun)

    def make_room(self) -> None:
        """Wait until one more save may begin.

        Raises:
            BackgroundSaveFailed: one before it failed, and nobody was told.
        """
        too_many = max(0, len(self._begun) - self._limit + 1)
        self._finish(self._begun[:too_many])
        self.raise_untold()

    def begin(self, step: int, work: Callable[[], Path]) -> SaveHandle:
        """Let the thread do a save; `make_room` comes before it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save")
        handle = SaveHandle(step, self._pool.submit(work))
        self._begun.append(handle)
        return handle

    def finish(self) -> None:
        """Wait until none goes on, whatever comes of them."""
        self._finish(self._begun)

    def raise_untold(self) -> None:
        """Raise the first error that nobody has learned, of saves that have ended.

        Raises:
            BackgroundSaveFailed: from that error.
        """
        ended_now = [handle for handle in self._begun if handle.done()]
        self._begun[:] = [handle for handle in self._begun if handle not in ended_now]
        failed = [handle for handle in ended_now if handle.untold_error()]
        if failed:
            error = BackgroundSaveFailed([handle.step for handle in failed])
            raise error from failed[0].exception()

    def close(self) -> None:
        """Wait for all of them, let the thread end, and raise an error that nobody has learned.

        Raises:
            BackgroundSaveFailed: from that error.
        """
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self.raise_untold()

    @staticmethod
    def _finish(handles: list[SaveHandle]) -> None:
        """Wait for the end of some saves; nobody learns of it."""
        for handle in handles:
            handle.untold_error()


def log_untold(handles: list[SaveHandle]) -> None:
    """Log what nobody has learned, where there is nobody left to tell."""
    for handle in handles:
        if error := handle.untold_error():
            logger.critical(
                "the save of step %d in the background failed, and nobody asked: no checkpoint of "
                "it is there; older ones are",
                handle.step,
                exc_info=error,
            )
