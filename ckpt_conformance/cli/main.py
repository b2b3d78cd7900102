"""The command line: each command has a module of its own, which registers it here.

Exit status: 0 certified, 1 violations, 2 usage error, 3 undecided (UNKNOWN, or the harness itself
failed), 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by a hang-up. Results go to stdout, progress and
errors to stderr.
"""

from __future__ import annotations

import sys
from typing import Annotated

from ckpt_conformance import __version__
from ckpt_conformance.contract import registry, requests, written
from ckpt_conformance.report import environment
from ckpt_conformance.subject import bundle

try:
    import typer

    from ckpt_conformance.cli import (
        certify,
        combine,
        explore,
        exporting,
        listing,
        mutants,
        running,
        write,
    )
    from ckpt_conformance.cli.disk import diff, drills, fsck
except ModuleNotFoundError as missing:
    if str(missing.name).startswith("ckpt_conformance"):
        raise
    sys.stderr.write(
        f"error: the command line needs {missing.name}, which is not installed; "
        "install it with: pip install 'ckpt-conformance[cli]'\n"
    )
    raise SystemExit(2) from None

USAGE_ERRORS = (
    *(requests.RequestError, environment.OutputError, registry.AdapterError),
    *(bundle.BundleError, written.WrittenError),
)

app = typer.Typer(
    name="ckpt-conformance",
    help="Certify checkpoint managers: what comes back after a crash, and the evidence.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def top(
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Certify checkpoint managers: what comes back after a crash, and the evidence."""
    if version:
        typer.echo(f"ckpt-conformance {__version__}")
        raise typer.Exit


DISK = (fsck, drills, diff, exporting)
for command in (certify, write, mutants, combine, listing, explore, *DISK):
    command.register(app)


def main() -> None:
    """Run the command line; a fault of the harness must not look like a violation."""
    running.run(app, USAGE_ERRORS)


if __name__ == "__main__":
    main()
