"""Run a command line: what ends it, and with which status."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance import report_terminal, stopping

if TYPE_CHECKING:
    import typer

USAGE, UNDECIDED = 2, 3  # as `certificate` has them


def run(app: typer.Typer, usage_errors: tuple[type[Exception], ...]) -> None:
    """Run the commands; a fault of the harness must not look like a violation."""
    # An adapter beside the user is named as `my_adapter:make`, as `python -m` would find it.
    sys.path.insert(0, str(Path.cwd()))
    stop = stopping.Stop()
    try:
        with stop:
            app()
    except SystemExit:
        if stop.status:  # whatever it left with: 1, as typer has it, would mean "violations"
            raise SystemExit(stop.status) from None
        raise
    except usage_errors as error:
        report_terminal.say(f"error: {report_terminal.shown(error)}", error=True)
        raise SystemExit(USAGE) from None
    except Exception:  # noqa: BLE001  Python itself would leave with 1, which means "violations"
        traceback.print_exc()
        sys.stderr.write(
            "error: the harness failed; this says nothing about the manager. Please report it.\n"
        )
        raise SystemExit(UNDECIDED) from None
