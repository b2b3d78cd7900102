"""Recovering from many crash states in one process: lay out, load, compare; run by `op_probe`.

The process itself recovers nothing, so it stays as fresh as it was forked. One child of it recovers
from all states, one after the other. What is not fine there, and one in fifty of the rest, gets a
child of its own. The directory is private memory at the recorded path where the kernel allows it.

Of several ranks each runs this. Rank 0 lays a state out, all recover from it, and each compares
what it got with what it had got from a whole step. The ranks meet in a group of their own, so that
a load that leaves them out of step is seen: then the world ends, and the rest needs another one.
"""

from __future__ import annotations

import datetime as dt
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import msgspec

from ckpt_conformance.contract import trees
from ckpt_conformance.crash.explore import messages
from ckpt_conformance.crash.explore.judging import LoadError, Recovery
from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.crash.explore.messages import (
    Began,
    Continued,
    Ended,
    Held,
    Learned,
    Message,
    Recovered,
    Totals,
)
from ckpt_conformance.harness.messages import Load, Run, RunResult, Save, whole
from ckpt_conformance.processes import children
from ckpt_conformance.processes.memory import mount_place
from ckpt_conformance.subject import oracle, recheck
from ckpt_conformance.trace.operations import Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt_conformance.crash.explore.messages import Item, Leaves, Place, Task
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.harness.child import Child

    Say = Callable[[Message], None]

PATIENCE = 30.0  # seconds that a rank waits for the others between two states


def recover_in_one_process(child: Child, task: str) -> object:
    """Do the task in a file; answers go line by line to its `out`.

    Returns `Totals` as plain JSON.
    """
    request = messages.read_task(Path(task))
    private = mount_place(Path(request.root))
    begun = time.monotonic()
    with Path(request.out).open("a") as out:
        recoverer = Recoverer(child, request, lambda message: _write(out, message))
        (recoverer.by_children if request.fork else recoverer.inline)()
    seconds = time.monotonic() - begun
    return msgspec.to_builtins(Totals(private, seconds, recoverer.batch or seconds))


def recover_with_ranks(child: Child, task: str) -> object:
    """Do a rank's part of the task in a file; its answers go to a file of its own."""
    import torch.distributed as dist

    request = messages.read_task(Path(task))
    with Path(f"{request.out}-{dist.get_rank()}").open("a") as out:
        RankRecoverer(child, request, lambda message: _write(out, message)).run()
    return {}


def loads_per_second(child: Child, seconds: float) -> float:
    """Load the newest step again and again for some seconds: the baseline of recoveries."""
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        child.close()
        child.load(None)
        count += 1
    return count / (time.perf_counter() - begun)


def _write(out: TextIO, message: Message) -> None:
    out.write(messages.to_line(message))
    out.flush()  # a death loses none


def in_child(work: Callable[[Say], None], deadline: float) -> Iterator[Message]:
    """Run `work` in a forked child; yield its messages, and `Ended` at last.

    A child that sends nothing for `deadline` seconds is killed.
    """
    kind: Any = Message
    for message in children.run(work, kind, deadline):
        yield Ended(message.exit_kind) if isinstance(message, children.Ended) else message


@dataclass(frozen=True)
class Loaded:
    """What a job arrived with at its first training step, or the error that it ended with."""

    exit_kind: str  # ended, or memory
    step: int | None
    error: LoadError | None
    leaves: Leaves  # those that the manager saves; a rank's own part where there are several

    def to_recovery(self) -> Recovery:
        """Return the recovery of a load that is not compared with any version."""
        return Recovery(self.exit_kind, self.step, error=self.error)


@dataclass(frozen=True)
class Onward:
    """Where a job goes on, from which step (0: the beginning), and two steps that it saves."""

    place: Place
    step: int
    saves: tuple[int, int]


UNHARMED = -1  # the number of going on where there was no crash
NO_ANSWER = "the process that restarts ends"


class Recoverer:
    """Recovers from the items of a task; `say` takes each answer."""

    def __init__(self, child: Child, task: Task, say: Say) -> None:
        """Read the recording; nothing is laid out yet."""
        self.child, self.task, self.say = child, task, say
        self.recording = Recording.read(Path(task.recording))
        self.states: list[State] = messages.unpack(task.states)
        self.root = Path(task.root)
        self.materializer: Materializer | None = None
        self.batch = 0.0  # seconds that the batch took
        self.legal: dict[int, Held] = {}  # by version

    # -- one recovery -----------------------------------------------------------------------

    def materialize(self, place: Place) -> None:
        """Make the directory what a place says; this undoes what the manager did there."""
        self.child.close()
        if isinstance(place, str):
            self.materializer = None
            trees.empty(self.root)
            trees.copy(Path(place), self.root, into=True)
            return
        if self.materializer is None:
            self.materializer = Materializer(self.recording, self.root)
        self.materializer.apply(self.states[place])

    def load(self, step: int | None = None) -> Loaded:
        """Resume into a fresh job up to its first training step; None: from the newest step."""
        child = self.child
        child.close()
        child.fresh()
        resume = True if step is None else step
        result = cast("RunResult", child.run_one(Run(resume=resume, stop_after=0)))
        if result.error:
            error = msgspec.convert(result.error, LoadError, from_attributes=True)
            return Loaded("memory" if error.memory else "ended", None, error, {})
        arrived = result.arrived.step if result.arrived else None
        leaves = whole(result.states.get(arrived, {})) if arrived is not None else {}
        return Loaded("ended", arrived, None, oracle.held(leaves, self.task.holds))

    def learn(self, say: Say) -> None:
        """Load every legal version where nothing is damaged: what that gives may be loaded."""
        for legal in self.task.legal:
            self.materialize(legal.place)
            loaded = self.load()
            if loaded.step != legal.step and self.task.explicit:
                loaded = self.load(legal.step)  # an older one, behind a newer
            say(Learned(legal.version, legal.step, loaded.to_recovery(), loaded.leaves))
            self.keep(legal.version, legal.step, loaded.step, loaded.leaves)

    def keep(self, version: int, wanted: int, step: int | None, leaves: Leaves | None) -> None:
        """Keep what an undamaged load gave, if it was the step that was wanted."""
        if step == wanted:
            self.legal[version] = Held(wanted, leaves or {})

    def recover(self, number: int, *, alone: bool = False) -> Recovered:
        """Recover from one item and compare what is loaded with the legal versions."""
        item = self.task.items[number]
        self.materialize(item.place)
        loaded = self.load()
        recovery = self.compare(loaded, alone=alone)
        if loaded.error and self.task.explicit:
            older = tuple(version for version in item.older if self.gives(item, version))
            recovery = msgspec.structs.replace(recovery, older=older)
        return Recovered(number, recovery)

    def compare(self, loaded: Loaded, *, alone: bool) -> Recovery:
        """Name the versions that were loaded, or what differs from the nearest."""
        step, versions, differs = loaded.step, tuple[int, ...](), tuple[str, ...]()
        if step:
            of_step = {n: held for n, held in self.legal.items() if held.step == step}
            versions = tuple(n for n, held in of_step.items() if held.leaves == loaded.leaves)
            near = list((of_step or self.legal).values())
            if near and not versions:
                holds = self.task.holds
                differs = tuple(oracle.differences(loaded.leaves, near[-1].leaves, holds))
        return Recovery(
            loaded.exit_kind, step, versions, loaded.error, differs=differs, alone=alone
        )

    def gives(self, item: Item, version: int) -> bool:
        """Whether an explicit load of its step still gives a version."""
        held = self.legal.get(version)
        if held is None:
            return False
        self.materialize(item.place)
        loaded = self.load(held.step)
        return loaded.step == held.step and loaded.leaves == held.leaves

    # -- going on after a recovery ----------------------------------------------------------

    def _continue(self, going: Onward) -> str:
        """Resume, train and save both steps in one child, restart in another.

        Returns what went wrong; empty if nothing did.
        """

        def train(say: Say) -> None:
            self.materializer = None
            self.materialize(going.place)
            say(Continued(self._train(going.step, *going.saves)))

        def restart(say: Say) -> None:
            say(Continued(self._restart(going.saves[1])))

        for function in (train, restart):
            error = self._error_of(function)
            if error:
                return error
        return ""

    def _continue_together(self, ways: dict[int, Onward]) -> dict[int, str]:
        """Go on from all in one child, restart from what each leaves in another one.

        Returns what went wrong by number; nothing of those that no answer came of.
        """
        folder = Path(self.task.out).with_name("onward")
        trees.clear(folder)

        def train(say: Say) -> None:
            self.materializer = None
            for number, going in ways.items():
                self.materialize(going.place)
                error = self._train(going.step, *going.saves)
                self.child.close()
                trees.copy(self.root, folder / str(number))
                say(Continued(error, number))

        errors = self._errors_of(train)

        def restart(say: Say) -> None:
            for number in (number for number, error in errors.items() if not error):
                self.materialize(str(folder / str(number)))
                say(Continued(self._restart(ways[number].saves[1]), number))

        restarted = self._errors_of(restart)
        shutil.rmtree(folder)
        return {
            number: error or restarted.get(number, NO_ANSWER) for number, error in errors.items()
        }

    def _errors_of(self, function: Callable[[Say], None]) -> dict[int, str]:
        answers = in_child(function, self.task.deadline)
        return {
            answer.item: answer.error
            for answer in answers
            if isinstance(answer, Continued) and answer.item is not None
        }

    def _restart(self, step: int) -> str:
        """Load the newest step in a process that did not save it; return what is wrong with it."""
        loaded = self.load()
        gave = (loaded.error and loaded.error.message) or f"step {loaded.step}"
        good = loaded.step == step
        return "" if good else f"a restart after step {step} was saved gives: {gave}"

    def _error_of(self, function: Callable[[Say], None]) -> str:
        """Run a part of going on in a child; return what went wrong, its death too."""
        answers = list(in_child(function, self.task.deadline))
        continued = next((answer for answer in answers if isinstance(answer, Continued)), None)
        return continued.error if continued else f"the job that goes on ends: {_exit_kind(answers)}"

    def _train(self, step: int, first: int, second: int) -> str:
        """Go on from a recovery; return the first error of what must not fail."""
        child = self.child
        child.close()
        child.fresh()
        run = Run(resume=step > 0, until=second, save_at=(first, second))
        ops: list[Run | Load | Save] = [run]
        if step >= first and child.adapter.shape == "manager":
            ops = [Load(), Save(step=first), msgspec.structs.replace(run, resume=False)]
        for op in ops:
            error = child.run_one(op).error
            if error and not isinstance(op, Save):  # some managers save no step twice
                name = op.__struct_config__.tag
                return f"{name} after the recovery: {error.type}: {error.message}"
        return ""

    # -- many -------------------------------------------------------------------------------

    def inline(self) -> None:
        """Recover from all here, for a manager that has threads: no child can be forked."""
        self.learn(lambda message: self.say(_without_leaves(message)))
        for number in range(len(self.task.items)):
            self.say(Began(number))
            self.say(self.recover(number, alone=len(self.task.items) == 1))

    def by_children(self) -> None:
        """Recover in one child, suspects and a sample again alone, go on from one of each kind.

        Where one alone gives something else, the order of the batch has mattered: then all are
        recovered from alone, and only that counts.
        """
        begun = time.monotonic()
        in_batch = self._recover_in_batch()
        self.batch = time.monotonic() - begun
        alone = self._each_alone(self._choose_again(in_batch))
        if any(not in_batch[number].agrees_with(alone[number]) for number in alone):
            alone |= self._each_alone([number for number in in_batch if number not in alone])
        self._continue_each(in_batch | alone)

    def _each_alone(self, numbers: Sequence[int]) -> dict[int, Recovery]:
        recoveries: dict[int, Recovery] = {}
        for number in numbers:
            recovered = self._recover_alone(number)
            self.say(recovered)
            recoveries[number] = recovered.recovery
        return recoveries

    def _continue_each(self, in_batch: dict[int, Recovery]) -> None:
        """Go on from one item of each kind, if going on works where nothing was harmed.

        All at first in one child. What goes wrong there, and the first that does not, goes on again
        alone: only that counts.
        """
        saves = next((item.saves_after for item in self.task.items if item.saves_after), None)
        if saves is None or not self.legal:
            return
        chosen = [] if self.task.control else self._choose_onward(in_batch)
        items = self.task.items
        ways = {
            n: Onward(items[n].place, in_batch[n].step or 0, items[n].saves_after or saves)
            for n in chosen
        }
        if self.task.control is None:
            whole = self.task.legal[-1]
            ways = {UNHARMED: Onward(whole.place, whole.step, saves), **ways}
        together = self._continue_together(ways) if len(ways) > 1 else {}

        def settle(number: int) -> str:
            is_fine = together.get(number) == "" and number not in chosen[:1]
            return "" if is_fine else self._continue(ways[number])

        control = self.task.control
        if control is None:
            control = settle(UNHARMED)
        self.say(Continued(control))
        for number in [] if control else chosen:
            self.say(Continued(settle(number), number))

    def _choose_onward(self, in_batch: dict[int, Recovery]) -> list[int]:
        """Choose the items after whose recovery a job goes on.

        One of each kind; then those with the rarest leftovers, and those with the most. A leftover
        is a name that no whole checkpoint has.
        """
        items = self.task.items
        fine = [n for n, r in in_batch.items() if items[n].saves_after and items[n].accepts(r)]
        kinds: dict[str, int] = {}
        for number in fine:
            kinds.setdefault(self._kind(number, in_batch[number]), number)
        whole = {entry.path for entry in self.recording.initial}
        whole |= {name for legal in self.task.legal for name in self._names(legal.place)}
        leftovers = {number: set(self._names(items[number].place)) - whole for number in fine}
        count = Counter(name for names in leftovers.values() for name in names)
        rest = [number for number in fine if leftovers[number]]
        rest.sort(key=lambda number: (min(count[name] for name in leftovers[number]), number))
        half = (self.task.onward + 1) // 2
        richest = sorted(rest, key=lambda number: -len(leftovers[number]))
        richest = richest[: self.task.onward - half]
        return list(dict.fromkeys([*kinds.values(), *rest[:half], *richest]))

    def _recover_in_batch(self) -> dict[int, Recovery]:
        """Recover from all, in one child after another where one dies of it."""
        recoveries: dict[int, Recovery] = {}
        left = list(range(len(self.task.items)))
        while left:
            self._batch(left, recoveries)
            left = [number for number in left if number not in recoveries]
        return recoveries

    def _batch(self, numbers: Sequence[int], recoveries: dict[int, Recovery]) -> None:
        def function(say: Say) -> None:
            if not self.legal:
                self.learn(say)
            for number in numbers:
                say(Began(number))
                say(self.recover(number))

        at = numbers[0]
        for answer in in_child(function, self.task.deadline):
            message = answer
            if isinstance(message, Began):
                at = message.item
            elif isinstance(message, Learned):
                step, leaves = message.recovery.step, message.leaves
                self.keep(message.version, message.wanted, step, leaves)
                self.say(_without_leaves(message))
            elif isinstance(message, Ended) and at not in recoveries:
                message = _died(at, message.exit_kind)
            if isinstance(message, Recovered):
                recoveries[message.item] = message.recovery
                self.say(message)

    def _recover_alone(self, number: int) -> Recovered:
        def function(say: Say) -> None:
            self.materializer = None
            say(self.recover(number, alone=True))

        answers = list(in_child(function, self.task.deadline))
        recovered = next((answer for answer in answers if isinstance(answer, Recovered)), None)
        return recovered or _died(number, _exit_kind(answers), alone=True)

    def _choose_again(self, in_batch: dict[int, Recovery]) -> list[int]:
        """Choose which items are judged alone: at least one that was fine, then suspects."""
        chosen = recheck.choose(
            in_batch,
            lambda number: not self.task.items[number].accepts(in_batch[number]),
            seed=self.task.seed,
            kind=lambda number: self._kind(number, in_batch[number]),
            limit=self.task.limit,
        )
        return [*(chosen.sample or chosen.fine[:1]), *chosen.suspects]

    def _kind(self, number: int, recovery: Recovery) -> str:
        error = recovery.error.type if recovery.error else None
        end = f"{recovery.exit_kind} {recovery.step} {error} {sorted(recovery.versions)}"
        return self.task.items[number].group + end

    def _names(self, place: Place) -> list[str]:
        return [] if isinstance(place, str) else list(self.states[place].names)


def _exit_kind(answers: Sequence[Message]) -> str:
    """Return how a child ended, by its last answer."""
    return next((answer.exit_kind for answer in answers if isinstance(answer, Ended)), "crashed")


def _died(number: int, exit_kind: str, *, alone: bool = False) -> Recovered:
    """Return the answer for a process that gave none; even one that ended well has crashed."""
    exit_kind = "crashed" if exit_kind == "ended" else exit_kind
    return Recovered(number, Recovery(exit_kind, alone=alone))


def _without_leaves(message: Message) -> Message:
    """Leave out what only this process needs."""
    if isinstance(message, Learned):
        return msgspec.structs.replace(message, leaves=None)
    return message


# ---- several ranks -------------------------------------------------------------------------------


class OutOfStepError(RuntimeError):
    """A load ended otherwise on this rank than on others: this process is of no further use."""


class RankRecoverer(Recoverer):
    """One rank's part of the recoveries."""

    def __init__(self, child: Child, task: Task, say: Say) -> None:
        """Make the group in which the ranks meet."""
        import torch.distributed as dist

        super().__init__(child, task, say)
        self.dist: Any = dist
        self.rank: int = dist.get_rank()
        self.group: Any = dist.new_group(backend="gloo", timeout=dt.timedelta(seconds=PATIENCE))
        if task.undamaged:
            self.legal = dict(task.undamaged[self.rank])

    def meet(self, value: object = None) -> list[Any]:
        """Wait for every rank; return the values of all, by rank."""
        values: list[Any] = [None] * self.dist.get_world_size()
        self.dist.all_gather_object(values, value, group=self.group)
        return values

    def materialize(self, place: Place) -> None:
        """Make the directory what a place says, while no rank has anything open."""
        self.child.close()
        self.meet()
        if self.rank == 0:
            super().materialize(place)
        self.meet()

    def load(self, step: int | None = None) -> Loaded:
        """Resume into a fresh job; a box of a sharded tensor counts by its digest here."""
        loaded = super().load(step)
        short = {
            component: {name: _digest(leaf) for name, leaf in leaves.items()}
            for component, leaves in loaded.leaves.items()
        }
        return Loaded(loaded.exit_kind, loaded.step, loaded.error, short)

    def run(self) -> None:
        """Learn what the whole steps give, then recover from each item."""
        if not self.legal:
            self._learn_together()
        for number in range(len(self.task.items)):
            self.say(Began(number))
            recovered = self.recover(number)
            self.say(recovered)
            if number + 1 < len(self.task.items):
                self._require_in_step(recovered.recovery.error)
            elif recovered.recovery.error:
                raise OutOfStepError  # and let no other rank wait for this one

    def recover(self, number: int, *, alone: bool = False) -> Recovered:
        """Recover from one item and compare this rank's part with that of the legal versions."""
        self.materialize(self.task.items[number].place)
        loaded = self.load(self.task.ask)
        return Recovered(number, self.compare(loaded, alone=alone or len(self.task.items) == 1))

    def _learn_together(self) -> None:
        for legal in self.task.legal:
            self.materialize(legal.place)
            loaded = self.load()
            steps = self.meet(loaded.step)
            if self.task.explicit and any(step != legal.step for step in steps):
                loaded = self.load(legal.step)  # an older one, behind a newer
            self.say(Learned(legal.version, legal.step, loaded.to_recovery(), loaded.leaves))
            self.keep(legal.version, legal.step, loaded.step, loaded.leaves)
            self._require_in_step(loaded.error)

    def _require_in_step(self, error: LoadError | None) -> None:
        """Raise OutOfStepError if the ranks can't do another recovery together."""
        failed = self.meet(error is not None)
        if not any(failed):
            return
        if not all(failed):
            raise OutOfStepError
        ranks: list[Any] = [None] * len(failed)
        self.dist.all_gather_object(ranks, self.rank)  # what a load left undone shows here
        if ranks != list(range(len(failed))):
            raise OutOfStepError


def _digest(leaf: object) -> str:
    """Return the digest of a box, and any other leaf as it is."""
    from ckpt_conformance.workload import digests  # it needs torch, which a child has

    return leaf if isinstance(leaf, str) else digests.digest(leaf)
