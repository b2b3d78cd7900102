"""A command line whose session is a fake: what it prints and writes, without running a check."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance import mutants as all_of_mutants
from ckpt_conformance.cli import certify, listing, main
from ckpt_conformance.cli import mutants as mutants_command
from ckpt_conformance.contract import registry
from ckpt_conformance.contract.catalogue import Catalogue, Invariant
from ckpt_conformance.contract.verdicts import CheckOutcome, Verdict
from ckpt_conformance.harness import facts
from ckpt_conformance.mutants import MutantInfo
from ckpt_conformance.plugin import depends, plan, session
from ckpt_conformance.report.certificate import selected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ckpt_conformance.plugin.options import SessionOptions

ATOM, CORR = "CKC-ATOM-001", "CKC-CORR-001"
PROFILES = {"crash": "a killed process loses nothing", "damage": "damage is refused"}
CATALOGUE = Catalogue(
    1,
    {
        ATOM: Invariant(ATOM, "A kill loses nothing.", "So.", "Rename.", "contract", ("crash",)),
        CORR: Invariant(CORR, "A flip is refused.", "Because.", "Sum.", "practice", ("damage",)),
    },
)
Verdicts = dict[tuple[str, str], str]


class Session:
    """Stands for `run_session`: gives the verdicts it was told, PASS where it was told none."""

    def __init__(self) -> None:
        """Start with nothing to tell."""
        self.told: Verdicts = {}
        self.stop_after = 10**6
        self.options: list[SessionOptions] = []

    def __call__(self, options: SessionOptions) -> list[CheckOutcome]:
        self.options.append(options)
        chosen = selected(CATALOGUE, options)
        found = [
            self._outcome(name, one, options)
            for name in options.adapters
            for one in chosen
            if options.selection is None or name in options.selection.get(f"suite::{one.id}", ())
        ]
        for done, outcome in enumerate(found, 1):
            if done > self.stop_after:
                raise KeyboardInterrupt
            if options.on_progress:
                options.on_progress(done, len(found), outcome)
        return found

    def _outcome(self, adapter: str, one: Invariant, options: SessionOptions) -> CheckOutcome:
        verdict = Verdict(self.told.get((adapter, one.id), "PASS"))
        unclaimed = one.level == "SHOULD" and not set(options.claims).intersection(one.profiles)
        if verdict is Verdict.VIOLATION and unclaimed:
            verdict = Verdict.NOT_MET
        reason = "" if verdict is Verdict.PASS else "step 20 [bold]was[/bold] served \x1b[31m"
        evidence = {"step": 20, "steps": [10, 20]} if verdict is Verdict.VIOLATION else {}
        return CheckOutcome(adapter, one.id, f"suite::{one.id}", verdict, reason, evidence)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Session:
    """Replace session, catalogue, registry and mutants; work in an empty folder."""
    made = Session()
    broken = [("A01", ATOM), ("O01", CORR)]
    mutants = {
        name: MutantInfo(
            name, name, "https://x.test/1", "change", "reference", frozenset({i}), object
        )
        for name, i in broken
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "run_session", made)
    monkeypatch.setattr(plan, "checks", planned)
    monkeypatch.setattr(plan, "load_catalogue", of_version)
    for module in (certify, listing):
        monkeypatch.setattr(module, "load_catalogue", lambda: CATALOGUE)
    for module in (certify, listing, mutants_command):
        monkeypatch.setattr(module, "PROFILES", PROFILES)
    monkeypatch.setattr(depends, "adapter_modules", lambda _: ())
    monkeypatch.setattr(facts, "serve", serve)
    monkeypatch.setattr(registry, "describe", describe)
    monkeypatch.setattr(registry, "known", lambda: ["reference", "broken"])
    monkeypatch.setattr(all_of_mutants, "all_mutants", lambda: mutants)
    return made


def planned() -> tuple[plan.Check, ...]:
    """Stand for the checks of the suites: one of each invariant."""
    names = CATALOGUE.invariants
    return tuple(plan.Check(f"suite::{name}", name, "ckpt_conformance.suites") for name in names)


def of_version(version: int | None) -> Catalogue:
    """Stand for the catalogue as one version had it."""
    pin = CATALOGUE.version if version is None else version
    there = {name: one for name, one in CATALOGUE.invariants.items() if one.since <= pin}
    return Catalogue(pin, there)


@contextlib.contextmanager
def serve(
    names: Sequence[str], described: Sequence[str], device: str, *, notes_opened: bool
) -> Iterator[tuple[str, dict[str, registry.AdapterInfo]]]:
    del notes_opened  # there is no child
    if not set(described) <= set(names) or device != "cpu":
        raise ValueError((names, described, device))
    yield "socket", {name: describe(name) for name in described}


def describe(name: str) -> registry.AdapterInfo:
    if name == "broken":
        raise registry.AdapterError(f"adapter {name!r}: lib is not installed")
    return registry.AdapterInfo(
        name, "1", "manager", [], ["model"], "lib", "a recipe", "recipe", ""
    )


Ckpt = Any  # gives (exit status, stdout, stderr)


@pytest.fixture
def ckpt(
    fake: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run the command line in this process."""
    del fake

    def run(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["ckpt-conformance", *words])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as left:
            main.main()
        captured = capsys.readouterr()
        return left.value.code, captured.out, captured.err

    return run
