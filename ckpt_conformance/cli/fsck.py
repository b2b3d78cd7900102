"""The commands `fsck` and `corrupt`: judge a checkpoint on disk, and damage a copy of one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_conformance.cli import progress as cli_progress
from ckpt_conformance.cli import stopping
from ckpt_conformance.cli.options import (
    OnCluster,
    Part,
    ResultLines,
    Seed,
    Threads,
    TlsAuthority,
    TlsCertificate,
    TlsKey,
    Where,
    part_of,
)
from ckpt_conformance.cluster.place import Tls
from ckpt_conformance.contract import requests
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ckpt_conformance.cli.fsck_plan import Jobs
    from ckpt_conformance.cli.fsck_results import Taker
    from ckpt_conformance.cluster.place import Place
    from ckpt_conformance.fsck.judge.judge import Judged, Options
    from ckpt_conformance.fsck.source import places
    from ckpt_conformance.fsck.source.findings import Report
    from ckpt_conformance.fsck.source.trust import Trust
    from ckpt_conformance.work import lines
    from ckpt_conformance.work.items import Shard

WHOLE, DAMAGED, UNDECIDED = 0, 1, 2
_MIB = 1 << 20
_LISTING = "listing"
_LISTED = 100  # checkpoints that are listed between two looks at the progress


class Progress(cli_progress.Progress):
    """Shows how much was read."""

    def __call__(self, done: int, total: int) -> None:
        """Take numbers of bytes."""
        self.update(done // _MIB, -(-total // _MIB), "MiB", unit=" MiB")

    def listed(self, checkpoints: int, files: int) -> None:
        """Take how much was listed."""
        if self.what != _LISTING:
            self.begin(_LISTING, "")
        if checkpoints % _LISTED == 0:
            self.update(checkpoints, checkpoints, f"{files} files", " checkpoints")


def share(value: object) -> float:
    """Read a share, above 0 and up to 1: `5%` or `0.05`."""
    text = str(value)
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise typer.BadParameter(f"{text!r} is no share above 0 and up to 1, as 5% or 0.05")
    return number


AllowName = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE.NAME|@FILE",
        help="A name in pickles that you vouch for; a file has one a line, # begins a comment.",
    ),
]
Sample = Annotated[
    float,
    typer.Option(
        parser=share,
        metavar="SHARE",
        help="Read this share of the payload only, as 5% or 0.05.",
    ),
]
RequireCoverage = Annotated[
    float | None,
    typer.Option(
        parser=share,
        metavar="SHARE",
        help="Exit 1 where less than this share, as 95%, was compared with a digest or a CRC.",
    ),
]
AllowCode = Annotated[
    bool, typer.Option(help="Vouch for all code that a load of these files may run.")
]


def fsck(  # noqa: PLR0913  one parameter for each option
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="A run's folder, a checkpoint, or a file; a path or a URL."
        ),
    ],
    *,
    newest_whole: Annotated[
        bool,
        typer.Option(
            help="Print the path of the newest whole checkpoint; 1 if there is none, 2 if unknown."
        ),
    ] = False,
    null: Annotated[
        bool,
        typer.Option(
            "--null", "-0", help="End the path of --newest-whole with a NUL, not a newline."
        ),
    ] = False,
    metadata_only: Annotated[
        bool, typer.Option(help="Read structure and sizes only: no digest, no CRC.")
    ] = False,
    sample: Sample = 1.0,
    seed: Seed = 0,
    require_coverage: RequireCoverage = None,
    nan: Annotated[bool, typer.Option(help="Count NaNs and infinities of each tensor.")] = False,
    allow_name: AllowName = None,
    allow_code: AllowCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    jobs: Threads = None,
    shard: Part = "1/1",
    results: ResultLines = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Judge what is in this plan, and list nothing anew."),
    ] = None,
    write_plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="List only, and write the plan that shards can read."),
    ] = None,
    on: OnCluster = None,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
) -> None:
    """Judge checkpoints on disk: whole, incomplete, damaged or unsafe to load.

    Writes and unpickles nothing.
    """
    from ckpt_conformance.fsck.judge.judge import Options
    from ckpt_conformance.fsck.source import places

    stopping.end_at_once()
    cluster = Where(on, Tls(tls_ca, tls_cert, tls_key), jobs, "threads").place()
    path = places.place(place)
    places.check_there(path)
    if metadata_only and (nan or sample < 1 or require_coverage):
        others = "--sample, --nan and --require-coverage"
        raise requests.RequestError(f"--metadata-only reads no payload: leave out {others}")
    if null and (as_json or not newest_whole):
        raise requests.RequestError("--null is for the path that --newest-whole prints")
    trust = trust_of(allow_name or [], is_all=allow_code)
    least = require_coverage or 0.0
    options = Options(jobs or threads(path), metadata_only, sample, seed, nan, trust, least)
    asked = Asked(part_of(shard, results), results, plan, write_plan, cluster)
    if newest_whole:
        asked.refuse("--newest-whole", "stops at the first whole checkpoint, and needs no parts")
        raise typer.Exit(_judge_newest(path, options, as_json=as_json, null=null))
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
    """Which part of a listing is judged, and what is kept."""

    shard: Shard
    results: Path | None
    plan: Path | None
    write_plan: Path | None
    cluster: Place | None = None  # None: this machine

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


def _judge_newest(path: places.Where, options: Options, *, as_json: bool, null: bool) -> int:
    from ckpt_conformance.fsck.judge.judge import judge_newest
    from ckpt_conformance.fsck.source import places

    with Progress("fsck") as progress:
        judged = judge_newest(path, options, progress)
    places.check_reached(path)
    if as_json:
        typer.echo(json.dumps(judged.to_json(), indent=2))
    else:
        _say_newest(judged, null=null)
    return _gate(judged)


def _write_plan(path: places.Where, asked: Asked) -> int:
    """Write a plan and judge nothing."""
    from ckpt_conformance.cli import fsck_plan

    asked.refuse("--write-plan", "lists and judges nothing", "--write-plan")
    file = asked.write_plan or Path()
    with Progress("fsck") as progress:
        listed = fsck_plan.write(file, path, progress.listed)
    terminal.say(f"{file}: {listed}")
    terminal.say("each shard: the same command with --plan FILE --shard K/N --results FILE")
    return WHOLE


def _judge_all(path: places.Where, options: Options, asked: Asked, *, as_json: bool) -> int:
    """Judge a part of what is there, or all of it; return the exit status."""
    from ckpt_conformance.cli import fsck_plan, fsck_results
    from ckpt_conformance.fsck.judge.judge import Judged

    with contextlib.ExitStack() as files:
        with Progress("fsck") as progress:
            if asked.plan:
                plan = files.enter_context(fsck_plan.opened(asked.plan, path))
            else:
                is_weighed = asked.is_shared
                listing = fsck_plan.made(path, is_weighed=is_weighed, tell=progress.listed)
                plan = files.enter_context(listing)
            part = plan.jobs(options, asked.shard, is_cut=asked.is_shared)
            taker = fsck_results.Taker(files.enter_context(fsck_results.spool()))
            with _writer(asked.results) as taker.writer:
                if taker.writer:
                    fsck_results.begin(taker.writer, options, part, asked.shard)
                if asked.cluster:
                    _run_on(asked.cluster, path, part, taker, progress)
                else:
                    _run(path, options, part, taker, progress)
        if asked.shard.count > 1:
            return _say_part(taker, asked)
        judged = Judged(path, taker.index.reports(), plan.listed.leftovers, options)
        return deliver(judged, as_json=as_json)


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
        if total > 1:
            progress.update(done, total, "checkpoints", unit=" checkpoints")


def _run_on(
    cluster: Place, path: places.Where, jobs: Jobs, taker: Taker, progress: Progress
) -> None:
    """Judge the jobs of a shard on a cluster."""
    from ckpt_conformance.cli.remote import fsck_client

    progress.begin("fsck", "starting")

    def tell(done: int, total: int) -> None:
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


def deliver(judged: Judged, *, as_json: bool) -> int:
    """Print what was judged; return the exit status."""
    from ckpt_conformance.report import fsck_lines

    if as_json:
        for text in fsck_lines.json_text(judged):
            typer.echo(text, nl=False)
    else:
        for line in fsck_lines.lines(judged):
            terminal.say(line)
    return _status(judged)


def combine(paths: Sequence[Path], *, as_json: bool) -> int:
    """Print one report of the results of all shards; return the exit status."""
    from ckpt_conformance.cli import fsck_results

    with contextlib.ExitStack() as files:
        judged = fsck_results.combined(paths, files)
        status = deliver(judged, as_json=as_json)
    if judged.missing:
        terminal.say(
            f"error: results of {terminal.count(len(judged.missing), 'shard')} are missing: "
            f"{', '.join(judged.missing)}; run them with the same arguments",
            error=True,
        )
    return status


def threads(*where: places.Where) -> int:
    """Return how many threads read payload: one for each core, more if they wait for a network."""
    from ckpt_conformance.cli.remote.fsck import FAR_THREADS
    from ckpt_conformance.fsck.source import places
    from ckpt_conformance.report import environment

    is_far = any(map(places.is_far, where))
    return max(environment.usable_cpus(), FAR_THREADS if is_far else 1)


def _say_newest(judged: Judged, *, null: bool) -> None:
    """Print one path for a script; say on stderr what was passed over, and why.

    Raises RequestError for a path that a script would take for two.
    """
    from ckpt_conformance.report import fsck_lines

    newest = judged.newest_whole
    for report in judged.reports:
        if report is not newest:
            where = fsck_lines.one_line(report.path)
            why = fsck_lines.why_not(report, judged.options)
            terminal.say(f"passed over: {where}: {fsck_lines.verdict(report)}: {why}", error=True)
    if hidden := _hidden(judged):
        where = fsck_lines.one_line(hidden.path)
        what = f"{where} could not be judged, and may be the newest whole checkpoint"
        terminal.say(what, error=True)
    elif newest:
        path = os.fsencode(str(newest.path))  # a name need not be UTF-8
        if not null and len(path.splitlines()) != 1:
            shown = fsck_lines.one_line(newest.path)
            raise requests.RequestError(f"the path {shown} has a line break: read it with --null")
        typer.echo(path + (b"\0" if null else b"\n"), nl=False)
    else:
        terminal.say(f"no whole checkpoint in {judged.path}", error=True)


def _hidden(judged: Judged) -> Report | None:
    """Return the newest checkpoint that could not be judged, if no newer one is whole."""
    from ckpt_conformance.fsck.source.findings import State

    telling = (one for one in judged.reports if one.state is State.UNKNOWN or judged.is_enough(one))
    first = next(telling, None)
    return first if first and first.state is State.UNKNOWN else None


def _gate(judged: Judged) -> int:
    if _hidden(judged):
        return UNDECIDED
    return WHOLE if judged.newest_whole else DAMAGED


def _status(judged: Judged) -> int:
    """Return 0 where all is whole, 1 where something is not, 2 where that could not be judged."""
    from ckpt_conformance.fsck.source.findings import State

    if judged.has_too_little:
        return DAMAGED
    if judged.state is State.WHOLE:
        return WHOLE
    return UNDECIDED if judged.state is State.UNKNOWN else DAMAGED


def corrupt(  # noqa: PLR0913  one parameter for each option
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to copy.")],
    *,
    fault: Annotated[str, typer.Option(metavar="NAME", help="A fault at rest.")],
    out: Annotated[Path, typer.Option(metavar="COPY", help="Where the damaged copy goes.")],
    file: Annotated[
        str | None, typer.Option(metavar="NAME", help="The file to damage, relative to DIR.")
    ] = None,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Damage a copy of a checkpoint, for drills; DIR stays as it is."""
    from ckpt_conformance.fault_injectors import at_rest

    if fault not in at_rest.AT_REST:
        hint = requests.nearest(fault, at_rest.AT_REST)
        known = ", ".join(at_rest.AT_REST)
        raise requests.RequestError(f"unknown fault {fault!r}; {hint}faults at rest: {known}")
    _check_request(path, out, file)
    try:
        damage = at_rest.copy_damaged(path, out, fault, random.Random(seed), file)  # noqa: S311  a drill
    except KeyboardInterrupt:
        shutil.rmtree(out, ignore_errors=True)
        raise
    except (Unknown, ValueError, OSError) as error:  # shutil.Error is an OSError
        shutil.rmtree(out, ignore_errors=True)
        raise requests.RequestError(f"{path} cannot be damaged by {fault}: {error}") from error
    if as_json:
        typer.echo(json.dumps(damage.to_json() | {"seed": seed, "copy": str(out)}, indent=2))
        return
    from ckpt_conformance.report.fsck_lines import one_line

    at = "" if damage.offset is None else f" at byte {damage.offset}"
    what = f"{damage.fault} in {damage.file}{at}: {damage.detail or damage.after}"
    terminal.say(one_line(f"{out}: {what}"))


def _check_request(path: Path, out: Path, file: str | None) -> None:
    """Refuse what cannot be done, before anything is copied."""
    if not path.is_dir():
        raise requests.RequestError(
            f"{path} is no folder; give the folder that holds the checkpoint"
        )
    if out.exists() or out.is_symlink():
        raise requests.RequestError(f"{out} exists; name a folder that does not")
    if out.resolve().is_relative_to(path.resolve()):
        raise requests.RequestError(f"{out} is inside of {path}; name a folder beside it")
    inside = file is None or (path / file).resolve().is_relative_to(path.resolve())
    if not inside:
        raise requests.RequestError(f"{file} leads out of {path}; name a file inside of it")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(fsck)
    app.command()(corrupt)
