"""The commands `explore` and `replay`: crash states of saves, and one of them again."""

from __future__ import annotations

import contextlib
import functools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from msgspec import structs

from ckpt_conformance.cli import explorations, recordings, scripts
from ckpt_conformance.cli import progress as cli_progress
from ckpt_conformance.cli.options import (
    Budget,
    CacheFolder,
    Jobs,
    Names,
    OnCluster,
    ResultLines,
    Seed,
    TlsAuthority,
    TlsCertificate,
    TlsKey,
    Where,
)
from ckpt_conformance.cli.options import Part as PartOfRun
from ckpt_conformance.cli.sessions import say_unused, work_of
from ckpt_conformance.cli.stopping import INTERRUPTED
from ckpt_conformance.cluster.place import Tls
from ckpt_conformance.contract import requests
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown, Verdict
from ckpt_conformance.crash.explore.stores import MIRRORED
from ckpt_conformance.crash.model.models import OF_A_DISK, OF_MOUNTS, OF_RANKS, OF_STORES
from ckpt_conformance.crash.script.command import GRACE, Signals
from ckpt_conformance.processes import scratch
from ckpt_conformance.report import (
    certificate,
    environment,
    exploration,
    files,
    terminal,
)
from ckpt_conformance.subject import bundle
from ckpt_conformance.work import lines

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from ckpt_conformance.cli.remote.states import Request
    from ckpt_conformance.cli.sessions import Work
    from ckpt_conformance.cli.states_found import Cached, Found
    from ckpt_conformance.crash.explore.audit import Finding
    from ckpt_conformance.crash.explore.engine import Recorded
    from ckpt_conformance.crash.explore.exploration import (
        BaseExplorer,
        Exploration,
        Limits,
        Violation,
    )
    from ckpt_conformance.crash.explore.kept import Kept
    from ckpt_conformance.crash.script.command import Script
    from ckpt_conformance.plugin.openings import Seen
    from ckpt_conformance.report.certificate import Json
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.work.identity import Identity

E = TypeVar("E", bound="BaseExplorer")


class Progress(cli_progress.Progress):
    """Shows from how many states was recovered, and how many a second."""

    def __call__(self, done: int, total: int, seconds: float) -> None:
        """Take the progress of one exploration."""
        rate = f"{done / seconds:.0f} states/s" if seconds > 0 else ""
        self.update(done, total, rate, unit=" states")


@contextlib.contextmanager
def subject_of(
    adapter: str, seed: int, budget: str = "full", *, notes_opened: bool = False
) -> Generator[Subject]:
    """Start a server with one adapter and yield its subject, in a folder that is removed.

    With `notes_opened` the server notes what the adapter opens: what is kept depends on that.
    """
    from ckpt_conformance.harness import facts
    from ckpt_conformance.harness.client import Client
    from ckpt_conformance.subject.subject import Subject

    with (
        # First, so that it goes last: a child that is still being killed may write there.
        scratch.session("explore") as folder,
        facts.serve((adapter,), (adapter,), notes_opened=notes_opened) as (server, infos),
        contextlib.closing(Client(server)) as client,
    ):
        yield Subject(infos[adapter], client, folder, seed=seed, budget=budget)


What = Annotated[
    list[str],
    typer.Argument(
        metavar="ADAPTER | -- COMMAND...",
        help="A bundled name or module:attribute; or a command with {out} in it.",
    ),
]
Models = Annotated[
    Names,
    typer.Option(
        help="Persistence model (repeatable); default: all of a disk but posix. Of a mounted "
        f"bucket: {OF_MOUNTS[0]}, or of one program {OF_MOUNTS[1]}, ..."
    ),
]
Ranks = Annotated[
    int, typer.Option(min=1, max=8, help=f"Ranks that save: models {', '.join(OF_RANKS)}.")
]
Workloads = Annotated[
    Names, typer.Option(help="What is saved (repeatable): first, second, same, resumed, ...")
]
Budgets = Annotated[Budget, typer.Option(help="quick: a few dozen states a model.")]
Out = Annotated[Path, typer.Option(help="Folder of result.json, report.html and bundles/.")]
Real = Annotated[
    Names, typer.Option(help="Crash mounted images, too (repeatable): ext4, xfs, btrfs; root.")
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the recordings there, too.")]


def explore(  # noqa: PLR0913  one parameter for each option
    what: What,
    *,
    model: Models = None,
    ranks: Ranks = 1,
    workload: Workloads = None,
    budget: Budgets = Budget.QUICK,
    jobs: Jobs = None,
    seed: Seed = 0,
    out: Out = Path("reports/explore"),
    real: Real = None,
    keep: Keep = False,
    resume_cmd: scripts.ResumeCmd = "",
    result_file: scripts.ResultFile = "",
    result_cmd: scripts.ResultCmd = "",
    step_regex: scripts.StepRegex = "",
    checkpoint_glob: scripts.CheckpointGlob = "",
    no_fork: scripts.NoFork = False,
    preload: scripts.Preload = None,
    deadline: scripts.Deadline = 0,
    preempt: scripts.Preempt = False,
    grace: scripts.Grace = int(GRACE),
    kill_rank: scripts.KillRank = None,
    shard: PartOfRun = "1/1",
    results: ResultLines = None,
    record: recordings.Record = None,
    recording: recordings.Recording = None,
    cache: CacheFolder = None,
    on: OnCluster = None,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
) -> None:
    """Recover from what the disk may hold after a crash in a save; keep what violates as bundles.

    With a command no adapter is needed: it is recorded once, then started again from each state.
    """
    with_command = scripts.CommandOptions(
        resume=resume_cmd,
        result_file=result_file,
        result_cmd=result_cmd,
        step_regex=step_regex,
        checkpoint_glob=checkpoint_glob,
        fork=not no_fork,
        preload=tuple(preload or ()),
        deadline=float(deadline),
    )
    is_full = budget is Budget.FULL
    _check(model or (), workload or (), real or ())
    models = list(model or (OF_RANKS if ranks > 1 else OF_A_DISK))
    _check_ranks(ranks, models, real or (), "" if len(what) == 1 else " ".join(what))
    of_disk = {"--real": real, "--cache": cache, "--on": on, "--record": record}
    _require_mounts_alone(models, {**of_disk, "--recording": recording})
    _check_parts(results, cache, on, ranks, real or ())
    recordings.check(
        *(record, recording), keep=keep, results=results, real=real, ranks=ranks, on=on, cache=cache
    )
    work = work_of(shard, results, cache, Where(on, Tls(tls_ca, tls_cert, tls_key), jobs))
    script = scripts.script_of(what, with_command, workload, out)
    refused: dict[str, object] = {"an adapter": not script, "--record": record}
    refused |= {"--results": results, "--cache": cache, "--on": on}
    signals = scripts.signals_of(preempt, grace, kill_rank or (), refused)
    chosen = [] if script else _workloads(workload or (), every=is_full)
    if set(models) & set(OF_STORES):
        alone = (workload, real, ranks > 1, script, results, cache, on, record, recording)
        _require_store_alone(models, any(alone))
        chosen = [MIRRORED]
    asked = exploration.Asked(seed, str(budget), models, chosen, list(real or ()))
    limits = _limits(jobs, every=is_full)
    order = Order(what, script, with_command, asked, limits, ranks, out, keep, signals)
    raise typer.Exit(_record(order, record) if record else _explore(order, work, recording))


@dataclass(frozen=True)
class Order:
    """What is to be explored, and how."""

    what: Sequence[str]  # an adapter, or the words of a command
    script: Script | None
    options: scripts.CommandOptions  # of a command
    asked: exploration.Asked
    limits: Limits
    ranks: int
    out: Path
    keep: bool
    signals: Signals  # to a command

    @property
    def of_command(self) -> Json:
        """What was given with a command, by the names of the options."""
        return scripts.options_of(self.options) if self.script else {}

    @functools.cached_property
    def depends(self) -> Identity:
        """What recoveries depend on: it reads the code of the adapter or of the script once."""
        from ckpt_conformance.cli.remote import states

        return states.identity_of(self.request)

    def kit(self, folder: Path) -> recordings.Kit:
        """Open a folder of recordings; raises RequestError if it is not of what is explored."""
        given = (self.what, self.of_command, self.asked.workloads)
        return recordings.Kit.open(folder, *given, self.depends)

    @property
    def request(self) -> Request:
        """The same, for workers of a cluster."""
        from ckpt_conformance.cli.remote import states

        return states.request_of(
            *(self.what, self.of_command, self.script),
            models=self.asked.models,
            workloads=self.asked.workloads,
            seed=self.asked.seed,
            budget=self.asked.budget,
            limits=self.limits,
        )


def _explore(order: Order, work: Work, recording: Path | None) -> int:
    """Explore, or a part of it; return the exit status."""
    asked = order.asked
    depends = order.depends if work.results or work.cache or work.place else None
    kit = order.kit(recording) if recording else None
    made = environment.folders_to_make(order.out)
    exploration.prepare(order.out)
    run = Run(asked, order.limits, order.out, keep=order.keep)
    run.ranks, run.kit, run.signals = order.ranks, kit, order.signals
    if depends:
        request = explorations.request_of(asked, order.what, order.of_command)
        run.take_part(request, work, depends)
    about: Json = {}
    with explorations.writing(run.part, run), contextlib.ExitStack() as stack:
        try:
            if run.part and (work.cache or work.place):
                run.part.found = _beside(order, run, work, stack)
            about = _explore_here(order, run)
        except KeyboardInterrupt:  # while it started
            run.findings.interrupted = True
        except Unknown as error:  # a script that can't be recorded
            about = run.give_up_script(order.script, error)
    if run.part and run.part.found and run.part.found.known:
        many = len(run.part.found.known)
        terminal.say(f"batches of states from the cache: {many}", error=True)
    if run.part and run.part.found:
        for why, many in sorted(run.part.found.not_kept.items()):
            terminal.say(f"batches of states not kept: {many}: {why}", error=True)
    say_unused(work.cache)
    if run.part and not run.part.is_whole:
        return explorations.say_part(run, run.part, work.results or order.out)
    status = run.finish(about)
    if not about:
        environment.remove_empty(made)
    return status


def _explore_here(order: Order, run: Run) -> Json:
    if order.script:
        return scripts.explore(run, order.script)
    return run.explore_adapter(order.what[0], order.asked.workloads)


def _beside(order: Order, run: Run, work: Work, stack: contextlib.ExitStack) -> Found:
    """Open the cache and the cluster, and record first where nothing was recorded yet.

    Both need a recording that stays as it is. Raises Unknown for a script that can't be recorded.
    """
    from ckpt_conformance.cli import states_found
    from ckpt_conformance.cluster import client
    from ckpt_conformance.work import openings

    opened = stack.enter_context(client.opened(work.place)) if work.place else None  # it may fail
    openings.leave_out(path for path in (order.out, work.results) if path)
    cached = states_found.Cached.open(order, work.cache) if work.cache else None
    if run.kit is None:
        folder = _recorded(order, cached, stack)
        run.kit = order.kit(folder)
    found = states_found.Found(cached, run.kit)
    if opened is not None:
        from ckpt_conformance.cli.remote import states_client

        request = structs.replace(order.request, notes_opened=cached is not None)
        given = (request, run.kit.folder, order.depends)
        opening = states_client.spread(opened, *given)
        found.spread = stack.enter_context(opening)
    return found


def _recorded(order: Order, cached: Cached | None, stack: contextlib.ExitStack) -> Path:
    """Return a folder of recordings: out of the cache, or made now, and kept there, too."""
    known = cached.recording() if cached else None
    if known is not None:
        return known
    made = stack.enter_context(scratch.Scratch("recorded")) / "kept"
    made.mkdir()
    is_whole, seen = _record_into(order, made)
    if cached and seen.why_not:
        terminal.say(f"the recording is not kept: {seen.why_not}", error=True)
    return (cached.keep_recording(made, seen) if cached and is_whole else None) or made


def _record_into(order: Order, folder: Path) -> tuple[bool, Seen]:
    """Record what is explored; return whether all of it could be, and what that depends on.

    Raises Unknown for a script.
    """
    if order.script:
        given = (order.script, order.options, order.limits.jobs, folder, order.depends)
        return True, scripts.record(*given, notes_opened=True).seen
    made, seen = _record_adapter(order, folder)
    return not any(workload.failed for workload in made.workloads.values()), seen


def _record(order: Order, folder: Path) -> int:
    """Record and explore nothing; return the exit status."""
    with recordings.making(folder):
        if order.script:
            return _record_script(order.script, order, folder)
        made, _ = _record_adapter(order, folder)
        recordings.say_each(made)
        failed = any(workload.failed for workload in made.workloads.values())
        return recordings.say_recorded(folder, failed=failed)


def _record_adapter(order: Order, folder: Path) -> tuple[Kept, Seen]:
    """Record workloads of an adapter; its code is read first, as it is when it is imported."""
    from ckpt_conformance.plugin import openings

    (adapter,), depends = order.what, order.depends
    with subject_of(adapter, 0, notes_opened=True) as subject:
        made = recordings.record(subject, adapter, order.asked.workloads, folder, depends)
        return made, openings.of_adapter(Path(subject.client.path).parent, adapter)


def _record_script(script: Script, order: Order, folder: Path) -> int:
    try:
        made = scripts.record(script, order.options, order.limits.jobs, folder, order.depends)
    except Unknown as error:
        files.say(f"? unknown  {script.name}: {error}")
        return certificate.UNDECIDED
    files.say(f"{script.name}: {files.count(made.operations, 'operation')}")
    return recordings.say_recorded(folder)


def _check(models: Sequence[str], workloads: Sequence[str], real: Sequence[str]) -> None:
    """Refuse names that do not exist, and images where this machine can't mount them."""
    from ckpt_conformance.crash.explore import observed, real_fs
    from ckpt_conformance.crash.explore.workloads import WORKLOADS
    from ckpt_conformance.crash.model.models import MODELS

    requests.check_names("model", models, MODELS)
    requests.check_names("workload", workloads, WORKLOADS)
    requests.check_names("file system", real, real_fs.FILE_SYSTEMS)
    try:
        observed.require(real)
    except Unknown as error:
        files.say(f"? unknown: {error}", error=True)
        raise typer.Exit(certificate.UNDECIDED) from None


def _check_ranks(ranks: int, models: Sequence[str], real: Sequence[str], command: str) -> None:
    """Refuse what several ranks can't have, and models of ranks where there is one."""
    strange = [name for name in models if (name in OF_RANKS) != (ranks > 1)]
    if strange:
        fits = ", ".join(OF_RANKS if ranks > 1 else (*OF_A_DISK, "posix"))
        hint = f"of {files.count(ranks, 'rank')} there is {fits}"
        raise requests.RequestError(f"model {strange[0]!r} is not for --ranks {ranks}; {hint}")
    if ranks > 1 and (real or command):
        what = f"the command {command!r}" if command else "--real"
        raise requests.RequestError(f"{what} is explored with one rank; leave --ranks out")


def _require_store_alone(models: Sequence[str], has_more: bool) -> None:  # noqa: FBT001  of one call
    """Refuse what goes with no recording of requests."""
    if has_more or set(models) - set(OF_STORES):
        raise requests.RequestError(
            f"model {OF_STORES[0]!r} is explored alone, of an adapter that mirrors to URLs: it has "
            "a workload of its own; leave out other models, workloads, --real, --ranks, --results, "
            "--cache, --on, --record and --recording, and give no command"
        )


def _require_mounts_alone(models: Sequence[str], options: Mapping[str, object]) -> None:
    """Refuse what goes with no recording that has closes, where a mounted bucket is explored."""
    if not set(models) & set(OF_MOUNTS):
        return
    others = [f"the model {name!r}" for name in models if name not in OF_MOUNTS]
    for one in (*others, *(name for name, value in options.items() if value)):
        raise requests.RequestError(
            f"{OF_MOUNTS[0]!r} does not go with {one}: it needs recordings of its own, which tell "
            "when files are closed; run them one after the other"
        )


def _limits(jobs: int | None, *, every: bool) -> Limits:
    from ckpt_conformance.crash.explore import exploration as engine

    limits = engine.FULL if every else engine.QUICK_COMMAND
    return replace(limits, jobs=jobs or environment.usable_cpus())


def _check_parts(
    results: Path | None, cache: Path | None, on: str | None, ranks: int, real: Sequence[str]
) -> None:
    """Raise RequestError where there can be no batches.

    That is what is not the same on two machines, or not recovered from in batches.
    """
    given = {"--results": results, "--cache": cache, "--on": on}
    option = next((name for name, value in given.items() if value), None)
    if option and (real or ranks > 1):
        what = f"--real {real[0]}" if real else f"--ranks {ranks}"
        why = (
            "an image is of the machine that mounts it"
            if real
            else "the recoveries of several ranks are not cut into batches"
        )
        raise requests.RequestError(f"{what} and {option}: {why}; run it without {option}")


def _workloads(names: Sequence[str], *, every: bool) -> list[str]:
    from ckpt_conformance.crash.explore import workloads

    return list(names or (workloads.EVERY if every else workloads.QUICK))


class Run:
    """The explorations of one command, and what is said of them."""

    def __init__(self, asked: exploration.Asked, limits: Limits, out: Path, *, keep: bool) -> None:
        """Start with nothing explored."""
        self.asked, self.limits, self.out, self.keep = asked, limits, out, keep
        self.ranks = 1
        self.signals = Signals()  # that a command gets
        self.kit: recordings.Kit | None = None  # recordings that were made before
        self.part: explorations.Part | None = None  # whose lines are written
        self.bundle_folder = out / "bundles"
        self.explorations: list[Exploration] = []
        self.findings = exploration.Findings(asked)
        self.bundles: dict[int, dict[str, str]] = {}  # by exploration and class

    @property
    def closing(self) -> bool:
        """Whether recordings have to tell when files are closed."""
        return not set(self.asked.models).isdisjoint(OF_MOUNTS)

    def take_part(self, request: explorations.Request, work: Work, depends: Identity) -> None:
        """Explore a part only, and write its lines."""
        writer = lines.Writer(work.results, keep=False)
        self.part = explorations.Part(request, work.shard, writer, depends)
        self.bundle_folder = explorations.bundles_of(self.out, work.shard)

    def explore_adapter(self, name: str, workloads: Sequence[str]) -> Json:
        """Explore an adapter; return what `result.json` says of it."""
        found = self.part.found if self.part else None
        cached = found.cached if found else None
        asked = self.asked
        with subject_of(name, asked.seed, asked.budget, notes_opened=cached is not None) as subject:
            if found and cached:
                from ckpt_conformance.plugin import openings

                folder = Path(subject.client.path).parent
                found.seen = functools.partial(openings.of_adapter, folder, name)
            about: Json = {"adapter": subject.info.to_json()}
            self.describe(about)
            self._explore_all(subject, workloads)
            return about

    def give_up_script(self, script: Script | None, error: Unknown) -> Json:
        """Note that a script can't be recorded; return what `result.json` says of it."""
        about = scripts.described(script) if script else {}
        self.describe(about)
        self.findings.unknown.append(f"{script.name if script else explorations.COMMAND}: {error}")
        self._give_up(recordings.SCRIPT, error)
        return about

    def describe(self, about: Json) -> None:
        """Write what is explored, before anything else: a part may be killed."""
        if self.part:
            self.part.describe(about)

    def _explore_all(self, subject: Subject, names: Sequence[str]) -> None:
        """Explore every workload; Ctrl-C and SIGTERM end it with what was found so far."""
        with Progress(subject.info.name) as progress:
            for name in self._mine(names):
                progress.begin(f"{subject.info.name} {name}", "recording")
                try:
                    self._explore_workload(subject, name, progress)
                except NotApplicable as error:
                    self.findings.not_applicable.append(f"{name}: {error}")
                    self._give_up(name, error)
                except Unknown as error:
                    self.findings.unknown.append(f"{name}: {error}")
                    self._give_up(name, error)
                except KeyboardInterrupt:
                    self.findings.interrupted = True
                if self.findings.interrupted:
                    break

    def _mine(self, names: Sequence[str]) -> list[str]:
        """Return the workloads of which some batch is explored here."""
        return [name for name in names if self.part is None or name in self.part.items]

    def _give_up(self, name: str, error: NotApplicable | Unknown) -> None:
        if self.part:
            self.part.give_up(name, error)

    def _explore_workload(self, subject: Subject, name: str, progress: Progress) -> None:
        """Record and explore one workload, and keep what violates."""
        from ckpt_conformance.crash.explore import workloads

        if self.ranks > 1:
            self._explore_on_ranks(subject, name, progress)
            return
        with contextlib.ExitStack() as stack:
            if name == MIRRORED:
                from ckpt_conformance.crash.explore.stores import store_saves

                recorded = store_saves.record(subject)
            elif self.kit:
                recorded = stack.enter_context(self.kit.workload(name))
            else:
                recorded = workloads.record(subject, name, closing=self.closing)
            self._explore_recorded(subject, recorded, progress)

    def _explore_recorded(self, subject: Subject, recorded: Recorded, progress: Progress) -> None:
        from ckpt_conformance.crash.explore import bundles, engine, reproduced

        name = recorded.name
        explorer = engine.Explorer(subject, recorded, self.limits, progress)
        notebook = self.part.notebook(explorer, name) if self.part else None
        share = notebook.share if notebook else None
        engine.run(explorer, self.asked.models, self.asked.real, share)
        reproduced.reproduce(explorer)
        if self.part and notebook:
            self.part.finish(notebook, name)
        self.take(explorer, bundles.write)

    def _explore_on_ranks(self, subject: Subject, name: str, progress: Progress) -> None:
        """Record and explore one workload of several ranks."""
        from ckpt_conformance.crash.explore import bundles, engine, reproduced, workloads

        subject.need("ranks")
        recorded = workloads.record(subject, name, {"fsdp": self.ranks})
        explorer = engine.RanksExplorer(subject, recorded, self.limits, progress)
        engine.run(explorer, self.asked.models)
        explorer.confirm_worst()
        reproduced.reproduce_ranks(explorer)
        self.take(explorer, bundles.write)

    def take(self, explorer: E, write: Callable[[Path, E, Violation], Path | None]) -> None:
        """Take what was found, and write bundles of what violates, as far as that can be done."""
        result = explorer.result
        self.explorations.append(result)
        self.findings.unknown += [f"{result.workload}: {why}" for why in result.unknown]
        self.findings.interrupted = result.interrupted
        paths = {
            key: write(self.bundle_folder, explorer, group[0])
            for key, group in result.classes().items()
        }
        self.bundles[len(self.explorations) - 1] = {
            k: str(path) for k, path in paths.items() if path
        }
        self.findings.add(explorer, self.bundles[len(self.explorations) - 1])
        if self.keep:
            _keep(explorer.recording.folder, self.out / "recordings" / result.workload)

    def finish(self, about: Json) -> int:
        """Write result.json and report.html, print what was found, return the exit status.

        `about` says what was explored; empty if it was stopped before that was known.
        """
        findings = self.findings
        if about:
            exploration.write(findings, about, self.out)
        for line in self._lines():
            files.say(line)
        if about:
            files.say(f"report: {self.out / 'report.html'}")
        if findings.interrupted:
            so_far = "Stopped before the end: this is what was found so far."
            nothing = "Stopped before the first crash state was visited: there is no report."
            files.say(so_far if about else nothing)
            return INTERRUPTED
        return exploration.STATUS[findings.verdict]

    def _lines(self) -> Iterator[str]:
        """Yield the lines of all that was found."""
        findings = self.findings
        for at, result in enumerate(self.explorations):
            yield from lines_of(result, self.bundles.get(at, {}))
        yield from signal_lines(findings.signals)
        glyph = files.WORDS[Verdict.VIOLATION].glyph
        yield from (f"{glyph} without a crash  {line}" for line in findings.without_a_crash)
        yield from (f"  note  {line}" for line in findings.notes)
        yield from (f"  not applicable  {line}" for line in findings.not_applicable)
        yield from (f"? unknown  {line}" for line in findings.unknown)


def _keep(recording: Path, target: Path) -> None:
    """Copy a recording; one of an earlier run goes, nothing else does."""
    from ckpt_conformance.trace.operations import Recording

    if target.exists():
        try:
            Recording.read(target)
        except (OSError, ValueError, KeyError) as error:
            raise environment.OutputError(
                f"{target} holds no recording of explore and would be replaced ({error}); name "
                "another folder with --out"
            ) from None
        shutil.rmtree(target)
    shutil.copytree(recording, target, symlinks=True)


def lines_of(result: Exploration, kept: dict[str, str]) -> Iterator[str]:
    """Yield the lines of an exploration: models, violations with their commands, the audit."""
    rate = result.recovered / result.batch_seconds if result.batch_seconds else 0
    count = len(result.recording.operations)
    recoveries = files.count(result.recovered, "run") + " of recovery"
    yield f"{result.workload}: {count} operations, {recoveries}, {rate:.0f}/s"
    if result.recording.remark:
        yield f"  crash: {result.recording.remark}"
    width = max(map(len, (*result.models, "btrfs")))
    for name, report in result.models.items():
        clean = report.is_clean and not report.unusable
        good = Verdict.UNKNOWN if result.interrupted else Verdict.PASS  # a part only
        sign = files.WORDS[good if clean else Verdict.VIOLATION].glyph
        ends = ", ".join(f"{outcome} {number}" for outcome, number in report.outcomes.most_common())
        judged = sum(report.outcomes.values())
        states = f"{report.candidates} states with {report.distinct} different contents"
        tried = f"{report.recovered} contents recovered from, so {judged} states judged"
        yield f"  {sign} {name:<{width}} {states}; {tried}: {ends}"
        phases = (f"{phase} {n.visited} of {n.unique}" for phase, n in report.phases.items())
        yield f"      contents tried: {', '.join(phases)}"
        for error in report.unusable:
            yield f"      after the recovery: {error}"
        yield from (f"      {one}" for one in report.refused)
    yield from _violation_lines(result, kept)
    yield from _audit_lines(result)


def _violation_lines(result: Exploration, kept: dict[str, str]) -> Iterator[str]:
    """Yield the lines of each class of violation; `kept` are the bundles by class."""
    for key, group in result.classes().items():
        violation, models = group[0], ", ".join(one.case.model for one in group)
        grades = "; ".join(result.grades(group))
        yield f"    {models}: {violation.outcome}: {violation.recovery.summary}"
        yield f"      {violation.where}; {violation.states} states so; {grades}"
        if violation.blame:
            yield f"      audit: {violation.blame.summary}"
        if key in kept:
            yield f"      replay: ckpt-conformance replay {kept[key]}"


def _audit_lines(result: Exploration) -> Iterator[str]:
    """Yield each finding of the audit once; further paths with the same one are counted."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in result.audit:
        groups.setdefault((finding.rule, finding.source), []).append(finding)
    for first, *others in groups.values():
        more = f"; and {files.count(len(others), 'more path')} so" if others else ""
        yield f"    audit {first.summary}{more}"


def signal_lines(kinds: Sequence[Json]) -> Iterator[str]:
    """Yield the lines of signals: of each kind what came of them, then what violates."""
    for kind in kinds:
        bad = any(item["violates"] for item in kind["signals"])
        good = Verdict.PASS if kind["signals"] else Verdict.UNKNOWN
        sign = files.WORDS[Verdict.VIOLATION if bad else good].glyph
        ends = ", ".join(f"{outcome} {count}" for outcome, count in kind["outcomes"].items())
        sent = files.count(len(kind["signals"]), "job")
        yield f"  {sign} {kind['kind']}: {kind['told']}: {sent}: {ends or 'nothing was sent'}"
        if kind["reactions"]:
            yield f"      {kind['reactions']}"
        for group in kind["classes"]:
            yield f"    {group['outcome']}: {group['summary']}"
            yield f"      {group['what']}; {group['handled']}; {group['count']} so"
            if group["bundle"]:
                yield f"      replay: ckpt-conformance replay {group['bundle']}"


def replay(
    folder: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder of bundles/.")],
) -> None:
    """Replay a violation from its bundle alone: 1 while it still violates, 0 when it does not."""
    content = bundle.read(folder)
    inner = folder / "crash"
    if content.get("kind") != "crash-state" and inner.is_dir():
        folder, content = inner, bundle.read(inner)
    kind = content.get("kind")
    if kind in scripts.KINDS:
        raise typer.Exit(scripts.replay(folder, content))
    status = _replay_state(folder, content) if kind == "crash-state" else _replay(content)
    raise typer.Exit(status)


def _replay_state(folder: Path, content: Json) -> int:
    """Recover from the directory of a bundle."""
    from ckpt_conformance.crash.explore import bundles

    origin = bundles.part_of(content, bundles.Origin)
    with subject_of(origin.adapter, origin.seed) as subject:
        return scripts.replayed(content, lambda: bundles.replay(folder, subject))


def _replay(content: Json) -> int:
    """Run the check of a bundle again, with its seed and budget."""
    from ckpt_conformance.harness import facts
    from ckpt_conformance.plugin.options import SessionOptions
    from ckpt_conformance.plugin.session import run_session  # it loads pytest

    outcome = content["outcome"]
    name = outcome["adapter"]
    with facts.serve((name,), (name,)) as (server, _):
        options = SessionOptions(
            adapters=(name,),
            only=(outcome["invariant"],),
            budget=content["budget"],
            seed=int(outcome["seed"]),
            order=outcome.get("evidence", {}).get("order", ""),
            server=server,
        )
        replayed = [one for one in run_session(options) if one.check == outcome["check"]]
    for now in replayed:
        files.say(f"{now.invariant} {now.verdict}: {now.reason}")
    verdicts = [now.verdict for now in replayed]
    if {Verdict.VIOLATION, Verdict.NOT_MET}.intersection(verdicts):
        return certificate.VIOLATED
    is_kept = set(verdicts) == {Verdict.PASS}
    return certificate.CERTIFIED if is_kept else certificate.UNDECIDED


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(explore)
    app.command()(replay)
