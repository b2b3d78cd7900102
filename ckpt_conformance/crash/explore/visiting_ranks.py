"""The harness's end of `visit_ranks`: run worlds, and join what their ranks say of a recovery."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.explore.judging import Visit
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.subject import OTHER_SEED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.crash.explore.visit import Task
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import WorldResult

PROBE = "ckpt_conformance.crash.explore.visit_ranks:visit"
EACH = 2.0  # seconds that a recovery of a batch may add to the deadline of its world
BATCH, ALONE = 4.0, worlds.PATIENCE  # seconds that a collective waits for a peer
Lines = list[dict[str, Any]]


def live(
    subject: Subject, layout: Mapping[str, int], task: Task, options: Mapping[str, Any]
) -> tuple[list[Lines], WorldResult]:
    """Run a task in one world; give the lines of each rank, and how the world ended."""
    size, path = worlds.size_of(layout), subject.folder / "task"
    files = [Path(f"{task.out}-{rank}") for rank in range(size)]
    for file in files:
        file.unlink(missing_ok=True)
    path.write_bytes(pickle.dumps(task))
    result = worlds.execute(
        subject,
        layout,
        {"op": "probe", "probe": PROBE, "args": {"task": str(path)}},
        root=task.root,
        seed=OTHER_SEED,
        options=dict(options),
        patience=ALONE if len(task.items) == 1 else BATCH,
        deadline=worlds.DEADLINE + EACH * len(task.items),
    )
    return [_lines(file) for file in files], result


def _lines(path: Path) -> Lines:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def known(found: Sequence[Lines]) -> list[dict[int, tuple[int, Any]]]:
    """Give what each rank has from the whole steps that it was to learn."""
    return [
        {line["legal"]: (line["step"], line["leaves"]) for line in lines if "legal" in line}
        for lines in found
    ]


def visits(found: Sequence[Lines], result: WorldResult) -> dict[int, Visit]:
    """Give the visits of a world by item: those that a rank began.

    Raises Unknown if a rank that did not die says nothing: then the harness failed.
    """
    begun = sorted({line["begin"] for lines in found for line in lines if "begin" in line})
    told = [{line["item"]: line for line in lines if "item" in line} for lines in found]
    return {number: joined([one.get(number) for one in told], result) for number in begun}


def joined(told: Sequence[dict[str, Any] | None], result: WorldResult) -> Visit:
    """Join what ranks say of one recovery; a rank that says nothing has died or hangs."""
    lines = [line for line in told if line is not None]
    silent = [rank for rank, line in enumerate(told) if line is None]
    ends = [result.ranks[rank].exit_kind for rank in silent]
    died = next((exit_kind for exit_kind in (*worlds.WORST, *ends) if exit_kind in ends), "ended")
    memory = any(line["exit_kind"] == "memory" for line in lines)
    exit_kind = died if died != "ended" else "memory" if memory else "ended"
    alone = bool(lines) and all(line["alone"] for line in lines)
    at = next((rank for rank, line in enumerate(told) if line and line["error"]), None)
    if at is not None:
        error = dict((told[at] or {})["error"])
        error["message"] = f"rank {at}: {error['message']}"
        return Visit(exit_kind, error=error, alone=alone)
    if silent and exit_kind == "ended":
        why = result.error or {"message": result.output[-200:]}
        msg = f"rank {silent[0]} gave no answer in a visit: {why['message']}"
        raise Unknown(msg)
    if silent:
        return Visit(exit_kind, alone=alone)
    return _served(lines, exit_kind, alone=alone)


def _served(lines: Lines, exit_kind: str, *, alone: bool) -> Visit:
    """Join what was served: a version only if every rank has its part of it."""
    steps = [line["step"] for line in lines]
    versions: list[set[int]] = [set(line["versions"]) for line in lines]
    same = versions[0].intersection(*versions[1:])
    differs = [f"rank {n}: {what}" for n, line in enumerate(lines) for what in line["differs"]]
    if len(set(steps)) > 1:
        said = ", ".join(f"rank {rank}: step {step}" for rank, step in enumerate(steps))
        one = next(step for step in steps if step)
        return Visit(exit_kind, one, differs=tuple(differs), alone=alone, said=said)
    return Visit(exit_kind, steps[0], tuple(sorted(same)), None, tuple(differs), alone=alone)


def alone(
    subject: Subject, layout: Mapping[str, int], task: Task, options: Mapping[str, Any]
) -> Visit:
    """Recover from the one item of a task in a world of its own.

    If all of it is refused, ask for older versions by step, each in a world of its own.
    """
    lines, result = live(subject, layout, task, options)
    visit = visits(lines, result).get(0)
    if visit is None:
        msg = f"a world that visits begins nothing: {subject.tell(result)}"
        raise Unknown(msg)
    if visit.error is None or not task.explicit:
        return replace(visit, alone=True)
    for version in task.items[0].older:
        step = next((step for number, step, _ in task.legal if number == version), None)
        found = visits(*live(subject, layout, replace(task, ask=step), options)).get(0)
        if step is not None and found and version in found.versions:
            return replace(visit, alone=True, older=(version,))
    return replace(visit, alone=True)
