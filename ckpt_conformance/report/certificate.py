"""The certificate of one adapter: what was promised, what was kept, and how to see it again.

`build_result` turns the outcomes of a session into `result.json`, `judge` gives the exit status
from that file alone. An invariant that was selected and has no outcome is UNKNOWN, never a pass.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace

from ckpt_conformance import __version__
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.catalogue import basis_of, is_chosen, level_of
from ckpt_conformance.contract.requests import RequestError, check_names, reproduce
from ckpt_conformance.contract.verdicts import (
    SEVERITY,
    Cause,
    CheckOutcome,
    Outcome,
    Remarks,
    Verdict,
    worst,
)
from ckpt_conformance.crash.explore import summary
from ckpt_conformance.report.result import (
    SCHEMA,
    SCHEMAS,
    STOPPED,
    Adapter,
    Asked,
    CheckResult,
    Environment,
    InvariantResult,
    Json,
    OriginResult,
    ProfileResult,
    Result,
    ResultError,
    Suite,
    as_table,
    load_result,
)
from ckpt_conformance.subject import bundle

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.contract.catalogue import Catalogue, Invariant, Origin
    from ckpt_conformance.contract.registry import AdapterInfo
    from ckpt_conformance.plugin.options import CheckOptions
    from ckpt_conformance.report.result import Rate, Waiver

__all__ = ["SCHEMA", "SCHEMAS", "Json", "ResultError", "as_table", "load_result"]  # of `result`

REPRODUCED = "reproduced with a real process"
CERTIFIED, VIOLATED, USAGE, UNDECIDED = 0, 1, 2, 3
DEEPEST = 20
RELEASES = "VERS"  # the family whose checks read what other releases of torch wrote


@dataclass(frozen=True)
class RunFacts:
    """What all certificates of one run share."""

    options: CheckOptions
    catalogue: Catalogue
    profiles: Mapping[str, str]  # name -> description, in the order of reports
    environment: Mapping[str, str | int | None]  # of `environment.describe_environment`
    commit: str | None = None
    interrupted: bool = False
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    waivers: Sequence[Waiver] = ()


def asked_profiles(options: CheckOptions) -> tuple[str, ...]:
    """Name the profiles of the command line; a claim that nothing tests would be empty."""
    claims = options.claims if options.profiles else ()
    return tuple(dict.fromkeys((*options.profiles, *claims)))


def selected(catalogue: Catalogue, options: CheckOptions) -> list[Invariant]:
    """List the invariants that a run with these options must judge, in catalogue order."""
    pin = catalogue.version if options.catalogue is None else options.catalogue
    asked = asked_profiles(options), options.only, options.claims, options.budget
    every = catalogue.invariants.values()
    return [one for one in every if one.since <= pin and is_chosen(one, *asked)]


def check_request(options: CheckOptions, catalogue: Catalogue, profiles: Collection[str]) -> None:
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


def build_result(info: AdapterInfo, outcomes: Iterable[CheckOutcome], run: RunFacts) -> Result:
    """Merge the outcomes of one adapter into the content of its `result.json`."""
    chosen = selected(run.catalogue, run.options)
    every, grouped = list(outcomes), defaultdict[str, list[CheckOutcome]](list)
    for outcome in every:
        grouped[outcome.invariant].append(outcome)
    judged = {one.id: _invariant(one, grouped[one.id], info, run) for one in chosen}
    judged = {name: _referring(one, judged) for name, one in judged.items()}
    invariants = {name: _counted_once(name, judged, info, run) for name in judged}
    profiles = _profiles(invariants, run)
    options = run.options
    return Result(
        suite=Suite(version=__version__, commit=run.commit, catalogue=_version(run)),
        created=run.created,
        interrupted=run.interrupted,
        environment=_environment(every, run),
        adapter=msgspec.convert(info.to_json(), Adapter),
        seed=options.seed,
        budget=options.budget,
        claims=list(options.claims),
        asked=Asked(profiles=list(asked_profiles(options)), only=list(options.only)),
        profiles={name: details.verdict for name, details in profiles.items()},
        profile_details=profiles,
        invariants=invariants,
        origins=_origins(invariants.values(), run.catalogue),
        harness=[_check(one) for one in _strays(grouped, run.catalogue)],
        crash=summary.of_outcomes(outcome.crash for outcome in every),
        waivers=list(run.waivers),
    )


def _environment(outcomes: Iterable[CheckOutcome], run: RunFacts) -> Environment:
    """Describe the machine, and what checks say of how they were made."""
    merged = Remarks()
    for outcome in outcomes:
        merged.add(outcome.remarks)
    points = "; ".join(f"{what}: {remark}" for what, remark in sorted(merged.io_points.items()))
    remarks = {
        "crash": merged.crash,
        "ranks": merged.ranks,
        "releases": ", ".join(merged.releases),
        "one_sided": merged.one_sided,
        "io_points": points,
        "planted": "; ".join(f"{what}: {told}" for what, told in sorted(merged.planted.items())),
    }
    described = {**run.environment, "device": run.options.device, **remarks}
    return msgspec.convert(described, Environment)


def _version(run: RunFacts) -> int:
    """Number the version of the catalogue that the run judges by."""
    pin = run.options.catalogue
    return run.catalogue.version if pin is None else pin


def _strays(grouped: Mapping[str, list[CheckOutcome]], catalogue: Catalogue) -> list[CheckOutcome]:
    """Find outcomes of no invariant, such as a worker that died: faults of the harness."""
    return [one for name in grouped if name not in catalogue.invariants for one in grouped[name]]


def _invariant(
    invariant: Invariant, outcomes: Sequence[CheckOutcome], info: AdapterInfo, run: RunFacts
) -> InvariantResult:
    verdict = worst(one.verdict for one in outcomes) if outcomes else Verdict.UNKNOWN
    telling = _telling(outcomes, verdict) or _not_run(invariant, info, run)
    bad = verdict in {Verdict.VIOLATION, Verdict.NOT_MET}
    origin = run.catalogue.origins.get(telling.origin)
    owner = origin.owner if origin else info.owner
    return InvariantResult(
        family=invariant.family,
        statement=invariant.statement,
        why=invariant.why,
        basis=_basis(invariant, origin, info),
        level=_level(invariant, origin, info, run.options),
        profiles=list(invariant.profiles),
        incidents=list(invariant.incidents),
        verdict=verdict,
        # A check that knows better says who owns a violation, or how it was seen.
        owner=str(telling.evidence.get("owner", owner)) if bad else None,
        grade=str(telling.evidence.get("grade", REPRODUCED)) if bad else None,
        rate=_rate(outcomes),
        reason=plain(telling.reason),
        cause=telling.cause,
        see=telling.told_by or telling.see or None,
        origin=telling.origin or None,
        checks=[_check(one) for one in sorted(outcomes, key=_worst_first)],
        evidence=plain(telling.evidence),
        remedy=invariant.remedy if bad else "",
        reproduce=_reproduce(invariant, info.name, run.options),
    )


def _referring(result: InvariantResult, judged: Mapping[str, InvariantResult]) -> InvariantResult:
    """Take back a reference to an invariant that says nothing: it is kept, or not applicable."""
    if result.verdict is not Verdict.UNKNOWN or result.see is None:
        return result
    other = judged.get(result.see)  # none: it was not run
    if other is None or other.verdict not in {Verdict.PASS, Verdict.NOT_APPLICABLE}:
        return result
    return replace(result, see=None, reason=result.reason.removesuffix(f"; see {result.see}"))


def _counted_once(
    name: str, judged: Mapping[str, InvariantResult], info: AdapterInfo, run: RunFacts
) -> InvariantResult:
    """Refer a violation to the invariant that tells its cause, where that one is violated, too.

    Else it counts itself: nobody else tells it.
    """
    result = judged[name]
    if result.verdict not in {Verdict.VIOLATION, Verdict.NOT_MET} or result.see is None:
        return result
    teller = judged.get(result.see)
    is_told = teller is not None and teller.verdict is Verdict.VIOLATION
    if teller is None or not is_told or teller.origin != result.origin:
        return replace(result, see=None)
    together = _reproduce(run.catalogue.invariants[name], info.name, run.options, result.see)
    return replace(result, verdict=Verdict.SAME_CAUSE, remedy="", reproduce=together)


def _origins(judged: Iterable[InvariantResult], catalogue: Catalogue) -> dict[str, OriginResult]:
    """Describe the origins that violations name."""
    names = sorted({one.origin for one in judged if one.origin})
    return {name: _origin(catalogue.origins[name]) for name in names}


def _origin(origin: Origin) -> OriginResult:
    return OriginResult(
        owner=origin.owner,
        statement=origin.statement,
        documentation=origin.documentation,
        decision=origin.decision,
    )


def _not_run(invariant: Invariant, info: AdapterInfo, run: RunFacts) -> CheckOutcome:
    """Stand for an invariant that has no outcome: UNKNOWN."""
    reason = STOPPED if run.interrupted else "not run"
    cause = Cause.INTERRUPTED if run.interrupted else Cause.HARNESS
    return CheckOutcome(info.name, invariant.id, "", Verdict.UNKNOWN, reason, cause=cause)


def _worst_first(outcome: CheckOutcome) -> tuple[int, str]:
    return -SEVERITY[outcome.verdict], outcome.check


def _telling(outcomes: Sequence[CheckOutcome], verdict: Verdict) -> CheckOutcome | None:
    """Pick the outcome whose reason stands for the invariant.

    A limit of the machine only where nothing else went wrong: it may be forgiven, a fault of the
    harness must not be. What the manager itself does before what another one tells; what is wrong
    without a word before what is loud; then by name, since workers end in any order.
    """
    matching = [one for one in outcomes if one.verdict == verdict]
    return min(matching, key=_telling_order, default=None)


def _telling_order(outcome: CheckOutcome) -> tuple[bool, bool, bool, str]:
    is_silent = outcome.evidence.get("outcome") == Outcome.SILENT_WRONG
    is_told_elsewhere = bool(outcome.origin or outcome.told_by)
    return outcome.cause is Cause.MACHINE, is_told_elsewhere, not is_silent, outcome.check


def _basis(invariant: Invariant, origin: Origin | None, info: AdapterInfo) -> str:
    basis = basis_of(invariant, origin)
    return "promise" if basis == "practice" and invariant.id in info.promises else basis


def _level(
    invariant: Invariant, origin: Origin | None, info: AdapterInfo, options: CheckOptions
) -> str:
    claimed = invariant.id in info.promises or set(options.claims) & set(invariant.profiles)
    return "MUST" if claimed else level_of(invariant, origin)


def _rate(outcomes: Sequence[CheckOutcome]) -> Rate | None:
    """Add up (bad, tried) of the checks that sample."""
    rates = [one.rate for one in outcomes if one.rate is not None]
    return (sum(bad for bad, _ in rates), sum(tried for _, tried in rates)) if rates else None


def _check(outcome: CheckOutcome) -> CheckResult:
    return CheckResult(
        name=plain(outcome.check),
        verdict=outcome.verdict,
        reason=plain(outcome.reason),
        cause=outcome.cause,
        see=outcome.told_by or outcome.see or None,
        origin=outcome.origin or None,
        seconds=round(outcome.seconds, 3),
        rate=outcome.rate,
        evidence=plain(outcome.evidence),
    )


def _reproduce(invariant: Invariant, adapter: str, options: CheckOptions, told_by: str = "") -> str:
    # Without the claim the same finding is NOT_MET, and the command would exit with 0. Without the
    # invariant that tells the cause it would be a violation of its own.
    return reproduce(
        adapter,
        *filter(None, (invariant.id, told_by)),
        claims=[claim for claim in options.claims if claim in invariant.profiles],
        seed=options.seed,
        budget=options.budget,
        catalogue=options.catalogue,
        device=options.device,
        deadline=options.deadline,
        written_by=options.written_by if invariant.family == RELEASES else (),
    )


def _profiles(invariants: Mapping[str, InvariantResult], run: RunFacts) -> dict[str, ProfileResult]:
    """Judge each profile that was covered whole.

    With `--only` most are not, and a profile that was judged on two of its ten invariants would
    be a false certificate.
    """
    details: dict[str, ProfileResult] = {}
    for name in asked_profiles(run.options) or run.profiles:
        members = _members(name, run)
        if members and members <= invariants.keys():
            verdicts = [invariants[one].verdict for one in sorted(members)]
            details[name] = _profile(run.profiles.get(name, ""), verdicts)
    return details


def _members(profile: str, run: RunFacts) -> set[str]:
    every, version = run.catalogue.invariants.values(), _version(run)
    return {one.id for one in every if profile in one.profiles and one.since <= version}


def _profile(description: str, verdicts: Sequence[Verdict]) -> ProfileResult:
    # A SHOULD that nobody claimed does not colour the profile; the count says that it is there.
    # What is broken by a cause that is told elsewhere is broken, and the profile is not kept.
    colours = {Verdict.NOT_MET: Verdict.PASS, Verdict.SAME_CAUSE: Verdict.VIOLATION}
    colour = worst(colours.get(one, one) for one in verdicts)
    return ProfileResult(verdict=colour, description=description, counts=dict(Counter(verdicts)))


def judge(result: Result, forgiven: Iterable[str] = ()) -> int:
    """Return the exit status of a result; `forgiven` are the ids of a baseline.

    What is UNKNOWN because of one of these is forgiven with it.
    """
    old = set(forgiven)
    if any(name not in old for name, _ in result.having(Verdict.VIOLATION)):
        return VIOLATED
    undecided = {name for name, one in result.invariants.items() if _counts(name, one, result)}
    counting = undecided - set(follows(result, old))
    return UNDECIDED if counting or result.harness else CERTIFIED


def follows(result: Result, known: Collection[str]) -> list[str]:
    """List what is UNKNOWN because its control violates a promise that is known to be broken."""
    broken = {name for name, _ in result.having(Verdict.VIOLATION) if name in known}
    broken |= {name for name, one in result.having(Verdict.SAME_CAUSE) if one.see in broken}
    return [
        name
        for name, one in result.having(Verdict.UNKNOWN)
        if one.cause is Cause.CONTROL and one.see in broken
    ]


def _counts(identifier: str, invariant: InvariantResult, result: Result) -> bool:
    """Return whether an UNKNOWN counts: a limit of the machine counts where it was asked for."""
    if invariant.verdict is not Verdict.UNKNOWN:
        return False
    if invariant.cause is not Cause.MACHINE:
        return True
    asked = {*result.asked.profiles, *result.claims}
    return bool(asked.intersection(invariant.profiles)) or identifier in result.asked.only


def merge_status(statuses: Iterable[int]) -> int:
    """Merge the statuses of several adapters: a violation wins over UNKNOWN."""
    order = (CERTIFIED, UNDECIDED, VIOLATED)
    return max(statuses, key=order.index, default=CERTIFIED)


def bundles_named(result: Result) -> set[str]:
    """Name the bundles of a result; a name that `bundle.safe` did not make is not ours."""
    judged: list[CheckResult | InvariantResult] = list(result.invariants.values())
    judged += [check for one in result.invariants.values() for check in one.checks]
    names = [one.evidence.get("bundle") for one in judged]
    return {name for name in names if isinstance(name, str) and name == bundle.safe(name) != ".."}


def bundles_of(path: Path) -> set[str]:
    """Name the bundles of the certificate that is there; none where none reads."""
    try:
        return bundles_named(load_result(path))
    except ResultError:  # cut, or edited by hand
        return set()


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: a run that is stopped leaves the old one."""
    trees.write_whole(path, text.encode(), is_synced=True)


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


def _plain_container(value: Any, depth: int) -> Any:  # noqa: ANN401  any container
    if isinstance(value, dict):
        return {plain(str(key)): plain(one, depth + 1) for key, one in cast("Json", value).items()}
    if isinstance(value, list | tuple):
        return [plain(one, depth + 1) for one in cast("list[object]", value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(one, depth + 1) for one in cast("set[object]", value)), key=str)
    return plain(repr(value))
