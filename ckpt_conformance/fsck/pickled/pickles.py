"""A pickle read as data: no name is imported, and nothing is called.

The standard library's own unpickler cannot be used for bytes that are not trusted, whatever it is
allowed to import: one instruction makes it allocate 64 GiB of memo, a bytearray is allocated before
it is read, and nested tuples as a key of a dict keep it busy for ever. So a `Machine` of our own
reads them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fsck.pickled import effort
from ckpt_conformance.fsck.pickled.faults import Again
from ckpt_conformance.fsck.pickled.instructions import STEPS
from ckpt_conformance.fsck.pickled.machine import Machine
from ckpt_conformance.fsck.source.untrusted import without_collector

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckpt_conformance.fsck.pickled.asked import Asked
    from ckpt_conformance.fsck.pickled.machine import Steps
    from ckpt_conformance.fsck.pickled.pickle_values import Name

LARGE = 1 << 20
"""Bytes of a pickle from which on it is worth it to look for runs."""


def load(data: bytes, many: Collection[Name] = ()) -> tuple[Any, Asked]:
    """Return what a pickle holds and what it asks for; Malformed where it is none.

    `many` are classes of which there may be a million: their instances have `keys`.
    """
    with without_collector(), effort.for_one_file():
        if many and len(data) >= LARGE:
            from ckpt_conformance.fsck.pickled.pickle_runs import Runs  # its patterns take 5 ms

            machine = Machine(data, Runs(many))
            with contextlib.suppress(Again):
                return machine.run(STEPS), machine.asked
        machine = Machine(data)
        return machine.run(STEPS), machine.asked


def load_each(data: bytes, most: int, steps: Steps | None = None) -> Iterator[tuple[Any, Asked]]:
    """Yield what each of some pickles holds that stand one behind the other, and what it asks for.

    Malformed where one of them is none.
    """
    at = 0
    with without_collector():
        for _ in range(most):
            machine = Machine(data, at=at)
            yield machine.run(steps or STEPS), machine.asked
            at = machine.at + 1
