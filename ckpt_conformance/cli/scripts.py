"""`explore -- COMMAND`: crash states of a training script that nobody changed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import shlex
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ckpt_conformance.cli.options import whole
from ckpt_conformance.cli.recordings import SCRIPT, depends_of
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.script.command import GRACE, OUT, Script, ScriptError, Signals, checked
from ckpt_conformance.plugin import openings
from ckpt_conformance.plugin.openings import Seen
from ckpt_conformance.processes.scratch import session
from ckpt_conformance.report import certificate, environment, files
from ckpt_conformance.work import sources
from ckpt_conformance.work.identity import Identity, identity
from ckpt_conformance.work.own_code import CODE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpt_conformance.cli.explore import Progress, Run
    from ckpt_conformance.crash.explore.bundles import Replayed
    from ckpt_conformance.crash.explore.evidence import Basis, Notebook
    from ckpt_conformance.crash.script.explore import ScriptExplorer
    from ckpt_conformance.crash.script.rehearsal import Rehearsal, Stage
    from ckpt_conformance.report.certificate import Json

STATE, SIGNAL = "script-state", "script-signal"
KINDS = (STATE, SIGNAL)  # of bundles
SMALL = 16 << 20  # bytes of a file that a command names and that is no script
PANEL = "With a command"
OPTIONS = {"fork": "no-fork", "resume": "resume-cmd"}  # whose names are not those of the fields

ResumeCmd = Annotated[
    str,
    typer.Option(
        metavar="CMD", help="What resumes it, with {out}; default: the same.", rich_help_panel=PANEL
    ),
]
ResultFile = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="Result below {out}, tensors compared bit for bit; default: the last one written.",
        rich_help_panel=PANEL,
    ),
]
ResultCmd = Annotated[
    str,
    typer.Option(metavar="CMD", help="What it prints is the result.", rich_help_panel=PANEL),
]
StepRegex = Annotated[
    str,
    typer.Option(
        metavar="RE",
        help="Finds the steps that are printed, one a line; default: step 3, epoch: 3.",
        rich_help_panel=PANEL,
    ),
]
CheckpointGlob = Annotated[
    str,
    typer.Option(
        metavar="GLOB", help="Which names below {out} are checkpoints.", rich_help_panel=PANEL
    ),
]
NoFork = Annotated[
    bool,
    typer.Option("--no-fork", help="Start the command anew for each state.", rich_help_panel=PANEL),
]
Preload = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="Imported before forking, besides torch (repeatable).",
        rich_help_panel=PANEL,
    ),
]
Deadline = Annotated[
    int,
    typer.Option(
        parser=whole(0, 10**6),
        metavar="SECONDS",
        help="Of one resume; default: ten times the uninterrupted run.",
        rich_help_panel=PANEL,
    ),
]
Preempt = Annotated[
    bool,
    typer.Option(
        "--preempt",
        help="Preempt runs, too: SIGTERM, SIGKILL after --grace, then resume.",
        rich_help_panel=PANEL,
    ),
]
Grace = Annotated[
    int,
    typer.Option(
        parser=whole(0, 86_400),
        metavar="SECONDS",
        help="From SIGTERM to SIGKILL; as Slurm and Kubernetes have it.",
        show_default=True,
        rich_help_panel=PANEL,
    ),
]
KillRank = Annotated[
    list[int] | None,
    typer.Option(
        min=0,
        metavar="RANK",
        help="Kill this rank in runs, too, while the others live (repeatable).",
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True)
class CommandOptions:
    """What a user gave with a command; what stands after --resume-cmd is one text."""

    resume: str = ""
    result_file: str = ""
    result_cmd: str = ""
    step_regex: str = ""
    checkpoint_glob: str = ""
    fork: bool = True
    preload: tuple[str, ...] = ()
    deadline: float = 0.0  # seconds

    def given(self) -> list[str]:
        """Name the fields that are not as they are without any option."""
        usual = CommandOptions()
        names = [field.name for field in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(usual, name)]


def options_of(options: CommandOptions) -> Json:
    """Return what a user gave with a command, by the names of the options."""
    values: Json = msgspec.to_builtins(asdict(options))
    values |= {"fork": not options.fork, "preload": list(options.preload)}
    return {OPTIONS.get(name, name.replace("_", "-")): value for name, value in values.items()}


def script_of(
    what: Sequence[str], options: CommandOptions, workload: object, out: Path
) -> Script | None:
    """Make the script of a command, None if an adapter is named; raises RequestError."""
    if OUT in str(out):
        raise RequestError(
            f"--out is the folder of the reports, and it is {str(out)!r}: put -- before the "
            f"command, so that its options are its own: explore -- python train.py --out {OUT}"
        )
    if len(what) == 1 and OUT not in what[0] and not what[0].endswith((".py", ".sh")):
        given = options.given()
        if given:
            name = OPTIONS.get(given[0], given[0].replace("_", "-"))
            raise RequestError(f"--{name} goes with a command: explore -- CMD {OUT}")
        return None
    if workload:
        raise RequestError("--workload goes with an adapter, not with a command")
    try:
        resume = tuple(shlex.split(options.resume))
    except ValueError as error:
        raise RequestError(f"--resume-cmd {options.resume!r}: {error}") from None
    script = Script(
        command=tuple(what),
        root="",
        cwd=str(Path.cwd()),
        resume=resume,
        result_file=options.result_file,
        result_cmd=options.result_cmd,
        step_regex=options.step_regex,
        checkpoint_glob=options.checkpoint_glob,
        fork=options.fork,
        preload=options.preload,
        deadline=options.deadline,
    )
    try:
        return checked(script)
    except ScriptError as error:
        raise RequestError(str(error)) from None


def signals_of(
    preempt: bool,  # noqa: FBT001  as the option is
    grace: int,
    ranks: Sequence[int],
    refused: Mapping[str, object],
) -> Signals:
    """Return the signals that were asked for.

    Raises RequestError where there can't be any: `refused` are values of options, by name.
    """
    if grace != GRACE and not preempt:
        raise RequestError(f"--grace {grace} is the time from SIGTERM to SIGKILL: add --preempt")
    signals = Signals(preempt=preempt, grace=float(grace), ranks=tuple(dict.fromkeys(ranks)))
    option = "--preempt" if preempt else "--kill-rank"
    given = [name for name, value in refused.items() if value]
    if signals and given:
        raise RequestError(f"{option} does not go with {given[0]}; leave one of them out")
    return signals


def explore(run: Run, script: Script) -> Json:
    """Explore a script; return what `result.json` says of it, nothing if it is stopped before."""
    from ckpt_conformance.cli.explore import Progress

    about = described(script)
    run.describe(about)
    begun = time.monotonic()
    with (
        _scratch() as folder,
        contextlib.ExitStack() as stack,
        Progress(script.name) as progress,
    ):
        is_rehearsed = False
        try:
            rehearsal = _rehearse(run, script, folder, stack, progress)
            is_rehearsed = True
            about |= _about(rehearsal, run)
            run.describe(about)
            _explore(run, rehearsal, progress, begun)
        except Unknown as error:
            run.findings.unknown.append(f"{script.name}: {error}")
            if run.part:
                run.part.give_up(SCRIPT, error)
        except KeyboardInterrupt:
            run.findings.interrupted = True
            if not is_rehearsed:
                return {}
    return about


def identity_of(script: Script) -> Identity:
    """Return what the recoveries of a script depend on: the suite, packages, and its own code.

    That is all code below the folder of each script in a command and of each module that it runs,
    and other files that it names, such as a configuration.
    """
    named = files_of(script)
    scripts = [path for path in named if is_code(path)]
    words = words_of(script)
    modules = [after for word, after in itertools.pairwise(words) if word == "-m"]
    files = sources.digests_below({path.resolve().parent for path in scripts})
    files |= {path.name: sources.digest_of(path) for path in scripts}  # however many are beside it
    files |= sources.code_beside([*modules, *script.preload], first=Path(script.cwd))
    files |= {
        str(path.relative_to(script.cwd)): sources.digest_of(path)
        for path in named
        if path not in scripts and path.is_relative_to(script.cwd) and _is_small(path)
    }
    return identity(environment.suite_commit(), {}, files)


def words_of(script: Script) -> list[str]:
    """Return the words of all commands of a script, as the user typed them."""
    return [*script.command, *script.resume, *shlex.split(script.result_cmd)]


def files_of(script: Script) -> list[Path]:
    """Return the files that commands of a script name: scripts, and such as a configuration."""
    words = (word for word in words_of(script) if OUT not in word)
    paths = (Path(script.cwd, word.rpartition("=")[2]) for word in words)
    return [path for path in paths if path.is_file()]


def is_code(path: Path) -> bool:
    """Return whether a file is one of code, beside which lies what it imports."""
    return CODE.fullmatch(path.name) is not None


def _is_small(path: Path) -> bool:
    """Return whether a file is read soon, which data for training may not be."""
    return path.stat().st_size <= SMALL


def described(script: Script) -> Json:
    """Return what `result.json` says of a script that did not run yet."""
    return {"script": _content(script)}


@dataclass(frozen=True)
class Recorded:
    """A script that was recorded: how many operations there are, and what that depends on."""

    operations: int
    seen: Seen


def record(  # noqa: PLR0913  one for each thing that it needs
    script: Script,
    options: CommandOptions,
    jobs: int,
    folder: Path,
    depends: Identity,
    *,
    notes_opened: bool = False,
) -> Recorded:
    """Record and rehearse a script, and keep that.

    Raises Unknown where that cannot be done.
    """
    from ckpt_conformance.cli.explore import Progress
    from ckpt_conformance.crash.explore import kept as recordings
    from ckpt_conformance.crash.script import kept, rehearsal

    with _scratch() as scratch, contextlib.ExitStack() as stack, Progress(script.name) as progress:
        place = _places(scratch)
        there = script.at(str(place / "out"))
        stage = _stage(there, scratch, stack, progress, jobs, notes_opened=notes_opened)
        rehearsed = rehearsal.rehearse(stage)
        kept.keep(rehearsed, folder / SCRIPT)
        seen = openings.of_command(stage.folder) if notes_opened else Seen()
    known, given = depends_of(depends), options_of(options)
    recordings.write(folder, recordings.Kept(recordings.SCHEMA, script.command, given, {}, known))
    return Recorded(len(rehearsed.recording.operations), seen)


def _scratch() -> contextlib.AbstractContextManager[Path]:
    return session("explore")


def _places(scratch: Path) -> Path:
    """Make the folders that a rehearsal needs; return the one that the script runs in."""
    from ckpt_conformance.processes import memory

    work, place = scratch / "work", scratch / "run"
    for path in (work, place, place / memory.TEMPORARY):
        path.mkdir()
    return place


def _stage(  # noqa: PLR0913  one for each thing that it needs
    script: Script,
    scratch: Path,
    stack: contextlib.ExitStack,
    progress: Progress,
    jobs: int,
    *,
    notes_opened: bool = False,
) -> Stage:
    from ckpt_conformance.crash.script import rehearsal

    return rehearsal.Stage(
        script=script,
        folder=scratch / "work",
        jobs=jobs,
        tell=lambda what: progress.begin(script.name, what),
        stack=stack,
        notes_opened=notes_opened,
    )


def _rehearse(
    run: Run, script: Script, scratch: Path, stack: contextlib.ExitStack, progress: Progress
) -> Rehearsal:
    from ckpt_conformance.crash.script import kept, rehearsal

    place = _places(scratch)
    if run.kit is None:
        there = script.at(str(place / "out"))
        stage = _stage(there, scratch, stack, progress, run.limits.jobs)
        stage.closing = run.closing
        return rehearsal.rehearse(stage)
    folder = run.kit.folder / SCRIPT
    known = kept.read(folder, script)
    stack.enter_context(run.kit.directory(known.script.root))
    found = run.part.found if run.part else None
    notes = found is not None and found.cached is not None
    stage = _stage(known.script, scratch, stack, progress, run.limits.jobs, notes_opened=notes)
    if found and notes:
        found.seen = functools.partial(openings.of_command, stage.folder)
    progress.begin(script.name, "starting")
    return kept.resume(stage, known, folder)


def _about(rehearsal: Rehearsal, run: Run) -> Json:
    """Note what is compared; return what `result.json` says of the script and its promises."""
    meter = rehearsal.meter
    result = (
        "what --result-cmd prints" if rehearsal.script.result_cmd else rehearsal.script.result_file
    )
    promised = [
        meter.describe(v.step) for v in rehearsal.versions if rehearsal.results.get(v.number)
    ]
    notes = run.findings.notes
    notes += rehearsal.notes
    run.findings.without_a_crash += rehearsal.inexact
    if meter.tells_nothing:
        notes.append(
            "LOST_STEP and COLD_START can't be told: the script prints no steps; give --step-regex "
            "or --checkpoint-glob"
        )
    else:
        words = {"lines": "the steps that it prints", "numbers": "the steps that it prints"}
        source = words.get(meter.measure.by, "its checkpoints")
        source = "the step it resumes from" if meter.measure.resumes else source
        notes.append(f"where a resume begins is told by {source}; promised: {len(promised)} times")
    notes.append(f"compared: {result or 'nothing'}")
    more = {"promised": promised, "forks": rehearsal.forks}
    return {"script": {**_content(rehearsal.script), **more}}


def _content(script: Script) -> Json:
    """Return what `result.json` says of a script before it ran."""
    fields_of: Json = msgspec.to_builtins(script)
    return {"name": script.name, **fields_of}


def _explore(run: Run, rehearsal: Rehearsal, progress: Progress, begun: float) -> None:
    from ckpt_conformance.crash.explore import exploration
    from ckpt_conformance.crash.script import bundles, explore

    limits = run.limits
    if limits.recoveries < exploration.FULL.recoveries:
        limits = rehearsal.within(limits, len(run.asked.models))
    explorer = explore.ScriptExplorer(rehearsal, limits, run.asked.seed)
    explorer.on_progress = progress
    explorer.on_first = lambda what: progress.console.print(
        f"first violation after {time.monotonic() - begun:.1f} s: {what}", highlight=False
    )
    progress.begin(rehearsal.script.name, "recovering")
    notebook = _notebook(run, explorer)
    share = notebook.share if notebook else None
    explore.explore(explorer, run.asked.models, run.asked.real, share)
    if run.part and notebook:
        run.part.finish(notebook, SCRIPT)
    if run.signals and not explorer.result.interrupted:
        _interrupt(run, explorer, progress, Path(rehearsal.script.root).parents[1] / "work")
    run.take(explorer, bundles.write)


def _interrupt(run: Run, explorer: ScriptExplorer, progress: Progress, scratch: Path) -> None:
    """Send signals to runs of the command, and keep what violates."""
    from ckpt_conformance.crash.explore import exploration
    from ckpt_conformance.crash.script import preemption, signal_bundles

    progress.begin(explorer.rehearsal.script.name, "signals")
    interruptions = preemption.Interruptions(explorer)
    every = run.limits.recoveries >= exploration.FULL.recoveries
    try:
        interruptions.run(run.signals, scratch, every=every)
    except Unknown as error:
        explorer.unknown(error)
    except KeyboardInterrupt:
        explorer.result.interrupted = True
    paths = {
        name: str(signal_bundles.write(run.bundle_folder, interruptions, name, kept))
        for name, kept in interruptions.kept.items()
    }
    run.findings.signals = [
        msgspec.to_builtins(kind) for kind in interruptions.summary(run.signals, paths)
    ]


def _notebook(run: Run, explorer: ScriptExplorer) -> Notebook | None:
    """Return what writes down the exploration of a part, with what only a rehearsal knows."""
    if run.part is None:
        return None
    rehearsal, findings = explorer.rehearsal, run.findings
    places = {v.number: rehearsal.meter.describe(v.step) for v in rehearsal.versions}

    def complete(basis: Basis) -> Basis:
        return msgspec.structs.replace(
            basis,
            places=places,
            notes=tuple(findings.notes),
            without_a_crash=tuple(findings.without_a_crash),
        )

    notebook = run.part.notebook(explorer, SCRIPT)
    notebook.complete, notebook.free = complete, set(rehearsal.controls)
    return notebook


def replay(folder: Path, content: Json) -> int:
    """Start the command of a bundle in its directory again, or send it the signal again."""
    from ckpt_conformance.crash.script import bundles, signal_bundles

    again = signal_bundles.replay if content["kind"] == SIGNAL else bundles.replay
    with session("replay") as scratch:
        (place := scratch / "run").mkdir()
        return replayed(content, lambda: again(folder, place))


def replayed(content: Json, replay: Callable[[], Replayed]) -> int:
    """Replay, print the outcome, and return the exit status."""
    try:
        now = replay()
    except Unknown as error:
        files.say(f"? unknown: {error}")
        return certificate.UNDECIDED
    word = "as it should be" if now.fine else "still violates"
    files.say(f"{now.outcome}: {now.summary}: {word} (recorded: {content['outcome']})")
    return certificate.CERTIFIED if now.fine else certificate.VIOLATED
