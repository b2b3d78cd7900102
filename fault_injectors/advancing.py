"""Advances a fault over the system calls of a save, a load or a rotation; run by `op_probe`.

Each trial is a child of one child: the directory as it was, one operation, one fault. So nothing in
memory of one trial reaches the next, and a writer that dies of its error ends its own trial only.
With no sample the number of the call advances until the operation completes without a fault.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.kept_trees import fingerprint
from ckpt_conformance.harness import messages
from ckpt_conformance.harness.messages import (
    Arguments,
    ExitKind,
    FaultReport,
    Message,
    Options,
    Run,
    RunResult,
    Save,
    SaveResult,
    SeenCall,
    UnsupportedCall,
)
from ckpt_conformance.harness.strata import Role, Stratum, of_calls, role_of
from ckpt_conformance.processes import children, hugepages
from ckpt_conformance.subject import oracle
from ckpt_conformance.trace import faults
from ckpt_conformance.trace.faults import OPENING, READING, SYNCING, WRITING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ckpt_conformance.processes.children import Put

DEADLINE = 20.0  # seconds that one trial may take
UNIQUE = re.compile(r"(?=\d*[a-f])[0-9a-f]{8,}")  # the part of a name that no two saves share
PASSES = 4  # over one file by a load; later ones are taken for the last of them
SYNCS = 8  # of one save, that fail alone at the quick budget
MOST = 100_000  # calls of one operation, after which advancing gives up


class CallFault(Message, frozen=True, omit_defaults=True):
    """A fault at a system call: arguments of `trace.faults.Fault`, as far as they are given."""

    at: int = 0
    error: str = ""
    persistent: bool = False
    only: tuple[str, ...] = ()
    alike: str = ""

    def arguments(self, *, reading: bool = False) -> Arguments:
        """Return the arguments of the injector `SystemCall`."""
        given: Arguments = msgspec.to_builtins(self)
        return given | {"elsewhere": True} | ({"reading": True} if reading else {})

    @property
    def when(self) -> str:
        """When it hits: once, from there on, or at all names of one kind."""
        return f"at {self.alike}" if self.alike else "on" if self.persistent else "once"


class PlannedTrial(Message, frozen=True):
    """A fault to try alone, and the kind that it is of (see `KINDS`)."""

    kind: str
    fault: CallFault


class SecondSave(Message, frozen=True):
    """The save that follows one that raised: its own error, and the tree that it leaves.

    `renewed`: it wrote anew, and synced, the file whose sync had failed; a directory it synced.
    """

    error: messages.Error | None
    left: str
    renewed: bool = False


class TrialResult(Message, frozen=True, omit_defaults=True):
    """What came of one trial; `left` names the tree that it leaves.

    `begins`: it begins, and a child that may not fork will die of it if no further line follows.
    `call` is the call that was hit; `renewed`: its file was written anew, and synced, by the same
    save. Of a load: the `step`, and a digest of what the manager holds. Of a control: all calls.
    """

    key: str
    kind: str
    what: str
    fault: CallFault
    begins: bool = False
    exit_kind: ExitKind = ExitKind.ENDED
    code: int = 0  # of a process that died: its exit status, or minus the signal
    error: messages.Error | None = None
    calls: int = 0
    fired: int = 0
    call: SeenCall | None = None
    renewed: bool = False
    log: tuple[SeenCall, ...] = ()
    unsupported: tuple[UnsupportedCall, ...] = ()
    left: str = ""
    again: SecondSave | None = None
    step: int | None = None
    state: str = ""


class Task(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What one child does.

    `what` is save, load, rotation, or the reads of one; `base` the tree that each trial begins
    with; `step` the step that is saved; `kinds` what to fail with (see `KINDS`); `trials` are
    faults to try alone.
    `sample` says how many trials of each kind, none: all; `named` at how many kinds of names every
    call fails, none: at all of them. With a sample each stratum of calls (`harness.strata`) is hit
    once at least, by up to `strata` more trials; `roles` are those of files, and `newest` are the
    files of the newest step: of a load the reads of these are hit. Trees that trials leave go to
    `keep`, of loads those alone that a load changed, and one line per trial to `out`. After every
    n-th trial that raised, `again`, but for those of strata, the same save is made once more
    without a fault; so it is after each one of a sync that failed once. What is `done` is not
    tried again.
    """

    what: str
    base: str
    step: int
    keep: str
    out: str
    holds: tuple[str, ...]
    reading: bool = False
    keep_last: int | None = None
    kinds: tuple[str, ...] = ()
    sample: tuple[int, ...] = ()
    named: int = 0
    strata: int = 0
    roles: dict[str, Role] = msgspec.field(default_factory=dict[str, Role])
    newest: tuple[str, ...] = ()
    trials: tuple[PlannedTrial, ...] = ()
    again: int = 1
    seed: int = 0
    fork: bool = True
    done: tuple[str, ...] = ()


# What a call fails with. A sync is also failed alone: all writes go well, and the disk has nothing.
KINDS: dict[str, CallFault] = {
    "ENOSPC": CallFault(error="ENOSPC"),
    "EDQUOT": CallFault(error="EDQUOT"),
    "EIO": CallFault(error="EIO"),
    "sync": CallFault(error="EIO", only=tuple(sorted(SYNCING))),
    "EINTR": CallFault(error="EINTR"),
    "short": CallFault(error="short"),
}
# What a disk behind a network says when its server is away or wants another password, and one that
# the kernel has made read-only. Each is tried once, from the first write on: which calls give them
# in reality is up to the file system.
OF_AN_OUTAGE = ("ESTALE", "ETIMEDOUT", "ENOTCONN", "EACCES", "EROFS")
HARMLESS = ("EINTR", "short")  # what a kernel may do on a healthy disk, at all calls, too
NONE = CallFault()
CONTROL = "control"  # the kind of a trial without a fault
READS = "rotation, reads"  # an operation: a save that rotates, of which the calls that read are hit
SYSTEM_CALL = "ckpt_conformance.fault_injectors.system_call:SystemCall"


def advance(child: Any, injector: str, task: Arguments, *, reading: bool = False) -> int:  # noqa: ANN401
    """Run a task; results go line by line to its `out`, so that a death loses none.

    `injector` and `reading` tell the server that the child needs a supervisor, and of which calls.
    """
    del reading
    given = msgspec.convert(task, Task)
    with Path(given.out).open("a") as out:
        return Advancer(child, given, injector, children.put_into(out)).run()


Group = tuple[str, str]  # calls of one function at files of one kind of name


class Drawn:
    """Which groups of calls a sample has hit so far: each is hit once before any is hit twice."""

    def __init__(self, rng: random.Random) -> None:
        """Begin with none."""
        self.rng = rng
        self.hit: set[tuple[Group, bool]] = set()

    def group(self, groups: Iterable[Group], *, persistent: bool) -> Group:
        """Draw a group to fail once, or from there on; a write that fails once comes first.

        From a write that fails on nothing is synced either, and that error may be the one that
        reaches the caller; a write that failed alone has only its own.
        """
        order = list(groups)
        self.rng.shuffle(order)
        chosen = min(
            order,
            key=lambda group: (
                (group, persistent) in self.hit,
                persistent or group[0] not in WRITING,
            ),
        )
        self.hit.add((chosen, persistent))
        return chosen


class Advancer:
    """Tries the faults of a task one after the other; `put` takes each result."""

    def __init__(self, child: Any, task: Task, injector: str, put: Put[TrialResult]) -> None:  # noqa: ANN401
        """Take the options of the task for the managers that are opened from now on."""
        self.child, self.task, self.injector, self.put = child, task, injector, put
        self.is_manager = child.adapter.shape == "manager"
        self.count, self.again = 0, task.again
        self.place = trees.Restorer(Path(task.base), child.root)
        child.options = Options(keep_last=task.keep_last)

    def run(self) -> int:
        """Try the control, then the faults; return the number of trials."""
        if not self.task.sample:
            hugepages.collapse()  # many children will be forked
        if self.task.what != "load" and self.is_manager:
            self.child.op_run(Run(until=self.task.step), {})
        control = self.trial(CONTROL, NONE)
        if control.error or control.exit_kind is not ExitKind.ENDED:
            return self.count
        for planned in self.chosen(control.log):
            self.trial(planned.kind, planned.fault)
        for kind in () if self.task.sample or self.task.trials else self.task.kinds:
            for persistent in (False, True):
                if kind != "sync" or persistent:  # one sync alone is a call like any other
                    self.until_clean(kind, control.log, persistent=persistent)
        return self.count

    def until_clean(self, kind: str, log: Sequence[SeenCall], *, persistent: bool) -> None:
        """Advance the number of the call until the operation completes without the fault.

        Calls of the control are passed over that are at files which stay elsewhere, such as a log.
        """
        calls = self.countable(kind, log)
        for at in range(1, MOST):
            if at <= len(calls) and calls[at - 1].elsewhere:
                continue
            result = self.trial(kind, structs.replace(KINDS[kind], at=at, persistent=persistent))
            if result.exit_kind is ExitKind.ENDED and not result.fired:
                return

    def chosen(self, log: Sequence[SeenCall]) -> Iterator[PlannedTrial]:
        """Yield the faults that the task names, then a sample of each of its kinds."""
        yield from self.task.trials
        if self.task.what == READS and not self.task.trials:
            yield from self._at_reads(log)
            return
        if not self.task.trials and self.task.what == "save":
            yield from self._at_names(log)
            yield from self._of_an_outage(log)
        drawn = Drawn(random.Random(self.task.seed))  # noqa: S311
        sample: list[PlannedTrial] = []
        for kind, count in zip(self.task.kinds, self.task.sample, strict=False):
            sample += self._sample(kind, count, log, drawn)
        yield from sample
        if sample:
            self.again = 0
            left_out = list(self._left_out(sample, log, drawn.rng))
            yield from left_out
            yield from self._other_syncs([*sample, *left_out], log)

    def _other_syncs(
        self, sample: Sequence[PlannedTrial], log: Sequence[SeenCall]
    ) -> Iterator[PlannedTrial]:
        """Yield an error at the latest syncs of a save that the sample does not meet alone.

        What the caller tries again after it is to be durable: there each of them counts.
        """
        usual = KINDS["EIO"]
        hit = {o.fault.at for o in sample if o.fault == structs.replace(usual, at=o.fault.at)}
        syncs = [call for call in log if call.what in SYNCING and not call.elsewhere]
        for call in syncs[-SYNCS:] if self.task.what == "save" else ():
            if call.call not in hit:
                yield PlannedTrial("EIO", structs.replace(usual, at=call.call))

    def _left_out(
        self, sample: Sequence[PlannedTrial], log: Sequence[SeenCall], rng: random.Random
    ) -> Iterator[PlannedTrial]:
        """Yield an error at one call of each stratum that a sample meets with none that ends."""
        left = unmet(log, [planned.fault for planned in sample], self.task)
        for calls in list(left.values())[: self.task.strata]:
            fault = structs.replace(KINDS["EIO"], at=rng.choice(calls).call)
            yield PlannedTrial("EIO", fault)

    def _at_reads(self, log: Sequence[SeenCall]) -> Iterator[PlannedTrial]:
        """Yield an error that ends at each call that reads; of a sample one of each group.

        What a rotation can't read it may take for nothing, and delete what that was to keep.
        """
        self.again = 0
        groups = reads_of(log, self.task)
        if self.task.sample:
            rng = random.Random(self.task.seed)  # noqa: S311
            groups = [[rng.choice(calls)] for calls in groups[: self.task.sample[0]]]
        for call in (call for calls in groups for call in calls):
            yield PlannedTrial("EIO", structs.replace(KINDS["EIO"], at=call.call))

    def _at_names(self, log: Sequence[SeenCall]) -> Iterator[PlannedTrial]:
        """Yield faults that last for the files of one kind of name, and meet no other one.

        Who tries again, and leaves a file out when that does not help, shows nowhere else: an error
        that ends does not take it so far, and one that meets every file ends the save.
        """
        calls = [call for call in log if not (call.elsewhere or call.is_folder or call.reads)]
        kinds = sorted({trees.pattern(call.path) for call in calls if call.path})
        if self.task.sample and len(kinds) > self.task.named:
            kinds = random.Random(self.task.seed).sample(kinds, self.task.named)  # noqa: S311
        for kind in kinds:
            fault = structs.replace(KINDS["EIO"], at=1, persistent=True, alike=kind)
            yield PlannedTrial("EIO", fault)

    def _of_an_outage(self, log: Sequence[SeenCall]) -> Iterator[PlannedTrial]:
        """Yield each error of an outage, from the first write on."""
        for error in OF_AN_OUTAGE:
            calls = [call for call in faults.Fault(error=error).among(log) if not call.elsewhere]
            writes = [call for call in calls if call.what in WRITING]
            for call in (writes or calls)[:1]:  # who maps its files makes no write
                yield PlannedTrial(error, CallFault(error=error, at=call.call, persistent=True))

    def countable(self, kind: str, log: Sequence[SeenCall]) -> list[SeenCall]:
        """Return the calls of a control that a fault of a kind counts, in their order."""
        return faults.Fault(**KINDS[kind].arguments(reading=self.task.reading)).among(log)

    def _sample(
        self, kind: str, count: int, log: Sequence[SeenCall], drawn: Drawn
    ) -> Iterator[PlannedTrial]:
        """Yield faults of one kind, each at a call of another function or of another file."""
        usual, calls = KINDS[kind], self.countable(kind, log)
        alike: dict[Group, list[int]] = {}
        for at, call in enumerate(calls, 1):
            if not call.elsewhere:
                alike.setdefault((call.what, trees.pattern(call.path)), []).append(at)
        for number in range(min(count, len(alike))):
            persistent = bool(number % 2) is not (kind in {"ENOSPC", "short"})
            at = drawn.rng.choice(alike.pop(drawn.group(alike, persistent=persistent)))
            if kind in HARMLESS and not number:
                yield PlannedTrial(kind, structs.replace(usual, at=1, persistent=True))
                continue
            fault = structs.replace(usual, at=at, persistent=persistent)
            if kind == "sync" and not persistent:  # what is written after it is to be seen
                fault = CallFault(at=calls[at - 1].call, error="EIO")
            yield PlannedTrial(kind, fault)

    # -- one trial ---------------------------------------------------------------------------

    def trial(self, kind: str, fault: CallFault) -> TrialResult:
        """Try one fault, in a child of its own where the adapter allows a fork."""
        key = f"{kind} {fault.at} {fault.when}"
        begun = TrialResult(key, kind, self.task.what, fault)
        if key in self.task.done:
            return structs.replace(begun, fired=1)
        self.count += 1
        self.place.restore()
        if self.task.fork:
            result = self._in_a_child(begun)
        else:
            self._say(structs.replace(begun, begins=True))
            result = self.once(begun)
        self._say(result)
        return result

    def _in_a_child(self, begun: TrialResult) -> TrialResult:
        drawn = random.getstate()  # Python gives a forked child another one

        def work(put: Put[TrialResult]) -> None:
            random.setstate(drawn)
            put(self.once(begun))

        result = begun
        for message in children.run(work, TrialResult, DEADLINE):
            if isinstance(message, TrialResult):
                result = message
            else:
                result = structs.replace(result, exit_kind=message.exit_kind, code=message.code)
        if result.exit_kind is ExitKind.ENDED:
            return result
        return structs.replace(result, left=self.left())  # by a process that its error ended

    def _say(self, result: TrialResult) -> None:
        self.put(result)

    def once(self, begun: TrialResult) -> TrialResult:
        """Do the operation under the fault, and say what came of it."""
        child, task, at = self.child, self.task, begun.fault.at
        child.close()
        done = self.operate(self.armed(begun.fault))
        counted = next(iter(done.faults), FaultReport())
        call = next((call for call in counted.log if call.call == at), None)
        result = structs.replace(
            begun,
            error=done.error,
            calls=counted.calls,
            fired=counted.fired,
            call=call,
            renewed=call is not None and is_renewed(counted.log, call),
            log=() if at else counted.log,
            unsupported=() if at else counted.unsupported,
        )
        if isinstance(done, RunResult) and task.what == "load":
            return self.arrived(result, done)
        result = structs.replace(result, left=self.left())
        is_sync = call is not None and call.what in SYNCING and not begun.fault.persistent
        if result.error and (is_sync or (self.again and self.count % self.again == 0)):
            result = structs.replace(result, again=self._second(call))
        return result

    def _second(self, failed: SeenCall | None) -> SecondSave:
        """Do the operation once more without a fault: armed, so that it is settled, too."""
        done = self.operate(self.armed(NONE))
        log = next(iter(done.faults), FaultReport()).log
        renewed = failed is not None and is_renewed(log, structs.replace(failed, call=0))
        return SecondSave(done.error, self.left(), renewed)

    def armed(self, fault: CallFault) -> messages.Fault:
        """Return a fault as an operation takes it."""
        arguments = fault.arguments(reading=self.task.reading)
        return messages.Fault(injector=self.injector, args=arguments)

    def operate(self, *faults: messages.Fault) -> RunResult | SaveResult:
        """Save or load once; a framework runs its loop up to there."""
        task, child = self.task, self.child
        if task.what == "load":
            child.fresh()
            op: Run | Save = Run(resume=True, stop_after=0, faults=faults)
        elif self.is_manager:
            op = Save(step=task.step, faults=faults)
        else:
            child.close()
            child.fresh()
            op = Run(
                until=task.step,
                save_at=(task.step,),
                resume=task.what != "save",
                faults=faults,
                fault_step=task.step,
            )
        done: RunResult | SaveResult = child.run_one(op)
        return done

    def arrived(self, result: TrialResult, done: RunResult) -> TrialResult:
        """Say what a load gave: the step, and a digest of what the manager holds."""
        step = done.arrived.step if done.arrived else None
        leaves = done.states.get(step, {}) if step is not None else {}
        digest = digest_of(messages.whole(leaves), self.task.holds)
        return structs.replace(result, step=step, state=digest, left=self.left())

    def left(self) -> str:
        """Copy what is left, each content once; names of temporary files are taken as equal.

        Of a load that changed nothing nothing is copied: gives an empty name.
        """
        if self.task.what == "load" and not self.place.is_touched():
            return ""
        tree = fingerprint(self.child.root)
        alike = sorted((UNIQUE.sub("#", name), digest) for name, digest in tree.items())
        name = blake2b(repr(alike).encode(), digest_size=8).hexdigest()
        target = Path(self.task.keep) / name
        if not target.exists():
            trees.copy(self.child.root, target)
        return name


def strata_of(log: Sequence[SeenCall], task: Task) -> dict[Stratum, list[SeenCall]]:
    """Group the calls of a control that an error can meet."""
    eio = faults.Fault(**KINDS["EIO"].arguments(reading=task.reading))
    groups = of_calls((call for call in eio.among(log) if not call.elsewhere), task.roles)
    if not task.reading:
        return groups
    number = passes(log)
    split: dict[Stratum, list[SeenCall]] = {}
    for stratum, calls in groups.items():
        if stratum.role is Role.OTHER:
            continue  # nothing of a step: the sample may draw it
        for call in telling(calls, task.newest):
            again = number.get(call.call, 1)
            sort = stratum.sort if again == 1 else f"{stratum.sort}, pass {again},"
            split.setdefault(Stratum(sort, stratum.role), []).append(call)
    return split


def reads_of(log: Sequence[SeenCall], task: Task) -> list[list[SeenCall]]:
    """Group the calls of a control that open or read a file of a step by how often that follows.

    The last pass over each file comes first, the latest of all at the front: what is read before
    something is deleted. Then come the passes before it, one file after the other.
    """
    opened: dict[str, list[list[SeenCall]]] = {}
    for call in (call for call in log if call.reads and not call.elsewhere):
        times = opened.setdefault(call.path, [])
        if call.what in OPENING or not times:
            times.append([])
        times[-1].append(call)
    last = sorted((times[-1] for times in opened.values()), key=lambda calls: -calls[0].call)
    earlier: dict[tuple[int, Role, str], list[SeenCall]] = {}
    for path, times in opened.items():
        for before, calls in enumerate(reversed(times[:-1]), 1):
            role = role_of(calls[0], task.roles)
            earlier.setdefault((min(before, PASSES), role, path), []).extend(calls)
    return [*last, *(earlier[key] for key in sorted(earlier))]


def telling(calls: list[SeenCall], newest: Collection[str]) -> list[SeenCall]:
    """Return the calls of a load's stratum that tell most: reads of files of the newest step."""
    own = [call for call in calls if call.path in newest]
    return [call for call in own if call.what in READING] or own or calls


def passes(log: Sequence[SeenCall]) -> dict[int, int]:
    """Map each call of a load to how often its file has been opened, at most `PASSES`.

    What a load does with a file before it restores the job, such as to look whether it is whole, is
    done in a pass of its own.
    """
    opened: Counter[str] = Counter()
    found: dict[int, int] = {}
    for call in log:
        opened[call.path] += call.what in OPENING
        found[call.call] = min(max(opened[call.path], 1), PASSES)
    return found


def unmet(
    log: Sequence[SeenCall], tried: Iterable[CallFault], task: Task
) -> dict[Stratum, list[SeenCall]]:
    """Return the strata of a control's calls that no fault hits with an error that does not last.

    An error that lasts may be told at a later call, and one that is harmless need not be told.
    """
    hit: set[int] = set()
    for fault in tried:
        calls = faults.Fault(**fault.arguments(reading=task.reading)).among(log)
        is_error = fault.error not in HARMLESS and not fault.persistent
        hit |= {calls[fault.at - 1].call} if is_error and 0 < fault.at <= len(calls) else set()
    groups = strata_of(log, task)
    return {
        stratum: calls
        for stratum, calls in groups.items()
        if not hit & {call.call for call in calls}
    }


def is_renewed(log: Sequence[SeenCall], call: SeenCall) -> bool:
    """Return whether a file whose sync failed was written anew, and synced, by the same save.

    A directory has only to be synced again: what it has to write is not dropped.
    """
    later = [seen for seen in log if seen.call > call.call]
    if call.is_folder:
        again = (seen for seen in later if seen.path == call.path and seen.what in SYNCING)
        return any(not seen.injected for seen in again)
    kind = trees.pattern(call.path)
    later = [seen for seen in later if trees.pattern(seen.path) == kind]
    written = [seen.call for seen in later if seen.what in WRITING]
    synced = [seen.call for seen in later if seen.what in SYNCING and not seen.injected]
    return bool(written and synced and written[0] < synced[-1])


def unsynced(
    log: Sequence[SeenCall], fault: CallFault, there: Collection[str]
) -> tuple[set[str], set[str]]:
    """Return what the syncs that a fault hits have to write: kinds of files, and of entries.

    `log` is that of the control. Of a file it is the data; of a directory each name in it that was
    given or taken away since the last sync of it that the fault spares. A call that would make a
    file and opens one that was `there` gives no name.
    """
    log = [call for call in log if call.what not in OPENING or call.path not in there]
    calls = faults.Fault(**fault.arguments()).among(log)
    calls = [call for call in calls if fault.alike in {"", trees.pattern(call.path)}]
    hit = calls[fault.at - 1 :] if fault.persistent else calls[fault.at - 1 : fault.at]
    files: set[str] = set()
    entries: set[str] = set()
    for sync in (call for call in hit if call.what in SYNCING):
        if sync.is_folder:
            spared = [call for call in log if call.what in SYNCING and call not in hit]
            entries |= _entries(log, sync, spared)
        else:
            files.add(trees.pattern(sync.became or sync.path))
    return files, entries


def _entries(log: Sequence[SeenCall], sync: SeenCall, spared: Sequence[SeenCall]) -> set[str]:
    """Return the kinds of names that a sync of a directory has to write."""
    earlier = [one.call for one in spared if one.path == sync.path and one.call < sync.call]
    begin = max(earlier, default=0)
    window = [call for call in log if begin < call.call < sync.call]
    naming = [call for call in window if call.what not in SYNCING | WRITING | READING]
    names = {name for call in naming for name in (call.path, call.became) if name}
    return {trees.pattern(name) for name in names if name.rpartition("/")[0] == sync.path}


def digest_of(leaves: messages.Leaves, holds: Sequence[str]) -> str:
    """Return one digest, 128 hex digits, of the components that a manager holds."""
    return blake2b(json.dumps(oracle.held(leaves, holds), sort_keys=True).encode()).hexdigest()
