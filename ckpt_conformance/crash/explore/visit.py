"""Visiting many crash states in one child: lay out, recover, compare; run by `op_probe`.

The process itself recovers nothing, so it stays as fresh as it was forked. One child of it screens
all states, one after the other. What is not fine there, and one in fifty of the rest, gets a child
of its own. The directory is private memory at the recorded path where the kernel allows it.
"""

from __future__ import annotations

import pickle
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.processes import children
from ckpt_conformance.processes.memory import mount_place
from ckpt_conformance.subject import oracle
from ckpt_conformance.trace.operations import Recording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.processes.children import Line, Put

AGAIN = 0.02  # of what was fine in a batch
FAR = 1 << 30
DEADLINE = 20.0  # seconds that one recovery may take


@dataclass(frozen=True)
class Item:
    """One thing to recover from: a crash state, or a tree on disk.

    `fine` are the versions that may be served, `empty` says that nothing need be there, `older` are
    the versions to ask for by step when the newest is refused. `then` are two steps to save after
    the recovery, which is tried for one item of each kind in each `group`.
    """

    place: State | str
    fine: frozenset[int] = frozenset()
    empty: bool = False
    older: tuple[int, ...] = ()
    group: str = ""
    then: tuple[int, int] | None = None


@dataclass
class Task:
    """What one child does. `legal` are trees or states, by version: (number, step, place)."""

    recording: str
    root: str
    out: str
    legal: list[tuple[int, int, State | str]]
    items: list[Item]
    holds: frozenset[str]
    seed: int = 0
    explicit: bool = False  # the adapter can be asked for a step
    limit: int = FAR  # how many suspects may have a child of their own
    onward: int = 30  # recoveries, beyond one of each kind, after which a job goes on
    control: str | None = None  # what going on gave without a crash, where that is known
    fork: bool = True
    deadline: float = DEADLINE
    ask: int | None = None  # the step that is asked for; None: the newest
    known: list[dict[int, tuple[int, Any]]] = field(default_factory=list[dict[int, Any]])  # by rank


def visit(child: Any, task: str) -> dict[str, Any]:  # noqa: ANN401  a Child
    """Run a task file; results go line by line to its `out`, so that a death loses none."""
    with Path(task).open("rb") as file:
        given: Task = pickle.load(file)  # noqa: S301  our own, of this session
    private = mount_place(Path(given.root))
    begun = time.monotonic()
    with Path(given.out).open("a") as out:
        visitor = Visitor(child, given, children.put_into(out))
        (visitor.by_children if given.fork else visitor.inline)()
    seconds = time.monotonic() - begun
    return {"private": private, "seconds": seconds, "batch_seconds": visitor.batch or seconds}


def loads(child: Any, seconds: float) -> float:  # noqa: ANN401  a Child
    """Load the newest step again and again; give the loads per second, to compare visits with."""
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        child.op_close({}, {})
        child.load(None)
        count += 1
    return count / (time.perf_counter() - begun)


class Visitor:
    """Recovers from the items of a task; `put` takes each result."""

    def __init__(self, child: Any, task: Task, put: Put) -> None:  # noqa: ANN401  a Child
        """Read the recording; nothing is laid out yet."""
        self.child, self.task, self.put = child, task, put
        self.recording = Recording.read(Path(task.recording))
        self.root = Path(task.root)
        self.materializer: Materializer | None = None
        self.batch = 0.0  # seconds of screening
        self.legal: dict[int, tuple[int, Any]] = {}  # version -> (step, held leaves)

    # -- one recovery -----------------------------------------------------------------------

    def materialize(self, place: State | str) -> None:
        """Make the directory what a place says; the lay-out undoes what the manager did there."""
        self.child.op_close({}, {})
        if isinstance(place, str):
            self.materializer = None
            trees.empty(self.root)
            trees.copy(Path(place), self.root, into=True)
            return
        if self.materializer is None:
            self.materializer = Materializer(self.recording, self.root)
        self.materializer.apply(place)

    def recover(self, step: int | None = None) -> dict[str, Any]:
        """Resume into a fresh job up to its first training step; give step, leaves or error."""
        child = self.child
        child.op_close({}, {})
        child.op_fresh({}, {})
        resume: Any = True if step is None else step
        op = {"op": "run", "until": None, "stop_after": 0, "resume": resume}
        found: dict[str, Any] = child.run_one(op)
        arrived = found.get("arrived", {}).get("step")
        leaves = found.get("states", {}).get(str(arrived), {})
        error = found.get("error")
        exit_kind = "memory" if error and error["memory"] else "ended"
        return {
            "exit_kind": exit_kind,
            "step": None if error else arrived,
            "error": error,
            "leaves": None if error else oracle.held(leaves, self.task.holds),
        }

    def learn(self, put: Put) -> None:
        """Recover from every legal version: what they give is legal."""
        for number, step, place in self.task.legal:
            self.materialize(place)
            found = self.recover()
            if found["step"] != step and self.task.explicit:
                found = self.recover(step)  # an older one, behind a newer
            put({"legal": number, "wanted": step, **found})
            if found["step"] == step:
                self.legal[number] = (step, found["leaves"])

    def one(self, number: int, *, alone: bool = False) -> Line:
        """Recover from one item and compare what is served with the legal versions."""
        item = self.task.items[number]
        self.materialize(item.place)
        found = self.recover()
        told = _plain(found) | {"item": number, "alone": alone, **self.compare(found)}
        if found["error"] and self.task.explicit:
            told["older"] = [each for each in item.older if self.serves(item, each)]
        return told

    def compare(self, found: dict[str, Any]) -> dict[str, Any]:
        """Name the versions that were served, or what differs from the nearest."""
        step, leaves = found["step"], found["leaves"]
        if not step:
            return {"versions": [], "differs": []}
        same = [n for n, (s, held) in self.legal.items() if s == step and held == leaves]
        near = [held for s, held in self.legal.values() if s == step] or [
            held for _, held in self.legal.values()
        ]
        told = oracle.differences(leaves, near[-1], self.task.holds) if near and not same else []
        return {"versions": same, "differs": told}

    def serves(self, item: Item, version: int) -> bool:
        """Tell whether an explicit load still gives a version."""
        if version not in self.legal:
            return False
        step, leaves = self.legal[version]
        self.materialize(item.place)
        found = self.recover(step)
        return bool(found["step"] == step and found["leaves"] == leaves)

    def is_suspect(self, told: Line) -> bool:
        """Tell whether an answer is not one that may be."""
        number: int = told["item"]
        item = self.task.items[number]
        if item.empty and told["exit_kind"] == "ended" and not told["step"]:
            return False
        return told["exit_kind"] != "ended" or not set(told["versions"]) & item.fine

    # -- going on after a recovery ----------------------------------------------------------

    def _going_on(self, place: State | str, step: int, then: tuple[int, int]) -> str:
        """Resume, train, save both steps in one child, restart in another; say what went wrong."""
        first, second = then

        def train(put: Put) -> None:
            self.materializer = None
            self.materialize(place)
            put({"used": self._train(step, first, second)})

        def restart(put: Put) -> None:
            found = self.recover()
            error: dict[str, Any] = found["error"] or {}
            what = error.get("message") or f"step {found['step']}"
            good = found["step"] == second
            put({"used": "" if good else f"a restart after step {second} was saved gives: {what}"})

        for work in (train, restart):
            lines = list(children.run(work, self.task.deadline))
            used: str | None = lines[0].get("used")
            if used is None:
                return f"the job that goes on ends: {lines[-1]['end']}"
            if used:
                return used
        return ""

    def _train(self, step: int, first: int, second: int) -> str:
        """Go on from a recovery; give the first error of what must not fail."""
        child = self.child
        child.op_close({}, {})
        child.op_fresh({}, {})
        run = {"op": "run", "resume": step > 0, "until": second, "save_at": [first, second]}
        ops: list[dict[str, Any]] = [run]
        if step >= first and child.adapter.shape == "manager":
            save: dict[str, Any] = {"op": "save", "step": first, "may_refuse": True}
            ops = [{"op": "load"}, save, {**run, "resume": False}]
        for op in ops:
            error = child.run_one(op).get("error")
            if error and not op.get("may_refuse"):  # some managers save no step twice
                what = f"{error['type']}: {error['message']}"
                return f"{op['op']} after the recovery: {what}"
        return ""

    # -- many -------------------------------------------------------------------------------

    def inline(self) -> None:
        """Recover from all here, for a manager that has threads: no child can be forked."""
        self.learn(lambda line: self.put(_plain(line)))
        for number in range(len(self.task.items)):
            self.put({"begin": number})
            self.put(self.one(number, alone=len(self.task.items) == 1))

    def by_children(self) -> None:
        """Screen in one child, judge suspects and a sample alone, go on from one of each kind."""
        begun = time.monotonic()
        in_batch = self._recover_in_batch()
        self.batch = time.monotonic() - begun
        for number in self._chosen(in_batch):
            self.put(self._alone(number))
        self._go_on_each(in_batch)

    def _go_on_each(self, in_batch: dict[int, Line]) -> None:
        """Go on from one item of each kind, if going on works where nothing was harmed."""
        wanted = [item for item in self.task.items if item.then]
        if not wanted or not self.legal:
            return
        control = self.task.control
        if control is None:
            _, step, place = self.task.legal[-1]
            control = self._going_on(place, step, wanted[0].then or (0, 0))
        self.put({"control": control})
        for number in [] if control else self._onward(in_batch):
            item, told = self.task.items[number], in_batch[number]
            used = self._going_on(item.place, told["step"] or 0, item.then or (0, 0))
            self.put({"item": number, "used": used})

    def _onward(self, in_batch: dict[int, Line]) -> list[int]:
        """Choose after what a job goes on: one of each kind, and the rarest and richest leftovers.

        A leftover is a name that no whole checkpoint has.
        """
        items = self.task.items
        fine = [n for n, told in in_batch.items() if items[n].then and not self.is_suspect(told)]
        kinds: dict[str, int] = {}
        for number in fine:
            kinds.setdefault(items[number].group + _kind(in_batch[number]), number)
        whole = {entry.path for entry in self.recording.initial}
        whole |= {name for _, _, place in self.task.legal for name in _names(place)}
        left = {number: set(_names(items[number].place)) - whole for number in fine}
        count = Counter(name for found in left.values() for name in found)
        rest = [number for number in fine if left[number]]
        rest.sort(key=lambda number: (min(count[name] for name in left[number]), number))
        half = (self.task.onward + 1) // 2
        richest = sorted(rest, key=lambda number: -len(left[number]))[: self.task.onward - half]
        return list(dict.fromkeys([*kinds.values(), *rest[:half], *richest]))

    def _recover_in_batch(self) -> dict[int, Line]:
        """Recover from all, in one child after another where one dies of it."""
        found: dict[int, Line] = {}
        left = list(range(len(self.task.items)))
        while left:
            self._batch(left, found)
            left = [number for number in left if number not in found]
        return found

    def _batch(self, numbers: Sequence[int], found: dict[int, Line]) -> None:
        def work(put: Put) -> None:
            if not self.legal:
                self.learn(put)
            for number in numbers:
                put({"begin": number})
                put(self.one(number))

        at = numbers[0]
        for line in children.run(work, self.task.deadline):
            at = line.get("begin", at)
            if "legal" in line:
                self.put(_plain(line))
                if line["step"] == line["wanted"]:
                    self.legal[line["legal"]] = (line["step"], line["leaves"])
            died = "end" in line and at not in found
            told = _nothing(at, _died(line)) if died else line
            if "item" in told:
                found[told["item"]] = told
                self.put(told)

    def _alone(self, number: int) -> Line:
        def work(put: Put) -> None:
            self.materializer = None
            put(self.one(number, alone=True))

        lines = list(children.run(work, self.task.deadline))
        if "item" in lines[0]:
            return lines[0]
        return _nothing(number, _died(lines[-1]), alone=True)

    def _chosen(self, in_batch: dict[int, Line]) -> list[int]:
        """Choose what is judged alone: a sample of the fine, then suspects, all kinds first."""
        rng = random.Random(self.task.seed)  # noqa: S311
        bad = [n for n, told in in_batch.items() if self.is_suspect(told)]
        good = [n for n in in_batch if n not in set(bad)]
        again = [n for n in good if rng.random() < AGAIN] or good[:1]
        count: dict[str, int] = {}
        rank: dict[int, int] = {}
        for number in bad:
            kind = self.task.items[number].group + _kind(in_batch[number])
            rank[number] = count[kind] = count.get(kind, 0) + 1
        return [*again, *sorted(bad, key=lambda n: (rank[n], n))[: self.task.limit]]


def _nothing(number: int, exit_kind: str, *, alone: bool = False) -> Line:
    """Give the answer of a recovery that died."""
    told: Line = {"item": number, "exit_kind": exit_kind, "alone": alone}
    return told | {"step": None, "error": None, "versions": [], "differs": []}


def _died(told: Line) -> str:
    return "crashed" if told["end"] == "ended" else str(told["end"])


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != "leaves"}


def _names(place: State | str) -> list[str]:
    return [] if isinstance(place, str) else list(place.names)


def _kind(told: Line) -> str:
    error: dict[str, Any] = told["error"] or {}
    return f"{told['exit_kind']} {told['step']} {error.get('type')} {sorted(told['versions'])}"
