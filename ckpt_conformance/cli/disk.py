"""The commands that need a directory and nothing else, without what certifying needs.

A launch script waits for `fsck --newest-whole`: these start in half the time.
"""

from __future__ import annotations

import typer

from ckpt_conformance.cli import diff, fsck, running
from ckpt_conformance.contract import requests

app = typer.Typer(name="ckpt-conformance", add_completion=False, pretty_exceptions_enable=False)
fsck.register(app)
diff.register(app)


def main() -> None:
    """Run one of them."""
    running.run(app, (requests.RequestError,))
