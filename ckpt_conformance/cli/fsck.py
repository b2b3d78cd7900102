"""The commands `fsck` and `corrupt`: judge a checkpoint on disk, and damage a copy of one."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path  # noqa: TC003  typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_conformance.cli import progress as cli_progress
from ckpt_conformance.cli.options import Seed, Threads  # noqa: TC001  as above
from ckpt_conformance.contract import requests
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    from ckpt_conformance.fsck.judge.judge import Judged
    from ckpt_conformance.fsck.source.findings import Report
    from ckpt_conformance.fsck.source.places import Where

WHOLE, DAMAGED, UNDECIDED = 0, 1, 2
FAR_THREADS = 8  # each with at most 9 MiB
_MIB = 1 << 20


class Progress(cli_progress.Progress):
    """Shows how much was read."""

    def __call__(self, done: int, total: int) -> None:
        """Take numbers of bytes."""
        self.update(done // _MIB, -(-total // _MIB), "MiB", unit=" MiB")


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
    metadata_only: Annotated[
        bool, typer.Option(help="Read structure and sizes only: no digest, no CRC.")
    ] = False,
    sample: Annotated[
        float,
        typer.Option(
            parser=share,
            metavar="SHARE",
            help="Read this share of the payload only, as 5% or 0.05.",
        ),
    ] = 1.0,
    seed: Seed = 0,
    nan: Annotated[bool, typer.Option(help="Count NaNs and infinities of each tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    jobs: Threads = None,
) -> None:
    """Judge checkpoints on disk: whole, incomplete or damaged. Writes and unpickles nothing."""
    from ckpt_conformance.fsck.judge.judge import Options, judge, judge_newest
    from ckpt_conformance.fsck.source import places

    path = places.place(place)
    places.check_there(path)
    if metadata_only and (nan or sample < 1):
        raise requests.RequestError(
            "--metadata-only reads no payload: leave out --sample and --nan"
        )
    options = Options(jobs or threads(path), metadata_only, sample, seed, nan)
    with Progress("fsck") as progress:
        judged = (judge_newest if newest_whole else judge)(path, options, progress)
    if newest_whole:
        places.check_reached(path)
    if as_json:
        typer.echo(json.dumps(judged.to_json(), indent=2))
    elif newest_whole:
        _say_newest(judged)
    else:
        _say_all(judged)
    raise typer.Exit(_gate(judged) if newest_whole else _status(judged))


def threads(*where: Where) -> int:
    """Return how many threads read payload: one for each core, more if they wait for a network."""
    from ckpt_conformance.fsck.source.remote import Url
    from ckpt_conformance.report import environment

    is_far = any(isinstance(one, Url) for one in where)
    return max(environment.usable_cpus(), FAR_THREADS if is_far else 1)


def _say_all(judged: Judged) -> None:
    from ckpt_conformance.report import fsck_lines

    for line in fsck_lines.lines(judged):
        terminal.say(line)


def _say_newest(judged: Judged) -> None:
    """Print one path for a script; say on stderr what was passed over, and why."""
    from ckpt_conformance.report import fsck_lines

    newest = judged.newest_whole
    for report in judged.reports:
        if report is not newest:
            why = fsck_lines.describe(report.findings[0]) if report.findings else ""
            terminal.say(f"passed over: {report.path}: {report.state}: {why}", error=True)
    if hidden := _hidden(judged):
        what = f"{hidden.path} could not be judged, and may be the newest whole checkpoint"
        terminal.say(what, error=True)
    elif newest:
        typer.echo(str(newest.path))
    else:
        terminal.say(f"no whole checkpoint in {judged.path}", error=True)


def _hidden(judged: Judged) -> Report | None:
    """Return the newest checkpoint that could not be judged, if no newer one is whole."""
    from ckpt_conformance.fsck.source.findings import State

    telling = (one for one in judged.reports if one.state in (State.WHOLE, State.UNKNOWN))
    first = next(telling, None)
    return first if first and first.state is State.UNKNOWN else None


def _gate(judged: Judged) -> int:
    if _hidden(judged):
        return UNDECIDED
    return WHOLE if judged.newest_whole else DAMAGED


def _status(judged: Judged) -> int:
    """Return 0 where all is whole, 1 where something is not, 2 where that could not be judged."""
    from ckpt_conformance.fsck.source.findings import State

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
