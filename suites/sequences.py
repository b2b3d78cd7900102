"""Scripts of operations on a manager, run against a model of what may come of them.

A script is a list of rules, each a small value, so that it can be drawn, shortened, printed and run
again. Consecutive rules of one process become one child. The model knows of each step whether it is
whole, damaged, or in doubt, and of which of two runs its state is; it never knows how.

The model asks for what any manager must do: a load gives a step that may be there, in exactly the
state in which that step was saved, or it refuses where something newer is damaged or in doubt. It
never goes back behind the newest whole step, and a save on a healthy disk succeeds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from msgspec import structs

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.harness.messages import Close, ExitKind, Options, Run, RunResult, whole
from ckpt_conformance.subject import names, oracle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyResult, Fault, Leaves
    from ckpt_conformance.subject.subject import Golden, Subject

STEPS = (2, 4, 6, 8)
SEEDS = {"first": 11, "second": 23}  # of the two runs that write into one directory

# -- rules -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainOn:
    """Train to the next of `STEPS`."""


@dataclass(frozen=True)
class SaveStep:
    """Save; train first if this child has trained nothing since its last load or save."""


@dataclass(frozen=True)
class LoadStep:
    """Load the latest; with `pick`, one of the steps that are or may be there, counted round."""

    pick: int | None = None


@dataclass(frozen=True)
class Restart:
    """End the process in good order."""


@dataclass(frozen=True)
class BeginAnew:
    """End the process; begin the other run from scratch in the same directory."""


@dataclass(frozen=True)
class DieInSave:
    """Train on and die inside the save; `pick` chooses among the deaths, counted round."""

    pick: int


@dataclass(frozen=True)
class KeepLast:
    """From the next child on, let rotation keep so many steps."""

    number: int


@dataclass(frozen=True)
class DamageFile:
    """Damage or delete, between two children, one file of a step.

    `fault` is one of `at_rest.AT_REST`; `file` counts from the largest file of the step, `pick`
    from the newest step, both round.
    """

    file: int
    fault: str
    pick: int = 0


Rule = TrainOn | SaveStep | LoadStep | Restart | BeginAnew | DieInSave | KeepLast | DamageFile

# -- what an execution knows -------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """What an execution is judged by: states by run and step, files by step, faults by number.

    `overwrites` is False for a manager that refuses to save a step that is there.
    """

    states: Mapping[str, Mapping[int, Leaves]]
    files: Mapping[int, Sequence[str]]
    deaths: Sequence[Fault] = ()
    overwrites: bool = True


@dataclass
class Entry:
    """What the model knows of a step: whole, damaged or in doubt, and whose state it may hold."""

    status: str
    runs: set[str]


@dataclass(frozen=True)
class Expected:
    """The only thing that a load may give: a step, and whose state."""

    step: int
    run: str


@dataclass(frozen=True)
class Planned:
    """A run that is gathered for the next child, and what its load must give, if only one may."""

    op: Run
    expects: Expected | None = None

    def to(self, until: int, save: int | None = None) -> Planned:
        """Return the same run to a further step, with one more save."""
        save_at = self.op.save_at if save is None else (*self.op.save_at, save)
        return Planned(structs.replace(self.op, until=until, save_at=save_at), self.expects)

    @property
    def is_in_doubt(self) -> bool:
        """Whether it looks at a load that may give one of several things."""
        return self.op.stop_after == 0 and self.expects is None

    @property
    def only_loads(self) -> bool:
        """Whether it ends where its load begins."""
        return self.expects is not None and self.expects.step == self.op.until


LOOK = {"until": None, "stop_after": 0}  # at what was loaded, then the end


@dataclass
class Operation:
    """What was done, in words; `gave` is what a load came to, empty until it is judged."""

    what: str
    gave: str = ""

    def __str__(self) -> str:
        """Write it for people."""
        return f"{self.what}: {self.gave}" if self.gave else self.what


@dataclass
class Execution:
    """One script on one subject, from an empty directory."""

    subject: Subject
    world: World
    disk: dict[int, Entry] = field(default_factory=dict[int, Entry])
    last: int = 0  # the step that was saved last
    log: list[Operation] = field(default_factory=list[Operation])
    keep: int | None = None
    run: str = "first"  # whose state the live job has
    step: int = 0
    planned: list[Planned] = field(default_factory=list[Planned])
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
            self.apply(rule)
        self.do_restart()

    def apply(self, rule: Rule) -> None:
        """Do what a rule says."""
        match rule:
            case TrainOn():
                self.do_train()
            case SaveStep():
                self.do_save()
            case LoadStep(pick):
                self.do_load(pick)
            case Restart():
                self.do_restart()
            case BeginAnew():
                self.do_begin()
            case DieInSave(pick):
                self.do_die(pick)
            case KeepLast(number):
                self.do_keep(number)
            case DamageFile():
                self.do_damage(rule)

    def note(self, what: str) -> None:
        """Add an operation to the script that a violation shows."""
        self.log.append(Operation(what))

    # -- rules: what happens inside a child --------------------------------------------------------

    def do_train(self) -> None:
        """Train to the next of `STEPS`."""
        if self.step >= STEPS[-1]:
            return
        if not self.planned and self.again:
            self.do_load(sorted(self.disk).index(self.again))  # go on from what was just loaded
        if self.step >= STEPS[-1]:
            return
        if not self.planned:
            self.planned.append(Planned(Run(until=self.step)))
        self.step += 2
        self.planned[-1] = self.planned[-1].to(self.step)
        self.note(f"train to step {self.step}")

    def do_save(self) -> None:
        """Save; train first if this child has trained nothing since its last load or save."""
        if not self.can_save():
            self.do_train()
        if self.can_save():
            self.planned[-1] = self.planned[-1].to(self.step, save=self.step)
            self.note(f"save step {self.step}")
            self.saved(self.step)

    def can_save(self) -> bool:
        """Whether the last step of this child was trained in it and is not saved."""
        if not self.planned:
            return False
        last = self.planned[-1]
        loaded = last.expects.step if last.expects else 0
        is_free = self.world.overwrites or self.step not in self.disk
        return is_free and self.step > loaded and self.step not in last.op.save_at

    def do_load(self, pick: int | None = None) -> None:
        """Load the latest, or one of the steps that are or may be there."""
        if not self.disk:
            return
        if not self.is_manager:
            self.do_restart()
        step = None if pick is None else sorted(self.disk)[pick % len(self.disk)]
        may, can_refuse = self.outcomes(step)
        resume = True if step is None else step
        self.note("load the latest" if step is None else f"load step {step}")
        if can_refuse or len(may) > 1 or any(len(self.disk[legal].runs) > 1 for legal in may):
            self.planned.append(Planned(Run(resume=resume, stop_after=0)))
            self.judge(self.live(), may, can_refuse=can_refuse)
            return
        (self.step,) = may
        (self.run,) = self.disk[self.step].runs
        op = Run(until=self.step, resume=resume)
        self.planned.append(Planned(op, Expected(self.step, self.run)))

    # -- rules: how a child ends -------------------------------------------------------------------

    def do_restart(self) -> None:
        """End the process in good order."""
        if self.planned:
            self.live(close=True)

    def do_begin(self) -> None:
        """End the process; begin another run from scratch in the same directory."""
        self.do_restart()
        self.run = "second" if self.run == "first" else "first"
        self.seed = SEEDS[self.run]
        self.note(f"begin the {self.run} run from scratch")

    def do_die(self, pick: int) -> None:
        """Train on and die inside the save."""
        if not self.can_save():
            self.do_train()
        if not self.can_save() or not self.world.deaths:
            return
        death = self.world.deaths[pick % len(self.world.deaths)]
        last = self.planned[-1].to(self.step, save=self.step)
        op = structs.replace(last.op, faults=(death,), fault_step=self.step)
        self.planned[-1] = Planned(op, last.expects)
        where = f"{death.args['moment']} call {death.args['at']}"
        self.note(f"die in the save of step {self.step}, {where}")
        step, run = self.step, self.run
        result = self.live(may_die=True)
        if result.exit_kind is ExitKind.ENDED:
            self.saved(step, run)
        else:
            before = self.disk.get(step, Entry("", set()))
            self.disk[step] = Entry("in doubt", before.runs | {run})

    def do_keep(self, number: int) -> None:
        """From the next child on, let rotation keep so many steps."""
        self.do_restart()
        self.keep = max(number, self.subject.info.min_keep)
        self.note(f"keep the last {self.keep}")

    # -- rules: what happens to the files ---------------------------------------------------------

    def do_damage(self, rule: DamageFile) -> None:
        """Damage or delete one file of a step, between two children."""
        from ckpt_conformance.fault_injectors import at_rest

        self.do_restart()
        there = [step for step in sorted(self.disk) if self.present(step)]
        if not there:
            return
        step = there[-1 - rule.pick % len(there)]
        path = self.present(step)[rule.file % len(self.present(step))]
        rng = random.Random(rule.pick)  # noqa: S311
        done = at_rest.AT_REST[rule.fault](self.subject.root, rng, path)
        self.note(f"{done.fault} in {done.file}, a file of step {step}")
        for other, entry in self.disk.items():
            if path in self.world.files[other]:
                entry.status = "damaged"

    def present(self, step: int) -> list[str]:
        """Return the files of a step that are there and not empty, largest first."""
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
        elif most := min(filter(None, (self.keep, self.subject.info.max_keep)), default=0):
            newest = known[-most:]
            # Of a step below the newest it is not said whether it is one of those that may stay.
            kept = {step, *(newest if step in newest else newest[1:])}
        else:
            kept = set(known)
        for other in known:
            if other not in kept and self.disk[other].status == "whole":
                self.disk[other].status = "in doubt"

    def outcomes(self, step: int | None) -> tuple[set[int], bool]:
        """Return the steps that a load may give, and whether it may refuse."""
        if step is not None:
            return {step}, self.disk[step].status != "whole"
        whole = [known for known, entry in self.disk.items() if entry.status == "whole"]
        newest = max(whole, default=0)
        doubtful = {known for known in self.disk if known > newest}
        last = {self.last} if self.last in whole else set[int]()
        if not whole:
            return set(self.disk), True
        return {newest} | doubtful | last, bool(doubtful)

    # -- children -----------------------------------------------------------------------------

    def live(self, *, may_die: bool = False, close: bool = False) -> ProcessResult:
        """Run what has been gathered in one child, and judge all but a last load in doubt."""
        planned, self.planned, self.again = self.planned, [], 0
        ops = [item.op for item in planned]
        if planned[-1].only_loads:
            ops[-1] = structs.replace(ops[-1], **LOOK)
        end = [Close()] if close else []
        options = Options(keep_last=self.keep) if self.keep else Options()
        process_result = self.subject.execute(*ops, *end, seed=self.seed, options=options)
        self.step, self.run = 0, next(run for run, seed in SEEDS.items() if seed == self.seed)
        if may_die and process_result.exit_kind is ExitKind.KILLED:
            return process_result
        self.judge_child(planned, process_result, count=len(ops) + len(end))
        saves = [step for op in ops for step in op.save_at]
        if process_result.steps_of("acknowledged") != saves:
            self.leave(f"of the saves {saves} not all were acknowledged", process_result)
        return process_result

    def judge_child(
        self, planned: Sequence[Planned], process_result: ProcessResult, count: int
    ) -> None:
        """Judge each of a child's `count` operations up to a load in doubt."""
        for index in range(count):
            item = planned[index] if index < len(planned) else None
            if item and item.is_in_doubt:
                break
            reached = index < len(process_result.results)
            result = process_result.results[index] if reached else None
            if process_result.exit_kind is not ExitKind.ENDED or not result or result.error:
                self.leave("an operation on a healthy disk fails", process_result)
            if item and item.expects:
                self.judge_state(item.expects, result, process_result)

    def judge_state(
        self, expects: Expected, result: AnyResult, process_result: ProcessResult
    ) -> None:
        """Compare what a load gave with the only thing that it may give."""
        if not isinstance(result, RunResult):
            return
        step = result.arrived.step if result.arrived else result.step
        if step != expects.step:
            self.leave(f"a load gives step {step} instead of {expects.step}", process_result)
        if result.arrived:
            self.compare(
                whole(result.states[expects.step]), expects.step, {expects.run}, process_result
            )

    def judge(self, result: ProcessResult, may: set[int], *, can_refuse: bool) -> None:
        """Judge a load that has several legal outcomes."""
        step, state = oracle.arrival(result)
        refused = result.exit_kind is ExitKind.ENDED and result.error is not None
        self.log[-1].gave = "refused" if refused else _came_to(step, result)
        if refused and can_refuse:
            return
        if refused or result.exit_kind is not ExitKind.ENDED:
            self.leave(f"a load of one of {sorted(may)} fails", result)
        if step is None or step not in may:
            self.leave(f"a load gives step {step}; {sorted(may)} may be there", result)
        run = self.compare(state, step, self.disk[step].runs, result)
        self.disk[step] = Entry("whole", {run})  # whatever was in doubt, it has loaded
        if "explicit_step" in self.subject.info.capabilities:
            self.again = step

    def compare(self, state: Leaves, step: int, runs: set[str], result: ProcessResult) -> str:
        """Return the run whose state was loaded, of those that may have saved it."""
        wanted, holds = {run: self.world.states[run][step] for run in runs}, self.subject.holds
        same = [run for run in sorted(runs) if oracle.same(state, wanted[run], holds)]
        if not same:
            differs = oracle.differences(state, wanted[min(runs)], holds)
            what = f"a load gives another state than was saved at step {step}: {differs}"
            self.leave(what, result)
        return same[0]

    def leave(self, what: str, result: ProcessResult) -> NoReturn:
        """Raise Violation, with the script so far."""
        evidence = self.subject.evidence(result, script=[str(done) for done in self.log])
        raise Violation(what, evidence=evidence)


def _came_to(step: int | None, result: ProcessResult) -> str:
    """Say what came of a load that did not refuse: a step, or how its process ended."""
    if result.exit_kind is not ExitKind.ENDED:
        return str(result.exit_kind)
    return "no step" if step is None else f"step {step}"


def files_of_steps(golden: Golden) -> dict[int, list[str]]:
    """Return the files of each step: those below its own names.

    Where a step has none, its files may be written to again, in turn or at once: each may be of
    any step.
    """
    from ckpt_conformance.fault_injectors import payload

    files: dict[int, list[str]] = {}
    changed = {step: payload.of_step(golden, step) for step in golden.saves}
    anyones = sorted({name for names_of in changed.values() for name in names_of})
    for step in golden.saves:
        own = tuple(name.path for name in names.of_step(golden, step))
        files[step] = [n for n in changed[step] if n.startswith(own)] if own else anyones
    return files
