"""What a fault at a system call is, which calls it may hit, and the report of what it hit.

Both ends read these types: the injector in the child, which asks, and the child's supervisor.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import msgspec

from ckpt_conformance.trace import calls
from ckpt_conformance.trace.operations import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

WRITING = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2"})
COPYING = frozenset({"copy_file_range", "sendfile"})
SYNCING = frozenset({"fsync", "fdatasync", "msync", "sync", "syncfs"})
OPENING = frozenset({"open", "openat", "openat2", "creat"})
READING = frozenset(calls.READING)
REMOVING = frozenset({"unlink", "unlinkat", "rmdir"})
NAMING = frozenset({"rename", "renameat", "renameat2", "link", "linkat"})
QUIET = frozenset({"sync", "ioctl"})  # sync(2) returns no error
# What may give which error; what is not named here may be given at every call but QUIET.
GIVERS: dict[str, frozenset[str]] = {
    "short": WRITING | COPYING,
    "EINTR": WRITING | COPYING | OPENING | READING | {"ftruncate", "truncate", "fallocate"},
}
NEEDS_ROOM = {"ENOSPC", "EDQUOT"}  # not by reading, removing, and opening what is there


class Counted(Protocol):
    """What has to be known of a call to say whether a fault counts it: see `CountedCall`."""

    @property
    def what(self) -> str: ...  # noqa: D102

    @property
    def reads(self) -> bool: ...  # noqa: D102

    @property
    def is_whole(self) -> bool: ...  # noqa: D102


C = TypeVar("C", bound=Counted)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do at a call: `error` is an errno's name, short, kill, hold, late or kill-writer.

    `at` is the call, from 1; 0 hits none and only counts. `persistent` hits every call from
    there on; `only` restricts to calls by name; `reading` also counts opening to read, and reads,
    if the process is asked about them. `moment` says how much of the call is done before a kill:
    before, half (of a write), after. `keep` is a folder that takes the directory as it is before
    each call that is counted; nothing else is under way then if `error` is "kill". `elsewhere` also
    counts calls at files that are made elsewhere on the same disk meanwhile: a rename may take them
    in, and it is full or broken for them, too. `alike` restricts to files whose names are of this
    pattern (`contract.trees`), and `spare` names files that are left alone. A call that is held is
    made when the other one of a `rendezvous` in the folder `gate` has left. If calls are "late",
    those of the child's first thread are neither counted nor hit; others, of threads of any
    language and of other processes, wait from call `at` on until they are let go, or until that
    thread waits. A "kill-writer" counts the calls of other processes than the child, and ends the
    one that makes call `at`, before it.
    """

    at: int = 0
    error: str = "EIO"
    persistent: bool = False
    only: tuple[str, ...] = ()
    reading: bool = False
    moment: str = "before"
    keep: str = ""
    elsewhere: bool = False
    alike: str = ""
    spare: tuple[str, ...] = ()
    gate: str = ""

    def counts(self, name: str, *, reads: bool, is_whole: bool = False) -> bool:
        """Return whether a call is one that this fault may hit; `reads`: it changes nothing.

        `is_whole`: it is a write that can't be cut short, of one byte, or of one block by O_DIRECT.
        """
        if is_whole and self.error == "short":
            return False
        if self.only and name not in self.only:
            return False
        if reads and not self.reading:
            return False
        if self.error in NEEDS_ROOM and (reads or name in REMOVING):
            return False
        return name in GIVERS.get(self.error, {name}) - QUIET

    def among(self, calls: Iterable[C]) -> list[C]:
        """Return the calls of a log that it counts, in their order."""
        return [
            call
            for call in calls
            if self.counts(call.what, reads=call.reads, is_whole=call.is_whole)
        ]

    @property
    def delays(self) -> bool:
        """Whether it lets calls wait, and the first thread go on."""
        return self.error == "late"

    def spares(self, process: int, thread: int, child: int) -> bool:
        """Return whether it neither counts nor hits a call, by who makes it."""
        return (self.delays and thread == child) or (
            self.error == "kill-writer" and process == child
        )

    def is_due(self, call: int) -> bool:
        """Return whether it hits the call of this number, counted from 1."""
        if self.delays:
            return 0 < self.at <= call
        if not self.persistent or self.at < 1 or call < self.at:
            return call == self.at
        return self.error != "EINTR" or (call - self.at) % 2 == 0


class CountedCall(msgspec.Struct, frozen=True):
    """A call that was counted: its number, from 1, and its name; `size` is that of a write."""

    call: int
    what: str
    path: str  # below the directory, or else absolute
    size: int  # bytes
    offset: int  # where in the file a write begins
    reads: bool  # it changes nothing
    injected: bool
    tree: dict[str, str] = {}  # the directory before the call, where it was kept
    elsewhere: bool = False  # the file was made elsewhere, and has not come in
    is_whole: bool = False  # a write that can't be cut short
    is_folder: bool = False  # the call is about a directory
    became: str = ""  # the name that its file has by now, or had last, if that is another one


class FaultReport(msgspec.Struct, frozen=True):
    """What was counted since a fault was armed."""

    calls: int
    fired: int
    log: list[CountedCall]
    unsupported: list[Unsupported]  # calls that write and can't be hit
    fault: Fault

    def write(self, path: str) -> None:
        """Write it where the injector reads it."""
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps(msgspec.to_builtins(self)))  # a path may be no UTF-8

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read it; raises FileNotFoundError, and ValueError for anything else."""
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return msgspec.convert(json.load(file), cls)
