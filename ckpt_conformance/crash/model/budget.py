"""Spreads a budget over the crash points: no state twice between two marks of the journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.enumerate import DRAWS, Walk
from ckpt_conformance.trace.operations import Kind

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from ckpt_conformance.crash.model.states import Content, State


class Seen:
    """What was given since the last mark; contents and names are numbered, so keys are short."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._contents: dict[Content, int] = {}
        self._by_id: dict[int, tuple[object, int]] = {}  # the object is held, so its id is its own
        self._names: dict[tuple[tuple[str, int], ...], int] = {}
        self._keys: set[tuple[int, ...]] = set()

    def forget(self) -> None:
        """Start again: after a mark the same state means something else."""
        self._keys.clear()
        self._by_id.clear()

    def is_new(self, state: State) -> bool:
        """Whether this state was not given yet; notes it."""
        contents = (self._number(state.contents[each]) for each in sorted(state.contents))
        key = (self._name(state), *contents)
        if key in self._keys:
            return False
        self._keys.add(key)
        return True

    def _number(self, content: Content) -> int:
        known = self._by_id.get(id(content))
        if known is None:
            number = self._contents.setdefault(content, len(self._contents))
            known = self._by_id[id(content)] = (content, number)
        return known[1]

    def _name(self, state: State) -> int:
        known = self._by_id.get(id(state.names))
        if known is None:
            number = self._names.setdefault(tuple(state.names.items()), len(self._names))
            known = self._by_id[id(state.names)] = (state.names, number)
        return known[1]


def explore(walk: Walk, rng: random.Random, budget: int) -> Iterator[State]:
    """Give at most `budget` states: each crash point has its share, and what others left over."""
    seen, given = Seen(), 0
    operations = walk.recording.operations
    for count in range(len(operations) + 1):
        if count:
            walk.step(operations[count - 1])
            if operations[count - 1].kind is Kind.MARK:
                seen.forget()
        share = budget * (count + 1) // (len(operations) + 1) - given
        for state in _at_point(walk, rng, seen, share):
            given += 1
            yield state


def _at_point(walk: Walk, rng: random.Random, seen: Seen, share: int) -> Iterator[State]:
    choices = list(walk.systematic())
    if len(choices) > share:  # the simplest two, and a sample of the rest, in order
        rest = range(2, len(choices))
        picked = sorted(rng.sample(rest, max(0, min(share - 2, len(rest)))))
        choices = choices[:2] + [choices[index] for index in picked]
    for why, position, differs in choices:
        state = walk.state(position, differs, why)
        if share > 0 and seen.is_new(state):
            share -= 1
            yield state
    missed = 0
    for _ in range(min(share, DRAWS)):
        why, position, differs = walk.drawn(rng)
        state = walk.state(position, differs, why)
        if seen.is_new(state):
            yield state
        else:
            missed += 1
        if missed == DRAWS // 8:
            return
