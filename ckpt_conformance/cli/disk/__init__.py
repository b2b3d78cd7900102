"""The commands that need a directory and nothing else, without what certifying needs.

A launch script waits for `fsck --newest-whole`: these start in half the time.
"""

from __future__ import annotations

import typer

from ckpt_conformance.cli import running
from ckpt_conformance.cli.disk import diff, drills, fsck
from ckpt_conformance.contract import requests

app = typer.Typer(name="ckpt-conformance", add_completion=False, pretty_exceptions_enable=False)
for command in (fsck, drills, diff):
    command.register(app)


def main() -> None:
    """Run one of them."""
    running.run(app, (requests.RequestError,))
