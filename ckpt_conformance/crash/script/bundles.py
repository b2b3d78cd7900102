"""A crash state of a script as a folder that replays alone: `ckpt-conformance replay BUNDLE`.

`checkpoints/` is the directory as the crash left it, `expected.*` the result of the uninterrupted
run, `output.txt` what the script printed when it was started there, `repro.py` a script that needs
the user's own and torch alone. The rest is as in `bundles`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Outcome, Unknown
from ckpt_conformance.crash.explore import bundles
from ckpt_conformance.crash.explore.judging import Version, is_fine, judge
from ckpt_conformance.crash.script import progress
from ckpt_conformance.crash.script.command import Script
from ckpt_conformance.crash.script.explore import ScriptExplorer
from ckpt_conformance.crash.script.pool import Pool, WorkerProcess
from ckpt_conformance.crash.script.rehearsal import Rehearsal
from ckpt_conformance.crash.script.repro import text_of
from ckpt_conformance.subject import bundle
from ckpt_conformance.trace.operations import Recording

if TYPE_CHECKING:
    from ckpt_conformance.crash.explore.exploration import Violation

KIND = "script-state"


def write(folder: Path, explorer: ScriptExplorer, violation: Violation) -> Path:
    """Write a bundle below `folder` and give its path; an older one of that name is replaced."""
    found, state = explorer.found, violation.case.state
    target = bundles.fresh(folder, bundles.name_of(explorer.result.workload, violation))
    bundles.materialize(explorer.recording, state, target / "checkpoints")
    trees.copy(explorer.recording.folder, target / "recording")
    if found.expected.is_dir():
        trees.copy(found.expected, target / found.expected.name)
    elif found.expected.is_file():
        shutil.copyfile(found.expected, target / found.expected.name)
    told = _told(explorer, violation)
    (target / "violation.json").write_text(json.dumps(told, indent=2, default=str))
    (target / "operations.txt").write_text(bundles.listing(explorer.recording, violation))
    (target / "output.txt").write_text(explorer.outputs.get(violation.case.content, ""))
    (target / "repro.py").write_text(text_of(told))
    return target


def _told(explorer: ScriptExplorer, violation: Violation) -> dict[str, Any]:
    found = explorer.found
    return {
        "schema": bundle.SCHEMA,
        "kind": KIND,
        "script": found.script.to_json(),
        "root": found.script.root,
        "expected": found.expected.name,
        "deadline": found.deadline,
        "forks": found.forks,
        "seed": explorer.seed,
        **violation.to_json(),
        "facts": asdict(explorer.result.facts(violation.case.state.point)),
        "versions": [asdict(version) for version in found.versions],
        "results": found.results,
        "meter": found.meter.to_json(),
        "replay": "ckpt-conformance replay .",
    }


def replay(folder: Path, scratch: Path) -> tuple[Outcome, bool, str]:
    """Start the command in the bundle's directory again; give the outcome, whether fine, and why.

    Raises Unknown if the command can't be started: then nothing can be said.
    """
    told, folder = bundle.read(folder), folder.resolve()
    script = Script.from_json(told["script"])
    if not Path(script.cwd).is_dir():
        raise Unknown(f"the folder in which the command ran is gone: {script.cwd}")
    root = Path(script.root)
    made = [each for each in (root, *root.parents) if not each.exists()]
    if root.exists() and any(root.iterdir()):
        script = script.at(str(scratch / "out"))
    try:
        return _replay(folder, told, script, scratch)
    finally:
        for each in made:
            if each.is_dir() and not any(each.iterdir()):
                each.rmdir()


def _replay(
    folder: Path, told: dict[str, Any], script: Script, scratch: Path
) -> tuple[Outcome, bool, str]:
    with WorkerProcess(scratch / "worker", script) as worker:
        worker.ask("begin")
        if told["forks"]:
            worker.ask("warm")
        recording, expected = str(folder / "recording"), str(folder / told["expected"])
        known = {"recording": recording, "expected": expected}
        worker.ask("expect", result_file=script.result_file, **known)
        place = str(folder / "checkpoints")
        line = worker.ask("visit", place=place, deadline=told["deadline"])
    explorer = _explorer(folder, told, script)
    visit = explorer.visit_of(line, tuple(told["older whole"]))
    facts = explorer.result.facts(told["point"])
    outcome = judge(visit, facts)
    return outcome, is_fine(outcome, facts), visit.told


def _explorer(folder: Path, told: dict[str, Any], script: Script) -> ScriptExplorer:
    """Rebuild what judges, from the bundle alone."""
    recording = Recording.read(folder / "recording")
    result = "" if script.result_cmd else script.result_file
    patterns = progress.patterns(script.step_regex, script.checkpoint_glob, result)
    meter = progress.Meter.from_json(patterns, told["meter"])
    found = Rehearsal(
        script, Pool([]), recording, meter, patterns, told["deadline"], folder / told["expected"]
    )
    found.versions = [Version(**each) for each in told["versions"]]
    found.results = {int(number): digest for number, digest in told["results"].items()}
    from ckpt_conformance.crash.explore.exploring import Limits

    return ScriptExplorer(found, Limits())
