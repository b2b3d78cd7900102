"""The certificate of one adapter: what was promised, what was kept, and how to see it again.

`build_result` turns the outcomes of a session into `result.json`, `judge` gives the exit status
from that file alone. An invariant that was selected and has no outcome is UNKNOWN, never a pass.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from ckpt_conformance import __version__
from ckpt_conformance.contract.catalogue import is_chosen
from ckpt_conformance.contract.requests import RequestError, check_names, reproduce
from ckpt_conformance.contract.verdicts import (
    CONTROL,
    SEVERITY,
    CheckOutcome,
    Outcome,
    Verdict,
    remarks,
    worst,
)
from ckpt_conformance.crash.explore import summary
from ckpt_conformance.subject import bundle

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.contract.catalogue import Catalogue, Invariant
    from ckpt_conformance.contract.registry import AdapterInfo
    from ckpt_conformance.plugin.session import SessionOptions

SCHEMA = "ckpt-conformance/result/v1"
REPRODUCED = "reproduced with a real process"
# A reason that begins so names something this machine cannot do (no seccomp, no loop device). It
# changes the exit status only where the user asked for the profile.
MACHINE_LIMIT = "this machine"
STOPPED = "not run: the run was interrupted"
CERTIFIED, VIOLATED, USAGE, UNDECIDED = 0, 1, 2, 3
REFERENCE = re.compile(rf"{re.escape(CONTROL)}.*; see (CKC-[A-Z]{{4}}-\d{{3}})", re.DOTALL)
DEEPEST = 20

Json = dict[str, Any]


class ResultError(ValueError):
    """A result file that cannot be judged."""


@dataclass(frozen=True)
class RunFacts:
    """What all certificates of one run share."""

    options: SessionOptions
    catalogue: Catalogue
    profiles: Mapping[str, str]  # name -> description, in the order of reports
    environment: Mapping[str, Any]
    commit: str | None = None
    interrupted: bool = False
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    waivers: Sequence[Mapping[str, Any]] = ()


def asked_profiles(options: SessionOptions) -> tuple[str, ...]:
    """Give the profiles named on the command line; a claim that nothing tests would be empty."""
    claims = options.claims if options.profiles else ()
    return tuple(dict.fromkeys((*options.profiles, *claims)))


def selected(catalogue: Catalogue, options: SessionOptions) -> list[Invariant]:
    """List the invariants that a run with these options must judge, in catalogue order."""
    pin = catalogue.version if options.catalogue is None else options.catalogue
    asked = asked_profiles(options), options.only, options.claims, options.budget
    found = catalogue.invariants.values()
    return [one for one in found if one.since <= pin and is_chosen(one, *asked)]


def check_request(options: SessionOptions, catalogue: Catalogue, profiles: Collection[str]) -> None:
    """Refuse a request for what does not exist, before anything runs.

    Raises:
        RequestError: names the value, the reason and the nearest valid names.

    """
    if options.catalogue is not None and options.catalogue > catalogue.version:
        raise RequestError(
            f"--catalogue {options.catalogue} does not exist; the newest is {catalogue.version}"
        )
    check_names("profile", (*options.profiles, *options.claims), profiles)
    check_names("invariant", options.only, catalogue.invariants)
    if not selected(catalogue, options):
        raise RequestError(
            "nothing is left to judge: no invariant fits --profile, --only and --catalogue at "
            "once; leave one of them out"
        )


def build_result(info: AdapterInfo, outcomes: Iterable[CheckOutcome], run: RunFacts) -> Json:
    """Merge the outcomes of one adapter into the content of its `result.json`."""
    chosen = selected(run.catalogue, run.options)
    found, grouped = list(outcomes), defaultdict[str, list[CheckOutcome]](list)
    for outcome in found:
        grouped[outcome.invariant].append(outcome)
    invariants = {one.id: _invariant(one, grouped[one.id], info, run) for one in chosen}
    profiles = _profiles(invariants, run)
    options = run.options
    return {
        "schema": SCHEMA,
        "suite": _suite(run),
        "created": run.created,
        "interrupted": run.interrupted,
        "environment": {**run.environment, "device": options.device, **remarks(found)},
        "adapter": info.to_json(),
        "seed": options.seed,
        "budget": options.budget,
        "claims": list(options.claims),
        "asked": {"profiles": list(asked_profiles(options)), "only": list(options.only)},
        "profiles": {name: details["verdict"] for name, details in profiles.items()},
        "profile_details": profiles,
        "invariants": invariants,
        "harness": [_check(one) for one in _strays(grouped, run.catalogue)],
        "crash": summary.of_outcomes(one.crash for one in found),
        "waivers": [dict(waiver) for waiver in run.waivers],
    }


def _suite(run: RunFacts) -> Json:
    pin = run.options.catalogue
    return {
        "version": __version__,
        "commit": run.commit,
        "catalogue": run.catalogue.version if pin is None else pin,
    }


def _strays(grouped: Mapping[str, list[CheckOutcome]], catalogue: Catalogue) -> list[CheckOutcome]:
    """Find outcomes of no invariant, such as a worker that died: faults of the harness."""
    return [one for name in grouped if name not in catalogue.invariants for one in grouped[name]]


def _invariant(
    invariant: Invariant, outcomes: Sequence[CheckOutcome], info: AdapterInfo, run: RunFacts
) -> Json:
    verdict = worst(one.verdict for one in outcomes) if outcomes else Verdict.UNKNOWN
    telling = _telling(outcomes, verdict)
    bad = verdict in {Verdict.VIOLATION, Verdict.NOT_MET}
    return {
        "family": invariant.family,
        "statement": invariant.statement,
        "why": invariant.why,
        "basis": _basis(invariant, info),
        "level": _level(invariant, info, run.options),
        "profiles": list(invariant.profiles),
        "incidents": list(invariant.incidents),
        "verdict": str(verdict),
        "owner": _told(telling, "owner", info.owner) if bad else None,
        "grade": _told(telling, "grade", REPRODUCED) if bad else None,
        "rate": _rate(outcomes),
        "reason": plain(telling.reason) if telling else STOPPED if run.interrupted else "not run",
        "checks": [_check(one) for one in sorted(outcomes, key=_worst_first)],
        "evidence": plain(telling.evidence) if telling else {},
        "reproduce": _reproduce(invariant, info.name, run.options),
    }


def _told(outcome: CheckOutcome | None, key: str, otherwise: str) -> str:
    """Let a check that knows better say who owns a violation, or how it was seen."""
    return str(outcome.evidence.get(key, otherwise)) if outcome else otherwise


def _worst_first(outcome: CheckOutcome) -> tuple[int, str]:
    return -SEVERITY[outcome.verdict], outcome.check


def _telling(outcomes: Sequence[CheckOutcome], verdict: Verdict) -> CheckOutcome | None:
    """Pick the outcome whose reason stands for the invariant.

    A limit of the machine only where nothing else went wrong: it may be forgiven, a fault of the
    harness must not be. What is wrong without a word before what is loud; then by name, since
    workers end in any order.
    """
    matching = [one for one in outcomes if one.verdict == verdict]
    return min(matching, key=_telling_order, default=None)


def _telling_order(outcome: CheckOutcome) -> tuple[bool, bool, str]:
    is_silent = outcome.evidence.get("outcome") == Outcome.SILENT_WRONG
    return outcome.reason.startswith(MACHINE_LIMIT), not is_silent, outcome.check


def _basis(invariant: Invariant, info: AdapterInfo) -> str:
    promised = invariant.basis == "practice" and invariant.id in info.promises
    return "promise" if promised else invariant.basis


def _level(invariant: Invariant, info: AdapterInfo, options: SessionOptions) -> str:
    claimed = invariant.id in info.promises or set(options.claims) & set(invariant.profiles)
    return "MUST" if claimed else invariant.level


def _rate(outcomes: Sequence[CheckOutcome]) -> list[int] | None:
    """Add up (bad, tried) of the checks that sample."""
    rates = [one.rate for one in outcomes if one.rate is not None]
    return [sum(rate[0] for rate in rates), sum(rate[1] for rate in rates)] if rates else None


def _check(outcome: CheckOutcome) -> Json:
    return {
        "name": plain(outcome.check),
        "verdict": str(outcome.verdict),
        "reason": plain(outcome.reason),
        "seconds": round(outcome.seconds, 3),
        "rate": list(outcome.rate) if outcome.rate else None,
        "evidence": plain(outcome.evidence),
    }


def _reproduce(invariant: Invariant, adapter: str, options: SessionOptions) -> str:
    # Without the claim the same finding is NOT_MET, and the command would exit with 0.
    claims = [claim for claim in options.claims if claim in invariant.profiles]
    names = ("seed", "budget", "catalogue", "device")
    choices: Json = {name: getattr(options, name) for name in names}
    return reproduce(adapter, invariant.id, claims=claims, **choices)


def _profiles(invariants: Mapping[str, Json], run: RunFacts) -> dict[str, Json]:
    """Judge each profile that was covered whole.

    With `--only` most are not, and a profile that was judged on two of its ten invariants would
    be a false certificate.
    """
    details: dict[str, Json] = {}
    for name in asked_profiles(run.options) or run.profiles:
        members = _members(name, run)
        if members and members <= invariants.keys():
            verdicts = [Verdict(invariants[one]["verdict"]) for one in sorted(members)]
            details[name] = _profile(run.profiles.get(name, ""), verdicts)
    return details


def _members(profile: str, run: RunFacts) -> set[str]:
    pin = run.catalogue.version if run.options.catalogue is None else run.options.catalogue
    every = run.catalogue.invariants.values()
    return {one.id for one in every if profile in one.profiles and one.since <= pin}


def _profile(description: str, verdicts: Sequence[Verdict]) -> Json:
    counts = Counter(map(str, verdicts))
    # A SHOULD that nobody claimed does not colour the profile; the count says that it is there.
    colour = worst(Verdict.PASS if one is Verdict.NOT_MET else one for one in verdicts)
    return {"verdict": str(colour), "description": description, "counts": dict(counts)}


def judge(result: Json, forgiven: Iterable[str] = ()) -> int:
    """Give the exit status of a result; `forgiven` are the ids of a baseline.

    What is UNKNOWN because of one of these is forgiven with it.

    Raises:
        ResultError: the result is not one of ours.

    """
    check_schema(result)
    old = set(forgiven)
    invariants: dict[str, Json] = result["invariants"]
    if any(one["verdict"] == Verdict.VIOLATION and i not in old for i, one in invariants.items()):
        return VIOLATED
    undecided = [i for i, one in invariants.items() if _undecided(i, one, result)]
    counting = set(undecided) - set(follows(result, old))
    return UNDECIDED if counting or result["harness"] else CERTIFIED


def follows(result: Json, known: Collection[str]) -> list[str]:
    """List what is UNKNOWN because its control violates a promise that is known to be broken."""
    invariants: dict[str, Json] = result["invariants"]
    broken = {i for i in known if invariants.get(i, {}).get("verdict") == Verdict.VIOLATION}
    return [
        name
        for name, one in sorted(invariants.items())
        if one["verdict"] == Verdict.UNKNOWN
        and (because := REFERENCE.fullmatch(str(one["reason"])))
        and because[1] in broken
    ]


def _undecided(identifier: str, invariant: Json, result: Json) -> bool:
    """Tell whether an UNKNOWN counts: what the machine cannot do counts where it was asked for."""
    if invariant["verdict"] != Verdict.UNKNOWN:
        return False
    if not str(invariant["reason"]).startswith(MACHINE_LIMIT):
        return True
    asked = {*result["asked"]["profiles"], *result["claims"]}
    return bool(asked.intersection(invariant["profiles"])) or identifier in result["asked"]["only"]


def merge_status(statuses: Iterable[int]) -> int:
    """Merge the statuses of several adapters: a violation wins over UNKNOWN."""
    order = (CERTIFIED, UNDECIDED, VIOLATED)
    return max(statuses, key=order.index, default=CERTIFIED)


def check_schema(result: object) -> None:
    """Refuse what is not a result of version 1, or lacks what `judge` reads.

    Raises:
        ResultError: names the schema that was found, or the keys that are missing.

    """
    content = as_table(result)
    if content.get("schema") != SCHEMA:
        found = content.get("schema")
        raise ResultError(f"schema is {found!r}, this version reads {SCHEMA!r}: certify again")
    missing = sorted({"invariants", "asked", "claims", "harness", "adapter"} - content.keys())
    if missing:
        raise ResultError(f"the result lacks {', '.join(missing)}: it was cut or edited")


def load_result(path: Path) -> Json:
    """Read a `result.json`, to judge it again or to report on it.

    Raises:
        ResultError: the file cannot be read, is no JSON, or is not one of ours.

    """
    try:
        result: Json = json.loads(path.read_text(encoding="utf-8"))
        check_schema(result)
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}; name a result.json") from error
    except ValueError as error:
        raise ResultError(f"{path}: {error}") from error
    return result


def bundles_of(path: Path) -> set[str]:
    """Name the bundles of the certificate that is there; none where none reads."""
    try:
        return bundle.named(load_result(path))
    except (ResultError, LookupError, TypeError, AttributeError):  # cut, or edited by hand
        return set()


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: a run that is stopped leaves the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON that reads well in a diff, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def plain(value: object, depth: int = 0) -> Any:  # noqa: ANN401  any JSON value
    """Turn evidence into values that every JSON reader takes, whatever a manager put into it."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # NaN is no JSON
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # half a surrogate is no UTF-8
    if isinstance(value, bytes):
        return f"<{len(value)} bytes, sha256 {hashlib.sha256(value).hexdigest()[:16]}>"
    return _plain_container(value, depth) if depth < DEEPEST else plain(repr(value))


def as_table(value: object) -> Json:
    """Take what was read as a JSON object; anything else is an empty one."""
    return cast("Json", value) if isinstance(value, dict) else {}


def _plain_container(value: Any, depth: int) -> Any:  # noqa: ANN401  any container
    if isinstance(value, dict):
        return {plain(str(key)): plain(one, depth + 1) for key, one in cast("Json", value).items()}
    if isinstance(value, list | tuple):
        return [plain(one, depth + 1) for one in cast("list[object]", value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(one, depth + 1) for one in cast("set[object]", value)), key=str)
    return plain(repr(value))
