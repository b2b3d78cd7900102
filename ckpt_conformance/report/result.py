"""What a `result.json` holds, as types: written by `encode`, read and checked by `load_result`.

The files' schema is `schemas/result.schema.json`; the order of the fields is that of the file.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ckpt_conformance.contract.verdicts import CONTROL, Cause, CrashSummary, Evidence, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SCHEMA = "ckpt-conformance/result/v3"
SECOND_SCHEMA = "ckpt-conformance/result/v2"  # knows no origins, and no verdict SAME_CAUSE
FIRST_SCHEMA = "ckpt-conformance/result/v1"  # names no causes: `_with_causes` finds them
SCHEMAS = (SCHEMA, SECOND_SCHEMA, FIRST_SCHEMA)
STOPPED = "not run: the run was interrupted"

Json = dict[str, Any]
Rate = tuple[int, int]  # bad, tried


class ResultError(ValueError):
    """A result file that cannot be judged."""


class Suite(Struct, frozen=True, kw_only=True):
    """The version of the suite that judged."""

    version: str
    commit: str | None  # None for an installed wheel; ends in -dirty after local changes
    catalogue: int


class Environment(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine, and what checks say of how they were made; empty where they say nothing."""

    python: str
    torch: str | None
    kernel: str
    machine: str = ""
    filesystem: str  # of the checkpoints
    cpus: int
    device: str = ""  # where ranks computed
    crash: str = ""
    ranks: str = ""
    releases: str = ""  # of torch, whose checkpoints were read
    one_sided: dict[str, list[str]] = {}  # release -> leaves that only it has
    io_points: str = ""
    planted: str = ""


class Adapter(Struct, frozen=True, kw_only=True):
    """The manager that was judged, and what was driven through it."""

    name: str  # as it was asked for
    title: str = ""  # what the adapter calls itself
    version: str
    shape: str
    capabilities: list[str]
    holds: list[str]
    library: str
    recipe: str
    owner: str
    notes: str
    saves_over: bool = True
    min_keep: int = 1
    max_keep: int | None = None
    skips: bool = False  # the position in the data is found by taking batches again
    cannot_hold: dict[str, str] = {}  # a Feature, and the documentation that says so


class Asked(Struct, frozen=True, kw_only=True):
    """What the command line named: a limit of the machine counts only there."""

    profiles: list[str]
    only: list[str]


class ProfileResult(Struct, frozen=True, kw_only=True):
    """The verdict of a profile that was judged whole, and its invariants by verdict."""

    verdict: Verdict
    description: str
    counts: dict[Verdict, int]


class OriginResult(Struct, frozen=True, kw_only=True):
    """A cause outside of the manager, what its owner documents, and what follows from that."""

    owner: str
    statement: str
    documentation: str
    decision: str


class CheckResult(Struct, frozen=True, kw_only=True):
    """What one check came to."""

    name: str
    verdict: Verdict
    reason: str
    cause: Cause | None = None  # of an UNKNOWN
    see: str | None = None  # the invariant that says why it is UNKNOWN, or that tells its cause
    origin: str | None = None  # of a violation: its cause, where that lies outside of the manager
    seconds: float
    rate: Rate | None
    evidence: Evidence


class InvariantResult(Struct, frozen=True, kw_only=True):
    """What one invariant came to: the verdict of its worst check, whose reason stands for it."""

    family: str
    statement: str
    why: str
    basis: str
    level: str
    profiles: list[str]
    incidents: list[str]
    verdict: Verdict
    owner: str | None
    grade: str | None  # how the evidence was seen
    rate: Rate | None
    reason: str
    cause: Cause | None = None
    see: str | None = None
    origin: str | None = None
    checks: list[CheckResult]
    evidence: Evidence
    remedy: str = ""  # what a manager does that keeps it; empty unless violated or not met
    reproduce: str


class Waiver(Struct, frozen=True, kw_only=True):
    """A violation that was accepted, with a reason."""

    invariant: str
    reason: str


class Result(Struct, frozen=True, kw_only=True):
    """The certificate of one adapter."""

    schema: str = SCHEMA
    suite: Suite
    created: str  # date and time, ISO 8601
    interrupted: bool
    environment: Environment
    adapter: Adapter
    seed: int
    budget: str
    claims: list[str]
    asked: Asked
    profiles: dict[str, Verdict]
    profile_details: dict[str, ProfileResult]
    invariants: dict[str, InvariantResult]
    origins: dict[str, OriginResult] = {}
    harness: list[CheckResult]  # outcomes of no invariant
    crash: CrashSummary
    waivers: list[Waiver]

    def following(self, identifier: str) -> list[str]:
        """List the ids of what is broken by the cause that this invariant tells."""
        return [name for name, one in self.having(Verdict.SAME_CAUSE) if one.see == identifier]

    def having(self, *verdicts: Verdict) -> Iterator[tuple[str, InvariantResult]]:
        """Iterate over (id, invariant) of those with one of these verdicts, in the order of ids."""
        return ((i, one) for i, one in sorted(self.invariants.items()) if one.verdict in verdicts)


def encode(content: Struct) -> Json:
    """Turn a result, or a part of one, into plain JSON values."""
    return cast("Json", msgspec.to_builtins(content))


def decode(content: object) -> Result:
    """Read the content of a `result.json`, of this version or of an earlier one.

    Raises:
        ResultError: names the schema that was found, the keys that are missing, or what is wrong.

    """
    table = as_table(content)
    schema = table.get("schema")
    if schema not in SCHEMAS:
        raise ResultError(f"schema is {schema!r}, this version reads {SCHEMA!r}: certify again")
    missing = sorted({"invariants", "asked", "claims", "harness", "adapter"} - table.keys())
    if missing:
        raise ResultError(f"the result lacks {', '.join(missing)}: it was cut or edited")
    try:
        result = msgspec.convert(table, Result)
    except msgspec.ValidationError as error:
        raise ResultError(f"{error}: it was cut or edited") from error
    return _with_causes(result) if schema == FIRST_SCHEMA else result


def load_result(path: Path) -> Result:
    """Read a `result.json`, to judge it again or to report on it.

    Raises:
        ResultError: the file cannot be read, is no JSON, or is not one of ours.

    """
    try:
        return decode(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}; name a result.json") from error
    except ValueError as error:
        raise ResultError(f"{path}: {error}") from error


def as_table(value: object) -> Json:
    """Take what was read as a JSON object; anything else is an empty one."""
    return cast("Json", value) if isinstance(value, dict) else {}


# -- results of version 1 --------------------------------------------------------------------------

# They name no cause. It stood in the sentence alone, and only here a sentence is taken apart.
MACHINE_SENTENCE = "this machine"
REFERENCE = re.compile(rf"{re.escape(CONTROL)}.*; see (CKC-[A-Z]{{4}}-\d{{3}})", re.DOTALL)

_Judged = TypeVar("_Judged", CheckResult, InvariantResult)


def _with_causes(old: Result) -> Result:
    """Add to a result of version 1 why what is UNKNOWN in it is so."""
    invariants = {
        name: replace(_caused(one), checks=[_caused(check) for check in one.checks])
        for name, one in old.invariants.items()
    }
    return replace(old, invariants=invariants, harness=[_caused(check) for check in old.harness])


def _caused(old: _Judged) -> _Judged:
    if old.verdict is not Verdict.UNKNOWN:
        return old
    reference = REFERENCE.fullmatch(old.reason)
    if old.reason.startswith(MACHINE_SENTENCE):
        cause = Cause.MACHINE
    elif old.reason.startswith(CONTROL):
        cause = Cause.CONTROL
    else:
        cause = Cause.INTERRUPTED if old.reason == STOPPED else Cause.HARNESS
    return replace(old, cause=cause, see=reference[1] if reference else None)
