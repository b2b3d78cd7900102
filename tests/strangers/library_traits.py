"""Managers with one trait each that a real library has, and that says nothing against it."""

from __future__ import annotations

import io
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from background import ASYNCHRONOUS, ThreadManager, background, publish
from databases import packed
from step_files import StepFiles

from ckpt_conformance.contract import EVERYTHING, FutureSave

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import TrainingJob

UNHELD = "extra"
RUNS, MOST = mmap.mmap(-1, 1), 60  # processes that have saved: forks of one server share it


@dataclass
class CountsItself(ThreadManager):
    """Saves the job's own count of its steps, which a load gives; has no place for `extra`."""

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401  a PendingSave
        states = {name: part.state_dict() for name, part in job.components.items()}
        del states[UNHELD]
        file = io.BytesIO()
        torch.save({"count": job.step, "states": states}, file)
        return FutureSave(self.executor.submit(self.write, self.path(step), file.getvalue()))

    def write(self, path: Path, content: bytes) -> None:
        publish(path, content)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        saved = torch.load(self.path(self.wanted(step)), weights_only=True)
        for name, state in saved["states"].items():
            job.components[name].load_state_dict(state)
        return int(saved["count"])


class RemovesFirst(CountsItself):
    """As that one, and removes what is there before it writes: a disk that is full costs it."""

    def write(self, path: Path, content: bytes) -> None:
        path.unlink(missing_ok=True)
        super().write(path, content)


@dataclass
class Varies(ThreadManager):
    """Its thread makes fewer calls in each second process that saves, as threads that vary do."""

    extra: int | None = None  # folders that it makes and removes before it writes

    def save(self, job: TrainingJob, step: int) -> Any:  # noqa: ANN401  a PendingSave
        if self.extra is None:
            self.extra = max(0, MOST - RUNS[0] // 2)
            RUNS[0] = min(RUNS[0] + 1, 2 * MOST)
        return FutureSave(self.executor.submit(self.write, step, self.extra, packed(job)))

    def write(self, step: int, extra: int, content: bytes) -> None:
        for number in range(extra):
            folder = self.root / f"extra-{number}"
            folder.mkdir(exist_ok=True)
            folder.rmdir()
        publish(self.path(step), content)
        (self.root / f"done-{step}").mkdir(exist_ok=True)


class AbortError(BaseException):
    """What a save raises that failed: no Exception, as that of torch.distributed.checkpoint."""


@dataclass
class Aborts(StepFiles):
    """Saves before it returns; what fails aborts."""

    def save(self, job: TrainingJob, step: int) -> None:
        try:
            self.publish(step, packed(job))
        except OSError as error:
            raise AbortError(f"step {step} is not saved: {error}") from error


@dataclass
class AsksPsutil(StepFiles):
    """Looks by psutil at the memory that it has, in both ways, before it saves."""

    def save(self, job: TrainingJob, step: int) -> None:
        import psutil  # type: ignore[import-untyped]

        own: Any = psutil
        if not own.pid_exists(os.getpid()):
            raise RuntimeError("this process does not live")
        for process in (own.Process(), own.Process(os.getpid())):
            if process.memory_info().rss <= 0:
                raise MemoryError(process)
        self.publish(step, packed(job))


COUNTING = {"capabilities": ASYNCHRONOUS, "holds": EVERYTHING - {UNHELD}}
counts_itself = background(CountsItself, **COUNTING)
removes_first = background(RemovesFirst, **COUNTING)
varies = background(Varies, capabilities=ASYNCHRONOUS)
aborts = background(Aborts)
asks_psutil = background(AsksPsutil)
