"""Worlds: one program on several ranks, and how all of them ended, seen as one.

A world is a set of child processes, one a rank, that begin together and meet through a file.
Suites drive a `Subject`; these functions give it ranks. Their results look like that of one child,
so the oracles judge both alike.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Cause, Unknown, control_failed
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.subject import JOB_SEED, OTHER_SEED, RUN_FIELDS, SAVES, Golden
from ckpt_conformance.workload import devices, joining

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.subject.subject import Subject

Layout = dict[str, int]  # fsdp, tp, replicate, dim: the fields of `sharded.Layout`

PATIENCE = 8.0  # seconds that a collective of the harness's own group waits for a peer
DEADLINE = 20.0  # seconds that a rank has to end, one way or another
WORST = ("hang", "memory", "crashed", "killed")
PLAIN: tuple[Layout, ...] = tuple({"fsdp": size} for size in (1, 2, 3, 4))
USUAL, MANY = 4, 8  # ranks of the largest world: always, and at the full budget where they fit

_worlds = itertools.count()  # a rendezvous file is never used twice


def size_of(layout: Mapping[str, int]) -> int:
    """Give the number of ranks of a layout."""
    return layout.get("fsdp", 1) * layout.get("tp", 1) * layout.get("replicate", 1)


def most(subject: Subject) -> int:
    """Give the number of ranks of the largest world; what is left out, and why, is remarked on.

    Eight ranks are tried at the full budget, if the memory that is free holds as many as one takes.
    """
    if subject.budget != "full":
        return USUAL
    if "most ranks" not in subject.notes:
        result = execute(subject, {"fsdp": 2}, {"op": "run", "until": 1})
        if result.exit_kind != "ended" or result.error:
            raise control_failed(f"two ranks do not train: {subject.tell(result)}")
        wanted = MANY * max(one.peak_kib for one in result.ranks)
        subject.notes["most ranks"] = fit(wanted, available_kib())
    found, remark = subject.notes["most ranks"]
    subject.remarks.ranks = remark
    return int(found)


def fit(wanted: int, free: int) -> tuple[int, str]:
    """Give the number of ranks that fit, and what to say of it; `wanted` is that of eight (KiB)."""
    gib = f"{MANY} ranks take up to {wanted / 2**20:.1f} GiB, and {free / 2**20:.1f} GiB are free"
    if wanted <= free:
        return MANY, f"worlds of 1 to {USUAL} ranks, and of {MANY}: {gib}"
    return USUAL, f"worlds of 1 to {USUAL} ranks, none of {MANY}: {gib}"


def available_kib() -> int:
    """Give the memory that the kernel would hand out without swapping, in KiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(one.split()[1]) for one in lines if one.startswith("MemAvailable:"))


@dataclass(frozen=True)
class WorldResult:
    """How the ranks of a world ended; reads like the result of one child."""

    ranks: tuple[ProcessResult, ...]
    program: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def exit_kind(self) -> str:
        """The worst end of a rank: hang, memory, crashed, killed; else ended."""
        found = {rank.exit_kind for rank in self.ranks}
        return next((exit_kind for exit_kind in WORST if exit_kind in found), "ended")

    @property
    def error(self) -> dict[str, Any] | None:
        """The first error of the lowest rank that has one, with the rank in its message."""
        for at, rank in enumerate(self.ranks):
            if rank.error:
                return {**rank.error, "message": f"rank {at}: {rank.error['message']}"}
        return None

    @property
    def output(self) -> str:
        """What the ranks printed, one after the other."""
        return "\n".join(rank.output for rank in self.ranks if rank.output)

    @property
    def code(self) -> int:
        """The exit status of the first rank that has one other than 0."""
        return next((rank.code for rank in self.ranks if rank.code), 0)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of all journals, rank by rank."""
        return [{**event, "rank": at} for at, r in enumerate(self.ranks) for event in r.events]

    @property
    def left(self) -> list[str]:
        """Daemons that had to be ended."""
        return [one for rank in self.ranks for one in rank.left]

    def steps_of(self, event: str) -> list[int]:
        """Give the steps that every rank's journal has for an event, in order."""
        found = [rank.steps_of(event) for rank in self.ranks]
        return [step for step in found[0] if all(step in one for one in found)]

    def result(self, op: str, index: int = -1) -> dict[str, Any]:
        """Join the ranks' results of an operation; empty if a rank did not reach it."""
        found = [rank.result(op, index) for rank in self.ranks]
        if not all(found):
            return {}
        if op != "run":
            return found[0]
        return joined(found) if all("arrived" in one for one in found) else {}

    @property
    def split(self) -> bool:
        """Whether some ranks arrived at a training step, and others did not, or at another one."""
        arrived = [rank.result("run").get("arrived", {}).get("step") for rank in self.ranks]
        return len(set(arrived)) > 1


def joined(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the results of `run`: global states; ranks at different steps arrived nowhere legal."""
    steps = {one["arrived"]["step"] for one in found}
    whole = dict(found[0])
    whole["records"] = [{**one, "rank": at} for at, r in enumerate(found) for one in r["records"]]
    if len(steps) > 1:
        return whole | {"arrived": {**whole["arrived"], "step": -1}, "states": {}}
    states = [one["states"] for one in found]
    shared = [step for step in states[0] if all(step in one for one in states)]
    whole["states"] = {step: joining.assemble([one[step] for one in states]) for step in shared}
    if all("final" in one for one in found):
        whole["final"] = joining.assemble([one["final"] for one in found])
    return whole


def execute(
    subject: Subject,
    layout: Mapping[str, int],
    *ops: dict[str, Any],
    **given: Any,  # noqa: ANN401
) -> WorldResult:
    """Run operations on every rank of a world; an operation or a fault with `ranks` on these only.

    Fields: seed, variant, tensors (the fields of `sharded.Tensors`), options, deadline (s),
    snapshots, patience (s of a collective), roots (by rank: the directory of its manager, where it
    is not that of the others).
    """
    made = programs(subject, layout, ops, given)
    return WorldResult(tuple(subject.send(made)), made[0])


def recorded(
    subject: Subject,
    layout: Mapping[str, int],
    *ops: dict[str, Any],
    folder: Path | None = None,
    stops: Sequence[Mapping[str, Any]] = (),
    **given: Any,  # noqa: ANN401
) -> WorldResult:
    """Run operations on every rank of a world in one child, which is recorded into a folder.

    With `stops` all are killed when each rank has done so many operations on the directory.
    """
    made = programs(subject, layout, ops, given)
    journal = made[0]["journal"]
    ranks = [{**one, "rank": at, "journal": journal} for at, one in enumerate(made)]
    rank_group = subject.program(deadline=made[0]["deadline"], rank_group=ranks)
    rank_group |= {"record": str(folder)} if folder else {"stops": list(stops)}
    rank_group |= {key: made[0][key] for key in ("isolation", "device") if key in made[0]}
    own = {name: f"{rank_group[name]}-rank-group" for name in ("result", "output")}
    return WorldResult(tuple(subject.send_rank_group(rank_group | own)), made[0])


def programs(
    subject: Subject,
    layout: Mapping[str, int],
    ops: Sequence[dict[str, Any]],
    given: dict[str, Any],
) -> list[dict[str, Any]]:
    """Make the program of each rank."""
    size = size_of(layout)
    store = subject.scratch / f"rendezvous-{next(_worlds)}"
    more = max(1.0, size / USUAL)  # a machine has no more cores for them
    if subject.device == devices.CUDA:
        more *= devices.SLOWER
        given |= {"isolation": "spawn", "device": devices.CUDA}
        _have_gpus(subject, size)
    patience = given.pop("patience", PATIENCE * more)
    given.setdefault("deadline", DEADLINE * more)
    roots: dict[int, str] = given.pop("roots", {})
    made = [
        subject.program(
            *ops_of_rank(ops, rank),
            rank=rank,
            layout=dict(layout),
            world={
                "rank": rank,
                "size": size,
                "store": str(store),
                "timeout": patience,
                "device": subject.device,
            },
            **dict(given),
        )
        for rank in range(size)
    ]
    return [{**one, "root": roots.get(rank, one["root"])} for rank, one in enumerate(made)]


def _have_gpus(subject: Subject, size: int) -> None:
    """Raise Unknown if ranks are more than GPUs: NCCL takes no two ranks on one."""
    if "gpus" not in subject.notes:
        op = {"op": "probe", "probe": "ckpt_conformance.workload.devices:count"}
        result = subject.execute(op, isolation="spawn", device=devices.CUDA)
        subject.notes["gpus"] = result.result("probe").get("value", 0)
    if size > subject.notes["gpus"]:
        raise Unknown(
            f"this machine has {subject.notes['gpus']} GPUs for {size} ranks on cuda, and NCCL "
            f"takes one for each: run it where there are {size}, or on the CPU",
            cause=Cause.MACHINE,
        )


def ops_of_rank(ops: Sequence[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """Give the operations of one rank, each with the faults that hit it."""
    return [_of_rank(op, rank) for op in ops if rank in op.get("ranks", [rank])]


def _of_rank(op: dict[str, Any], rank: int) -> dict[str, Any]:
    """Keep of an operation's faults those that hit this rank."""
    if "faults" not in op:
        return op
    mine = [one for one in op["faults"] if rank in one.get("ranks", [rank])]
    return {**op, "faults": mine}


def run(
    subject: Subject,
    layout: Mapping[str, int],
    until: int | None,
    save_at: Sequence[int] = (),
    **given: Any,  # noqa: ANN401  fields of the operation and of the program
) -> WorldResult:
    """Train to a step with saves, on every rank."""
    op = {"op": "run", "until": until, "save_at": list(save_at)}
    op |= {key: given.pop(key) for key in RUN_FIELDS if key in given}
    tail = given.pop("then", [])
    given.setdefault("seed", JOB_SEED)
    return execute(subject, layout, op, *tail, **given)


def resume(
    subject: Subject,
    layout: Mapping[str, int],
    step: int | str | None = None,
    **given: Any,  # noqa: ANN401
) -> WorldResult:
    """Load into a job of another seed on every rank, and digest at the first training step."""
    given = {"seed": OTHER_SEED, "stop_after": 0, **given}
    return run(subject, layout, None, resume=True if step is None else step, **given)


def golden(
    subject: Subject,
    layout: Mapping[str, int],
    saves: tuple[int, ...] = SAVES,
    **given: Any,  # noqa: ANN401  options
) -> Golden:
    """Give a run without faults in a layout, made once per adapter, layout, saves and options."""
    key = ("world", repr(sorted(layout.items())), saves, repr(sorted(given.items())))
    if key not in subject.goldens:
        subject.goldens[key] = _record(subject, layout, saves, given)
    trees.clear(subject.root)
    return subject.goldens[key]


def _record(
    subject: Subject, layout: Mapping[str, int], saves: tuple[int, ...], given: dict[str, Any]
) -> Golden:
    folder = subject.folder / "golden" / str(len(subject.goldens))
    trees.clear(folder)
    trees.clear(subject.root)
    result = run(
        subject,
        layout,
        max(saves) + 4,
        saves,
        watch=True,
        snapshots=str(folder),
        then=[{"op": "close"}],
        **given,
    )
    if result.exit_kind != "ended" or result.error:
        told = subject.tell(result)
        raise control_failed(f"a run of {size_of(layout)} ranks does not end well: {told}")
    found = result.result("run")
    at = {int(step): state for step, state in found["states"].items()}
    return Golden(saves, "sharded", folder, at, found["records"], found["arrived"]["ties"], {})


def served(subject: Subject, gold: Golden, layout: Mapping[str, int], step: int) -> dict[str, Any]:
    """Give what an undamaged load of a step gives in a layout: the control of a fault check."""
    key = f"served {sorted(layout.items())} {step}"
    if key not in gold.memo:
        subject.materialize(gold, step)
        result = resume(subject, layout)
        arrived, state = oracle.arrival(result)
        if arrived != step:
            told = subject.tell(result)
            raise control_failed(f"an undamaged load of step {step} gives {told}")
        gold.memo[key] = state
    found: dict[str, Any] = gold.memo[key]
    return found


def legal(
    subject: Subject, gold: Golden, layout: Mapping[str, int], *steps: int
) -> dict[int, dict[str, Any]]:
    """Give the states of several steps in a layout."""
    return {step: served(subject, gold, layout, step) for step in steps or gold.saves}


def of_rank(component: Mapping[str, str], rank: int) -> dict[str, str]:
    """Give the leaves that one rank has of an assembled component."""
    found: dict[str, str] = {}
    for path, value in component.items():
        name, at, owner = path.rpartition("@")
        if at and owner.isdecimal():
            if int(owner) == rank:
                found[name] = value
        else:
            found[path] = value
    return found


def told(subject: Subject, result: WorldResult) -> list[str]:
    """Say of each rank how it ended."""
    return [f"rank {rank}: {subject.tell(one)}" for rank, one in enumerate(result.ranks)]
