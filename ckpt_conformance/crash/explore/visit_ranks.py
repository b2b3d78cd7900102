"""Visiting crash states with all ranks of a world, one state after the other; run by `op_probe`.

Rank 0 lays a state out, all recover from it, and each compares what it got with what it had got
from a whole step. The ranks meet in a group of their own, so that a load that leaves them out of
step is seen: then the world ends, and what is left is for another one.
"""

from __future__ import annotations

import datetime as dt
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckpt_conformance.crash.explore.visit import Task, Visitor
from ckpt_conformance.processes import children
from ckpt_conformance.workload import digests

if TYPE_CHECKING:
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.processes.children import Line

PATIENCE = 30.0  # seconds that a rank waits for the others between two states


class OutOfStepError(RuntimeError):
    """A load ended otherwise on this rank than on others: this process is of no further use."""


def visit(child: Any, task: str) -> dict[str, Any]:  # noqa: ANN401  a Child
    """Run a task file; this rank's results go line by line to a file of its own."""
    with Path(task).open("rb") as file:
        given: Task = pickle.load(file)  # noqa: S301  our own, of this session
    with Path(f"{given.out}-{dist.get_rank()}").open("a") as out:
        RankVisitor(child, given, children.put_into(out)).run()
    return {}


class RankVisitor(Visitor):
    """One rank's part of the visits."""

    def __init__(self, child: Any, task: Task, put: children.Put) -> None:  # noqa: ANN401  a Child
        """Make the group in which the ranks meet."""
        super().__init__(child, task, put)
        self.rank = dist.get_rank()
        self.group: Any = dist.new_group(backend="gloo", timeout=dt.timedelta(seconds=PATIENCE))
        if task.known:
            self.legal = task.known[self.rank]

    def meet(self, said: object = None) -> list[Any]:
        """Wait for every rank; give what each says."""
        heard: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(heard, said, group=self.group)
        return heard

    def materialize(self, place: State | str) -> None:
        """Make the directory what a place says, while no rank has anything open."""
        self.child.op_close({}, {})
        self.meet()
        if self.rank == 0:
            super().materialize(place)
        self.meet()

    def recover(self, step: int | None = None) -> dict[str, Any]:
        """Resume into a fresh job; give step, leaves or error. A box counts by its digest here."""
        found = super().recover(step)
        held: dict[str, dict[str, Any]] = found["leaves"] or {}
        short = {part: {k: _short(v) for k, v in leaves.items()} for part, leaves in held.items()}
        return found | {"leaves": short if found["leaves"] is not None else None}

    def run(self) -> None:
        """Learn what the whole steps give, then recover from each item."""
        if not self.legal:
            self._learn_together()
        for number in range(len(self.task.items)):
            self.put({"begin": number})
            told = self.one(number)
            self.put(told)
            if number + 1 < len(self.task.items):
                self._go_on(told)
            elif told["error"]:
                raise OutOfStepError  # and let no other rank wait for this one

    def one(self, number: int, *, alone: bool = False) -> Line:
        """Recover from one item and compare this rank's part with that of the legal versions."""
        del alone
        self.materialize(self.task.items[number].place)
        found = self.recover(self.task.ask)
        alone = len(self.task.items) == 1
        told = {key: value for key, value in found.items() if key != "leaves"}
        return told | {"item": number, "alone": alone, **self.compare(found)}

    def _learn_together(self) -> None:
        for number, step, place in self.task.legal:
            self.materialize(place)
            found = self.recover()
            steps = self.meet(found["step"])
            if self.task.explicit and any(each != step for each in steps):
                found = self.recover(step)  # an older one, behind a newer
            self.put({"legal": number, "wanted": step, **found})
            if found["step"] == step:
                self.legal[number] = (step, found["leaves"])
            self._go_on(found)

    def _go_on(self, told: Line) -> None:
        """Raise OutOfStepError if the ranks can't do another recovery together."""
        failed = self.meet(told["error"] is not None)
        if not any(failed):
            return
        if not all(failed):
            raise OutOfStepError
        heard: list[Any] = [None] * len(failed)
        dist.all_gather_object(heard, self.rank)  # what a load left undone shows here
        if heard != list(range(len(failed))):
            raise OutOfStepError


def _short(leaf: object) -> str:
    """Give the digest of a box, and any other leaf as it is."""
    return leaf if isinstance(leaf, str) else digests.digest(leaf)
