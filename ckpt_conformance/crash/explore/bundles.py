"""A crash state that violates, as a folder that replays alone: `ckpt-conformance replay BUNDLE`.

`violation.json` says what was found, `checkpoints/` is the directory as the crash left it, `legal/`
holds what may be served, one tree for each version, `recording/` the trace, `operations.txt` the
same to read with the crash point marked, `repro.py` a script for an upstream
report; not of several ranks, which one process can't be.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Unknown, control_failed
from ckpt_conformance.crash.explore import repro, visiting_ranks
from ckpt_conformance.crash.explore.judging import Facts, Visit, is_fine, judge
from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.crash.explore.visit import Item, Task
from ckpt_conformance.crash.explore.visiting import live, visit_of
from ckpt_conformance.subject import bundle

if TYPE_CHECKING:
    from ckpt_conformance.contract.verdicts import Outcome
    from ckpt_conformance.crash.explore.engine import Explorer
    from ckpt_conformance.crash.explore.exploration import Exploration, Violation
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.trace.operations import Operation, Recording

KIND = "crash-state"
EMPTY = "empty"  # the name of no tree: nothing was there


def name_of(workload: str, violation: Violation) -> str:
    """Name the folder of a violation."""
    return bundle.safe(f"{workload}-{violation.case.model}-{violation.outcome}")


def write(folder: Path, explorer: Explorer, violation: Violation) -> Path:
    """Write a bundle below `folder` and give its path; an older one of that name is replaced."""
    result, state = explorer.result, violation.case.state
    target = fresh(folder, name_of(result.workload, violation))
    materialize(explorer.recording, state, target / "checkpoints")
    facts = result.facts(state)
    legal = _legal(explorer, facts, target / "legal")
    trees.copy(explorer.recording.folder, target / "recording")
    told = _told(explorer, violation, facts, legal)
    (target / "violation.json").write_text(json.dumps(told, indent=2, default=str))
    (target / "operations.txt").write_text(listing(explorer.recording, violation))
    library = explorer.subject.info.library
    if not told["layout"]:  # a script of one process can't show what several ranks load
        (target / "repro.py").write_text(repro.script(library, explorer.subject.info.name, told))
    return target


def fresh(folder: Path, name: str) -> Path:
    """Make an empty folder for a bundle; an older bundle of that name goes, nothing else does."""
    target = folder / name
    if target.exists():
        bundle.read(target)  # raises for what is not ours
        shutil.rmtree(target)
    target.mkdir(parents=True)
    return target


def materialize(recording: Recording, state: State, target: Path) -> None:
    """Lay a state out in a folder that this makes."""
    target.mkdir(parents=True)
    Materializer(recording, target).apply(state)


def _legal(explorer: Explorer, facts: Facts, target: Path) -> dict[int, str]:
    """Lay out the versions that matter at the crash point."""
    wanted = {*facts.fine, *facts.older}
    found: dict[int, str] = {}
    for number, step, place in explorer.legal():
        if number in wanted:
            found[number] = f"{number}-step-{step}"
            if isinstance(place, str):
                trees.copy(Path(place), target / found[number])
            else:
                materialize(explorer.recording, place, target / found[number])
    return found


def _told(
    explorer: Explorer, violation: Violation, facts: Facts, legal: dict[int, str]
) -> dict[str, Any]:
    info = explorer.subject.info
    steps = {version.number: version.step for version in explorer.versions}
    return {
        "schema": bundle.SCHEMA,
        "kind": KIND,
        "adapter": info.name,
        "library": info.library,
        "version": info.version,
        "workload": explorer.result.workload,
        "root": explorer.recording.root,
        "options": explorer.recorded.options,
        "layout": explorer.recorded.layout,
        "seed": explorer.subject.seed,
        **violation.to_json(),
        "facts": asdict(facts),
        "legal": [
            {"number": number, "step": steps[number], "tree": tree}
            for number, tree in legal.items()
        ],
        "replay": "ckpt-conformance replay .",
    }


def listing(recording: Recording, violation: Violation) -> str:
    """Write the operations, one a line, with the crash point and the guilty one marked."""
    point, guilty = violation.case.state.point, violation.guilty
    lines = [f"# {violation.outcome} under {violation.case.model}: {violation.visit.told}"]
    for operation in recording.operations:
        if recording.ranks > 1:
            issued = "  " if violation.case.state.has(operation) else "--"
            sign = ">>" if guilty and operation.index == guilty.index else issued
            lines.append(f"{sign} rank {operation.rank} {line_of(operation)}")
            continue
        if operation.index == point:
            lines.append(f"---- crash here: {violation.case.state.why or 'all of it kept'} ----")
        sign = ">>" if guilty and operation.index == guilty.index else "  "
        lines.append(f"{sign} {line_of(operation)}")
    if recording.ranks > 1:
        lines.insert(1, f"# {violation.case.state.why}; -- is what had not been issued")
    elif point >= len(recording.operations):
        lines.append("---- crash here ----")
    return "\n".join(lines) + "\n"


def line_of(operation: Operation) -> str:
    """Write one operation in one line."""
    where = f"{operation.path} -> {operation.target}" if operation.target else operation.path
    extent = f" [{operation.offset}, {operation.stop})" if operation.size else ""
    mark = f" {operation.mark} step {operation.step}" if operation.mark else ""
    source = f"  ({operation.source})" if operation.source else ""
    return f"{operation.index:>6} {operation.kind:<9} {where}{extent}{mark}{source}".rstrip()


def replay(folder: Path, subject: Subject) -> tuple[Outcome, bool, str]:
    """Recover from the bundle's directory again; give the outcome, whether it is fine, and why.

    Raises Unknown if a legal version does not load: then nothing can be said.
    """
    told = bundle.read(folder)
    legal = [(int(v["number"]), int(v["step"]), v["tree"]) for v in told["legal"]]
    given = told["facts"]
    facts = Facts(given["floor"], tuple(given["older"]), tuple(given["flying"]))
    floor = () if facts.floor is None else (facts.floor,)
    item = Item(
        str((folder / "checkpoints").resolve()),
        facts.fine,
        facts.floor is None,
        (*floor, *reversed(facts.older)),
    )
    task = Task(
        recording=str((folder / "recording").resolve()),
        root=_root(told["root"], subject),
        out=str(subject.folder / "visits"),
        legal=[(n, step, str((folder / "legal" / tree).resolve())) for n, step, tree in legal],
        items=[item],
        holds=subject.holds,
        explicit="explicit_step" in subject.info.capabilities,
        fork=subject.info.isolation == "fork",
    )
    if told.get("layout"):
        visit = visiting_ranks.alone(subject, told["layout"], task, told["options"])
    else:
        visit = _alone(subject, task, told["options"])
    outcome = judge(visit, facts)
    return outcome, is_fine(outcome, facts), visit.told


def _alone(subject: Subject, task: Task, options: dict[str, Any]) -> Visit:
    """Recover in one process."""
    lines = live(subject, task, options)
    for line in lines:
        if "failed" in line or ("legal" in line and line["step"] != line["wanted"]):
            what = line.get("failed") or f"a whole step {line['wanted']} does not load"
            raise control_failed(what)
    answers = [line for line in lines if "item" in line and "used" not in line]
    if not answers:
        raise Unknown("the recovery gave no answer")
    return replace(visit_of(answers[-1]), alone=True)


def _root(recorded: str, subject: Subject) -> str:
    """Use the recorded path where it can be made: a manager may have written it down."""
    path = Path(recorded)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError:
        return str(subject.root)
    return str(path) if not any(path.iterdir()) else str(subject.root)


def simplest(result: Exploration) -> list[Violation]:
    """Give the violations that are worth a bundle: one of each outcome and model, worst first."""
    return result.violations
