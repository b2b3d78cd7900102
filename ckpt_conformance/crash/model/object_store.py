"""A store of objects whose client was killed: each object is whole or absent, nothing is torn.

Of the requests that were in flight at the crash any subset took effect, in any order; all that had
been answered did. A recording of requests has each as joined operations (`trace.store_recording`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations, islice
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.states import Content, Extent, State
from ckpt_conformance.trace.operations import Kind, is_crash_point

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    from ckpt_conformance.trace.operations import Operation, Recording

NAME = "object-store"
ALL_SUBSETS = 6  # of so many requests in flight; of more the small ones, the large ones, and draws
DRAWS = 32


@dataclass(frozen=True)
class Effect:
    """What one request did: an object at a path, or none there any more."""

    path: str
    object: int  # 0: it was removed
    first: int  # index of the first of its operations, and of the last one
    last: int
    begin: int
    end: int
    content: Content | None = None


def effects_of(operations: Sequence[Operation]) -> list[Effect]:
    """Return what requests did, in the order in which they began."""
    effects: list[Effect] = []
    first, content = 0, Content(0)
    for operation in operations:
        if not operation.joined:
            first, content = operation.index, Content(0)
        if operation.kind is Kind.WRITE:
            content = Content(operation.size, (Extent(0, operation.size, operation.index),))
        clock = operation.begin, operation.end
        if operation.kind is Kind.RENAME:
            made = operation.target, operation.object
            effects.append(Effect(*made, first, operation.index, *clock, content))
        elif operation.kind is Kind.UNLINK:
            effects.append(Effect(operation.path, 0, first, operation.index, *clock))
    return effects


class ObjectStoreModel:
    """The enumerator."""

    name = NAME

    def states(self, recording: Recording, rng: random.Random, budget: int) -> Iterator[State]:
        """Yield the states of each crash point, all that was issued first; at most `budget`."""
        return islice(self._states(recording, rng), budget)

    def _states(self, recording: Recording, rng: random.Random) -> Iterator[State]:
        operations = recording.operations
        effects = effects_of(operations)
        folders = {o.path: o.object for o in operations if o.kind is Kind.MKDIR}
        for point in range(len(operations) + 1):
            if not is_crash_point(operations, point):
                continue
            issued = [one for one in effects if one.last < point]
            moment = operations[point - 1].begin if point else 0
            flying = [one for one in issued if one.end >= moment]
            settled = [one for one in issued if one.end < moment]
            for chosen in _subsets(flying, rng):
                lost = [one.path for one in flying if one not in chosen]
                why = f"without {', '.join(lost)}" if lost else "everything"
                for last, order in _orders([*settled, *chosen]):
                    yield _state(point, order, folders, f"{why}; {last}" if last else why)


def _orders(done: Sequence[Effect]) -> Iterator[tuple[str, list[Effect]]]:
    """Yield the orders in which requests may have taken effect: which was the last at its path.

    They are as they began, and then with another last one at one path, in words.
    """
    by_path: dict[str, list[Effect]] = {}
    for one in done:
        by_path.setdefault(one.path, []).append(one)
    yield "", list(done)
    for path, several in by_path.items():
        for one in several[:-1]:
            if not any(one.end < other.begin for other in several):
                others = [other for other in done if other is not one]
                yield f"{path} of operation {one.first} last", [*others, one]


def _subsets(flying: Sequence[Effect], rng: random.Random) -> Iterator[tuple[Effect, ...]]:
    count = len(flying)
    if count <= ALL_SUBSETS:
        yield from chain.from_iterable(combinations(flying, n) for n in range(count, -1, -1))
        return
    for size in (count, count - 1, 1, 0):
        yield from combinations(flying, size)
    for _ in range(DRAWS):
        yield tuple(one for one in flying if rng.random() < 0.5)  # noqa: PLR2004  either


def _state(point: int, effects: Sequence[Effect], folders: Mapping[str, int], why: str) -> State:
    """Return what a bucket holds after some requests took effect, one after the other."""
    there: dict[str, Effect] = {}
    for one in effects:
        there.pop(one.path, None)
        if one.object:
            there[one.path] = one
    names = {path: one.object for path, one in there.items()}
    for path in there:
        above = path.rpartition("/")[0]
        while above:
            names[above] = folders[above]
            above = above.rpartition("/")[0]
    contents = {one.object: one.content or Content(0) for one in there.values()}
    changed = {one.object: one.last for one in there.values()}
    return State(point, dict(sorted(names.items())), contents, changed, why=why)
