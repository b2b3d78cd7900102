"""The command `write`: what an adapter saves under this release of torch, for others to load."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ckpt_conformance.cli.options import Budget, Seed
from ckpt_conformance.cli.progress import Progress
from ckpt_conformance.contract import requests, trees, written
from ckpt_conformance.contract.registry import check_name
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown
from ckpt_conformance.processes.scratch import Scratch
from ckpt_conformance.report import certificate, environment, files

if TYPE_CHECKING:
    from ckpt_conformance.contract.written import Written

UNDECIDED = certificate.UNDECIDED


def write(
    adapters: Annotated[
        list[str], typer.Argument(metavar="ADAPTER", help="A bundled name, or module:attribute.")
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(help="A new folder, or an empty one; each of several adapters has its own."),
    ],
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Save a job of this kind only (repeatable)."),
    ] = None,
    budget: Annotated[
        Budget, typer.Option(help="quick: the kinds of jobs that releases changed; full: all.")
    ] = Budget.QUICK,
    seed: Seed = 0,
) -> None:
    """Save jobs under the installed release of torch, for `certify --written-by` under another."""
    from ckpt_conformance.subject import writing

    requests.check_names("kind", kind or (), writing.FULL)
    chosen = tuple(dict.fromkeys(adapters))
    for name in chosen:
        check_name(name)
    folders = environment.output_folders(out, chosen)
    for folder in (out, *folders.values()):
        _check_empty(folder)
    failed = False
    for name, folder in folders.items():
        failed |= not _write_one(name, folder, seed, str(budget), tuple(kind or ()))
    raise typer.Exit(UNDECIDED if failed else 0)


def _check_empty(folder: Path) -> None:
    """Refuse a folder with something in it: what is there may be all that another release left.

    Raises RequestError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise requests.RequestError(
            f"--out {folder} is not empty, and nothing is overwritten: name a new folder"
        )


def _write_one(name: str, folder: Path, seed: int, budget: str, kinds: tuple[str, ...]) -> bool:
    """Write the folder of one adapter; return whether at least a plain job was saved."""
    from ckpt_conformance.cli.explore import subject_of
    from ckpt_conformance.subject import writing

    with Scratch("write") as scratch:
        made = scratch / "made"
        made.mkdir()
        with Progress(name, "saving"), subject_of(name, seed, budget) as subject:
            try:
                record = writing.write(subject, made, kinds)
            except (NotApplicable, Unknown) as error:
                files.say(f"error: {name}: nothing was written: {error}", error=True)
                return False
        _publish(made, folder, record)
    _say(name, folder, record)
    return True


def _publish(scratch: Path, folder: Path, record: Written) -> None:
    """Copy the checkpoints, then write the record: a folder without it is not whole.

    Raises OutputError where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trees.copy(scratch, folder, into=True)
    except OSError as error:
        raise environment.OutputError(
            f"cannot write to {folder}: {error.strerror}; name another folder with --out"
        ) from error
    certificate.write_json(folder / written.RECORD, msgspec.to_builtins(record))


def _say(name: str, folder: Path, record: Written) -> None:
    names = ", ".join(run.folder for run in record.runs)
    files.say(f"{name}, torch {record.torch}: {names} -> {folder}")
    for run, reason in record.left_out.items():
        files.say(f"  left out: {run}: {reason}")
    files.say(f"  elsewhere: ckpt-conformance certify {name} --profile versions --written-by DIR")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(write)
