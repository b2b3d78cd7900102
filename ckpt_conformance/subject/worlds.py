"""Worlds: one program on several ranks, and how all of them ended, seen as one.

A world is a set of child processes, one a rank, that begin together and meet through a file.
Suites drive a `Subject`; these functions give it ranks. Their results look like that of one child,
so the oracles judge both alike.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec import structs

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Cause, Unknown, control_failed
from ckpt_conformance.harness.messages import (
    Close,
    ExitKind,
    Load,
    Probe,
    ProbeResult,
    Result,
    Run,
    RunResult,
    Save,
    World,
    whole,
)
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.subject import (
    JOB_SEED,
    OTHER_SEED,
    SAVES,
    Golden,
    RankRecord,
    Slot,
    run_op,
)
from ckpt_conformance.workload import devices, joining

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpt_conformance.contract.journal import Event, StepEventName
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Error, Leaves, Program, Stop
    from ckpt_conformance.subject.subject import Subject

R = TypeVar("R", bound=Result)
MOST: Slot[tuple[int, str]] = Slot("the largest world, and what to remark on it")
GPUS: Slot[int] = Slot("GPUs of this machine")
LOADED: Slot[Leaves] = Slot("the state that an undamaged load gives in a layout")
Layout = dict[str, int]  # fsdp, tp, replicate, dim: the fields of `sharded.Layout`

PATIENCE = 8.0  # seconds that a collective of the harness's own group waits for a peer
DEADLINE = 20.0  # seconds that a rank has to end, one way or another
BUSY = 3.0  # times as slow may a machine be that does other work
WORST = (ExitKind.HANG, ExitKind.MEMORY, ExitKind.CRASHED, ExitKind.KILLED)
PLAIN: tuple[Layout, ...] = tuple({"fsdp": size} for size in (1, 2, 3, 4))
USUAL, MANY = 4, 8  # ranks of the largest world: always, and at the full budget where they fit

_worlds = itertools.count()  # a rendezvous file is never used twice


def size_of(layout: Mapping[str, int]) -> int:
    """Return the number of ranks of a layout."""
    return layout.get("fsdp", 1) * layout.get("tp", 1) * layout.get("replicate", 1)


def most(subject: Subject) -> int:
    """Return the number of ranks of the largest world; what is left out, and why, is remarked on.

    Eight ranks are tried at the full budget, if the memory that is free holds as many as one takes.
    """
    if subject.budget != "full":
        return USUAL
    number, remark = subject.once(MOST, lambda: _fit_here(subject))
    subject.remarks.ranks = remark
    return number


def _fit_here(subject: Subject) -> tuple[int, str]:
    """Measure what one of two ranks takes, and hold it against the memory that is free."""
    result = execute(subject, {"fsdp": 2}, Run(until=1))
    if not result.went_well:
        raise control_failed(f"two ranks do not train: {subject.tell(result)}")
    return fit(MANY * max(rank.peak_kib for rank in result.ranks), available_kib())


def fit(wanted: int, free: int) -> tuple[int, str]:
    """Return the number of ranks that fit, and a remark; `wanted`: KiB that eight take."""
    gib = f"{MANY} ranks take up to {wanted / 2**20:.1f} GiB, and {free / 2**20:.1f} GiB are free"
    if wanted <= free:
        return MANY, f"worlds of 1 to {USUAL} ranks, and of {MANY}: {gib}"
    return USUAL, f"worlds of 1 to {USUAL} ranks, none of {MANY}: {gib}"


def available_kib() -> int:
    """Return the memory that the kernel would hand out without swapping, in KiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


@dataclass(frozen=True)
class WorldResult:
    """How the ranks of a world ended; reads like the result of one child."""

    ranks: tuple[ProcessResult, ...]
    program: Program  # of the first rank

    @property
    def exit_kind(self) -> ExitKind:
        """The worst end of a rank: hang, memory, crashed, killed; else ended."""
        kinds = {rank.exit_kind for rank in self.ranks}
        return next((kind for kind in WORST if kind in kinds), ExitKind.ENDED)

    @property
    def error(self) -> Error | None:
        """The first error of the lowest rank that has one, with the rank in its message."""
        for at, rank in enumerate(self.ranks):
            if rank.error:
                return structs.replace(rank.error, message=f"rank {at}: {rank.error.message}")
        return None

    @property
    def went_well(self) -> bool:
        """Whether every rank came to its end, and no operation raised."""
        return self.exit_kind is ExitKind.ENDED and self.error is None

    @property
    def output(self) -> str:
        """What the ranks printed, one after the other."""
        return "\n".join(rank.output for rank in self.ranks if rank.output)

    @property
    def code(self) -> int:
        """The exit status of the first rank that has one other than 0."""
        return next((rank.code for rank in self.ranks if rank.code), 0)

    @property
    def events(self) -> list[Event]:
        """The events of all journals, rank by rank; each says whose it is."""
        return [
            structs.replace(event, rank=rank)
            for rank, result in enumerate(self.ranks)
            for event in result.events
        ]

    @property
    def has_fired(self) -> bool:
        """Whether a fault has hit a call of some rank, as its journal says."""
        return any(rank.has_fired for rank in self.ranks)

    @property
    def left(self) -> list[str]:
        """Daemons that had to be ended."""
        return [daemon for rank in self.ranks for daemon in rank.left]

    @property
    def records(self) -> list[RankRecord]:
        """The records of all ranks, rank by rank; none if a rank did not train."""
        if self.of(RunResult).arrived is None:
            return []
        return [
            RankRecord(at, record)
            for at, rank in enumerate(self.ranks)
            for record in rank.of(RunResult).records
        ]

    def steps_of(self, event: StepEventName) -> list[int]:
        """Return the steps that every rank's journal has for an event, in order."""
        by_rank = [rank.steps_of(event) for rank in self.ranks]
        return [step for step in by_rank[0] if all(step in steps for steps in by_rank)]

    def of(self, kind: type[R], index: int = -1) -> R:
        """Join the ranks' results of an operation; empty if a rank did not reach it."""
        if not self.reached(kind):
            return kind()
        results = [rank.of(kind, index) for rank in self.ranks]
        if not all(isinstance(result, RunResult) for result in results):
            return results[0]
        runs = [result for result in results if isinstance(result, RunResult)]
        whole: Any = joined(runs) if all(run.arrived for run in runs) else kind()
        return cast("R", whole)

    def reached(self, kind: type[Result]) -> bool:
        """Return whether every rank reached an operation with such a result."""
        return all(rank.reached(kind) for rank in self.ranks)

    @property
    def split(self) -> bool:
        """Whether some ranks arrived at a training step, and others did not, or at another one."""
        places = [rank.of(RunResult).arrived for rank in self.ranks]
        return len({place and place.step for place in places}) > 1


def joined(runs: Sequence[RunResult]) -> RunResult:
    """Join the results of `run`: global states; ranks at different steps arrived nowhere legal."""
    whole = runs[0]
    steps = {run.arrived.step for run in runs if run.arrived}
    if len(steps) > 1 and whole.arrived:
        nowhere = structs.replace(whole.arrived, step=-1)
        return structs.replace(whole, arrived=nowhere, states={})
    shared = [step for step in whole.states if all(step in run.states for run in runs)]
    states = {step: joining.assemble([run.states[step] for run in runs]) for step in shared}
    finals = [run.final for run in runs if run.final is not None]
    final = joining.assemble(finals) if len(finals) == len(runs) else whole.final
    return structs.replace(whole, states=states, final=final)


def execute(
    subject: Subject,
    layout: Mapping[str, int],
    *ops: AnyOp,
    **given: Any,  # noqa: ANN401
) -> WorldResult:
    """Run operations on every rank of a world; an operation or a fault with `ranks` on these only.

    Fields: seed, variant, tensors (the fields of `sharded.Tensors`), options, deadline (s),
    snapshots, patience (s of a collective), slower (a factor for both), roots (by rank: the
    directory of its manager, where it is not that of the others).
    """
    made = programs(subject, layout, ops, given)
    return WorldResult(tuple(subject.send(made)), made[0])


def recorded(
    subject: Subject,
    layout: Mapping[str, int],
    *ops: AnyOp,
    folder: Path | None = None,
    stops: Sequence[Stop] = (),
    **given: Any,  # noqa: ANN401
) -> WorldResult:
    """Run operations on every rank of a world in one child, which is recorded into a folder.

    With `stops` all are killed when each rank has done so many operations on the directory.
    """
    made = programs(subject, layout, ops, given)
    first = made[0]
    ranks = [
        structs.replace(program, rank=at, journal=first.journal) for at, program in enumerate(made)
    ]
    group = subject.program(
        rank_group=tuple(ranks),
        record=str(folder) if folder else "",
        stops=() if folder else tuple(stops),
        deadline=first.deadline,
        isolation=first.isolation,
        device=first.device,
    )
    group = structs.replace(
        group, result=f"{group.result}-rank-group", output=f"{group.output}-rank-group"
    )
    return WorldResult(tuple(subject.send_rank_group(group)), first)


def programs(
    subject: Subject,
    layout: Mapping[str, int],
    ops: Sequence[AnyOp],
    given: dict[str, Any],
) -> list[Program]:
    """Make the program of each rank."""
    size = size_of(layout)
    store = subject.scratch / f"rendezvous-{next(_worlds)}"
    more = given.pop("slower", 1.0) * max(1.0, size / USUAL)  # a machine has no more cores for them
    if subject.device == devices.CUDA:
        more *= devices.SLOWER
        given |= {"isolation": "exec", "device": devices.CUDA}
        _have_gpus(subject, size)
    patience = given.pop("patience", PATIENCE * more)
    given.setdefault("deadline", DEADLINE * more)
    roots: dict[int, str] = given.pop("roots", {})
    made = [
        subject.program(
            *ops_of_rank(ops, rank),
            rank=rank,
            layout=dict(layout),
            world=World(
                rank=rank, size=size, store=str(store), timeout=patience, device=subject.device
            ),
            **dict(given),
        )
        for rank in range(size)
    ]
    return [
        structs.replace(program, root=roots.get(rank, program.root))
        for rank, program in enumerate(made)
    ]


def _have_gpus(subject: Subject, size: int) -> None:
    """Raise Unknown if ranks are more than GPUs: NCCL takes no two ranks on one."""
    gpus = subject.once(GPUS, lambda: _count_gpus(subject))
    if size > gpus:
        raise Unknown(
            f"this machine has {gpus} GPUs for {size} ranks on cuda, and NCCL "
            f"takes one for each; without --device cuda it needs none",
            cause=Cause.MACHINE,
        )


def _count_gpus(subject: Subject) -> int:
    count = Probe(probe="ckpt_conformance.workload.devices:count")
    result = subject.execute(count, isolation="exec", device=devices.CUDA)
    return int(result.of(ProbeResult).value or 0)


def ops_of_rank(ops: Sequence[AnyOp], rank: int) -> list[AnyOp]:
    """Return the operations of one rank, each with the faults that hit it."""
    return [_of_rank(op, rank) for op in ops if op.ranks is None or rank in op.ranks]


def _of_rank(op: AnyOp, rank: int) -> AnyOp:
    """Keep of an operation's faults those that hit this rank."""
    if not isinstance(op, Run | Save | Load):
        return op
    mine = tuple(fault for fault in op.faults if fault.ranks is None or rank in fault.ranks)
    return structs.replace(op, faults=mine)


def run(
    subject: Subject,
    layout: Mapping[str, int],
    until: int | None,
    save_at: Sequence[int] = (),
    *,
    then: Sequence[AnyOp] = (),
    **given: Any,  # noqa: ANN401  fields of the operation and of the program
) -> WorldResult:
    """Train to a step with saves, on every rank, and do what comes `then`."""
    op, rest = run_op(until, save_at, given)
    rest.setdefault("seed", JOB_SEED)
    return execute(subject, layout, op, *then, **rest)


def resume(
    subject: Subject,
    layout: Mapping[str, int],
    step: int | str | None = None,
    **given: Any,  # noqa: ANN401
) -> WorldResult:
    """Load into a job of another seed on every rank, and digest at the first training step."""
    given = {"seed": OTHER_SEED, "stop_after": 0, **given}
    return run(subject, layout, None, resume=True if step is None else step, **given)


def patiently(
    make: Callable[..., WorldResult],
    stuck: Callable[[WorldResult], object] = lambda result: result.exit_kind is ExitKind.HANG,
) -> WorldResult:
    """Make a result; make it again with more time where a rank had no end: machines may be busy.

    `make` takes the field `slower` of `execute`.
    """
    result = make()
    return make(slower=BUSY) if stuck(result) else result


def golden(
    subject: Subject,
    layout: Mapping[str, int],
    saves: tuple[int, ...] = SAVES,
    **given: Any,  # noqa: ANN401  options
) -> Golden:
    """Return a run without faults in a layout, made once per adapter, layout, saves and options."""
    key = ("world", repr(sorted(layout.items())), saves, repr(sorted(given.items())))
    if key not in subject.goldens:
        subject.goldens[key] = _record(subject, layout, saves, given)
    trees.clear(subject.root)
    return subject.goldens[key]


def _record(
    subject: Subject, layout: Mapping[str, int], saves: tuple[int, ...], given: dict[str, Any]
) -> Golden:
    folder = subject.folder / "golden" / str(len(subject.goldens))
    given = {"watch": True, "snapshots": str(folder), "then": [Close()], **given}

    def record(**more: Any) -> WorldResult:  # noqa: ANN401  fields of `execute`
        trees.clear(folder)
        trees.clear(subject.root)
        return run(subject, layout, max(saves) + 4, saves, **given, **more)

    result = patiently(record)
    if not result.went_well:
        message = subject.tell(result)
        raise control_failed(f"a run of {size_of(layout)} ranks does not end well: {message}")
    ran = result.of(RunResult)
    ties = ran.arrived.ties if ran.arrived else []
    at = {step: whole(state) for step, state in ran.states.items()}
    return Golden(saves, "sharded", folder, at, result.records, ties, {})


def loaded(subject: Subject, gold: Golden, layout: Mapping[str, int], step: int) -> Leaves:
    """Return what an undamaged load of a step gives in a layout: the control of a fault check."""

    def load() -> Leaves:
        subject.materialize(gold, step)
        result = patiently(partial(resume, subject, layout))
        arrived, state = oracle.arrival(result)
        if arrived != step:
            message = subject.tell(result)
            raise control_failed(f"an undamaged load of step {step} gives {message}")
        return state

    return subject.once(LOADED, load, gold.folder, *sorted(layout.items()), step)


def legal(
    subject: Subject, gold: Golden, layout: Mapping[str, int], *steps: int
) -> dict[int, Leaves]:
    """Return the states of several steps in a layout."""
    return {step: loaded(subject, gold, layout, step) for step in steps or gold.saves}


def of_rank(component: Mapping[str, str], rank: int) -> dict[str, str]:
    """Return the leaves that one rank has of an assembled component."""
    leaves: dict[str, str] = {}
    for path, value in component.items():
        name, at, owner = path.rpartition("@")
        if at and owner.isdecimal():
            if int(owner) == rank:
                leaves[name] = value
        else:
            leaves[path] = value
    return leaves


def by_rank(subject: Subject, result: WorldResult) -> list[str]:
    """Say of each rank how it ended."""
    return [f"rank {rank}: {subject.tell(process)}" for rank, process in enumerate(result.ranks)]
