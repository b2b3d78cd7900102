"""The command `combine`: one report of the results of all shards."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_conformance.cli import certify, explorations, generated, mutants, parts
from ckpt_conformance.cli.disk import fsck
from ckpt_conformance.cli.disk import results as fsck_results
from ckpt_conformance.cli.sessions import session_of
from ckpt_conformance.cli.stopping import INTERRUPTED
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.report import certificate, terminal
from ckpt_conformance.work import lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.cli.sessions import Session
    from ckpt_conformance.plugin.options import CheckOptions

UNDECIDED = 3


def combine(
    results: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Files that --results wrote, of one run.")
    ],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the report's files.")] = Path("reports"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead (of mutants and fsck).")
    ] = False,
) -> None:
    """Make one report of the results of all shards, and say which shard is missing."""
    if lines.command_of(results[0]) == fsck_results.COMMAND:
        raise typer.Exit(fsck.combine(results, as_json=as_json))
    whole = lines.combine([lines.read(path) for path in results])
    if whole.header.command == explorations.COMMAND:
        status = explorations.combine(whole, results, out)
    elif whole.header.command == generated.COMMAND:
        status = generated.deliver(whole, as_json=as_json)
    else:
        status = _of_session(whole, results, out, as_json=as_json)
    stopped = whole.stopped if whole.undone else ()  # who was stopped after the last item lost none
    if parts.say_lacking(whole.missing, stopped):
        status = UNDECIDED if status in (0, INTERRUPTED) else status
    raise typer.Exit(status)


def _of_session(whole: lines.Results, results: Sequence[Path], out: Path, *, as_json: bool) -> int:
    """Make the matrix or the certificates of a session of the suites."""
    session = replace(session_of(whole), interrupted=False)  # who combines has stopped nothing
    options = _options(whole.header, out)
    if whole.header.command == "mutants":
        return mutants.deliver(session, options, as_json=as_json)
    return _certificates(session, options, results)


def _options(header: lines.Header, out: Path) -> CheckOptions:
    """Read what was asked for; raises RequestError if the suite here plans something else."""
    from ckpt_conformance.plugin.options import CheckOptions
    from ckpt_conformance.plugin.plan import plan_of

    options = CheckOptions.from_plain(header.request)
    if plan_of(options).digest != header.plan:
        reason = "these results were planned by another version of the suite"
        raise RequestError(
            f"{reason} ({header.version}, commit {header.commit}); combine them with that one"
        )
    return replace(options, out=out)


def _certificates(session: Session, options: CheckOptions, files: Sequence[Path]) -> int:
    certify.prepare_files(options, None, None)
    made = certify.build_results(session, options)
    for result, folder in zip(made, certify.folders_of(options).values(), strict=True):
        for name in certificate.bundles_named(result):
            _copy_bundle(name, folder, files)
    return certify.deliver(made, options, None, None)


def _copy_bundle(name: str, folder: Path, files: Sequence[Path]) -> None:
    """Copy a bundle from beside the shard's results, where that kept one."""
    target = folder / "bundles" / name
    for part in files:
        source = part.parent / "bundles" / name
        if source.is_dir() and not target.exists():
            shutil.copytree(source, target, symlinks=True)
    if not target.exists():
        terminal.say(
            f"note: bundle {name} is not beside the results; let each shard write --out and "
            "--results to one folder, and bring all of it",
            error=True,
        )


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(combine)
