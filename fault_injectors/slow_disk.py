"""A disk that is slow for one rank: a call of its save returns when nothing else happens any more.

Models: a rank whose write, sync or rename takes longer than all that the others do without it: it
is let go when each of them was told how the save ended, is gone, or sleeps while nothing in the
directory changes. So no time is chosen, and a busy machine is not taken for a slow disk.
Does not model: a disk so slow that a deadline of the manager passes; calls of C++ or Rust code.
Proof: `fired`; then `released`, with what the others did, and a copy of the directory of then.
"""

from __future__ import annotations

import importlib
import os
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import journal, trees
from ckpt_conformance.contract.journal import Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from ckpt_conformance.contract.journal import ChildJournal
    from ckpt_conformance.fault_injectors.injector import Injector
    from ckpt_conformance.harness.messages import Arguments, SeenCall

PEER = f"{__name__}:Peer"
WATCHED = "watched"
ENDINGS = ("acknowledged", "failed")  # of a save
WAITS, AWAY = "waits", "away"
LOOKS = 10  # in a row that have to show the same
BREATH = 0.02  # seconds between two looks
LIMIT = 4.0  # seconds: a collective of the job waits for twice as long


class Peer:
    """One of the other ranks: it only says which process it is."""

    name = "slow-disk-peer"

    def __init__(self, root: Path, journal: ChildJournal) -> None:
        """Keep the journal."""
        del root
        self.journal = journal
        self.calls, self.fired = 0, 0
        self.log: list[SeenCall] = []

    def install(self) -> None:
        """Write the id of this process into the journal."""
        self.journal.note(WATCHED, process=os.getpid())

    def remove(self) -> None:
        """Nothing was replaced."""


class SlowDisk:
    """Holds one call of this rank, once.

    Arguments: `call` is the fault (for `Child.arm`, in mode hold) that counts the calls; `peers`
    maps each other rank to its journal and the size that it had before these children; `copy` is an
    empty directory: what there is while the call is held is copied into it.
    """

    name = "slow-disk"

    def __init__(
        self,
        root: Path,
        journal: ChildJournal,
        **given: Any,  # noqa: ANN401  JSON-plain arguments of a program
    ) -> None:
        """Make the injector that counts."""
        self.root, self.journal = root, journal
        self.peers: dict[str, tuple[str, int]] = given["peers"]
        self.copy = Path(given["copy"])
        module, _, name = str(given["call"]["injector"]).partition(":")
        args: Arguments = given["call"]["args"]
        make: Callable[..., Injector] = getattr(importlib.import_module(module), name)
        self.inner = make(root, journal, **args)
        self.inner.on_hold = self.hold

    def install(self) -> None:
        """Count from now on."""
        self.inner.install()

    def remove(self) -> None:
        """Put everything back."""
        self.inner.remove()

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return self.inner.calls

    @property
    def fired(self) -> int:
        """How many of them were held."""
        return self.inner.fired

    @property
    def log(self) -> list[SeenCall]:
        """What was called."""
        return self.inner.log

    def hold(self) -> None:
        """Wait until the others do nothing more; copy the directory; say how things stand."""
        until = time.monotonic() + LIMIT
        looks = deque([self.look()], LOOKS)
        while not (settled := is_quiet(looks)) and time.monotonic() < until:
            time.sleep(BREATH)
            looks.append(self.look())
        others = looks[-1].others
        if settled:
            trees.copy(self.root, self.copy, into=True)
        else:
            others = {rank: "runs" if what == WAITS else what for rank, what in others.items()}
        self.journal.note("released", others=others, settled=settled)

    def look(self) -> Look:
        """Look at the other ranks, and at the directory."""
        states = {rank: state_of(Path(path), start) for rank, (path, start) in self.peers.items()}
        try:
            files = trees.listing(self.root)
        except FileNotFoundError:  # a name went away while it was listed
            files = None
        busy = (threads for _, threads in states.values())
        return Look({rank: what for rank, (what, _) in states.items()}, files, set().union(*busy))


@dataclass(frozen=True)
class Look:
    """What was seen at one moment."""

    others: dict[str, str]  # rank -> acknowledged, failed, gone, waits, or away: not in this save
    files: dict[str, tuple[str, int, int]] | None
    busy: set[str]  # threads of ranks that wait


def is_quiet(looks: Collection[Look]) -> bool:
    """Return whether nothing changed, and no thread was busy more often than not.

    Threads of a transport wake up a hundred times a second to look for messages.
    """
    first, *rest = looks
    same = all((look.others, look.files) == (first.others, first.files) for look in rest)
    often = Counter(thread for look in looks for thread in look.busy).values()
    is_here = AWAY not in first.others.values() and first.files is not None
    return len(looks) == LOOKS and same and is_here and max(often, default=0) <= LOOKS // 2


def state_of(path: Path, start: int) -> tuple[str, set[str]]:
    """Say what a rank was told of the save, or that it is gone, waits, or is away; who is busy."""
    watched: Watched | None = None
    ending = ""
    for event in journal.read(path, start):
        if watched is None:
            watched = event if isinstance(event, Watched) else None
        elif event.event in ENDINGS:
            ending = event.event
    if watched is None:
        return AWAY, set()
    if ending:
        return ending, set()
    states = dict(threads_of(watched.process))
    return WAITS if states else "gone", {name for name, state in states.items() if state != "S"}


def threads_of(process: int) -> Iterator[tuple[str, str]]:
    """Yield name and state of each thread of a process and of its children, as the kernel does.

    S sleeps. Threads of a process that has ended, in state Z or X, are left out.
    """
    for task in Path(f"/proc/{process}/task").glob("[0-9]*"):
        states = _read(task / "stat").rpartition(")")[2].split()[:1]
        yield from ((task.name, state) for state in states if state not in ("Z", "X"))
        for child in _read(task / "children").split():
            yield from threads_of(int(child))


def _read(path: Path) -> str:
    """Read a file of the kernel; empty if what it is about ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""
