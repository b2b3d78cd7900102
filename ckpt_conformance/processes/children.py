"""Children of one process: each does one thing, answers in typed messages, and may die of it.

A message is one line of JSON, so that a death loses none that was written whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import sys
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ckpt_conformance.processes import lifecycle
from ckpt_conformance.processes.lifecycle import ExitKind

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import TextIO

T = TypeVar("T")
if TYPE_CHECKING:
    Put = Callable[[T], None]  # sends one message
    Work = Callable[[Put[T]], None]


class Ended(msgspec.Struct, frozen=True):
    """The last word about a child: how it ended.

    `code` is its exit status where it died, or minus the signal that ended it.
    """

    exit_kind: ExitKind
    code: int = 0


def to_line(message: object) -> bytes:
    """Write a message as one line of JSON.

    By `json`: a manager's message may hold lone surrogates, which msgspec does not write.
    """
    return json.dumps(msgspec.to_builtins(message)).encode() + b"\n"


LAST_WORD = to_line(Ended(ExitKind.ENDED)).rstrip()


def put_into(out: TextIO) -> Put[object]:
    """Return a function that writes one message at once, so that a death loses none."""

    def put(message: object) -> None:
        out.write(to_line(message).decode())
        out.flush()

    return put


def run(work: Work[T], kind: type[T], deadline: float) -> Iterator[T | Ended]:
    """Fork a child that works; yield its messages, and at last how it ended.

    A child that says nothing for `deadline` seconds is killed: `ExitKind.HANG`. Raises ValueError
    for a message that is not of the `kind`. The caller has one thread.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()

    def child() -> None:
        os.close(read)
        _work(work, write)

    pid = lifecycle.fork(child)
    os.close(write)
    exit_kind = yield from _messages(read, pid, kind, deadline)
    os.close(read)
    lifecycle.kill_group(pid)  # and what it started: loader workers
    exited = lifecycle.reap(pid)
    if exit_kind is None:
        kind_of_death = ExitKind.KILLED if exited.is_killed else ExitKind.CRASHED
        yield Ended(kind_of_death, exited.code)
        return
    yield Ended(exit_kind)


def _work(work: Work[T], write: int) -> None:
    """Work in the child: it leads a group of its own, and dies with its parent."""
    os.setpgid(0, 0)
    lifecycle.die_with_parent()
    put = put_into(os.fdopen(write, "w"))
    work(put)
    put(Ended(ExitKind.ENDED))


def _messages(
    read: int, pid: int, kind: type[T], deadline: float
) -> Generator[T, None, ExitKind | None]:
    """Yield messages as they come, until the last word, the death, or a silence that is too long.

    Returns `ENDED` after the last word, `HANG` after a silence, and None after a death.
    """
    left = b""
    os.set_blocking(read, False)
    watch = os.pidfd_open(pid)
    exit_kind: ExitKind | None = ExitKind.HANG
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        selector.register(watch, selectors.EVENT_READ)
        while ready := selector.select(deadline):
            is_dead = any(key.fd == watch for key, _ in ready)
            *lines, left = (left + _read(read)).split(b"\n")
            for line in lines:
                if line != LAST_WORD:
                    yield msgspec.convert(json.loads(line), kind)
            if lines[-1:] == [LAST_WORD]:
                exit_kind = ExitKind.ENDED
                break
            if is_dead:
                exit_kind = None
                break
    os.close(watch)
    return exit_kind


def _read(read: int) -> bytes:
    """Read all that is there now."""
    received = b""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(read, 1 << 16):
            received += data
    return received
