"""What is expected to be violated: by a manager's baseline, or by each mutant.

A baseline holds the violations a project knows about, so that CI fails on new ones only. Its
entries are keyed by adapter and invariant id. One that is no longer violated is listed as turned
green, so that the file can shrink; UNKNOWN is not green.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ckpt_conformance import __version__
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.report.certificate import (
    MACHINE_LIMIT,
    STOPPED,
    as_table,
    follows,
    plain,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.contract.verdicts import CheckOutcome
    from ckpt_conformance.mutants import MutantInfo
    from ckpt_conformance.report.certificate import Json

SCHEMA = "ckpt-conformance/baseline/v1"
MATRIX_SCHEMA = "ckpt-conformance/kill-matrix/v1"
GREEN = frozenset({Verdict.PASS, Verdict.NOT_MET, Verdict.NOT_APPLICABLE, Verdict.WAIVED})


class BaselineError(RequestError):
    """A baseline that cannot be used, with the file, the reason and the next step."""


@dataclass(frozen=True)
class Baseline:
    """Known violations: adapter -> invariant id -> the reason when it was written."""

    violations: Mapping[str, Mapping[str, str]]

    def known(self, adapter: str) -> Mapping[str, str]:
        """Give the known violations of one adapter."""
        return self.violations.get(adapter, {})

    def turned_green(self, result: Json) -> dict[str, str]:
        """Give the known violations that this result no longer shows, with their verdict now."""
        now = {name: one["verdict"] for name, one in result["invariants"].items()}
        known = sorted(self.known(result["adapter"]["name"]))
        return {name: now[name] for name in known if now.get(name) in GREEN}

    def new(self, result: Json) -> list[str]:
        """List the violations of a result that the baseline does not know."""
        return sorted(violated(result).keys() - self.known(result["adapter"]["name"]).keys())


def violated(result: Json) -> dict[str, str]:
    """Give the violated invariants of a result with their reasons."""
    invariants: dict[str, Json] = result["invariants"]
    return {
        name: str(one["reason"])
        for name, one in sorted(invariants.items())
        if one["verdict"] == Verdict.VIOLATION
    }


def asides(result: Json, old: Baseline | None) -> dict[str, list[str]]:
    """List what nobody has to act on: unmet SHOULDs, and what the baseline knows."""
    invariants: dict[str, Json] = result["invariants"]
    unmet = [name for name, one in invariants.items() if one["verdict"] == Verdict.NOT_MET]
    stopped = sum(one["reason"] == STOPPED for one in invariants.values())
    lists = {
        "SHOULD not met": sorted(unmet),
        "not run": [f"{stopped} of {len(invariants)}"][:stopped],
    }
    if old:
        known = old.known(result["adapter"]["name"])
        green = old.turned_green(result).items()
        lists["known, in the baseline"] = sorted(violated(result).keys() & known.keys())
        lists["unknown because of these"] = follows(result, known.keys())
        lists["turned green, take out of the baseline"] = [f"{i} ({now})" for i, now in green]
    return lists


def read_baseline(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        BaselineError: the file is missing, is no JSON, or is not a baseline of this version.

    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(
            f"baseline {path}: {error.strerror}; write one with --write-baseline {path}"
        ) from error
    except ValueError as error:
        raise BaselineError(f"baseline {path} is not JSON ({error}); {_again(path)}") from error
    return Baseline(_violations(content, path))


def _again(path: Path) -> str:
    return f"move it away and write a new one with --write-baseline {path}"


def _violations(content: object, path: Path) -> dict[str, dict[str, str]]:
    """Take the entries out of a file that may be anything."""
    table = as_table(content)
    found = table.get("schema")
    if found != SCHEMA:
        what = f"its schema is {found!r}" if found else "it has no schema"
        raise BaselineError(
            f"{path} is no baseline that this version reads: {what}, expected {SCHEMA!r}; "
            f"{_again(path)}"
        )
    violations = table.get("violations")
    if not isinstance(violations, dict):
        raise BaselineError(f"baseline {path} has no table of violations; {_again(path)}")
    return {name: as_table(ids) for name, ids in cast("Json", violations).items()}


def check_writable(path: Path) -> None:
    """Refuse to overwrite a file that is no baseline, before anything runs.

    Raises:
        BaselineError: the path holds something else, or its folder does not exist.

    """
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"has no folder {path.parent} to stand in"
        raise BaselineError(f"--write-baseline {path} {reason}; name a file in a folder that is")
    if path.exists():
        _add_to(path)


def _add_to(path: Path) -> Baseline:
    try:
        return read_baseline(path)
    except BaselineError as error:
        told = f"--write-baseline adds to a file that is there: {error}"
        raise BaselineError(told) from error


def write_baseline(path: Path, results: Iterable[Json]) -> int:
    """Write what is violated now; give the number of entries.

    What this run did not judge (other adapters, invariants left out by --only, UNKNOWN) is kept.

    Raises:
        BaselineError: the path holds something else.

    """
    entries = dict(_add_to(path).violations) if path.exists() else {}
    for result in results:
        name = result["adapter"]["name"]
        judged = {i for i, one in result["invariants"].items() if one["verdict"] in GREEN}
        kept = {i: why for i, why in entries.get(name, {}).items() if i not in judged}
        entries[name] = dict(sorted((kept | violated(result)).items()))
    filled = {name: ids for name, ids in sorted(entries.items()) if ids}
    suite = {"version": __version__}
    write_json(path, {"schema": SCHEMA, "suite": suite, "violations": filled})
    return sum(map(len, filled.values()))


def kill_matrix(
    mutants: Mapping[str, MutantInfo], outcomes: Mapping[str, Sequence[CheckOutcome]]
) -> Json:
    """Compare what each mutant violates with what it was built to break.

    `outcomes` are by adapter; those that belong to no mutant are controls. UNKNOWN is shown and
    does not spare a mutant; in a control it is a fault, because "violates nothing" was not shown.
    """
    rows = {f"mutant:{name}": info for name, info in mutants.items()}
    controls = {name: _control(ones) for name, ones in outcomes.items() if name not in rows}
    killed = {rows[name].id: _kill(rows[name], outcomes[name]) for name in rows if name in outcomes}
    exact = all(row["exact"] for row in (*controls.values(), *killed.values()))
    return {
        "schema": MATRIX_SCHEMA,
        "suite": {"version": __version__},
        "exact": exact,
        "controls": controls,
        "mutants": killed,
    }


def _kill(info: MutantInfo, outcomes: Sequence[CheckOutcome]) -> Json:
    row = _row(outcomes, info.violates)
    facts = {"bug": info.bug, "url": info.url, "change": info.change, "base": info.base}
    return row | facts | {"exact": not row["missed"] and not row["extra"]}


def _control(outcomes: Sequence[CheckOutcome]) -> Json:
    row = _row(outcomes, frozenset())
    limits = {one.invariant for one in outcomes if one.reason.startswith(MACHINE_LIMIT)}
    clean = bool(outcomes) and not row["extra"] and limits.issuperset(row["unknown"])
    return row | {"bug": "", "url": "", "change": "", "base": "", "exact": clean}


def _row(outcomes: Sequence[CheckOutcome], expected: frozenset[str]) -> Json:
    found = {one: _reasons(outcomes, one) for one in (Verdict.VIOLATION, Verdict.UNKNOWN)}
    got, unknown = found[Verdict.VIOLATION], found[Verdict.UNKNOWN]
    return {
        "expected": sorted(expected),
        "got": sorted(got),
        "missed": sorted(expected - got.keys()),
        "extra": sorted(got.keys() - expected),
        "unknown": sorted(unknown.keys() - got.keys()),
        "reasons": {name: plain(reason) for name, reason in sorted((unknown | got).items())},
        "verdicts": _verdicts(outcomes),
    }


def _verdicts(outcomes: Sequence[CheckOutcome]) -> dict[str, dict[str, str]]:
    """Give the verdict of each check that ran, by invariant: what was run, and what applied."""
    table = defaultdict[str, dict[str, str]](dict)
    for one in sorted(outcomes, key=lambda one: (one.invariant, one.check)):
        table[one.invariant][one.check] = str(one.verdict)
    return dict(table)


def _reasons(outcomes: Sequence[CheckOutcome], verdict: Verdict) -> dict[str, str]:
    """Give the first reason for each invariant with this verdict."""
    return {one.invariant: one.reason for one in reversed(outcomes) if one.verdict == verdict}
