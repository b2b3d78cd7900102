"""The command line: `certify`, `mutants` and `list`; the rest is in `cli_explore` and `cli_fsck`.

Exit status: 0 certified, 1 violations, 2 usage error, 3 undecided (UNKNOWN, or the harness itself
failed), 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by a hang-up. Results go to stdout, progress and
errors to stderr.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ckpt_conformance import __version__
from ckpt_conformance.contract import registry, requests
from ckpt_conformance.contract.catalogue import PROFILES, load_catalogue
from ckpt_conformance.contract.verdicts import CheckOutcome, Verdict
from ckpt_conformance.report import environment
from ckpt_conformance.subject import bundle

try:
    import typer

    from ckpt_conformance.cli import (
        diff,
        explore,
        fsck,
        running,
    )
    from ckpt_conformance.cli import (
        progress as cli_progress,
    )
    from ckpt_conformance.cli.options import (
        Budget,
        Device,
        Jobs,
        Names,
        OnDevice,
        Seed,
        Spending,
        whole,
    )
    from ckpt_conformance.report import (
        baseline,
        certificate,
        files,
    )
except ModuleNotFoundError as missing:
    if str(missing.name).startswith("ckpt_conformance"):
        raise
    sys.stderr.write(
        f"error: the command line needs {missing.name}, which is not installed; "
        "install it with: pip install 'ckpt-conformance[cli]'\n"
    )
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.contract.registry import AdapterInfo
    from ckpt_conformance.plugin.session import SessionOptions
    from ckpt_conformance.report.certificate import Json

CONTROLS = ("reference", "reference-dcp", "reference-trainer")
INTERRUPTED = 130
USAGE_ERRORS = (
    *(requests.RequestError, environment.OutputError, registry.AdapterError),
    bundle.BundleError,
)
MEANINGS = {0: "certified", 1: "violated", 3: "undecided"}

app = typer.Typer(
    name="ckpt-conformance",
    help="Certify checkpoint managers: what comes back after a crash, and the evidence.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# Values are the names in lower case.
Listed = StrEnum("Listed", ["ADAPTERS", "INVARIANTS", "PROFILES", "FAULTS", "MUTANTS"])


class Progress(cli_progress.Progress):
    """Shows how far a session is, and keeps what it has found in case it is stopped."""

    def __init__(self, what: str) -> None:
        """Start with nothing found."""
        super().__init__(what)
        self.outcomes: list[CheckOutcome] = []

    def __call__(self, done: int, total: int, outcome: CheckOutcome | None) -> None:
        """Take one step of the session."""
        if outcome is not None:
            self.outcomes.append(outcome)
        bad = sum(one.verdict is Verdict.VIOLATION for one in self.outcomes)
        self.update(done, total, files.count(bad, "violation") if bad else "")


@dataclass
class Ran:
    """What came of a session: facts of the adapters, their outcomes, whether it was stopped."""

    infos: dict[str, AdapterInfo]
    outcomes: dict[str, list[CheckOutcome]]
    interrupted: bool


def run(options: SessionOptions, what: str, described: Sequence[str] = ()) -> Ran:
    """Start the server, run a session; the facts of the `described` adapters come with it.

    Raises AdapterError for an adapter that can't be made.
    """
    from ckpt_conformance.harness import facts
    from ckpt_conformance.plugin.session import run_session, scratch_folder  # they load pytest

    ran = Ran({}, defaultdict(list), interrupted=False)
    with Progress(what) as progress, scratch_folder() as scratch:
        options = replace(options, on_progress=progress, scratch=Path(scratch))
        try:
            served = facts.serve(options.adapters, described, options.device)
            with served as (server, ran.infos):
                outcomes = run_session(replace(options, server=server))
        except KeyboardInterrupt:
            outcomes, ran.interrupted = progress.outcomes, True
    for one in outcomes:
        ran.outcomes[one.adapter].append(one)
    return ran


def _unique(given: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(given or ()))


@app.command()
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
) -> None:
    """Certify checkpoint managers; write result.json, report.html, junit.xml and summary.md."""
    from ckpt_conformance.plugin.session import SessionOptions

    options = SessionOptions(
        adapters=_unique(adapters),
        # A claim outside the chosen profiles would never be tested.
        profiles=_unique((*profile, *(claim or ()))) if profile else (),
        only=_unique(only),
        claims=_unique(claim),
        budget=str(budget),
        seed=seed,
        device=str(device),
        jobs=jobs or environment.usable_cpus(),
        out=out,
        catalogue=catalogue,
    )
    certificate.check_request(options, load_catalogue(), PROFILES)
    old = prepare_files(options, known, write_baseline)
    ran = run(options, "certify", options.adapters)
    results = build_results(ran, options)
    raise typer.Exit(deliver(results, options, old, write_baseline))


def prepare_files(
    options: SessionOptions, known: Path | None, write: Path | None
) -> baseline.Baseline | None:
    """Read the baseline and try every file that will be written, before anything runs."""
    old = baseline.read_baseline(known) if known else None
    if write:
        baseline.check_writable(write)
    for folder in folders_of(options).values():
        environment.prepare_output(folder)
    return old


def folders_of(options: SessionOptions) -> dict[str, Path]:
    """Give the folder of each adapter's files."""
    return environment.output_folders(options.out or Path(), options.adapters)


def build_results(ran: Ran, options: SessionOptions) -> list[Json]:
    """Merge the outcomes into one result for each adapter."""
    facts = certificate.RunFacts(
        options=options,
        catalogue=load_catalogue(),
        profiles=PROFILES,
        environment=environment.describe_environment(Path(tempfile.gettempdir())),
        commit=environment.suite_commit(),
        interrupted=ran.interrupted,
    )
    return [
        certificate.build_result(info, ran.outcomes.get(name, ()), facts)
        for name, info in ran.infos.items()
    ]


def deliver(
    results: Sequence[Json],
    options: SessionOptions,
    old: baseline.Baseline | None,
    write: Path | None,
) -> int:
    """Write and print the results; give the exit status."""
    if not results:  # stopped before the adapters had said what they are
        files.say(f"Stopped before anything ran.{_no_baseline(write)}")
        return INTERRUPTED
    folders = list(folders_of(options).values())
    for result, folder in zip(results, folders, strict=True):  # before a terminal can be gone
        files.write_certificate(result, folder)
    for result, folder in zip(results, folders, strict=True):
        files.show(
            "result.txt.j2",
            result=result,
            known=old.known(result["adapter"]["name"]) if old else {},
            asides=baseline.asides(result, old),
            folder=str(folder),
        )
    if len(results) > 1:
        profiles = dict.fromkeys(name for one in results for name in one["profiles"])
        pad = max(len(one["adapter"]["name"]) for one in results) + 2
        files.show("managers.txt.j2", results=results, profiles=list(profiles), pad=pad)
    if any(result["interrupted"] for result in results):
        files.say(f"Stopped before the end: what did not run is UNKNOWN.{_no_baseline(write)}")
        return INTERRUPTED
    if write:
        known = baseline.write_baseline(write, results)
        files.say(f"{write}: {files.count(known, 'known violation')}")
    status = certificate.merge_status(
        certificate.judge(one, old.known(one["adapter"]["name"]) if old else ()) for one in results
    )
    files.say(f"{_closing(results, status, old)} (exit {status})")
    return status


def _closing(results: Sequence[Json], status: int, old: baseline.Baseline | None) -> str:
    """Say what the exit status means here: where nothing was judged, nothing is certified."""
    if status:
        return MEANINGS[status]
    if old:
        return "nothing new is violated"
    titles = {files.headline(one).title for one in results}
    return titles.pop().lower() if len(titles) == 1 else MEANINGS[status]


def _no_baseline(path: Path | None) -> str:
    """Say that a baseline was not written: half a run would forget what it did not judge."""
    return f" {path} was not written: run it again to the end." if path else ""


@app.command()
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
    from ckpt_conformance.plugin.session import SessionOptions

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
    ran = run(options, "mutants")
    if not ran.interrupted:
        # A control without any outcome was not shown to be clean.
        ran.outcomes |= {name: ran.outcomes.get(name, []) for name in options.adapters}
    matrix = baseline.kill_matrix(chosen, ran.outcomes) | {"interrupted": ran.interrupted}
    if as_json:
        typer.echo(json.dumps(matrix, indent=2))
    else:
        files.show("kill_matrix.txt.j2", matrix=matrix, pad=max(map(len, (*controls, *chosen))))
    raise typer.Exit(INTERRUPTED if ran.interrupted else int(not matrix["exact"]))


@app.command("list")
def list_(what: Annotated[Listed, typer.Argument(help="What to list.")]) -> None:
    """List what there is."""
    plugins = registry.entry_points()
    files.show("listing.txt.j2", what=str(what), entries=entries(what), plugins=plugins)


def entries(what: Listed) -> Mapping[str, object]:
    """Give what there is by name; mutants and faults are imported only where they are listed."""
    if what is Listed.MUTANTS:
        from ckpt_conformance.mutants import all_mutants

        return all_mutants()
    if what is Listed.FAULTS:
        from ckpt_conformance.fault_injectors import all_faults

        return all_faults()
    if what is Listed.ADAPTERS:
        return {name: _adapter(name) for name in registry.known()}
    return PROFILES if what is Listed.PROFILES else load_catalogue().invariants


def _adapter(name: str) -> registry.AdapterInfo | str:
    """Describe an adapter; one whose library is missing says what to install."""
    try:
        return registry.describe(name)
    except registry.AdapterError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  an installed package's: it must not hide the others
        return registry.refusal(name, f"{type(error).__name__}: {error}")


@app.callback(invoke_without_command=True)
def top(
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Certify checkpoint managers: what comes back after a crash, and the evidence."""
    if version:
        typer.echo(f"ckpt-conformance {__version__}")
        raise typer.Exit


explore.register(app)
fsck.register(app)
diff.register(app)


def main() -> None:
    """Run the command line; a fault of the harness must not look like a violation."""
    running.run(app, USAGE_ERRORS)


if __name__ == "__main__":
    main()
