"""The commands that need a directory and nothing else, without what certifying needs.

A launch script waits for `fsck --newest-whole`: these start in half the time.
"""

from __future__ import annotations

import typer

from ckpt_conformance import cli_diff, cli_fsck, cli_running
from ckpt_conformance.contract import requests

app = typer.Typer(name="ckpt-conformance", add_completion=False, pretty_exceptions_enable=False)
cli_fsck.register(app)
cli_diff.register(app)


def main() -> None:
    """Run one of them."""
    cli_running.run(app, (requests.RequestError,))
