"""What the files of results of every command have in common, and what is said of them."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance import __version__
from ckpt_conformance.report import environment, terminal
from ckpt_conformance.work.lines import Header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.work.identity import Identity
    from ckpt_conformance.work.items import Shard


def header(  # noqa: PLR0913  one for each thing that it says
    command: str,
    request: Mapping[str, Any],
    *,
    plan: str,
    shard: Shard,
    items: Iterable[str] = (),
    described: Mapping[str, str | int | None] | None = None,
    depends: Identity | None = None,
) -> Header:
    """Say what was asked for, where and when, and which part of the `plan` this is.

    `described` is the machine of the run, this one unless it is given; `depends` is what results
    depend on besides.
    """
    here = environment.describe_environment(Path(tempfile.gettempdir()))
    return Header(
        command=command,
        version=__version__,
        commit=environment.suite_commit(),
        request=dict(request),
        environment=dict(here if described is None else described),
        depends=depends,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        plan=plan,
        shard=str(shard),
        items=list(items),
    )


def say_lacking(missing: Sequence[str], stopped: Sequence[str]) -> bool:
    """Name the shards of which there is no file, or not all results; return whether there are."""
    for shards, what in ((missing, "missing"), (stopped, "stopped before the end")):
        if shards:
            many, names = terminal.count(len(shards), "shard"), ", ".join(shards)
            advice = "run them with the same arguments"
            terminal.say(f"error: {many} {what}: {names}; {advice}", error=True)
    return bool(missing or stopped)


def complete(results: Path | None) -> str:
    """Say where the results of a part are, and what to do with them."""
    return f"{results}; all shards: ckpt-conformance combine FILE..."


def stopped(results: Path | None) -> str:
    """Say what a run that was stopped has left."""
    return f"Stopped before the end; {results} has what was found."
