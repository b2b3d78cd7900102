"""Managers that dump when SIGTERM has come: by a handler, or by a signal that stays blocked."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from databases import packed
from step_files import StepFiles
from tricks import write_all

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob


@dataclass
class Told(StepFiles):
    """Notes the signal in a handler; a dump is saved as any other step."""

    came: list[int] = field(default_factory=list[int])

    def save(self, job: TrainingJob, step: int) -> None:
        self.publish(step, packed(job))

    def save_emergency(self, job: TrainingJob, step: int) -> None:
        self.save(job, step)

    def catch_sigterm(self) -> Callable[[], bool]:
        signal.signal(signal.SIGTERM, lambda number, _: self.came.append(number))
        return lambda: bool(self.came)


@dataclass
class Blocking(Told):
    """Blocks the signal: it comes to nobody, and who asks sees that it waits."""

    def catch_sigterm(self) -> Callable[[], bool]:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        return lambda: signal.SIGTERM in signal.sigpending()


@dataclass
class Bare(Told):
    """Writes by one bare call of the system: one signal comes in the save, and one in the dump."""

    def publish(self, step: int, content: bytes | bytearray) -> None:
        descriptor = os.open(self.path(step), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(descriptor, bytes(content))
        finally:
            os.close(descriptor)


@dataclass
class Failing(Told):
    """Fails where it is asked whether a signal has come, so before one is sent."""

    def catch_sigterm(self) -> Callable[[], bool]:
        def ask() -> bool:
            raise RuntimeError("nobody knows")

        return ask


@dataclass(frozen=True)
class Adapter(AdapterBase):
    make: Callable[[Path], Told] = Told

    def open(self, root: Path, options: OpenOptions) -> Told:
        del options
        return self.make(root)


def adapter(make: Callable[[Path], Told]) -> Adapter:
    able = {Capability.STEPS, Capability.EXPLICIT_STEP, Capability.EMERGENCY}
    return Adapter(
        name="told", version="1", capabilities=frozenset(able), holds=EVERYTHING, make=make
    )


noting, blocking, bare, failing = (adapter(kind) for kind in (Told, Blocking, Bare, Failing))
