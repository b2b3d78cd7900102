"""Adapters that misbehave, each in one way: what the tests of the harness's patience certify.

The base is a plain manager that works. `broken` gives it one method that does not.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.adapters.torch_save import SingleFile
from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions
    from ckpt_conformance.workload.job import Job


@dataclass(frozen=True)
class Broken(AdapterBase):
    """A file per step, with some methods replaced; `on_open` runs first."""

    manager: type[SingleFile] = SingleFile
    on_open: Callable[[], Any] = lambda: None

    def open(self, root: Path, options: OpenOptions) -> SingleFile:
        del options
        self.on_open()
        return self.manager(root, atomic=True, per_step=True)


def broken(on_open: Callable[[], Any] = lambda: None, **methods: object) -> Broken:
    return Broken(
        name="broken",
        version="1",
        holds=EVERYTHING | {"gradients"},
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        manager=type("Misbehaving", (SingleFile,), methods),
        on_open=on_open,
    )


def fail(*_: object) -> None:
    raise RuntimeError("this adapter raises")


def wrong_data(manager: SingleFile, job: Job, step: int | None = None) -> int:
    found = SingleFile.load(manager, job, step)
    job.model.inner.weight.data.add_(1)
    return found


def load_newest(manager: SingleFile, job: Job, step: int | None = None) -> int:
    """Load without asking steps()."""
    return SingleFile.load(manager, job, step or SingleFile.steps(manager)[-1])


def eat(*_: object) -> None:
    eaten = []
    while True:
        eaten.append(torch.empty(1 << 28, dtype=torch.uint8))  # not touched: address space only


def work_beside_others(manager: SingleFile, job: Job, step: int) -> None:
    """Need half a second of the CPU on which others are busy."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    SingleFile.save(manager, job, step)


def crash(*_: object) -> None:
    ctypes.string_at(0)


def shout(*_: object) -> None:
    for _ in range(64):
        sys.stdout.write("x" * (1 << 20) + "\n")
    fail()


def save_later(manager: SingleFile, job: Job, step: int) -> None:
    """Return at once; a child writes, if the job lives long enough."""
    if os.fork() == 0:
        time.sleep(60)
        SingleFile.save(manager, job, step)
        os._exit(0)


def save_as_daemon(manager: SingleFile, job: Job, step: int) -> None:
    """Return at once; a daemon writes, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
            SingleFile.save(manager, job, step)
        os._exit(0)
    os.wait()


good = broken()
wrong = broken(load=wrong_data)
hangs_in_load = broken(load=lambda *_: time.sleep(600))
hangs_in_save = broken(save=lambda *_: time.sleep(600))
works_beside_others = broken(save=work_beside_others)
stops = broken(load=lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
eats_memory = broken(load=eat)
kills_itself = broken(load=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
segfaults = broken(load=crash)
aborts = broken(save=lambda *_: os.abort())
leaves_quietly = broken(save=lambda *_: os._exit(0))
exits = broken(save=lambda *_: sys.exit(0))
raises_from_steps = broken(steps=fail, load=load_newest)
names_for_steps = broken(steps=lambda *_: ["checkpoint-2.pt"], load=load_newest)
loads_none = broken(load=lambda *_: None)
loads_words = broken(load=lambda *_: "4")
raises_at_open = broken(on_open=fail)
lacks_a_module = broken(on_open=lambda: importlib.import_module("not_installed"))
refuses_all = broken(load=fail)
leaves_open = broken(on_open=lambda: sys.exit(3))
shouts = broken(load=shout)
saves_later = broken(save=save_later)
daemonises = broken(save=save_as_daemon)


def make_fails() -> Broken:
    raise RuntimeError("this factory raises")
