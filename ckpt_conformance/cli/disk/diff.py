"""The command `diff`: compare two checkpoints on disk."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_conformance.cli import stopping
from ckpt_conformance.cli.disk.fsck import (
    Progress,
    threads,
    trust_of,
)
from ckpt_conformance.cli.disk.options import AllowCode, AllowName
from ckpt_conformance.cli.options import Names, Threads, Timeout
from ckpt_conformance.contract import requests
from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    from ckpt_conformance.fsck.diff.diff import Compared

SAME, DIFFERENT, UNDECIDED = 0, 1, 2
_CHECKPOINT = "A checkpoint's folder or file; a path or a URL."


def diff(  # noqa: PLR0913  one parameter for each option
    a: Annotated[str, typer.Argument(metavar="A", help=_CHECKPOINT)],
    b: Annotated[str, typer.Argument(metavar="B", help=_CHECKPOINT)],
    *,
    rename: Annotated[
        Names,
        typer.Option(
            metavar="REGEX=NEW", help="Rename entries of A, as re.sub does; may be given again."
        ),
    ] = None,
    only: Annotated[
        Names, typer.Option(metavar="REGEX", help="Compare only names in which this is found.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show every difference.")] = False,
    allow_name: AllowName = None,
    allow_code: AllowCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    jobs: Threads = None,
    timeout: Timeout = None,
) -> None:
    """Compare two checkpoints bit for bit, whatever their formats and world sizes.

    Exit status: 0 the same, 1 different, 2 usage error, or one of them is damaged or unsafe.
    """
    from ckpt_conformance.fsck.diff.diff import Options
    from ckpt_conformance.fsck.diff.diff import diff as compare
    from ckpt_conformance.fsck.source import places

    stopping.end_at_once()
    bound = stopping.Bound(timeout, UNDECIDED, "the time of --timeout is used up: not compared")
    renames = tuple(_rename(left) for left in rename or ())
    patterns = tuple(_pattern(left, "--only") for left in only or ())
    left, right = places.place(a), places.place(b)
    for place in (left, right):
        places.check_there(place)
    trust = trust_of(allow_name or [], is_all=allow_code)
    options = Options(renames, patterns, jobs or threads(left, right), trust)
    with Progress("diff") as progress:
        compared = compare(left, right, options, progress)
    bound.close()
    if as_json:
        typer.echo(json.dumps(compared.to_json(names_same=show_all), indent=2))
    else:
        _say(compared, show_all=show_all)
    raise typer.Exit(_status(compared))


def _say(compared: Compared, *, show_all: bool) -> None:
    from ckpt_conformance.report import diff_lines

    for line in diff_lines.lines(compared, show_all=show_all):
        terminal.say(line)


def _status(compared: Compared) -> int:
    if not compared.is_judged:
        return UNDECIDED
    return DIFFERENT if compared.differences else SAME


def _rename(text: str) -> tuple[re.Pattern[str], str]:
    """Divide at the last `=`: a pattern may have one, as in `(?=...)`."""
    pattern, sign, replacement = text.rpartition("=")
    if not sign or not pattern:
        raise requests.RequestError(f"--rename {text!r} is no REGEX=NEW, as in '^module\\.='")
    return _pattern(pattern, "--rename"), replacement


def _pattern(text: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise requests.RequestError(
            f"{option} {text!r} is no regular expression: {error}"
        ) from error


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(diff)
