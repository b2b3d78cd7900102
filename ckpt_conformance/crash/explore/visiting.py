"""The harness's end of `visit`: send a task to a child, read what it said."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

from ckpt_conformance.crash.explore.judging import Visit
from ckpt_conformance.crash.explore.visit import DEADLINE
from ckpt_conformance.subject.subject import OTHER_SEED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.crash.explore.visit import Task
    from ckpt_conformance.subject.subject import Subject


def live(subject: Subject, task: Task, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run a task in one child; give its lines and a last one about the child itself."""
    out, path = subject.folder / "visits", subject.folder / "task"
    out.unlink(missing_ok=True)
    path.write_bytes(pickle.dumps(task))
    op = {
        "op": "probe",
        "probe": "ckpt_conformance.crash.explore.visit:visit",
        "args": {"task": str(path)},
    }
    deadline = DEADLINE * (len(task.items) + len(task.legal) + 2)
    result = subject.execute(
        op, root=task.root, seed=OTHER_SEED, deadline=deadline, options=dict(options)
    )
    lines = [json.loads(line) for line in _whole_lines(out)]
    value = result.result("probe").get("value")
    if value is None and task.fork:
        return [*lines, {"failed": f"the process that recovers ends: {subject.tell(result)}"}]
    return [*_with_death(lines, result.exit_kind), value or {}]


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text.rpartition("\n")[0].splitlines()


def _with_death(lines: list[dict[str, Any]], exit_kind: str) -> list[dict[str, Any]]:
    """Name the item that a process without children died of."""
    if exit_kind == "ended" or not lines or "begin" not in lines[-1]:
        return lines
    dead = {"item": lines[-1]["begin"], "exit_kind": exit_kind, "step": None, "error": None}
    return [*lines, {**dead, "versions": [], "differs": [], "alone": False}]


def visit_of(line: dict[str, Any]) -> Visit:
    """Read what a child said of one recovery."""
    return Visit(
        line["exit_kind"],
        line["step"],
        tuple(line["versions"]),
        line["error"],
        tuple(line["differs"]),
        tuple(line.get("older", ())),
        line["alone"],
    )


def what_it_serves(visit: Visit) -> tuple[Any, ...]:
    """Give what must not depend on what was visited before."""
    return visit.exit_kind, visit.step, visit.versions, visit.error is None


def told_of(line: dict[str, Any]) -> str:
    """Say in one line what a child said of one recovery."""
    return visit_of({**line, "versions": [], "differs": [], "alone": False}).told
