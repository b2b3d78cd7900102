"""The commands `explore` and `replay`: crash states of saves, and one of them again."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich import progress as bars

from ckpt_conformance import bundle, certificate, cli_scripts, environment, report
from ckpt_conformance.cli_options import Budget, Jobs, Names, Seed
from ckpt_conformance.verdicts import NotApplicable, Unknown, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from ckpt_conformance.crash.audit import Finding
    from ckpt_conformance.crash.exploration import Exploration, Violation
    from ckpt_conformance.crash.exploring import Exploring, Limits
    from ckpt_conformance.subject import Subject

DEFAULT_MODELS = ("kill", "ext4", "xfs", "btrfs")
INTERRUPTED, QUIET_SECONDS = 130, 10.0
E = TypeVar("E", bound="Exploring")
SCHEMA = "ckpt-conformance/exploration/v1"


class Bar:
    """Shows how many states were visited, and how many a second."""

    def __init__(self) -> None:
        """Draw on stderr; a log gets a line now and then."""
        self.console = report.open_console(error=True)
        self.what, self.shown = "", time.monotonic()
        self.plain = not self.console.is_terminal or self.console.is_dumb_terminal
        self.bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(complete_style="cyan", finished_style="cyan"),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.fields[rate]}"),
            console=self.console,
            transient=True,
            disable=self.plain,
        )
        self.task = self.bar.add_task("", total=None, rate="")

    def begin(self, what: str) -> None:
        """Name what is explored now."""
        self.what = what
        self.bar.reset(self.task, description=what, total=None, rate="recording")

    def __call__(self, done: int, total: int, seconds: float) -> None:
        """Take the progress of one exploration."""
        rate = f"{done / seconds:.0f} states/s" if seconds > 0 else ""
        self.bar.update(self.task, completed=done, total=total, rate=rate)
        if self.plain and time.monotonic() - self.shown > QUIET_SECONDS:
            self.shown = time.monotonic()
            self.console.print(f"{self.what}: {done} of {total} states, {rate}")


@contextlib.contextmanager
def subject_of(adapter: str, seed: int, budget: str = "full") -> Generator[Subject]:
    """Start a server with one adapter and give its subject, in a folder that goes away."""
    from ckpt_conformance import facts
    from ckpt_conformance.client import Client
    from ckpt_conformance.subject import Subject

    with (
        facts.serve((adapter,), (adapter,)) as (server, infos),
        tempfile.TemporaryDirectory(prefix="ckc-explore-") as folder,
        contextlib.closing(Client(server)) as client,
    ):
        yield Subject(infos[adapter], client, Path(folder), seed=seed, budget=budget)


def explore(  # noqa: PLR0913  one parameter for each option
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER | -- COMMAND...",
            help="A bundled name or module:attribute; or a command with {out} in it.",
        ),
    ],
    *,
    model: Annotated[
        Names, typer.Option(help="Persistence model (repeatable); default: all but posix.")
    ] = None,
    workload: Annotated[
        Names, typer.Option(help="What is saved (repeatable): first, second, same, resumed, ...")
    ] = None,
    budget: Annotated[Budget, typer.Option(help="quick: a few dozen states a model.")] = (
        Budget.QUICK
    ),
    jobs: Jobs = None,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder of exploration.json and bundles/.")] = Path(
        "reports"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the recordings there, too.")] = False,
    resume_cmd: cli_scripts.ResumeCmd = "",
    result_file: cli_scripts.ResultFile = "",
    result_cmd: cli_scripts.ResultCmd = "",
    step_regex: cli_scripts.StepRegex = "",
    checkpoint_glob: cli_scripts.CheckpointGlob = "",
    no_fork: cli_scripts.NoFork = False,
    preload: cli_scripts.Preload = None,
    deadline: cli_scripts.Deadline = 0,
) -> None:
    """Visit what the disk may hold after a crash in a save; keep what violates as bundles.

    With a command no adapter is needed: it is recorded once, then started again from each state.
    """
    from ckpt_conformance.crash import exploring as engine
    from ckpt_conformance.crash.models import MODELS

    asked = cli_scripts.Asked(
        *(resume_cmd, result_file, result_cmd, step_regex, checkpoint_glob),
        fork=not no_fork,
        preload=tuple(preload or ()),
        deadline=float(deadline),
    )
    certificate.check_names("model", model or (), MODELS)
    script = cli_scripts.script_of(what, asked, workload, out)
    usual = _workloads(workload or (), every=budget is Budget.FULL)
    environment.prepare_output(out)
    limits = engine.FULL if budget is Budget.FULL else engine.QUICK_COMMAND
    limits = replace(limits, jobs=jobs or environment.usable_cpus())
    run = Run(list(model or DEFAULT_MODELS), limits, out, keep=keep)
    if script is not None:
        about = cli_scripts.explore(run, script, seed, Bar())
        raise typer.Exit(run.finish({**about, "seed": seed}))
    with subject_of(what[0], seed, str(budget)) as subject:
        run.all(subject, usual)
    raise typer.Exit(run.finish({"adapter": what[0], "seed": seed}))


def _workloads(names: Sequence[str], *, every: bool) -> list[str]:
    from ckpt_conformance.crash import workloads

    certificate.check_names("workload", names, workloads.WORKLOADS)
    return list(names or (workloads.WORKLOADS if every else workloads.QUICK))


class Run:
    """The explorations of one command, and what is said of them."""

    def __init__(self, models: Sequence[str], limits: Limits, out: Path, *, keep: bool) -> None:
        """Start with nothing found."""
        self.models, self.limits, self.out, self.keep = models, limits, out, keep
        self.found: list[Exploration] = []
        self.aside: list[str] = []
        self.unknown: list[str] = []
        self.notes: list[str] = []
        self.wrong: list[str] = []  # violations that need no crash
        self.bundles: dict[int, dict[str, str]] = {}  # by exploration and class
        self.interrupted = False

    def all(self, subject: Subject, names: Sequence[str]) -> None:
        """Explore every workload; Ctrl-C ends it with what was found so far."""
        bar = Bar()
        with bar.bar:
            for name in names:
                bar.begin(f"{subject.info.name} {name}")
                try:
                    self.one(subject, name, bar)
                except NotApplicable as error:
                    self.aside.append(f"{name}: {error}")
                except Unknown as error:
                    self.unknown.append(f"{name}: {error}")
                except KeyboardInterrupt:
                    self.interrupted = True
                if self.interrupted:
                    break

    def one(self, subject: Subject, name: str, bar: Bar) -> None:
        """Record and explore one workload, and keep what violates."""
        from ckpt_conformance.crash import bundles, workloads
        from ckpt_conformance.crash import explore as engine

        recorded = workloads.record(subject, name)
        explorer = engine.Explorer(subject, recorded, self.limits, bar)
        self.take(engine.run(explorer, self.models))
        self.keep_all(explorer, bundles.write)

    def take(self, result: Exploration) -> None:
        """Take what was found."""
        self.found.append(result)
        self.unknown += [f"{result.workload}: {why}" for why in result.unknown]
        self.interrupted = result.interrupted

    def keep_all(self, explorer: E, write: Callable[[Path, E, Violation], Path]) -> None:
        """Write bundles of what violates."""
        result = explorer.result
        folder = self.out / "bundles"
        self.bundles[len(self.found) - 1] = {
            key: str(write(folder, explorer, group[0])) for key, group in result.classes().items()
        }
        if self.keep:
            target = self.out / "recordings" / result.workload
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(explorer.recording.folder, target, symlinks=True)

    def finish(self, about: Mapping[str, Any]) -> int:
        """Write exploration.json, print what was found, give the exit status."""
        body: dict[str, Any] = {
            "schema": SCHEMA,
            **about,
            "interrupted": self.interrupted,
            "not applicable": self.aside,
            "unknown": self.unknown,
            "notes": self.notes,
            "without a crash": self.wrong,
            "explorations": [result.to_json() for result in self.found],
        }
        certificate.write_json(self.out / "exploration.json", certificate.plain(body))
        for at, result in enumerate(self.found):
            for line in lines_of(result, self.bundles.get(at, {})):
                report.say(line)
        for line in self.wrong:
            report.say(f"{report.WORDS[Verdict.VIOLATION].glyph} without a crash  {line}")
        for line in self.notes:
            report.say(f"  note  {line}")
        for line in self.aside:
            report.say(f"  not applicable  {line}")
        for line in self.unknown:
            report.say(f"? unknown  {line}")
        if self.interrupted:
            report.say("Stopped by hand: this is what was found so far.")
            return INTERRUPTED
        if self.wrong or any(result.violations or _unusable(result) for result in self.found):
            return certificate.VIOLATED
        return certificate.UNDECIDED if self.unknown or not self.found else certificate.CERTIFIED


def _unusable(result: Exploration) -> list[str]:
    return [told for one in result.models.values() for told in one.unusable]


def lines_of(result: Exploration, kept: dict[str, str]) -> Iterator[str]:
    """Tell an exploration in lines: models, violations with their replay command, the audit."""
    rate = result.visited / result.batch_seconds if result.batch_seconds else 0
    count = len(result.recording.operations)
    yield f"{result.workload}: {count} operations, {result.visited} states visited, {rate:.0f}/s"
    for name, one in result.models.items():
        clean = one.is_clean and not one.unusable
        sign = report.WORDS[Verdict.PASS if clean else Verdict.VIOLATION].glyph
        ends = ", ".join(f"{outcome} {number}" for outcome, number in one.outcomes.most_common())
        seen = f"{one.candidates} candidates, {one.distinct} distinct, {one.visited} visited"
        yield f"  {sign} {name:<6} {seen}: {ends}"
        for told in one.unusable:
            yield f"      after the recovery: {told}"
    for key, group in result.classes().items():
        violation, models = group[0], ", ".join(each.case.model for each in group)
        yield f"    {models}: {violation.outcome}: {violation.visit.told}"
        yield f"      {violation.where}; {violation.states} states so; {violation.grade}"
        if violation.blame:
            yield f"      audit: {violation.blame.told}"
        if key in kept:
            yield f"      replay: ckpt-conformance replay {kept[key]}"
    yield from _audit_lines(result)


def _audit_lines(result: Exploration) -> Iterator[str]:
    """Tell each habit once; what shows it again is counted."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in result.audit:
        groups.setdefault((finding.rule, finding.source), []).append(finding)
    for first, *others in groups.values():
        more = f"; and {report.count(len(others), 'more path')} so" if others else ""
        yield f"    audit {first.told}{more}"


def replay(
    folder: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder of bundles/.")],
) -> None:
    """Replay a violation from its bundle alone: 1 while it still violates, 0 when it does not."""
    told = bundle.read(folder)
    inner = folder / "crash"
    if told.get("kind") != "crash-state" and inner.is_dir():
        folder, told = inner, bundle.read(inner)
    if told.get("kind") == cli_scripts.KIND:
        raise typer.Exit(cli_scripts.replay(folder, told))
    status = _replay_state(folder, told) if told.get("kind") == "crash-state" else _replay(told)
    raise typer.Exit(status)


def _replay_state(folder: Path, told: dict[str, Any]) -> int:
    """Recover from the directory of a bundle."""
    from ckpt_conformance.crash import bundles

    with subject_of(told["adapter"], int(told["seed"])) as subject:
        try:
            outcome, fine, what = bundles.replay(folder, subject)
        except Unknown as error:
            report.say(f"? unknown: {error}")
            return certificate.UNDECIDED
    return cli_scripts.say_replayed(outcome, what, told, fine=fine)


def _replay(told: dict[str, Any]) -> int:
    """Run the check of a bundle again, with its seed and budget."""
    from ckpt_conformance import facts
    from ckpt_conformance.session import SessionOptions, run_session  # it loads pytest

    outcome = told["outcome"]
    name = outcome["adapter"]
    with facts.serve((name,), (name,)) as (server, _):
        options = SessionOptions(
            adapters=(name,),
            only=(outcome["invariant"],),
            budget=told["budget"],
            seed=int(outcome["seed"]),
            server=server,
        )
        again = [one for one in run_session(options) if one.check == outcome["check"]]
    for one in again:
        report.say(f"{one.invariant} {one.verdict}: {one.reason}")
    bad = {Verdict.VIOLATION, Verdict.NOT_MET}
    if any(one.verdict in bad for one in again):
        return certificate.VIOLATED
    good = again and all(one.verdict is Verdict.PASS for one in again)
    return certificate.CERTIFIED if good else certificate.UNDECIDED


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(explore)
    app.command()(replay)
