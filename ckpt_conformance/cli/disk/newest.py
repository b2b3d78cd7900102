"""`fsck --newest-whole`: one path for a launch script, and on stderr why it is no newer one."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ckpt_conformance.cli import running
from ckpt_conformance.contract import requests
from ckpt_conformance.report import terminal
from ckpt_conformance.report.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.cli.disk.pin import Pinned
    from ckpt_conformance.cli.stopping import Bound
    from ckpt_conformance.fsck.judge.gate import Gate
    from ckpt_conformance.fsck.judge.judge import Judged, Options
    from ckpt_conformance.fsck.source.findings import Report
    from ckpt_conformance.fsck.source.places import Where

FOUND, NONE, UNDECIDED = 0, 1, 2


@dataclass(frozen=True)
class Answer:
    """How the answer is given.

    Attributes:
        as_json: all findings, instead of the path.
        null: a NUL after the path, instead of a newline.
        pin: the folder in which the checkpoint is to be held; None for none.
        may_copy: whether it may be copied where its blocks cannot be shared.

    """

    as_json: bool = False
    null: bool = False
    pin: Path | None = None
    may_copy: bool = False

    def check(self, place: Where, *, is_newest: bool) -> None:
        """Raise RequestError for options that do not go together."""
        if is_newest and "stdout" in running.closed:
            raise requests.RequestError("standard output is closed: nobody would get the answer")
        if self.null and (self.as_json or not is_newest):
            raise requests.RequestError("--null is for the path that --newest-whole prints")
        if self.may_copy and self.pin is None:
            raise requests.RequestError("--pin-copy is for --pin DIR")
        if self.pin is None:
            return
        from ckpt_conformance.cli.disk import pin

        if not is_newest:
            raise requests.RequestError("--pin is for what --newest-whole finds")
        pin.check(place, self.pin)


def judge(
    place: Where,
    options: Options,
    progress: Callable[[], Any],
    bound: Bound,
    answer: Answer,
) -> int:
    """Find the newest whole checkpoint, pin it if that was asked, and print it."""
    from ckpt_conformance.fsck.judge.gate import Gate
    from ckpt_conformance.fsck.source import places

    with contextlib.ExitStack() as stack:
        hold = None
        if answer.pin is not None:
            from ckpt_conformance.cli.disk.pin import Pin

            hold = stack.enter_context(Pin(answer.pin, answer.may_copy))
        with progress() as shown:
            gate = Gate(place, options, shown, hold)
            judged = gate.run()
        bound.close()
        places.check_reached(place)
        newest = judged.newest_whole
        ending = _ending(judged)
        pinned = None
        if hold and newest and ending.status == FOUND:
            _check_still_there(gate, newest)
            pinned = hold.keep(newest)
        _say(gate, judged, pinned, answer, ending)
    return ending.status


def _check_still_there(gate: Gate, newest: Report) -> None:
    """Raise RequestError where the answer is not true any more."""
    if not gate.is_still_there():
        raise requests.RequestError(
            f"{one_line(newest.path)} was whole, and changed or went before it could be named: "
            "a job saves or rotates there now. Ask again, or hold it by --pin DIR"
        )


def _say(
    gate: Gate, judged: Judged, pinned: Pinned | None, answer: Answer, ending: _Ending
) -> None:
    """Print the answer, last of all, if it is still true."""
    if not answer.as_json:
        _say_passed(judged, ending.strange)
        for line in pinned.lines() if pinned else ():
            terminal.say(line, error=True)
    newest = judged.newest_whole
    if newest is not None and pinned is None:
        _check_still_there(gate, newest)
    if answer.as_json:
        plain: dict[str, Any] = {**judged.to_json()}
        if pinned:
            plain["pin"] = pinned.to_json()
        typer.echo(json.dumps(plain, indent=2))
    elif newest is not None and ending.status == FOUND:
        _print(pinned.path if pinned else newest.path, null=answer.null)


def _say_passed(judged: Judged, strange: str | None) -> None:
    """Say what was passed over, what changed meanwhile, and why there is no answer."""
    from ckpt_conformance.report import fsck_lines

    newest = judged.newest_whole
    for report in judged.reports:
        if report is not newest:
            where, why = one_line(report.path), fsck_lines.why_not(report, judged.options)
            terminal.say(f"passed over: {where}: {fsck_lines.verdict(report)}: {why}", error=True)
    for path, change in judged.meanwhile:
        what = f"{fsck_lines.CHANGES[change]} while others were judged, and was not judged"
        terminal.say(f"passed over: {one_line(path)} {what}", error=True)
    if hidden := hidden_by(judged):
        what = "could not be judged, and may be the newest whole checkpoint"
        terminal.say(f"{one_line(hidden.path)} {what}", error=True)
    elif strange:
        what = "may be a checkpoint, and has no format that fsck knows"
        terminal.say(f"{one_line(judged.path / strange)} {what}", error=True)
    elif newest is None:
        terminal.say(f"no whole checkpoint in {one_line(judged.path)}", error=True)


def _print(path: Where, *, null: bool) -> None:
    """Print a path; raises RequestError for one that a script would take for two."""
    name = os.fsencode(str(path))  # a name need not be UTF-8
    if not null and len(name.splitlines()) != 1:
        raise requests.RequestError(
            f"the path {one_line(path)} has a line break: read it with --null"
        )
    typer.echo(name + (b"\0" if null else b"\n"), nl=False)


def hidden_by(judged: Judged) -> Report | None:
    """Return the newest checkpoint that could not be judged, if no newer one is whole."""
    from ckpt_conformance.fsck.source.findings import State

    newest = judged.newest_whole
    telling = (one for one in judged.reports if one.state is State.UNKNOWN or one == newest)
    first = next(telling, None)
    return first if first and first.state is State.UNKNOWN else None


class _Ending(NamedTuple):
    """How the command ends; `strange` is a file that may be a checkpoint of another format."""

    status: int
    strange: str | None


def _ending(judged: Judged) -> _Ending:
    """Find out how the command ends; a folder without a checkpoint is looked through once more."""
    from ckpt_conformance.fsck.judge import gate

    strange = None if judged.reports else gate.of_another_format(judged.path)
    if hidden_by(judged) or strange:
        return _Ending(UNDECIDED, strange)
    return _Ending(FOUND if judged.newest_whole else NONE, strange)
