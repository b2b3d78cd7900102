"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_conformance.cluster.place import Place, Tls
from ckpt_conformance.contract.requests import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.work.items import Shard

# Values are the names in lower case.
Budget = StrEnum("Budget", ["QUICK", "FULL"])
Device = StrEnum("Device", ["CPU", "CUDA"])


MOST_SECONDS = 86_400 * 365  # what a timer takes


def whole(low: int, high: int) -> Callable[[str], int]:
    """Make a parser of whole numbers that shows the value it refuses."""

    def parse(value: object) -> int:
        text = str(value)
        if not (text.isdecimal() and low <= int(text) <= high):
            raise typer.BadParameter(f"{text!r} is no whole number from {low} to {high}")
        return int(text)

    return parse


def seconds(value: object) -> float:
    """Read a time above 0, in seconds."""
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST_SECONDS:
        raise typer.BadParameter(f"{str(value)!r} is no number of seconds above 0, as 30 or 0.5")
    return number


def part_of(shard: str, results: Path | None) -> Shard:
    """Read --shard; raises RequestError if it is none, or has no file for its results."""
    from ckpt_conformance.work.items import Shard

    part = Shard.parse(shard)
    if part.count > 1 and results is None:
        raise RequestError(
            f"--shard {part} makes no report: name a file with --results FILE, and give the files "
            "of all shards to `ckpt-conformance combine`"
        )
    return part


@dataclass(frozen=True)
class Where:
    """The options that name a cluster, as they were given; `jobs_are` is what `--jobs` counts."""

    on: str | None = None
    tls: Tls = field(default_factory=Tls)
    jobs: int | None = None
    jobs_are: str = "processes"

    def place(self) -> Place | None:
        """Read them; raises RequestError for what they cannot be."""
        if self.on is None:
            if self.tls:
                raise RequestError(
                    "--tls-ca, --tls-cert and --tls-key go with --on tls://HOST:PORT"
                )
            return None
        if self.jobs is not None:
            raise RequestError(
                f"--jobs {self.jobs} is a number of {self.jobs_are} here, and --on {self.on} has "
                "workers of its own; leave one of them out"
            )
        return Place.parse(self.on, self.tls)


Names = list[str] | None
Jobs = Annotated[
    int | None,
    typer.Option(parser=whole(1, 1024), metavar="N", help="Processes; default: one a core."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        parser=whole(1, 1024),
        metavar="N",
        help="Threads; default: one a core, and at least 8 for a URL.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        parser=seconds,
        metavar="SECONDS",
        help="Stop reading after so long; what was not read is unknown.",
    ),
]
Part = Annotated[
    str,
    typer.Option(
        "--shard", metavar="K/N", help="Run this part only; `combine` makes one report of all."
    ),
]
ResultLines = Annotated[
    Path | None,
    typer.Option(
        "--results",
        metavar="FILE",
        help="Write each result as one line of JSON; its folder is made.",
    ),
]
CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache", metavar="DIR", help="Keep results there; what has not changed is not run again."
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="CLUSTER",
        help="Run on dask workers: dask://HOST:PORT, tls://HOST:PORT, or local:N.",
    ),
]
TlsAuthority = Annotated[
    Path | None, typer.Option("--tls-ca", metavar="FILE", help="Whom to trust with --on tls://.")
]
TlsCertificate = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="FILE", help="This client's certificate.")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="And its key.")]
Spending = Annotated[Budget, typer.Option(help="quick: a sample of the faults; full: all of them.")]
Seed = Annotated[
    int,
    typer.Option(parser=whole(0, 2**32 - 1), metavar="N", help="Every choice follows from it."),
]
Deadline = Annotated[
    int,
    typer.Option(
        parser=whole(1, 86_400),
        metavar="SECONDS",
        help="What one child may take before it counts as a hang; more on a slow machine.",
    ),
]
OnDevice = Annotated[
    Device, typer.Option(help="Where ranks compute; cuda: NCCL, and a GPU for each rank.")
]
WrittenBy = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="Load what `write` made under another torch, in DIR and below (repeatable).",
    ),
]
