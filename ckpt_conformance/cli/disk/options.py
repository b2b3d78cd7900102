"""The options of `fsck`, and those that `diff` shares with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpt_conformance.cli.options import seconds


def share(value: object) -> float:
    """Read a share, above 0 and up to 1: `5%` or `0.05`."""
    text = str(value)
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise typer.BadParameter(f"{text!r} is no share above 0 and up to 1, as 5% or 0.05")
    return number


PlaceToJudge = Annotated[
    str,
    typer.Argument(metavar="DIR", help="A run's folder, a checkpoint, or a file; a path or a URL."),
]
NewestWhole = Annotated[
    bool,
    typer.Option(
        help="Print the path of the newest whole checkpoint; 1 if there is none, 2 if unknown."
    ),
]


def _explain(topic: str | None) -> None:
    """Print what a topic means, and end."""
    if topic is None:
        return
    from ckpt_conformance.report import explanations, terminal

    for line in explanations.lines(topic):
        terminal.say(line)
    raise typer.Exit


Explain = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="TOPIC",
        is_eager=True,
        callback=_explain,
        help="Say what findings about a topic, as `checksum`, mean, and what to do; needs no DIR.",
    ),
]
Null = Annotated[
    bool,
    typer.Option("--null", "-0", help="End the path of --newest-whole with a NUL, not a newline."),
]
Pin = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Hold what --newest-whole finds in a new folder, as links that no rotation removes.",
    ),
]
PinCopy = Annotated[
    bool,
    typer.Option(help="Copy for --pin where blocks cannot be shared; also to other file systems."),
]
MetadataOnly = Annotated[
    bool, typer.Option(help="Read structure and sizes only: no digest, no CRC.")
]
Sample = Annotated[
    float,
    typer.Option(
        parser=share,
        metavar="SHARE",
        help="Read this share of the payload only, as 5% or 0.05.",
    ),
]
RequireCoverage = Annotated[
    float | None,
    typer.Option(
        parser=share,
        metavar="SHARE",
        help="Exit 1 where less than this share, as 95%, was compared with a digest or a CRC.",
    ),
]
CountNans = Annotated[bool, typer.Option(help="Count NaNs and infinities of each tensor.")]
Details = Annotated[
    bool, typer.Option(help="Show all that was read and found of whole checkpoints, too.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
FileTimeout = Annotated[
    float | None,
    typer.Option(
        parser=seconds,
        metavar="SECONDS",
        help="Stop reading a file after so long; its checkpoint is unknown.",
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Judge what is in this plan, and list nothing anew."),
]
WritePlan = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="List only, and write the plan that shards can read."),
]
AllowName = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE.NAME|@FILE",
        help="A name in pickles that you vouch for; a file has one a line, # begins a comment.",
    ),
]
AllowCode = Annotated[
    bool, typer.Option(help="Vouch for all code that a load of these files may run.")
]
