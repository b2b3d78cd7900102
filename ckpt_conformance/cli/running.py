"""Run a command line: what ends it, and with which status."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ckpt_conformance.cli import stopping
from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    import typer

USAGE, UNDECIDED = 2, 3  # as `certificate` has them
NO_ROOM = {  # for what is written, and what to do where that is not plain
    errno.ENOSPC: "",
    errno.EDQUOT: "",
    errno.EFBIG: "; raise the limit of the size of files (ulimit -f)",
}
NO_READER = 128 + signal.SIGPIPE  # what a shell says of a command whose reader went away


def run(app: typer.Typer, usage_errors: tuple[type[Exception], ...]) -> None:
    """Run the commands; a fault of the harness must not look like a violation."""
    # An adapter beside the user is named as `my_adapter:make`, as `python -m` would find it.
    sys.path.insert(0, str(Path.cwd()))
    _open_descriptors()
    stop = stopping.Stop()
    try:
        _run(app, usage_errors, stop)
    except SystemExit as left:
        if stop.is_at_once and stopping.threads_wait():
            stopping.leave_at_once(left.code if isinstance(left.code, int) else USAGE)
        raise


def _run(app: typer.Typer, usage_errors: tuple[type[Exception], ...], stop: stopping.Stop) -> None:
    try:
        try:
            with stop:
                app()
        finally:
            stop.leave()
    except SystemExit as left:
        if stop.status:  # whatever it left with: 1, as typer has it, would mean "violations"
            raise SystemExit(stop.status) from None
        if isinstance(left.__context__, BrokenPipeError):  # typer leaves with 1 here, too
            raise SystemExit(NO_READER) from None
        raise
    except usage_errors as error:
        terminal.say(f"error: {terminal.shown(error)}", error=True)
        raise SystemExit(USAGE) from None
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename is not None:
            _report_fault()
        reason = f"{error.strerror}{NO_ROOM[error.errno]}"
        terminal.say(f"error: the output is not whole: {reason}", error=True)
        raise SystemExit(USAGE) from None
    except Exception:  # noqa: BLE001  Python itself would leave with 1, which means "violations"
        _report_fault()


def _report_fault() -> NoReturn:
    """Print the traceback of what is being handled, and leave as undecided."""
    traceback.print_exc()
    sys.stderr.write(
        "error: the harness failed; this says nothing about the manager. Please report it.\n"
    )
    raise SystemExit(UNDECIDED) from None


closed: set[str] = set()
"""The streams of Python that whoever started this process had closed."""


def _open_descriptors() -> None:
    """Open what was closed by `>&-`: the next file would get its number, and be printed into."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            closed.add(name)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w"))
