"""A crash state of a script as a folder that replays alone: `ckpt-conformance replay BUNDLE`.

`checkpoints/` is the directory as the crash left it, `expected.*` the result of the uninterrupted
run, `output.txt` what the script printed when it was started there, `repro.py` a script that needs
the user's own and torch alone. The rest is as in `crash.explore.bundles`.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.explore import bundles
from ckpt_conformance.crash.explore.exploration import Limits, ViolationRecord
from ckpt_conformance.crash.explore.judging import Facts, Version
from ckpt_conformance.crash.script import progress, repro
from ckpt_conformance.crash.script.command import Script
from ckpt_conformance.crash.script.explore import ScriptExplorer
from ckpt_conformance.crash.script.messages import Begin, Expect, Recover, Warm
from ckpt_conformance.crash.script.pool import Pool, WorkerProcess
from ckpt_conformance.crash.script.progress import Measure
from ckpt_conformance.crash.script.rehearsal import Rehearsal
from ckpt_conformance.subject import bundle
from ckpt_conformance.trace.operations import Recording

if TYPE_CHECKING:
    from collections.abc import Generator

    from ckpt_conformance.crash.explore.bundles import Replayed
    from ckpt_conformance.crash.explore.exploration import Violation
    from ckpt_conformance.crash.script.messages import A, Request

KIND = "script-state"


class Origin(msgspec.Struct, frozen=True):
    """The first part of `violation.json`: the command, and how it was run."""

    schema: str
    kind: str
    script: Script
    root: str
    expected: str  # name of the result of the uninterrupted run
    deadline: float  # seconds
    forks: bool
    seed: int


class Promise(msgspec.Struct, frozen=True):
    """The last part of `violation.json`: what was promised, and how it is measured.

    `results` are digests of what a resume from each version's whole directory gives.
    """

    facts: Facts
    versions: tuple[Version, ...]
    results: dict[int, str]
    meter: Measure
    replay: str = bundles.COMMAND

    @property
    def last_step(self) -> int:
        """How far the newest acknowledged version had come; 0 if there was none."""
        steps = {version.number: version.step for version in self.versions}
        last = self.facts.last_acknowledged
        return 0 if last is None else steps.get(last, 0)


@dataclass(frozen=True)
class ScriptBundle:
    """What `violation.json` says."""

    origin: Origin
    record: ViolationRecord
    promise: Promise

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a bundle; raises BundleError if it is none of a script."""
        content = bundle.read(folder)
        return cls(
            bundles.part_of(content, Origin),
            bundles.part_of(content, ViolationRecord),
            bundles.part_of(content, Promise),
        )


def write(folder: Path, explorer: ScriptExplorer, violation: Violation) -> Path:
    """Write a bundle below `folder` and give its path; an older one of that name is replaced."""
    rehearsal = explorer.rehearsal
    facts = explorer.result.facts(violation.case.state.point)
    content = ScriptBundle(origin_of(explorer), violation.record(), promise_of(explorer, facts))
    parts = (content.origin, content.record, content.promise)
    target = bundles.write_state(folder, explorer, violation, *parts)
    copy_expected(rehearsal, target)
    (target / "output.txt").write_text(explorer.outputs.get(violation.case.content, ""))
    (target / "repro.py").write_text(script_of(content))
    return target


def copy_expected(rehearsal: Rehearsal, target: Path) -> None:
    """Copy the result of the uninterrupted run into a bundle."""
    if rehearsal.expected.is_dir():
        trees.copy(rehearsal.expected, target / rehearsal.expected.name)
    elif rehearsal.expected.is_file():
        shutil.copyfile(rehearsal.expected, target / rehearsal.expected.name)


def origin_of(explorer: ScriptExplorer, kind: str = KIND) -> Origin:
    """Say what was run, and how."""
    rehearsal = explorer.rehearsal
    return Origin(
        schema=bundle.SCHEMA,
        kind=kind,
        script=rehearsal.script,
        root=rehearsal.script.root,
        expected=rehearsal.expected.name,
        deadline=rehearsal.deadline,
        forks=rehearsal.forks,
        seed=explorer.seed,
    )


def promise_of(explorer: ScriptExplorer, facts: Facts) -> Promise:
    """Say what was promised, and how it is measured."""
    rehearsal = explorer.rehearsal
    return Promise(
        facts=facts,
        versions=tuple(rehearsal.versions),
        results=rehearsal.results,
        meter=rehearsal.meter.measure,
    )


def script_of(content: ScriptBundle) -> str:
    """Write the script for whoever owns the training script."""
    origin, promise = content.origin, content.promise
    measure = promise.meter
    return repro.script(
        content.record,
        origin.script,
        expected=origin.expected,
        by="resumed" if measure.resumes else measure.by,
        reference=list(measure.reference),
        promised=promise.last_step,
        deadline=origin.deadline,
    )


def replay(folder: Path, scratch: Path) -> Replayed:
    """Start the command in the bundle's directory again.

    Raises Unknown if the command can't be started: then nothing can be said.
    """
    folder = folder.resolve()
    content = ScriptBundle.read(folder)
    with placed(content.origin, scratch) as script:
        request = Recover(tree=str(folder / "checkpoints"), deadline=content.origin.deadline)
        run = ask(folder, content.origin, script, scratch, request)
    explorer = rebuilt(folder, content.origin, content.promise, script)
    recovery = explorer.recovery_of(run, content.record.older_whole)
    return bundles.replayed(recovery, explorer.result.facts(content.record.point))


@contextlib.contextmanager
def placed(origin: Origin, scratch: Path) -> Generator[Script]:
    """Yield the script of a bundle with a directory that it may use; what was made for it goes.

    Raises Unknown if the command can't be started.
    """
    script = origin.script
    if not Path(script.cwd).is_dir():
        raise Unknown(f"the folder in which the command ran is gone: {script.cwd}")
    root = Path(script.root)
    missing = [path for path in (root, *root.parents) if not path.exists()]
    if root.exists() and any(root.iterdir()):
        script = script.at(str(scratch / "out"))
    try:
        yield script
    finally:
        for path in missing:  # what the run made
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def ask(folder: Path, origin: Origin, script: Script, scratch: Path, request: Request[A]) -> A:
    """Ask a worker that knows a bundle for one thing."""
    with WorkerProcess(scratch / "worker", script) as worker:
        worker.ask(Begin())
        if origin.forks:
            worker.ask(Warm())
        recording, expected = str(folder / "recording"), str(folder / origin.expected)
        worker.ask(Expect(recording, expected, script.result_file))
        return worker.ask(request)


def rebuilt(folder: Path, origin: Origin, promise: Promise, script: Script) -> ScriptExplorer:
    """Rebuild what judges, from the bundle alone."""
    recording = Recording.read(folder / "recording")
    result = "" if script.result_cmd else script.result_file
    patterns = progress.make_patterns(script.step_regex, script.checkpoint_glob, result)
    meter = progress.Meter(patterns, promise.meter)
    expected = folder / origin.expected
    rehearsal = Rehearsal(script, Pool([]), recording, meter, patterns, origin.deadline, expected)
    rehearsal.versions = list(promise.versions)
    rehearsal.results = dict(promise.results)
    return ScriptExplorer(rehearsal, Limits())
