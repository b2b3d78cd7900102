"""The command `mutants`: the kill matrix."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_conformance.cli import generated
from ckpt_conformance.cli.options import (
    Budget,
    CacheFolder,
    Deadline,
    Jobs,
    OnCluster,
    Part,
    ResultLines,
    Seed,
    Spending,
    TlsAuthority,
    TlsCertificate,
    TlsKey,
    Where,
    whole,
)
from ckpt_conformance.cli.sessions import (
    Session,
    fill_in,
    run,
    say_part,
    work_of,
)
from ckpt_conformance.cli.stopping import INTERRUPTED
from ckpt_conformance.cluster.place import Tls
from ckpt_conformance.contract import requests
from ckpt_conformance.contract.catalogue import PROFILES
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.report import environment, files, kill_matrix
from ckpt_conformance.report.result import encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.plugin.options import CheckOptions

CONTROLS = ("reference", "reference-dcp", "reference-trainer")


Generated = Annotated[
    bool,
    typer.Option(
        "--generated", help="Every small change of the reference manager, to its first kill."
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID", help="This mutant and its base only; with --generated a pattern of names."
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(parser=whole(1, 10**6), metavar="N", help="With --generated: so many, by --seed."),
]
OfRanks = Annotated[
    bool,
    typer.Option(
        "--ranks", help="With --generated: of the modules of several ranks; takes far longer."
    ),
]
NamesOnly = Annotated[
    bool, typer.Option("--list", help="With --generated: print names and changes alone.")
]
Whole = Annotated[
    bool,
    typer.Option(
        "--whole",
        help="Run checks that enter nothing of a change, too; with --generated, each check on "
        "all bases at once, not on one and then on the others.",
    ),
]


def mutants(  # noqa: PLR0913  one parameter for each option
    only: Only = None,
    *,
    is_generated: Generated = False,
    sample: Sample = None,
    ranks: OfRanks = False,
    only_list: NamesOnly = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    jobs: Jobs = None,
    budget: Spending = Budget.QUICK,
    seed: Seed = 0,
    deadline: Deadline = 60,
    shard: Part = "1/1",
    results: ResultLines = None,
    cache: CacheFolder = None,
    is_whole: Whole = False,
    on: OnCluster = None,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
) -> None:
    """Print the kill matrix: each mutant must violate exactly what it was built to break."""
    from ckpt_conformance.mutants import all_mutants
    from ckpt_conformance.plugin.options import SessionOptions

    if is_generated:
        refuse({"--jobs": jobs, "--on": on, "--budget": str(budget) != "quick"})
        asked = generated.Request(tuple(only or ()), sample, seed, ranks, is_whole)
        if only_list:
            generated.say_names(asked)
            raise typer.Exit
        raise typer.Exit(generated.command(asked, work_of(shard, results, cache), as_json=as_json))
    refuse_without({"--sample": sample, "--ranks": ranks, "--list": only_list})
    where = Where(on, Tls(tls_ca, tls_cert, tls_key), jobs)
    # On a cluster all pairs run: to record here what is entered would take longer.
    work = replace(work_of(shard, results, cache, where), is_whole=is_whole or on is not None)
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
        deadline=float(deadline),
        pretends=True,
        jobs=jobs or environment.usable_cpus(),
    )
    session = run(options, "mutants", work=work)
    if work.shard.count > 1:
        raise typer.Exit(say_part(session, work))
    raise typer.Exit(deliver(session, options, as_json=as_json))


def refuse(given: Mapping[str, object]) -> None:
    """Raise RequestError for an option that generated mutants do not have."""
    for name, value in given.items():
        if value:
            raise RequestError(
                f"{name} does not go with --generated: one server judges all mutants at the quick "
                "budget; for several processes or machines run each --shard K/N by itself"
            )


def refuse_without(given: Mapping[str, object]) -> None:
    """Raise RequestError for an option that only generated mutants have."""
    for name, value in given.items():
        if value:
            raise RequestError(f"{name} goes with --generated")


def deliver(session: Session, options: CheckOptions, *, as_json: bool) -> int:
    """Print the matrix of a session; return the exit status."""
    from ckpt_conformance.mutants import all_mutants

    asked = set(options.adapters)
    chosen = {name: info for name, info in all_mutants().items() if f"mutant:{name}" in asked}
    if not session.interrupted:  # what has no outcome was not shown to be clean
        fill_in(session, options)
    matrix = kill_matrix.kill_matrix(
        chosen, session.outcomes, session.unreached, interrupted=session.interrupted
    )
    if as_json:
        typer.echo(json.dumps(encode(matrix), indent=2))
    else:
        names = (*(name for name in options.adapters if not name.startswith("mutant:")), *chosen)
        files.show("kill_matrix.txt.j2", matrix=matrix, pad=max(map(len, names)))
    return INTERRUPTED if session.interrupted else int(not matrix.exact)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(mutants)
