"""Advances a fault over the system calls of a save, a load or a rotation; run by `op_probe`.

Each trial is a child of one child: the directory as it was, one operation, one fault. So nothing in
memory of one trial reaches the next, and a writer that dies of its error ends its own trial only.
With no sample the number of the call advances until the operation completes without a fault.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_conformance.contract import trees
from ckpt_conformance.fault_injectors.injector import fingerprint
from ckpt_conformance.fault_injectors.points import pattern
from ckpt_conformance.processes import children, hugepages
from ckpt_conformance.subject import oracle
from ckpt_conformance.trace.faults import SYNCING, WRITING, Fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.processes.children import Line, Put

DEADLINE = 20.0  # seconds that one trial may take
UNIQUE = re.compile(r"(?=\d*[a-f])[0-9a-f]{8,}")  # the part of a name that no two saves share
MOST = 100_000  # calls of one operation, after which advancing gives up


@dataclass(frozen=True)
class Task:
    """What one child does, in plain values.

    `what` is save, load or rotation; `base` the tree that each trial begins with; `step` the step
    that is saved; `kinds` what to fail with (see `KINDS`); `trials` are faults to try alone.
    `sample` says how many trials of each kind, 0: all. Trees that trials leave go to `keep`, one
    line per trial to `out`. After every n-th trial that raised, `again`, the same save is made once
    more without a fault.
    """

    what: str
    base: str
    step: int
    keep: str
    out: str
    holds: Sequence[str]
    injector: str = "ckpt_conformance.fault_injectors.system_call:SystemCall"
    reading: bool = False
    keep_last: int | None = None
    kinds: Sequence[str] = ()
    sample: Sequence[int] = ()
    trials: Sequence[dict[str, Any]] = ()
    again: int = 1
    seed: int = 0
    fork: bool = True
    done: Sequence[str] = field(default=())


# What a call fails with. A sync is also failed alone: all writes go well, and the disk has nothing.
KINDS: dict[str, dict[str, Any]] = {
    "ENOSPC": {"error": "ENOSPC"},
    "EDQUOT": {"error": "EDQUOT"},
    "EIO": {"error": "EIO"},
    "sync": {"error": "EIO", "only": sorted(SYNCING)},
    "EINTR": {"error": "EINTR"},
    "short": {"error": "short"},
}
HARMLESS = ("EINTR", "short")  # what a kernel may do on a healthy disk, at all calls, too
NONE: dict[str, Any] = {"at": 0}


def advance(child: Any, **task: Any) -> int:  # noqa: ANN401  a Child, and the fields of a Task
    """Run a task; results go line by line to its `out`, so that a death loses none."""
    given = Task(**task)
    with Path(given.out).open("a") as out:
        return Advancer(child, given, children.put_into(out)).run()


class Advancer:
    """Tries the faults of a task one after the other; `put` takes each result."""

    def __init__(self, child: Any, task: Task, put: Put) -> None:  # noqa: ANN401  a Child
        """Take the options of the task for the managers that are opened from now on."""
        self.child, self.task, self.put = child, task, put
        self.is_manager = child.adapter.shape == "manager"
        self.count = 0
        self.place = trees.Restorer(Path(task.base), child.root)
        child.program["options"] = {"keep_last": task.keep_last} if task.keep_last else {}

    def run(self) -> int:
        """Try the control, then the faults; give the number of trials."""
        if not self.task.sample:
            hugepages.collapse()  # many children will be forked
        if self.task.what != "load" and self.is_manager:
            self.child.op_run({"until": self.task.step, "save_at": []}, {})
        control = self.trial("control", NONE)
        if control.get("error") or control["exit_kind"] != "ended":
            return self.count
        for kind, fault in self.chosen(control["log"]):
            self.trial(kind, fault)
        for kind in () if self.task.sample or self.task.trials else self.task.kinds:
            for persistent in (False, True):
                if kind != "sync" or persistent:  # one sync alone is a call like any other
                    self.until_clean(kind, persistent=persistent)
        return self.count

    def until_clean(self, kind: str, *, persistent: bool) -> None:
        """Advance the number of the call until the operation completes without the fault."""
        for at in range(1, MOST):
            fault = {**KINDS[kind], "at": at, "persistent": persistent}
            line = self.trial(kind, fault)
            if line["exit_kind"] == "ended" and not line.get("fired"):
                return

    def chosen(self, log: Sequence[Line]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Give the faults that were asked for, or a sample: kinds of calls and of files in turn."""
        yield from ((fault["kind"], fault["args"]) for fault in self.task.trials)
        rng = random.Random(self.task.seed)  # noqa: S311
        for kind, count in zip(self.task.kinds, self.task.sample, strict=False):
            fault = msgspec.convert({"reading": self.task.reading, **KINDS[kind]}, Fault)
            calls = [one for one in log if fault.counts(one["what"], reads=one["reads"])]
            alike: dict[tuple[str, str], list[int]] = {}
            for at, one in enumerate(calls, 1):
                alike.setdefault((one["what"], pattern(one["path"])), []).append(at)
            kinds = list(alike.values())
            rng.shuffle(kinds)
            for number, places in enumerate(kinds[:count]):
                at = rng.choice(places)
                if kind in HARMLESS and not number:
                    yield kind, {**KINDS[kind], "at": 1, "persistent": True}
                    continue
                persistent = bool(number % 2) is not (kind in {"ENOSPC", "short"})
                args = {**KINDS[kind], "at": at, "persistent": persistent}
                if kind == "sync" and not persistent:  # what is written after it is to be seen
                    args = {"error": "EIO", "at": calls[at - 1]["call"], "persistent": False}
                yield kind, args

    # -- one trial ---------------------------------------------------------------------------

    def trial(self, kind: str, fault: dict[str, Any]) -> Line:
        """Try one fault, in a child of its own where the adapter allows a fork."""
        key = f"{kind} {fault['at']} {'on' if fault.get('persistent') else 'once'}"
        if key in self.task.done:
            return {"exit_kind": "ended", "fired": 1, "log": []}
        self.count += 1
        self.place.restore()
        told: Line = {"key": key, "kind": kind, "what": self.task.what, "args": fault}
        if self.task.fork:
            drawn = random.getstate()  # Python gives a forked child another one

            def work(put: Put) -> None:
                random.setstate(drawn)
                put(self.once(fault))

            *found, end = children.run(work, DEADLINE)
            told |= found[0] if found else {}
            told["exit_kind"] = end["end"]
            if told["exit_kind"] != "ended" and self.task.what != "load":
                told["left"] = self.left()  # by a process that its error ended
        else:
            self.put({**told, "begin": True})
            told |= {**self.once(fault), "exit_kind": "ended"}
        self.put(told)
        return told

    def once(self, fault: dict[str, Any]) -> Line:
        """Do the operation under the fault, and say what came of it."""
        child, task = self.child, self.task
        child.op_close({}, {})
        more = {"reading": True} if task.reading else {}
        found = self.operate([{"injector": task.injector, "args": {**fault, **more}}])
        injected = (found.get("faults") or [{"calls": 0, "fired": 0, "log": []}])[0]
        line: Line = {"error": found.get("error"), **self.calls_of(injected, fault)}
        if task.what == "load":
            return line | self.arrived(found)
        line["left"] = self.left()
        if line["error"] and self.count % task.again == 0:
            again = self.operate([])
            line["again"] = {"error": again.get("error"), "left": self.left()}
        return line

    def calls_of(self, injected: Line, fault: dict[str, Any]) -> Line:
        """Say which call was hit; all calls only of a control."""
        log, at = injected["log"], fault["at"]
        call: Line = next((one for one in log if one["call"] == at), {})
        told = {"calls": injected["calls"], "fired": injected["fired"], "call": call}
        told["renewed"] = is_renewed(log, call) if call else False
        return told | ({} if at else {"log": log, "unsupported": injected.get("unsupported", [])})

    def operate(self, faults: list[Line]) -> Line:
        """Save or load once; a framework runs its loop up to there."""
        task, child = self.task, self.child
        if task.what == "load":
            child.op_fresh({}, {})
            op: Line = {"op": "run", "until": None, "stop_after": 0, "resume": True}
        elif self.is_manager:
            op = {"op": "save", "step": task.step}
        else:
            child.op_close({}, {})
            child.op_fresh({}, {})
            resume = task.what == "rotation"
            op = {"op": "run", "until": task.step, "save_at": [task.step], "resume": resume}
            op["fault_step"] = task.step
        done: Line = child.run_one({**op, "faults": faults})
        return done

    def arrived(self, found: Line) -> Line:
        """Say what a load gave: the step, and a digest of what the manager holds."""
        step = found.get("arrived", {}).get("step")
        leaves = found.get("states", {}).get(str(step), {})
        return {"step": step, "state": digest_of(leaves, self.task.holds)}

    def left(self) -> str:
        """Copy what is left, each content once; names of temporary files are taken as equal."""
        tree = fingerprint(self.child.root)
        alike = sorted((UNIQUE.sub("#", name), digest) for name, digest in tree.items())
        name = blake2b(repr(alike).encode(), digest_size=8).hexdigest()
        target = Path(self.task.keep) / name
        if not target.exists():
            trees.copy(self.child.root, target)
        return name


def is_renewed(log: Sequence[Line], call: Line) -> bool:
    """Tell whether a file whose sync failed was written anew, and synced, by the same save."""
    kind = pattern(call["path"])
    alike = [one for one in log if one["call"] > call["call"] and pattern(one["path"]) == kind]
    written = [one["call"] for one in alike if one["what"] in WRITING]
    synced = [one["call"] for one in alike if one["what"] in SYNCING and not one["injected"]]
    return bool(written and synced and written[0] < synced[-1])


def digest_of(leaves: dict[str, Any], holds: Sequence[str]) -> str:
    """Give one digest of the components that a manager holds."""
    return blake2b(json.dumps(oracle.held(leaves, holds), sort_keys=True).encode()).hexdigest()
