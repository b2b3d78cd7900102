"""The command `rehydrate`: the model of a DCP checkpoint as one file that plain torch opens."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  typer reads the annotations
from typing import Annotated

import typer

from ckpt_conformance.contract import requests
from ckpt_conformance.report import environment, files


def rehydrate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DCP_DIR", help="A DCP directory of the reference manager.")
    ],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The torch file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
) -> None:
    """Write the model of a verified DCP checkpoint as one torch file, bit for bit."""
    from ckpt_conformance.reference_impl import CheckpointError, export_model

    if out.exists() and not force:
        raise requests.RequestError(f"--out {out} is there: name a new file, or give --force")
    if not out.absolute().parent.is_dir():
        raise requests.RequestError(f"--out {out}: there is no folder {out.parent}; make it first")
    try:
        exported = export_model(checkpoint, out)
    except CheckpointError as error:
        raise requests.RequestError(f"{checkpoint} is not written as one file: {error}") from error
    except OSError as error:
        raise environment.OutputError(
            f"cannot write to {out}: {error.strerror}; name another file with --out"
        ) from error
    files.say(f"step {exported.step}: {exported.tensors} entries -> {out}")
    if exported.scales is not None:
        files.say(f"  scales of 8-bit training: {exported.scales.name}, beside it")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(rehydrate)
