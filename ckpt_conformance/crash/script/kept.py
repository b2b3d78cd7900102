"""A rehearsal that is kept: what was found out about a script before the first crash.

So a script is recorded, run again and resumed from whole directories once, however many
explorations follow. `crash.explore.kept` has the folder; here is the part that scripts add.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.crash.explore.judging import Version
from ckpt_conformance.crash.explore.kept import recording_of
from ckpt_conformance.crash.explore.messages import from_line, to_line
from ckpt_conformance.crash.script import progress
from ckpt_conformance.crash.script.command import Script
from ckpt_conformance.crash.script.messages import Begin, Expect, Run, Warm
from ckpt_conformance.crash.script.pool import Pool
from ckpt_conformance.crash.script.progress import Measure
from ckpt_conformance.crash.script.rehearsal import Rehearsal, Stage

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.crash.script.pool import WorkerProcess

FILE = "rehearsal.json"
RECORDING = "recording"


class KeptRehearsal(msgspec.Struct, frozen=True):
    """A `Rehearsal` as a message. `workers` is how many there were: they set the limits."""

    script: Script
    expected: str
    measure: Measure
    result: str  # what is no checkpoint, though its name says so
    deadline: float  # seconds
    versions: tuple[Version, ...]
    results: dict[int, str]
    controls: dict[str, Run]
    inexact: tuple[str, ...]
    notes: tuple[str, ...]
    forks: bool
    seconds: float
    workers: int


def keep(rehearsal: Rehearsal, folder: Path) -> None:
    """Copy a rehearsal into a new folder."""
    folder.mkdir()
    trees.copy(rehearsal.recording.folder, folder / RECORDING)
    (folder / RECORDING / "recording.json").write_text(rehearsal.recording.text)
    expected = rehearsal.expected
    if expected.is_dir():
        trees.copy(expected, folder / expected.name)
    elif expected.is_file():
        shutil.copyfile(expected, folder / expected.name)
    kept = KeptRehearsal(
        script=rehearsal.script,
        expected=expected.name,
        measure=rehearsal.meter.measure,
        result=rehearsal.patterns.result,
        deadline=rehearsal.deadline,
        versions=tuple(rehearsal.versions),
        results=rehearsal.results,
        controls=rehearsal.controls,
        inexact=tuple(rehearsal.inexact),
        notes=tuple(rehearsal.notes),
        forks=rehearsal.forks,
        seconds=rehearsal.seconds,
        workers=len(rehearsal.pool.workers),
    )
    (folder / FILE).write_text(to_line(kept))


def read(folder: Path, script: Script) -> KeptRehearsal:
    """Read what was kept of a script; raises RequestError.

    What is run is what the user asked for; a file from elsewhere names no command.
    """
    try:
        kept = from_line((folder / FILE).read_text(), KeptRehearsal)
    except (OSError, ValueError) as error:
        raise RequestError(f"{folder} holds no rehearsal ({error}); record again") from error
    then = kept.script
    now = replace(script, root=then.root, result_file=then.result_file, fork=then.fork)
    return msgspec.structs.replace(kept, script=now)


def resume(stage: Stage, kept: KeptRehearsal, folder: Path) -> Rehearsal:
    """Start workers that know a kept rehearsal, and return it; `stage` has its script."""
    folder = folder.resolve()
    recording = recording_of(folder / RECORDING)
    expected = folder / kept.expected
    first = _ready(stage, kept, folder)
    others = [_ready(stage, kept, folder) for _ in range(stage.jobs - 1)] if stage.private else []
    patterns = progress.make_patterns(
        kept.script.step_regex, kept.script.checkpoint_glob, kept.result
    )
    meter = progress.Meter(patterns, kept.measure)
    pool = Pool([first, *others])
    rehearsal = Rehearsal(kept.script, pool, recording, meter, patterns, kept.deadline, expected)
    rehearsal.versions, rehearsal.results = list(kept.versions), dict(kept.results)
    rehearsal.controls, rehearsal.inexact = dict(kept.controls), list(kept.inexact)
    rehearsal.notes, rehearsal.forks = list(kept.notes), kept.forks
    rehearsal.seconds, rehearsal.workers = kept.seconds, kept.workers
    return rehearsal


def _ready(stage: Stage, kept: KeptRehearsal, folder: Path) -> WorkerProcess:
    """Start a worker that can recover."""
    worker = stage.worker()
    stage.private = worker.ask(Begin()).private
    if kept.forks:
        worker.ask(Warm())
    recording, expected = str(folder / RECORDING), str(folder / kept.expected)
    worker.ask(Expect(recording, expected, kept.script.result_file))
    return worker
