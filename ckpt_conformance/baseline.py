"""A baseline: the violations a project knows about, so that CI fails on new ones only.

Entries are keyed by adapter and invariant id. An entry that is no longer violated is listed as
turned green, so that the file can shrink; UNKNOWN is not green.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ckpt_conformance import __version__
from ckpt_conformance.certificate import as_table, write_json
from ckpt_conformance.verdicts import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ckpt_conformance.certificate import Json

SCHEMA = "ckpt-conformance/baseline/v1"
GREEN = frozenset({Verdict.PASS, Verdict.NOT_MET, Verdict.NOT_APPLICABLE, Verdict.WAIVED})


class BaselineError(ValueError):
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
        read_baseline(path)


def write_baseline(path: Path, results: Iterable[Json]) -> int:
    """Write what is violated now; give the number of entries.

    What this run did not judge (other adapters, invariants left out by --only, UNKNOWN) is kept.

    Raises:
        BaselineError: the path holds something else.

    """
    entries = dict(read_baseline(path).violations) if path.exists() else {}
    for result in results:
        name = result["adapter"]["name"]
        judged = {i for i, one in result["invariants"].items() if one["verdict"] in GREEN}
        kept = {i: why for i, why in entries.get(name, {}).items() if i not in judged}
        entries[name] = dict(sorted((kept | violated(result)).items()))
    filled = {name: ids for name, ids in sorted(entries.items()) if ids}
    suite = {"version": __version__}
    write_json(path, {"schema": SCHEMA, "suite": suite, "violations": filled})
    return sum(map(len, filled.values()))
