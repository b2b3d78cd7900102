"""Scripts of operations on a manager, run against a model of what may come of them.

A script is a list of rules, each a plain dict, so that it can be drawn, shortened, printed and run
again. Consecutive rules of one process become one child. The model knows of each step whether it is
whole, damaged, or in doubt, and of which of two runs its state is; it never knows how.

The model asks for what any manager must do: a load gives a step that may be there, in exactly the
state in which that step was saved, or it refuses where something newer is damaged or in doubt. It
never goes back behind the newest whole step, and a save on a healthy disk succeeds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.subject import names, oracle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.subject.subject import Golden, Subject

Rule = dict[str, Any]
STEPS = (2, 4, 6, 8)
SEEDS = {"first": 11, "second": 23}  # of the two runs that write into one directory
CLOSE: Rule = {"op": "close"}


@dataclass(frozen=True)
class World:
    """What an execution is judged by: states by run and step, files by step, faults by number.

    `overwrites` is False for a manager that refuses to save a step that is there.
    """

    states: Mapping[str, Mapping[int, Any]]
    files: Mapping[int, Sequence[str]]
    deaths: Sequence[Mapping[str, Any]] = ()
    overwrites: bool = True


@dataclass
class Entry:
    """What the model knows of a step: whole, damaged or in doubt, and whose state it may hold."""

    status: str
    runs: set[str]


@dataclass
class Execution:
    """One script on one subject, from an empty directory."""

    subject: Subject
    world: World
    disk: dict[int, Entry] = field(default_factory=dict[int, Entry])
    last: int = 0  # the step that was saved last
    log: list[str] = field(default_factory=list[str])
    keep: int | None = None
    run: str = "first"  # whose state the live job has
    step: int = 0
    ops: list[Rule] = field(default_factory=list[Rule])
    seed: int = SEEDS["first"]
    again: int = 0  # the step that a load in doubt has served, until another child ends

    @property
    def is_manager(self) -> bool:
        """Whether loads in the middle of a child are possible."""
        return self.subject.info.shape == "manager"

    def execute(self, script: Sequence[Rule]) -> None:
        """Run a script; raises Violation where the manager leaves the model."""
        trees.clear(self.subject.root)
        for rule in script:
            given = {key: value for key, value in rule.items() if key != "rule"}
            getattr(self, f"do_{rule['rule']}")(**given)
        self.do_restart()

    # -- rules: what happens inside a child --------------------------------------------------------

    def do_train(self) -> None:
        """Train to the next of `STEPS`."""
        if self.step >= STEPS[-1]:
            return
        if not self.ops and self.again:
            self.do_load(sorted(self.disk).index(self.again))  # go on from what was just served
        if self.step >= STEPS[-1]:
            return
        if not self.ops:
            self.ops.append({"op": "run", "until": self.step, "save_at": []})
        self.step += 2
        self.ops[-1]["until"] = self.step
        self.log.append(f"train to step {self.step}")

    def do_save(self) -> None:
        """Save; train first if this child has trained nothing since its last load or save."""
        if not self.can_save():
            self.do_train()
        if self.can_save():
            self.ops[-1]["save_at"].append(self.step)
            self.log.append(f"save step {self.step}")
            self.saved(self.step)

    def can_save(self) -> bool:
        """Whether the last step of this child was trained in it and is not saved."""
        if not self.ops:
            return False
        loaded = self.ops[-1].get("expects", [0])[0]
        is_free = self.world.overwrites or self.step not in self.disk
        return is_free and self.step > loaded and self.step not in self.ops[-1]["save_at"]

    def do_load(self, pick: int | None = None) -> None:
        """Load the latest, or one of the steps that are or may be there."""
        if not self.disk:
            return
        if not self.is_manager:
            self.do_restart()
        step = None if pick is None else sorted(self.disk)[pick % len(self.disk)]
        may, can_refuse = self.outcomes(step)
        resume = True if step is None else step
        self.log.append("load the latest" if step is None else f"load step {step}")
        if can_refuse or len(may) > 1 or any(len(self.disk[one].runs) > 1 for one in may):
            self.ops.append({"op": "run", "until": None, "resume": resume, "stop_after": 0})
            self.judge(self.live(), may, can_refuse=can_refuse)
            return
        (self.step,) = may
        (self.run,) = self.disk[self.step].runs
        expects = [self.step, self.run]
        op = {"op": "run", "until": self.step, "resume": resume, "save_at": [], "expects": expects}
        self.ops.append(op)

    # -- rules: how a child ends -------------------------------------------------------------------

    def do_restart(self) -> None:
        """End the process in good order."""
        if self.ops:
            self.ops.append(CLOSE)
            self.live()

    def do_begin(self) -> None:
        """End the process; begin another run from scratch in the same directory."""
        self.do_restart()
        self.run = "second" if self.run == "first" else "first"
        self.seed = SEEDS[self.run]
        self.log.append(f"begin the {self.run} run from scratch")

    def do_die(self, pick: int) -> None:
        """Train on and die inside the save."""
        if not self.can_save():
            self.do_train()
        if not self.can_save() or not self.world.deaths:
            return
        self.ops[-1]["save_at"].append(self.step)
        death = self.world.deaths[pick % len(self.world.deaths)]
        self.ops[-1] |= {"faults": [death], "fault_step": self.step}
        args = death["args"]
        self.log.append(f"die in the save of step {self.step}, {args['moment']} call {args['at']}")
        step, run = self.step, self.run
        result = self.live(may_die=True)
        if result.exit_kind == "ended":
            self.saved(step, run)
        else:
            before = self.disk.get(step, Entry("", set()))
            self.disk[step] = Entry("in doubt", before.runs | {run})

    def do_keep(self, number: int) -> None:
        """From the next child on, let rotation keep so many steps."""
        self.do_restart()
        self.keep = number
        self.log.append(f"keep the last {number}")

    # -- rules: what happens to the files ---------------------------------------------------------

    def do_damage(self, pick: int, file: int, fault: str) -> None:
        """Damage or delete one file of a step, between two children."""
        from ckpt_conformance.fault_injectors import at_rest

        self.do_restart()
        there = [step for step in sorted(self.disk) if self.present(step)]
        if not there:
            return
        step = there[-1 - pick % len(there)]
        path = self.present(step)[file % len(self.present(step))]
        done = at_rest.AT_REST[fault](self.subject.root, random.Random(pick), path)  # noqa: S311
        self.log.append(f"{done.fault} in {done.file}, a file of step {step}")
        for other, entry in self.disk.items():
            if path in self.world.files[other]:
                entry.status = "damaged"

    def present(self, step: int) -> list[str]:
        """Give the files of a step that are there and not empty, largest first."""
        root = self.subject.root
        sizes = {
            name: (root / name).stat().st_size
            for name in self.world.files[step]
            if (root / name).is_file()
        }
        return sorted(
            (name for name in sizes if sizes[name]), key=lambda name: (-sizes[name], name)
        )

    # -- the model --------------------------------------------------------------------------------

    def saved(self, step: int, run: str = "") -> None:
        """Note a save that has returned, and what rotation may have taken away."""
        self.disk[step] = Entry("whole", {run or self.run})
        self.last = step
        known = sorted(self.disk)
        if "explicit_step" not in self.subject.info.capabilities:
            kept = {step}
        elif self.keep:
            kept = {*known[-self.keep :], step}
        else:
            kept = set(known)
        for other in known:
            if other not in kept and self.disk[other].status == "whole":
                self.disk[other].status = "in doubt"

    def outcomes(self, step: int | None) -> tuple[set[int], bool]:
        """Give the steps that a load may serve, and whether it may refuse."""
        if step is not None:
            return {step}, self.disk[step].status != "whole"
        whole = [one for one, entry in self.disk.items() if entry.status == "whole"]
        newest = max(whole, default=0)
        doubtful = {one for one in self.disk if one > newest}
        last = {self.last} if self.last in whole else set[int]()
        if not whole:
            return set(self.disk), True
        return {newest} | doubtful | last, bool(doubtful)

    # -- children -----------------------------------------------------------------------------

    def live(self, *, may_die: bool = False) -> ProcessResult:
        """Run what has been gathered in one child, and judge all but a last load in doubt."""
        ops, self.ops, self.again = self.ops, [], 0
        loads = [op for op in ops if op["op"] == "run"]
        if loads and loads[-1].get("expects", [None])[0] == loads[-1]["until"]:
            loads[-1] |= {"until": None, "stop_after": 0}  # a look at what was loaded, then the end
        options = {"keep_last": self.keep} if self.keep else {}
        process_result = self.subject.execute(*ops, seed=self.seed, options=options)
        self.step, self.run = 0, next(run for run, seed in SEEDS.items() if seed == self.seed)
        if may_die and process_result.exit_kind == "killed":
            return process_result
        for index, op in enumerate(ops):
            if op.get("stop_after") == 0 and "expects" not in op:
                break
            result = process_result.results[index] if index < len(process_result.results) else {}
            if process_result.exit_kind != "ended" or not result or "error" in result:
                self.leave("an operation on a healthy disk fails", process_result)
            self.judge_state(op, result, process_result)
        saves = [step for op in ops for step in op.get("save_at", ())]
        if process_result.steps_of("acknowledged") != saves:
            self.leave(f"of the saves {saves} not all were acknowledged", process_result)
        return process_result

    def judge_state(
        self, op: Rule, result: Mapping[str, Any], process_result: ProcessResult
    ) -> None:
        """Compare what a load gave with the only thing that it may give."""
        if "expects" not in op:
            return
        step, run = op["expects"]
        arrived = result.get("arrived", {}).get("step", result.get("step"))
        if arrived != step:
            self.leave(f"a load gives step {arrived} instead of {step}", process_result)
        if "arrived" in result:
            self.compare(result["states"][str(step)], step, {run}, process_result)

    def judge(self, result: ProcessResult, may: set[int], *, can_refuse: bool) -> None:
        """Judge a load that has several legal outcomes."""
        step, state = oracle.arrival(result)
        refused = result.exit_kind == "ended" and result.error is not None
        if refused and can_refuse:
            self.log.append("... refused")
            return
        if refused or result.exit_kind != "ended":
            self.leave(f"a load of one of {sorted(may)} fails", result)
        if step not in may or step is None:
            self.leave(f"a load gives step {step}; {sorted(may)} may be there", result)
        self.log.append(f"... step {step}")
        run = self.compare(state, step, self.disk[step].runs, result)
        self.disk[step] = Entry("whole", {run})  # whatever was in doubt, it has loaded
        if "explicit_step" in self.subject.info.capabilities:
            self.again = step

    def compare(
        self, state: Mapping[str, Any], step: int, runs: set[str], result: ProcessResult
    ) -> str:
        """Give the run whose state was loaded, of those that may have saved it."""
        wanted, holds = {run: self.world.states[run][step] for run in runs}, self.subject.holds
        found = [run for run in sorted(runs) if oracle.same(state, wanted[run], holds)]
        if not found:
            told = oracle.differences(state, wanted[min(runs)], holds)
            self.leave(f"a load gives another state than was saved at step {step}: {told}", result)
        return found[0]

    def leave(self, what: str, result: ProcessResult) -> NoReturn:
        """Raise Violation, with the script so far."""
        evidence = self.subject.evidence(result, script="; ".join(self.log))
        raise Violation(what, evidence=evidence)


def files_of_steps(golden: Golden) -> dict[int, list[str]]:
    """Give the files of each step: below its own names, or whatever its save changed."""
    from ckpt_conformance.fault_injectors import payload

    found: dict[int, list[str]] = {}
    for step in golden.saves:
        changed = payload.of_step(golden, step)
        mine = tuple(one.path for one in names.of_step(golden, step))
        found[step] = [name for name in changed if name.startswith(mine)] if mine else changed
    return found
