"""Children of one process: each does one thing, says so in lines, and may die of it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import sys
from typing import TYPE_CHECKING, Any

from ckpt_conformance.processes import lifecycle
from ckpt_conformance.processes.lifecycle import ExitKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Line = dict[str, Any]
    Put = Callable[[Line], None]

LAST_WORD, DEATH = b'{"end": "ended"}', b'{"end": "died"}'


def put_into(out: Any) -> Put:  # noqa: ANN401  a text file
    """Give a function that writes one line at once, so that a death loses none."""

    def put(line: Line) -> None:
        out.write(json.dumps(line, default=str) + "\n")
        out.flush()

    return put


def run(work: Callable[[Put], None], deadline: float) -> Iterator[Line]:
    """Fork a child that works; give its lines, and a last one that says how it ended.

    A child that says nothing for `deadline` seconds is killed: {"end": "hang"}. The caller has one
    thread.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()

    def child() -> None:
        os.close(read)
        _work(work, write)

    pid = lifecycle.fork(child)
    os.close(write)
    exit_kind: str = ExitKind.HANG
    for line in _lines(read, pid, deadline):
        message: Line = json.loads(line)
        exit_kind = message.get("end", exit_kind)
        if "end" not in message:
            yield message
    os.close(read)
    lifecycle.kill_group(pid)  # and what it started: loader workers
    exited = lifecycle.reap(pid)
    if exit_kind == "died":
        exit_kind = ExitKind.KILLED if exited.is_killed else ExitKind.CRASHED
    yield {"end": exit_kind}


def _work(work: Callable[[Put], None], write: int) -> None:
    """Be the child: the leader of a group that dies with its parent."""
    os.setpgid(0, 0)
    lifecycle.die_with_parent()
    put = put_into(os.fdopen(write, "w"))
    work(put)
    put({"end": ExitKind.ENDED})


def _lines(read: int, pid: int, deadline: float) -> Iterator[bytes]:
    """Give lines as they come, until the last word, the death, or a silence that is too long."""
    left = b""
    os.set_blocking(read, False)
    watch = os.pidfd_open(pid)
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        selector.register(watch, selectors.EVENT_READ)
        while ready := selector.select(deadline):
            dead = any(key.fd == watch for key, _ in ready)
            *lines, left = (left + _read(read)).split(b"\n")
            yield from lines
            if dead or lines[-1:] == [LAST_WORD]:
                yield from [DEATH] if lines[-1:] != [LAST_WORD] else []
                break
    os.close(watch)


def _read(read: int) -> bytes:
    """Read all that is there now."""
    received = b""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(read, 1 << 16):
            received += data
    return received
