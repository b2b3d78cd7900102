"""Where a save can be struck: the points of one counting pass, and which of them differ.

A pass with every writing injector in `survey` mode gives each call with the tree before it. From
that come the points: before each call, after a prefix of each file, after each rename. Two points
at which a new process would find the same files in the same condition are alike, so a small sample
can still see every kind of crash state. Names that are there neither before nor after the save are
temporary: they count only as "something is left".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance import fault_injectors
from ckpt_conformance.fault_injectors import injector
from ckpt_conformance.verdicts import Unknown

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.subject import Golden, Subject

WRITERS = (
    "file-write",
    "torch-save",
    "safetensors-save",
    "dcp-save",
    "dcp-writer",
    "rename",
    "unlink",
    "fsync",
)
WHOLE_FILES = ("torch-save", "safetensors-save")
OTHER = 23  # the seed of the job that saves step 4 over another job's step 4
PREFIXES = ("0", "half", "len-1")
_WORDS = {"0": "after 0 bytes of", "half": "after half of", "len-1": "before the last byte of"}
Tree = dict[str, str]


@dataclass(frozen=True)
class Point:
    """One place to strike: which injector, at which call, when; and what the disk is like then."""

    fault: str
    at: int
    moment: str
    prefix: str
    what: str
    path: str
    state: tuple[str, ...]

    def spec(self, mode: str, **more: object) -> dict[str, object]:
        """Give the fault for `Life.arm`."""
        args: dict[str, object] = {"at": self.at, "moment": self.moment, "mode": mode, **more}
        return fault_injectors.spec(self.fault, prefix=self.prefix, **args)

    @property
    def name(self) -> str:
        """Say it in a few words."""
        when = _WORDS[self.prefix] if self.moment == "prefix" else self.moment
        return f"{when} {self.what} {self.path} (call {self.at})"


def survey() -> list[dict[str, object]]:
    """Give the faults of a counting pass."""
    return [fault_injectors.spec(name, survey=True) for name in WRITERS]


def of_save(subject: Subject, golden: Golden, name: str) -> list[Point]:
    """List the points of a save of step 4, counted once per adapter and name.

    `name` is `new`, a job that was resumed from step 2, or `same`, another job's step 4 over it.
    """
    key = f"points {name}"
    if key not in subject.notes:
        subject.lay_out(golden, start_of(name))
        before = injector.fingerprint(subject.root)
        ending = subject.run(4, (4,), faults=survey(), fault_step=4, **job_of(name))
        if ending.how != "ended" or ending.error:
            told = subject.tell(ending)
            msg = f"control failed: the save that is to be struck ends: {told}"
            raise Unknown(msg)
        after = injector.fingerprint(subject.root)
        subject.notes[key] = points(ending.result("run")["faults"], before, after)
    found: list[Point] = subject.notes[key]
    if not found:
        msg = "no call of the save was seen: its writer is native, and not among those watched"
        raise Unknown(msg)
    return found


def start_of(name: str) -> int:
    """Give the step whose snapshot is laid out before a save of a name."""
    return 2 if name == "new" else 4


def job_of(name: str) -> dict[str, Any]:
    """Give the arguments of the run that saves."""
    return {"resume": True} if name == "new" else {"seed": OTHER}


def points(counted: Sequence[Mapping[str, Any]], before: Tree, after: Tree) -> list[Point]:
    """List the points of a counting pass in their order; the trees are of before and after it."""
    calls = [{**call, "fault": each["name"]} for each in counted for call in each["log"]]
    calls.sort(key=lambda call: call["order"])
    found: list[Point] = []
    for index, call in enumerate(calls):
        following = calls[index + 1]["tree"] if index + 1 < len(calls) else after
        found += _of_call(call, following, before, after)
    return found


def _of_call(call: Mapping[str, Any], following: Tree, before: Tree, after: Tree) -> list[Point]:
    def point(moment: str, tree: Tree, prefix: str = "half") -> Point:
        state = condition(tree, before, after)
        if moment == "prefix" and call["path"] in {*before, *after}:
            state = (*state, f"{call['path']} cut at {prefix}")
        named = (call["fault"], call["call"], moment, prefix, call["what"], call["path"])
        return Point(*named, state)

    found = [point("before", call["tree"])]
    if call["fault"] in WHOLE_FILES:
        found += [point("prefix", call["tree"], prefix) for prefix in PREFIXES]
    elif call["what"] == "write":
        found.append(point("prefix", call["tree"]))
    return [*found, point("after", following)]


def condition(tree: Tree, before: Tree, after: Tree) -> tuple[str, ...]:
    """Describe a tree by what each lasting name is: as before, as after, absent, or neither."""
    lasting = sorted({*before, *after})
    found = [
        f"{name} {_mark(tree.get(name), before.get(name), after.get(name))}" for name in lasting
    ]
    left = any(name not in before and name not in after for name in tree)
    return (*found, "something temporary" if left else "nothing temporary")


def _mark(now: str | None, before: str | None, after: str | None) -> str:
    if now == before:
        return "as before"
    return "as after" if now == after else "gone" if now is None else "half"


def pattern(path: str) -> str:
    """Give a name without its numbers and unique parts, so that files of one kind are alike."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", path)


def choose(found: Sequence[Point], rng: random.Random, quick: int) -> list[Point]:
    """Choose points of different conditions: mixed ones first, then untouched or finished ones."""
    groups: dict[tuple[str, ...], list[Point]] = {}
    for point in found:
        groups.setdefault(point.state, []).append(point)
    picked = [rng.choice(group) for group in groups.values()]
    rng.shuffle(picked)
    picked.sort(key=lambda point: is_plain(point.state))
    return sorted(picked[:quick], key=found.index)


def is_plain(state: tuple[str, ...]) -> bool:
    """Tell whether every lasting name is as before, or every one as after."""
    marks = {name.partition(" ")[2] for name in state[:-1]}
    return marks <= {"as before"} or "as before" not in marks
