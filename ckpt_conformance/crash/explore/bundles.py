"""A crash state that violates, as a folder that replays alone: `ckpt-conformance replay BUNDLE`.

`violation.json` says what was found, `checkpoints/` is the directory as the crash left it, `legal/`
holds what may be loaded, one tree for each version, `recording/` the trace, `operations.txt` the
same to read with the crash point marked, `repro.py` a script for an upstream report; not of several
ranks, which one process can't be. Bundles of scripts (`crash.script.bundles`) share the mechanism.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Unknown, control_failed
from ckpt_conformance.crash.explore import recovering, repro
from ckpt_conformance.crash.explore.exploration import ViolationRecord
from ckpt_conformance.crash.explore.judging import Facts, Recovery, is_fine, judge
from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.crash.explore.messages import Item, Legal, Task
from ckpt_conformance.subject import bundle

if TYPE_CHECKING:
    from ckpt_conformance.contract.verdicts import Outcome
    from ckpt_conformance.crash.explore.engine import Explorer
    from ckpt_conformance.crash.explore.exploration import BaseExplorer, Json, Violation
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.trace.operations import Operation, Recording

KIND = "crash-state"
COMMAND = "ckpt-conformance replay ."
Part = TypeVar("Part", bound=msgspec.Struct)


class Origin(msgspec.Struct, frozen=True):
    """The first part of `violation.json`: what was explored, and how."""

    schema: str
    kind: str
    adapter: str
    library: str
    version: str
    workload: str
    root: str  # the recorded path of the manager's directory
    options: dict[str, int]
    layout: dict[str, int]
    seed: int
    job: str = "mixed"  # the kind of job; bundles that name none are of a time when it was this one
    without: tuple[str, ...] = ()  # each Feature that the job left out


class LegalTree(msgspec.Struct, frozen=True):
    """A version that may matter, and the name of its tree below `legal/`."""

    number: int
    step: int
    tree: str


class Promise(msgspec.Struct, frozen=True):
    """The last part of `violation.json`: what was promised when the crash came."""

    facts: Facts
    legal: tuple[LegalTree, ...]
    replay: str = COMMAND

    @property
    def fine(self) -> list[str]:
        """The trees that may be loaded."""
        return [tree.tree for tree in self.legal if tree.number in self.facts.fine]


@dataclass(frozen=True)
class Replayed:
    """What a replay came to: the outcome, whether it keeps the promise, and why in one line."""

    outcome: Outcome
    fine: bool
    summary: str


# ---- what all bundles share ----------------------------------------------------------------------


def name_of(workload: str, violation: Violation) -> str:
    """Return the name of a violation's folder: workload, model, outcome."""
    return bundle.safe(f"{workload}-{violation.case.model}-{violation.outcome}")


def write_state(
    folder: Path, explorer: BaseExplorer, violation: Violation, *parts: msgspec.Struct
) -> Path:
    """Write what every bundle has, in a folder of its own below `folder`; return its path.

    `parts` become one JSON object, `violation.json`. An older bundle of that name is replaced.
    """
    target = fresh(folder, name_of(explorer.result.workload, violation))
    materialize(explorer.recording, violation.case.state, target / "checkpoints")
    trees.copy(explorer.recording.folder, target / "recording")
    merged: Json = {}
    for part in parts:
        merged |= msgspec.to_builtins(part)
    (target / "violation.json").write_text(json.dumps(merged, indent=2))
    (target / "operations.txt").write_text(listing(explorer.recording, violation))
    return target


def fresh(folder: Path, name: str) -> Path:
    """Make an empty folder for a bundle; an older bundle of that name goes, nothing else does."""
    target = folder / name
    if target.exists():
        bundle.read(target)  # raises for what is not ours
        shutil.rmtree(target)
    target.mkdir(parents=True)
    return target


def is_of(folder: Path, violation: Violation) -> bool:
    """Whether a folder is a bundle of this violation: the same content, point, model and outcome.

    How many states end so, and what was found out later, may differ.
    """
    try:
        record = part_of(bundle.read(folder), ViolationRecord)
    except bundle.BundleError:
        return False
    mine = violation.record()
    names = ("content", "point", "model", "outcome")
    return all(getattr(record, name) == getattr(mine, name) for name in names)


def adopt(source: Path, folder: Path, workload: str, violation: Violation) -> Path:
    """Copy a bundle of a violation below `folder`, with what is known of it now; return its path.

    An older bundle of that name is replaced; one that stands there already is brought up to date.
    """
    target = folder / name_of(workload, violation)
    if source.resolve() != target.resolve():
        target = fresh(folder, target.name)
        trees.copy(source, target, into=True)
    content = bundle.read(target) | msgspec.to_builtins(violation.record())
    (target / "violation.json").write_text(json.dumps(content, indent=2))
    return target


def part_of(content: Json, kind: type[Part]) -> Part:
    """Read one part of a `violation.json`; raises BundleError if it is not as it was written."""
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        msg = f"violation.json does not hold what a bundle of a crash state does: {error}"
        raise bundle.BundleError(msg) from error


def replayed(recovery: Recovery, facts: Facts) -> Replayed:
    """Judge the recovery of a replay."""
    outcome = judge(recovery, facts)
    return Replayed(outcome, is_fine(outcome, facts), recovery.summary)


def materialize(recording: Recording, state: State, target: Path) -> None:
    """Put a state into a new folder."""
    target.mkdir(parents=True)
    Materializer(recording, target).apply(state)


def listing(recording: Recording, violation: Violation) -> str:
    """Write the operations, one a line, with the crash point and the guilty one marked."""
    point, guilty = violation.case.state.point, violation.guilty
    lines = [f"# {violation.outcome} under {violation.case.model}: {violation.recovery.summary}"]
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


# ---- bundles of adapters -------------------------------------------------------------------------


def write(folder: Path, explorer: Explorer, violation: Violation) -> Path:
    """Write a bundle below `folder`, return its path; an older one of that name is replaced."""
    info, record = explorer.subject.info, violation.record()
    origin = Origin(
        schema=bundle.SCHEMA,
        kind=KIND,
        adapter=info.name,
        library=info.library,
        version=info.version,
        workload=explorer.result.workload,
        root=explorer.recording.root,
        options=explorer.recorded.options,
        layout=explorer.recorded.layout,
        seed=explorer.subject.seed,
        job=explorer.recorded.job,
        without=tuple(sorted(info.cannot_hold)),
    )
    facts = explorer.result.facts(violation.case.state)
    promise = Promise(facts, tuple(_legal_trees(explorer, facts)))
    target = write_state(folder, explorer, violation, origin, record, promise)
    _write_legal(explorer, promise, target / "legal")
    if not origin.layout:  # a script of one process can't show what several ranks load
        script = repro.script(info.library, info.version, info.name, record, promise.fine)
        (target / "repro.py").write_text(script)
    return target


def _legal_trees(explorer: Explorer, facts: Facts) -> list[LegalTree]:
    """List the versions that matter at the crash point."""
    wanted = {*facts.fine, *facts.older}
    return [
        LegalTree(legal.version, legal.step, f"{legal.version}-step-{legal.step}")
        for legal in explorer.legal()
        if legal.version in wanted
    ]


def _write_legal(explorer: Explorer, promise: Promise, target: Path) -> None:
    """Put the tree of each version that matters below `target`."""
    places = {legal.version: legal.place for legal in explorer.legal()}
    for tree in promise.legal:
        place = places[tree.number]
        if isinstance(place, str):
            trees.copy(Path(place), target / tree.tree)
        else:
            materialize(explorer.recording, place, target / tree.tree)


def replay(folder: Path, subject: Subject) -> Replayed:
    """Recover from the bundle's directory again.

    Raises Unknown if a legal version does not load: then nothing can be said.
    """
    content = bundle.read(folder)
    origin, promise = part_of(content, Origin), part_of(content, Promise)
    facts, folder = promise.facts, folder.resolve()
    item = Item(
        place=str(folder / "checkpoints"),
        fine=facts.fine,
        empty=facts.last_acknowledged is None,
        older=facts.acknowledged,
    )
    legal = [
        Legal(tree.number, tree.step, str(folder / "legal" / tree.tree)) for tree in promise.legal
    ]
    task = Task(
        recording=str(folder / "recording"),
        root=_root(origin.root, subject),
        legal=tuple(legal),
        items=(item,),
        holds=frozenset(subject.holds),
        kind=origin.job,
        without=origin.without,
        explicit="explicit_step" in subject.info.capabilities,
        fork=subject.info.isolation == "fork",
    )
    if origin.layout:
        recovery = recovering.recover_alone(subject, origin.layout, task, origin.options)
    else:
        recovery = _alone(subject, task, origin.options)
    return replayed(recovery, facts)


def _alone(subject: Subject, task: Task, options: dict[str, int]) -> Recovery:
    """Recover in one process; raises Unknown where it can't be judged."""
    answers = recovering.recover(subject, task, options)
    failed = [f"a whole step {c.wanted} does not load" for c in answers.controls if c.failed]
    failed += [answers.failure] if answers.failure else []
    if failed:
        raise control_failed(failed[0])
    if not answers.recoveries:
        raise Unknown("the recovery gave no answer")
    return replace(answers.recoveries[-1].recovery, alone=True)


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
