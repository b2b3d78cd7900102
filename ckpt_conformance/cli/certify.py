"""The command `certify`: judge managers, write their certificates, hold them against a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_conformance.cli.options import (
    Budget,
    CacheFolder,
    Deadline,
    Device,
    Jobs,
    Names,
    OnCluster,
    OnDevice,
    Part,
    ResultLines,
    Seed,
    Spending,
    TlsAuthority,
    TlsCertificate,
    TlsKey,
    Where,
    WrittenBy,
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
from ckpt_conformance.contract import written
from ckpt_conformance.contract.catalogue import PROFILES, load_catalogue
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.report import baseline, certificate, environment, files

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt_conformance.plugin.options import CheckOptions
    from ckpt_conformance.report.result import Result

MEANINGS = {0: "certified", 1: "violated", 3: "undecided"}


def _unique(given: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(given or ()))


def certify(  # noqa: PLR0913  one parameter for each option
    adapters: Annotated[
        list[str], typer.Argument(metavar="ADAPTER", help="A bundled name, or module:attribute.")
    ],
    *,
    profile: Annotated[Names, typer.Option(help="Judge this profile only (repeatable).")] = None,
    claim: Annotated[
        Names, typer.Option(help="Make the practice of this profile a MUST (repeatable).")
    ] = None,
    only: Annotated[
        Names, typer.Option(metavar="ID", help="Judge this invariant only (repeatable).")
    ] = None,
    budget: Spending = Budget.QUICK,
    jobs: Jobs = None,
    seed: Seed = 0,
    deadline: Deadline = 60,
    device: OnDevice = Device.CPU,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the files; each of several adapters has its own."),
    ] = Path("reports"),
    known: Annotated[
        Path | None, typer.Option("--baseline", help="Exit with 0 while only these are violated.")
    ] = None,
    write_baseline: Annotated[
        Path | None,
        typer.Option(help="Write what is violated now; the exit status stays what it is."),
    ] = None,
    catalogue: Annotated[
        int | None,
        typer.Option(parser=whole(1, 9999), metavar="N", help="Pin the version of the invariants."),
    ] = None,
    written_by: WrittenBy = None,
    shard: Part = "1/1",
    results: ResultLines = None,
    cache: CacheFolder = None,
    on: OnCluster = None,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
) -> None:
    """Certify checkpoint managers; write result.json, report.html, junit.xml and summary.md."""
    from ckpt_conformance.plugin.options import SessionOptions

    options = SessionOptions(
        adapters=_unique(adapters),
        # A claim outside the chosen profiles would never be tested.
        profiles=_unique((*profile, *(claim or ()))) if profile else (),
        only=_unique(only),
        claims=_unique(claim),
        budget=str(budget),
        seed=seed,
        deadline=float(deadline),
        device=str(device),
        jobs=jobs or environment.usable_cpus(),
        out=out,
        catalogue=catalogue,
        written_by=tuple(map(str, written_by or ())),
    )
    check_written(options)
    certificate.check_request(options, load_catalogue(), PROFILES)
    work = work_of(shard, results, cache, Where(on, Tls(tls_ca, tls_cert, tls_key), jobs))
    old = prepare_files(options, known, write_baseline)
    session = run(options, "certify", options.adapters, work)
    if work.shard.count > 1:
        raise typer.Exit(say_part(session, work))
    raise typer.Exit(deliver(build_results(session, options), options, old, write_baseline))


def check_written(options: CheckOptions) -> None:
    """Refuse a folder that no other release wrote for these adapters, or that is not whole.

    Raises WrittenError, or RequestError where none of the adapters wrote there, or all that one of
    them wrote is of the installed release: nothing between two releases would be compared.
    """
    releases: dict[str, set[str]] = {}  # by adapter
    for folder in options.written_by:
        found = written.find(Path(folder))
        mine = [one for one in found if one.record.adapter in options.adapters]
        for one in mine:
            written.check_files(one)
            releases.setdefault(one.record.adapter, set()).add(one.record.release)
        if not mine:
            names = ", ".join(sorted({one.record.adapter for one in found}))
            raise RequestError(
                f"--written-by {folder}: it was written by {names}, and by none of "
                f"{', '.join(options.adapters)}: name the folder of the adapter that is certified"
            )
    here = written.release_of(written.installed())
    for name, those in releases.items():
        if those == {here}:
            raise RequestError(
                f"--written-by {' '.join(options.written_by)}: all that {name} wrote there is of "
                f"torch {here}, which is installed here, so nothing between two releases would be "
                "compared: certify under another release, or name what another one wrote"
            )


def prepare_files(
    options: CheckOptions, known: Path | None, write: Path | None
) -> baseline.Baseline | None:
    """Read the baseline and try every file that will be written, before anything runs."""
    old = baseline.read_baseline(known) if known else None
    if write:
        baseline.check_writable(write)
    for folder in folders_of(options).values():
        environment.prepare_output(folder)
    return old


def folders_of(options: CheckOptions) -> dict[str, Path]:
    """Return the folder of the files by adapter."""
    return environment.output_folders(options.out or Path(), options.adapters)


def build_results(session: Session, options: CheckOptions) -> list[Result]:
    """Merge the outcomes into one result for each adapter."""
    if session.header is None:
        return []
    fill_in(session, options)
    facts = certificate.RunFacts(
        options=options,
        catalogue=load_catalogue(),
        profiles=PROFILES,
        environment=session.header.environment,
        commit=session.header.commit,
        created=session.header.created,
        interrupted=session.interrupted,
    )
    return [
        certificate.build_result(info, session.outcomes.get(name, ()), facts)
        for name, info in session.infos.items()
    ]


def deliver(
    results: Sequence[Result],
    options: CheckOptions,
    old: baseline.Baseline | None,
    write: Path | None,
) -> int:
    """Write and print the results; return the exit status."""
    if not results:  # stopped before the adapters had said what they are
        files.say(f"Stopped before anything ran.{_no_baseline(write)}")
        return INTERRUPTED
    folders = list(folders_of(options).values())
    for result, folder in zip(results, folders, strict=True):  # before a terminal can be gone
        files.write_certificate(result, folder)
    for result, folder in zip(results, folders, strict=True):
        files.show(
            "result.txt.j2" if len(results) == 1 else "brief.txt.j2",
            result=result,
            known=old.known(result.adapter.name) if old else {},
            asides=baseline.asides(result, old),
            folder=str(folder),
        )
    if len(results) > 1:
        profiles = dict.fromkeys(name for one in results for name in one.profiles)
        pad = max(len(one.adapter.name) for one in results) + 2
        files.show("managers.txt.j2", results=results, profiles=list(profiles), pad=pad)
    if any(result.interrupted for result in results):
        files.say(f"Stopped before the end: what did not run is UNKNOWN.{_no_baseline(write)}")
        return INTERRUPTED
    if write:
        known = baseline.write_baseline(write, results)
        files.say(f"{write}: {files.count(known, 'known violation')}")
    status = certificate.merge_status(
        certificate.judge(one, old.known(one.adapter.name) if old else ()) for one in results
    )
    files.say(f"{_closing(results, status, old)} (exit {status})")
    return status


def _closing(results: Sequence[Result], status: int, old: baseline.Baseline | None) -> str:
    """Write what the exit status means here: where nothing was judged, nothing is certified."""
    if status:
        return MEANINGS[status]
    if old:
        return "nothing new is violated"
    titles = {files.headline(one).title for one in results}
    return titles.pop().lower() if len(titles) == 1 else MEANINGS[status]


def _no_baseline(path: Path | None) -> str:
    """Write that a baseline was not written: half a run would forget what it did not judge."""
    return f" {path} was not written: run it again to the end." if path else ""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(certify)
