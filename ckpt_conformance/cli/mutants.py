"""The command `mutants`: the kill matrix."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ckpt_conformance.cli.options import Budget, Jobs, Seed, Spending
from ckpt_conformance.cli.sessions import INTERRUPTED, run
from ckpt_conformance.contract import requests
from ckpt_conformance.contract.catalogue import PROFILES
from ckpt_conformance.report import environment, files, kill_matrix
from ckpt_conformance.report.result import encode

CONTROLS = ("reference", "reference-dcp", "reference-trainer")


def mutants(
    only: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="This mutant and its base only.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    jobs: Jobs = None,
    budget: Spending = Budget.QUICK,
    seed: Seed = 0,
) -> None:
    """Print the kill matrix: each mutant must violate exactly what it was built to break."""
    from ckpt_conformance.mutants import all_mutants
    from ckpt_conformance.plugin.options import SessionOptions

    known = all_mutants()
    requests.check_names("mutant", only or (), known)
    chosen = {name: known[name] for name in only or known}
    bases = {info.base for info in chosen.values()}
    controls = [name for name in CONTROLS if not only or name in bases]
    options = SessionOptions(
        adapters=(*controls, *(f"mutant:{name}" for name in chosen)),
        claims=tuple(PROFILES),
        budget=str(budget),
        seed=seed,
        jobs=jobs or environment.usable_cpus(),
    )
    session = run(options, "mutants")
    if not session.interrupted:
        # A control without any outcome was not shown to be clean.
        session.outcomes |= {name: session.outcomes.get(name, []) for name in options.adapters}
    matrix = kill_matrix.kill_matrix(chosen, session.outcomes, interrupted=session.interrupted)
    if as_json:
        typer.echo(json.dumps(encode(matrix), indent=2))
    else:
        files.show("kill_matrix.txt.j2", matrix=matrix, pad=max(map(len, (*controls, *chosen))))
    raise typer.Exit(INTERRUPTED if session.interrupted else int(not matrix.exact))


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(mutants)
