"""The violations of a manager that are known.

A baseline holds the violations a project knows about, so that CI fails on new ones only. Its
entries are keyed by adapter and invariant id. One that is no longer violated is listed as turned
green, so that the file can shrink; UNKNOWN is not green.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ckpt_conformance import __version__
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.contract.verdicts import Cause, Verdict
from ckpt_conformance.report.certificate import follows, write_json
from ckpt_conformance.report.result import as_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ckpt_conformance.report.result import Result

SCHEMA = "ckpt-conformance/baseline/v1"
GREEN = frozenset({Verdict.PASS, Verdict.NOT_MET, Verdict.NOT_APPLICABLE, Verdict.WAIVED})


class BaselineError(RequestError):
    """A baseline that cannot be used, with the file, the reason and the next step."""


@dataclass(frozen=True)
class Baseline:
    """Known violations: adapter -> invariant id -> the reason when it was written."""

    violations: Mapping[str, Mapping[str, str]]

    def known(self, adapter: str) -> Mapping[str, str]:
        """Look up the violations of one adapter: invariant id -> reason."""
        return self.violations.get(adapter, {})

    def turned_green(self, result: Result) -> dict[str, Verdict]:
        """List the known violations that this result no longer shows: id -> verdict now."""
        known = self.known(result.adapter.name)
        return {name: one.verdict for name, one in result.having(*GREEN) if name in known}

    def new(self, result: Result) -> list[str]:
        """List the violations of a result that the baseline does not know."""
        return sorted(violated(result).keys() - self.known(result.adapter.name).keys())


def violated(result: Result) -> dict[str, str]:
    """List the violated invariants of a result: id -> reason."""
    return {name: one.reason for name, one in result.having(Verdict.VIOLATION)}


def asides(result: Result, old: Baseline | None) -> dict[str, list[str]]:
    """List what nobody has to act on: unmet SHOULDs, and what the baseline knows."""
    invariants = result.invariants
    stopped = sum(one.cause is Cause.INTERRUPTED for one in invariants.values())
    lists = {
        "SHOULD not met": [name for name, _ in result.having(Verdict.NOT_MET)],
        "same cause, not counted again": [
            f"{name} (see {one.see})" for name, one in result.having(Verdict.SAME_CAUSE)
        ],
        "not run": [f"{stopped} of {len(invariants)}"][:stopped],
    }
    if old:
        known = old.known(result.adapter.name)
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
    schema = table.get("schema")
    if schema != SCHEMA:
        what = f"its schema is {schema!r}" if schema else "it has no schema"
        raise BaselineError(
            f"{path} is no baseline that this version reads: {what}, expected {SCHEMA!r}; "
            f"{_again(path)}"
        )
    violations = table.get("violations")
    if not isinstance(violations, dict):
        raise BaselineError(f"baseline {path} has no table of violations; {_again(path)}")
    return {name: as_table(ids) for name, ids in as_table(cast("object", violations)).items()}


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
        message = f"--write-baseline adds to a file that is there: {error}"
        raise BaselineError(message) from error


def write_baseline(path: Path, results: Iterable[Result]) -> int:
    """Write what is violated now; give the number of entries.

    What this run did not judge (other adapters, invariants left out by --only, UNKNOWN) is kept.

    Raises:
        BaselineError: the path holds something else.

    """
    entries = dict(_add_to(path).violations) if path.exists() else {}
    for result in results:
        name = result.adapter.name
        judged = {i for i, _ in result.having(*GREEN)}
        kept = {i: why for i, why in entries.get(name, {}).items() if i not in judged}
        entries[name] = dict(sorted((kept | violated(result)).items()))
    filled = {name: ids for name, ids in sorted(entries.items()) if ids}
    suite = {"version": __version__}
    write_json(path, {"schema": SCHEMA, "suite": suite, "violations": filled})
    return sum(map(len, filled.values()))
