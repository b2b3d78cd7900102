"""Managers that save in a thread, and acknowledge when the thread is done; some in a wrong way."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from databases import packed
from step_files import StepFiles, sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability, FutureSave
from ckpt_conformance.reference_impl.trainer import Trainer

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob


def publish(final: Path, content: bytes) -> None:
    """Write a file so that its name means that it is whole and durable."""
    draft = final.with_name(f".{final.name}.part")
    draft.write_bytes(content)
    sync(draft)
    draft.rename(final)
    sync(final.parent)


@dataclass
class ThreadManager(StepFiles):
    """A file for each step, written by one thread from a copy of the state."""

    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401  a PendingSave, mostly
        return FutureSave(self.executor.submit(publish, self.path(step), packed(job)))

    def close(self) -> None:
        self.executor.shutdown()


class Once(ThreadManager):
    """Takes no step twice."""

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        if self.path(step).exists():
            raise FileExistsError(self.path(step))
        return super().save(job, step)


@dataclass
class Locking(ThreadManager):
    """Lets one save go on at a time: the next one takes a lock that the thread gives back."""

    lock: Any = field(default_factory=threading.Lock)

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        self.lock.acquire()
        future = self.executor.submit(publish, self.path(step), packed(job))
        future.add_done_callback(lambda _: self.lock.release())
        return FutureSave(future)


class Looping(ThreadManager):
    """Copies the state in an event loop, whose pool does the work; then goes on in a thread."""

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        content = asyncio.run(asyncio.to_thread(packed, job))
        return FutureSave(self.executor.submit(publish, self.path(step), content))


class Looking(ThreadManager):
    """One thread looks again and again whether another one has written; the next save waits."""

    writes: Future[None] | None = None
    looks: threading.Thread | None = None

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        if self.looks:
            self.looks.join()
        self.writes = Future()
        todo = (self.writes, self.path(step), packed(job))
        threading.Thread(target=self.write, args=todo).start()
        self.looks = threading.Thread(target=self.look, args=(self.writes,))
        self.looks.start()
        return FutureSave(self.writes)

    @staticmethod
    def write(writes: Future[None], path: Path, content: bytes) -> None:
        try:
            publish(path, content)
        except OSError as error:
            writes.set_exception(error)
        else:
            writes.set_result(None)

    @staticmethod
    def look(writes: Future[None]) -> None:
        while not writes.done():
            threading.Event().wait(0.01)

    def close(self) -> None:
        if self.looks:
            self.looks.join()


def live(job: TrainingJob) -> dict[str, Any]:
    """Return the states with the tensors that the job trains."""
    return {name: part.state_dict() for name, part in job.components.items()}


class LoopingLate(ThreadManager):
    """As that one, but its loop copies nothing: the thread has the live tensors."""

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        states = asyncio.run(asyncio.to_thread(live, job))
        return FutureSave(self.executor.submit(self.write, self.path(step), states))

    def write(self, path: Path, states: dict[str, Any]) -> None:
        file = io.BytesIO()
        torch.save(states, file)
        publish(path, file.getvalue())


class Aliasing(ThreadManager):
    """Hands the live tensors to the thread, which waits until it is asked for the result."""

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        return Late(self.path(step), live(job))


class SharingCounters(ThreadManager):
    """Copies for its thread what has dimensions: a counter costs nothing to copy, and changes."""

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        states = {name: self.copied(part.state_dict()) for name, part in job.components.items()}
        return FutureSave(self.executor.submit(self.write, self.path(step), states))

    def copied(self, tree: Any) -> Any:  # noqa: ANN401  a state_dict, or what is in one
        if isinstance(tree, torch.Tensor):
            return tree.detach().clone() if tree.ndim else tree.detach()
        if isinstance(tree, dict):
            return {key: self.copied(value) for key, value in tree.items()}
        return [self.copied(one) for one in tree] if isinstance(tree, list) else tree

    @staticmethod
    def write(path: Path, states: dict[str, Any]) -> None:
        file = io.BytesIO()
        torch.save(states, file)
        publish(path, file.getvalue())


class SharingLists(SharingCounters):
    """Copies lists for its thread, and not what is in them."""

    def copied(self, tree: Any) -> Any:  # noqa: ANN401
        if isinstance(tree, torch.Tensor):
            return tree.detach().clone()
        return [*tree] if isinstance(tree, list) else super().copied(tree)


@dataclass
class Late:
    """A save that begins when it is waited for: what a slow disk makes of any other."""

    path: Path
    states: dict[str, Any]

    def wait(self) -> None:
        file = io.BytesIO()
        torch.save(self.states, file)
        publish(self.path, file.getvalue())

    def done(self) -> bool:
        return self.path.exists()

    def exception(self) -> None:
        """Never fails."""


class Forgetful(ThreadManager):
    """Acknowledges whatever became of the thread."""

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        return Deaf(self.executor.submit(publish, self.path(step), packed(job)))


@dataclass
class Deaf:
    """Waits for the end of a future, and does not ask how it ended."""

    future: Future[None]

    def wait(self) -> None:
        self.future.exception()

    def done(self) -> bool:
        return self.future.done()

    def exception(self) -> None:
        """Never asks."""


class Unwrapped(ThreadManager):
    """Returns the future itself."""

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        return self.executor.submit(publish, self.path(step), packed(job))


WRAPPED: WeakSet[TrainingJob] = WeakSet()  # by any manager of this process


class Wrapping(ThreadManager):
    """Cannot work with a job that it has not wrapped."""

    job: TrainingJob | None = None

    def prepare(self, job: TrainingJob) -> None:
        if self.job is job:
            raise RuntimeError("wrapped twice")
        if job not in WRAPPED and any(optimizer.state for optimizer in job.optimizers.values()):
            raise RuntimeError("trained before it was wrapped")
        WRAPPED.add(job)
        self.job = job

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        if self.job is not job:
            raise RuntimeError("not wrapped")
        return super().save(job, step)


@dataclass
class Purging(StepFiles):
    """Saves at once; a thread deletes the oldest, as late as it can."""

    keep: int | None = None
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    saved: int | None = None  # by this process, and not purged yet

    def save(self, job: TrainingJob, step: int) -> None:
        self.settle()
        publish(self.path(step), packed(job))
        self.saved = step

    def purge(self, saved: int, keep: int) -> None:
        others = [step for step in self.steps() if step != saved]
        for step in others[: max(0, len(others) + 1 - keep)]:
            with contextlib.suppress(OSError):
                self.path(step).unlink()

    def settle(self) -> None:
        if self.keep and self.saved is not None:
            self.executor.submit(self.purge, self.saved, self.keep).result()
        self.saved = None

    def close(self) -> None:
        """Waits for nothing: that is what `settle` is for."""


@dataclass
class Counting(ThreadManager):
    """Counts what is there when a save begins, and deletes all but the newest of it.

    So the step before the newest stays until the next save, and one more of the `spare` ones.
    """

    keep: int | None = None
    spare: int = 0

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401
        others = [there for there in self.steps() if there != step]
        for old in others[: max(0, len(others) - self.keep - self.spare)] if self.keep else ():
            self.path(old).unlink()
        return super().save(job, step)


class ThreadTrainer(Trainer):
    """Owns the loop; its thread writes a step as late as it can: when the next save begins."""

    def __init__(self, root: Path) -> None:
        """Open on a directory."""
        self.files, self.executor = StepFiles(root), ThreadPoolExecutor(1)
        self.steps = self.files.steps
        self.until_next = threading.Event()
        self.last: Future[None] | None = None

    def fit(self, *given: Any) -> None:  # noqa: ANN401
        super().fit(*given)
        self.finish()

    def restore(self, job: Any, resume: bool | int | Path) -> None:  # noqa: ANN401, FBT001
        job.step = self.files.load(job, None if resume is True else int(str(resume)))

    def checkpoint(self, job: Any, journal: Any) -> None:  # noqa: ANN401
        self.until_next.set()
        journal.begun(job.step)
        self.finish()
        self.until_next = threading.Event()
        todo = (self.until_next, job.step, packed(job), journal)
        self.last = self.executor.submit(self.write, *todo)

    def write(self, until: threading.Event, step: int, content: bytes, journal: Any) -> None:  # noqa: ANN401
        until.wait()
        try:
            publish(self.files.path(step), content)
        except Exception as error:
            journal.failed(step, error)
            raise
        journal.acknowledged(step)

    def finish(self) -> None:
        """Wait for the thread; raises what made it fail."""
        self.until_next.set()
        last, self.last = self.last, None
        if last:
            last.result()


@dataclass(frozen=True)
class Trains(AdapterBase):
    def open(self, root: Path, options: OpenOptions) -> ThreadTrainer:
        if options.keep_last is not None:
            raise NotImplementedError("it keeps all steps")
        return ThreadTrainer(root)


@dataclass(frozen=True)
class Counts(AdapterBase):
    spare: int = 0

    def open(self, root: Path, options: OpenOptions) -> Counting:
        return Counting(root, keep=options.keep_last, spare=self.spare)


@dataclass(frozen=True)
class Purges(AdapterBase):
    def open(self, root: Path, options: OpenOptions) -> Purging:
        return Purging(root, options.keep_last)


@dataclass(frozen=True)
class Background(AdapterBase):
    manager: type[StepFiles] = ThreadManager
    keeps: tuple[int | None, ...] = (None,)  # values of keep_last that it takes

    def open(self, root: Path, options: OpenOptions) -> StepFiles:
        if options.keep_last not in self.keeps:
            raise NotImplementedError("it keeps all steps")
        return self.manager(root)


def background(manager: type[StepFiles], **more: Any) -> Background:  # noqa: ANN401
    return Background(
        **{
            "name": f"background-{manager.__name__.lower()}",
            "version": "1",
            "holds": EVERYTHING,
            "refusals": (FileNotFoundError,),
            "capabilities": frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
            "manager": manager,
            **more,
        }
    )


thread = background(ThreadManager)
ASYNCHRONOUS = thread.capabilities | {Capability.ASYNC}
once = background(Once, capabilities=ASYNCHRONOUS, saves_over=False)
locking = background(Locking, capabilities=ASYNCHRONOUS)
looping = background(Looping, capabilities=ASYNCHRONOUS)
looping_late = background(LoopingLate, capabilities=ASYNCHRONOUS)
looking = background(Looking, capabilities=ASYNCHRONOUS)
aliasing = background(Aliasing)
sharing_counters = background(SharingCounters)
sharing_lists = background(SharingLists)
forgetful = background(Forgetful)
unwrapped = background(Unwrapped)
wrapping = background(Wrapping, prepares=True)
ROTATING: dict[str, Any] = {
    "version": "1",
    "holds": EVERYTHING,
    "refusals": (FileNotFoundError,),
    "capabilities": frozenset({Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}),
}
trainer = Trains(
    **ROTATING
    | {"shape": "trainer", "capabilities": thread.capabilities, "name": "background-trainer"}
)
purging = Purges(name="background-purging", **ROTATING)
counting = Counts(name="background-counting", **ROTATING)
sparing = Counts(name="background-sparing", **ROTATING, spare=1)
not_rotating = background(
    ThreadManager,
    capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}),
)
