"""The command `fsck`: judge checkpoints on disk."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckpt_conformance.cli import progress as cli_progress
from ckpt_conformance.cli import stopping
from ckpt_conformance.cli.disk import newest
from ckpt_conformance.cli.disk.options import (
    AllowCode,
    AllowName,
    AsJson,
    CountNans,
    Details,
    Explain,
    FileTimeout,
    MetadataOnly,
    NewestWhole,
    Null,
    Pin,
    PinCopy,
    PlaceToJudge,
    PlanFile,
    RequireCoverage,
    Sample,
    WritePlan,
)
from ckpt_conformance.cli.options import (
    OnCluster,
    Part,
    ResultLines,
    Seed,
    Threads,
    Timeout,
    TlsAuthority,
    TlsCertificate,
    TlsKey,
    Where,
    part_of,
)
from ckpt_conformance.cluster.place import Tls
from ckpt_conformance.contract import requests
from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ckpt_conformance.cli.disk.plan import Jobs
    from ckpt_conformance.cli.disk.results import Taker
    from ckpt_conformance.cli.stopping import Bound
    from ckpt_conformance.cluster.client import Cluster
    from ckpt_conformance.cluster.place import Place
    from ckpt_conformance.fsck.judge.judge import Judged, Options
    from ckpt_conformance.fsck.source import places
    from ckpt_conformance.fsck.source.trust import Trust
    from ckpt_conformance.work import lines
    from ckpt_conformance.work.items import Shard

WHOLE, DAMAGED, UNDECIDED = 0, 1, 2
_MIB = 1 << 20
_LISTING = "listing"
_LISTED = 100  # checkpoints that are listed between two looks at the progress


class Progress(cli_progress.Progress):
    """Shows how much was read."""

    bound: Bound | None = None

    def went_on(self) -> None:
        """Take that something was judged, or given up: no bound needs to end the command."""
        if self.bound:
            self.bound.tick()

    def __call__(self, done: int, total: int) -> None:
        """Take numbers of bytes."""
        self.update(done // _MIB, -(-total // _MIB), "MiB", unit=" MiB")

    def listed(self, checkpoints: int, files: int) -> None:
        """Take how much was listed."""
        if self.what != _LISTING:
            self.begin(_LISTING, "")
        if checkpoints % _LISTED == 0:
            self.update(checkpoints, checkpoints, f"{files} files", " checkpoints")


OUT_OF_TIME = (
    "the time of --timeout is used up before the answer was known. Give it more time, or less to "
    "read; where more time does not help, a disk or a store does not answer"
)


def fsck(  # noqa: PLR0913  one parameter for each option
    place: PlaceToJudge,
    *,
    newest_whole: NewestWhole = False,
    explain: Explain = None,
    null: Null = False,
    pin: Pin = None,
    pin_copy: PinCopy = False,
    metadata_only: MetadataOnly = False,
    sample: Sample = 1.0,
    seed: Seed = 0,
    require_coverage: RequireCoverage = None,
    nan: CountNans = False,
    allow_name: AllowName = None,
    allow_code: AllowCode = False,
    details: Details = False,
    as_json: AsJson = False,
    jobs: Threads = None,
    timeout: Timeout = None,
    file_timeout: FileTimeout = None,
    shard: Part = "1/1",
    results: ResultLines = None,
    plan: PlanFile = None,
    write_plan: WritePlan = None,
    on: OnCluster = None,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
) -> None:
    """Judge checkpoints on disk: whole, incomplete, damaged or unsafe to load.

    Unpickles nothing, and writes nothing but what you name.
    """
    from ckpt_conformance.fsck.judge.judge import Options
    from ckpt_conformance.fsck.source import places

    del explain  # its callback has printed it
    stopping.end_at_once()
    bound = stopping.Bound(timeout, UNDECIDED, f"{place}: {OUT_OF_TIME}")
    cluster = Where(on, Tls(tls_ca, tls_cert, tls_key), jobs, "threads").place()
    path = places.place(place)
    places.check_there(path)
    if metadata_only and (nan or sample < 1 or require_coverage):
        others = "--sample, --nan and --require-coverage"
        raise requests.RequestError(f"--metadata-only reads no payload: leave out {others}")
    answer = newest.Answer(as_json, null, pin, pin_copy)
    answer.check(path, is_newest=newest_whole)
    trust = trust_of(allow_name or [], is_all=allow_code)
    count, least = jobs or threads(path), require_coverage or 0.0
    given = (count, metadata_only, sample, seed, nan, trust, bound.end, file_timeout, least)
    options = Options(*given)
    asked = Asked(bound, part_of(shard, results), results, plan, write_plan, cluster, details)
    if newest_whole:
        asked.refuse("--newest-whole", "stops at the first whole checkpoint, and needs no parts")
        raise typer.Exit(newest.judge(path, options, lambda: Progress("fsck"), bound, answer))
    if write_plan:
        raise typer.Exit(_write_plan(path, asked))
    raise typer.Exit(_judge_all(path, options, asked, as_json=as_json))


def trust_of(given: Sequence[str], *, is_all: bool) -> Trust:
    """Return what the user vouches for; raises RequestError for what is no name."""
    from ckpt_conformance.fsck.source.trust import Trust

    names: set[str] = set()
    for text in given:
        names |= _names_in(Path(text[1:])) if text.startswith("@") else {text}
    try:
        return Trust(frozenset(names), is_all)
    except ValueError as error:
        raise requests.RequestError(f"--allow-name: {error}") from error


def _names_in(file: Path) -> set[str]:
    """Read one name a line; raises RequestError for a file that cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise requests.RequestError(f"--allow-name @{file}: {error}") from error
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {line for line in lines if line}


@dataclass(frozen=True)
class Asked:
    """Which part of a listing is judged, in which time, and what is kept."""

    bound: Bound
    shard: Shard
    results: Path | None
    plan: Path | None
    write_plan: Path | None
    cluster: Place | None = None  # None: this machine
    details: bool = False  # of every checkpoint

    @property
    def is_shared(self) -> bool:
        """Whether several machines judge: then large checkpoints are cut."""
        return self.shard.count > 1 or self.cluster is not None

    def refuse(self, option: str, why: str, *allowed: str) -> None:
        """Raise RequestError if any of these options was given, but for `allowed` ones."""
        given = {
            "--shard": self.shard.count > 1,
            "--results": self.results is not None,
            "--plan": self.plan is not None,
            "--write-plan": self.write_plan is not None,
            "--on": self.cluster is not None,
        }
        others = [name for name, is_given in given.items() if is_given and name not in allowed]
        if others:
            raise requests.RequestError(f"{option} {why}: leave out {' and '.join(others)}")


def _write_plan(path: places.Where, asked: Asked) -> int:
    """Write a plan and judge nothing."""
    from ckpt_conformance.cli.disk import plan as plans

    asked.refuse("--write-plan", "lists and judges nothing", "--write-plan")
    file = asked.write_plan or Path()
    with Progress("fsck") as progress:
        listed = plans.write(file, path, progress.listed)
    terminal.say(f"{file}: {listed}")
    terminal.say("each shard: the same command with --plan FILE --shard K/N --results FILE")
    return WHOLE


def _judge_all(path: places.Where, options: Options, asked: Asked, *, as_json: bool) -> int:
    """Judge a part of what is there, or all of it; return the exit status."""
    from ckpt_conformance.cli.disk import plan as plans
    from ckpt_conformance.cli.disk import results
    from ckpt_conformance.fsck.judge import trackers
    from ckpt_conformance.fsck.judge.judge import Judged

    with contextlib.ExitStack() as files:
        with Progress("fsck") as progress:
            progress.bound = asked.bound
            if asked.plan:
                plan = files.enter_context(plans.opened(asked.plan, path))
            else:
                is_weighed = asked.is_shared
                listing = plans.made(path, is_weighed=is_weighed, tell=progress.listed)
                plan = files.enter_context(listing)
            part = plan.jobs(options, asked.shard, is_cut=asked.is_shared)
            taker = results.Taker(files.enter_context(results.spool()))
            cluster = files.enter_context(_connected(asked, path, part, progress))
            with _writer(asked.results) as taker.writer:
                if taker.writer:
                    results.begin(taker.writer, options, part, asked.shard)
                if cluster:
                    _run_on(cluster, path, part, taker, progress)
                else:
                    _run(path, options, part, taker, progress)
        asked.bound.close()
        if asked.shard.count > 1:
            return _say_part(taker, asked)
        reports = taker.index.reports(options.least)
        named = trackers.read(path, reports)
        judged = Judged(path, reports, plan.listed.leftovers, options, trackers=named)
        return deliver(judged, as_json=as_json, details=asked.details)


@contextlib.contextmanager
def _writer(results: Path | None) -> Generator[lines.Writer | None]:
    """Open the file of the user's results; say what is in it if the run is stopped."""
    from ckpt_conformance.cli import parts
    from ckpt_conformance.work import lines

    if results is None:
        yield None
        return
    try:
        with lines.Writer(results, keep=False) as writer:
            yield writer
    except KeyboardInterrupt:
        terminal.say(parts.stopped(results), error=True)
        raise


def _run(
    path: places.Where, options: Options, jobs: Jobs, taker: Taker, progress: Progress
) -> None:
    """Judge the jobs of a shard."""
    from ckpt_conformance.fsck.judge.judging import Judging

    total = len(jobs)
    progress.begin("fsck", "")
    judging = Judging(path, options, progress if total == 1 else None)
    for done, (job, judgement) in enumerate(judging.run(jobs), 1):
        taker.take(job, judgement)
        progress.went_on()
        if total > 1:
            progress.update(done, total, "checkpoints", unit=" checkpoints")


@contextlib.contextmanager
def _connected(
    asked: Asked, path: places.Where, jobs: Jobs, progress: Progress
) -> Generator[Cluster | None]:
    """Connect to the cluster that was asked for; None where none was."""
    if asked.cluster is None:
        yield None
        return
    from ckpt_conformance.cli.remote import fsck_client

    progress.begin("fsck", "starting")
    with fsck_client.connected(asked.cluster, path, jobs) as cluster:
        yield cluster


def _run_on(
    cluster: Cluster, path: places.Where, jobs: Jobs, taker: Taker, progress: Progress
) -> None:
    """Judge the jobs of a shard on a cluster."""
    from ckpt_conformance.cli.remote import fsck_client

    def tell(done: int, total: int) -> None:
        progress.went_on()
        progress.update(done, total, "checkpoints", unit=" checkpoints")

    fsck_client.run(cluster, path, jobs, taker, tell)


def _say_part(taker: Taker, asked: Asked) -> int:
    """Say what a shard found, and what to do with it."""
    from ckpt_conformance.cli import parts

    counts = Counter(report.state for report in taker.index.reports())
    found = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
    many = terminal.count(sum(counts.values()), "checkpoint")
    terminal.say(f"shard {asked.shard}: {many} ({found or 'nothing to judge'})")
    terminal.say(parts.complete(asked.results))
    return WHOLE


def deliver(judged: Judged, *, as_json: bool, details: bool = False) -> int:
    """Print what was judged; return the exit status."""
    from ckpt_conformance.report import fsck_lines

    if as_json:
        for text in fsck_lines.json_text(judged):
            typer.echo(text, nl=False)
    else:
        style = fsck_lines.Style(terminal.width(), details)
        for line in fsck_lines.lines(judged, style):
            terminal.say(line)
    return _status(judged)


def combine(paths: Sequence[Path], *, as_json: bool) -> int:
    """Print one report of the results of all shards; return the exit status."""
    from ckpt_conformance.cli import parts
    from ckpt_conformance.cli.disk import results

    with contextlib.ExitStack() as files:
        judged, stopped = results.combined(paths, files)
        status = deliver(judged, as_json=as_json)
    parts.say_lacking([name for name in judged.missing if name not in stopped], stopped)
    return status


def threads(*where: places.Where) -> int:
    """Return how many threads read payload: one for each core, more if they wait for a network."""
    from ckpt_conformance.cli.remote.fsck import FAR_THREADS
    from ckpt_conformance.fsck.source import places
    from ckpt_conformance.report import environment

    is_far = any(map(places.is_far, where))
    return max(environment.usable_cpus(), FAR_THREADS if is_far else 1)


def _status(judged: Judged) -> int:
    """Return 0 where all is whole, 1 where something is not, 2 where that could not be judged."""
    from ckpt_conformance.fsck.source.findings import State

    if judged.has_too_little:
        return DAMAGED
    if judged.state is State.WHOLE:
        return WHOLE
    return UNDECIDED if judged.state is State.UNKNOWN else DAMAGED


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(fsck)
