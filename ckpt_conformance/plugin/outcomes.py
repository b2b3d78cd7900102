"""From what a check raised to its outcome, and to what pytest shows."""

from __future__ import annotations

import contextlib
import copy
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract import requests
from ckpt_conformance.contract.catalogue import is_chosen, level_of, load_catalogue
from ckpt_conformance.contract.verdicts import (
    Cause,
    CheckOutcome,
    Evidence,
    NotApplicable,
    Remarks,
    StoodInFor,
    Unknown,
    Verdict,
    Violation,
    control_failed,
)
from ckpt_conformance.harness.client import ServerError
from ckpt_conformance.plugin import NEEDS, Needs, adapter_of
from ckpt_conformance.plugin.options import CheckOptions, options_of
from ckpt_conformance.subject import bundle, resumption

if TYPE_CHECKING:
    from ckpt_conformance.contract.verdicts import CrashSummary
    from ckpt_conformance.subject.subject import Subject


def require(needs: Needs) -> None:
    """Raise NotApplicable if the adapter lacks a capability, a component or the shape."""
    subject, invariant = needs
    subject.need(*invariant.capabilities, holds=invariant.needs)
    if subject.info.shape not in invariant.shapes:
        shapes = " or ".join(invariant.shapes)
        msg = f"asks for the {shapes} shape; this adapter is a {subject.info.shape}"
        raise NotApplicable(msg)


@dataclass(frozen=True)
class Judgement:
    """What came of a check, apart from which check it was."""

    verdict: Verdict
    reason: str = ""
    evidence: Evidence = field(default_factory=dict[str, Any])
    rate: tuple[int, int] | None = None
    cause: Cause | None = None
    see: str = ""
    origin: str = ""
    told_by: str = ""
    is_remarked: bool = True  # whether the outcome says how the check was made


def passed(item: pytest.Item, invariant: str) -> CheckOutcome:
    """Make the PASS of a check that raised nothing."""
    remember(item, "")
    return _outcome(item, invariant, Judgement(Verdict.PASS))


def of_error(item: pytest.Item, invariant: str, error: BaseException) -> CheckOutcome:
    """Make the outcome of an exception; what is no verdict of ours is the harness's: UNKNOWN."""
    if isinstance(error, Violation):
        remember(item, str(error))
    return _outcome(item, invariant, _judgement(item, invariant, error))


def _judgement(item: pytest.Item, invariant: str, error: BaseException) -> Judgement:
    if isinstance(error, Violation):
        promised = _promise(item, invariant)
        evidence = error.evidence | ({"promised": promised} if promised else {})
        must = promised or _is_must(item, invariant, error.origin)
        verdict = Verdict.VIOLATION if must else Verdict.NOT_MET
        return Judgement(
            *(verdict, str(error), evidence, error.rate),
            origin=error.origin,
            told_by=_told_by(error, invariant),
        )
    if isinstance(error, NotApplicable):
        is_remarked = isinstance(error, StoodInFor)
        return Judgement(Verdict.NOT_APPLICABLE, str(error), is_remarked=is_remarked)
    if isinstance(error, Unknown):
        doubt = _referred(item, error)
        return Judgement(Verdict.UNKNOWN, str(doubt), cause=doubt.cause, see=doubt.see)
    reason = f"the harness failed: {type(error).__name__}: {error}"
    trace: Evidence = {"trace": traceback.format_exception(error)[-6:]}
    return Judgement(Verdict.UNKNOWN, reason, trace, cause=Cause.HARNESS, is_remarked=False)


def _outcome(item: pytest.Item, invariant: str, judgement: Judgement) -> CheckOutcome:
    """Add to what was found which check it was, and how it was made."""
    remarks = _remarks(item) if judgement.is_remarked else Remarks()
    return CheckOutcome(
        adapter=adapter_of(item),
        invariant=invariant,
        check=_name(item),
        verdict=judgement.verdict,
        reason=judgement.reason,
        evidence=judgement.evidence | remarks.as_evidence(),
        rate=judgement.rate,
        seed=options_of(item.config).seed,
        crash=_explored(item),
        cause=judgement.cause,
        see=judgement.see,
        remarks=remarks,
        origin=judgement.origin,
        told_by=judgement.told_by,
    )


def remember(item: pytest.Item, violated: str) -> None:
    """Keep what a check found, empty if nothing: as a control of others it need not run again."""
    if subject := _subject(item):
        subject.controls[_name(item)] = violated


def _subject(item: pytest.Item) -> Subject | None:
    needs = item.stash.get(NEEDS, None)
    return needs.subject if needs else None


def _explored(item: pytest.Item) -> dict[str, CrashSummary]:
    """Take what was explored since the last outcome, by workload; each is carried once."""
    subject = _subject(item)
    if subject is None:
        return {}
    explored, subject.explored = subject.explored, {}
    return dict(explored)


def _referred(item: pytest.Item, doubt: Unknown) -> Unknown:
    """Refer a failed control that names no invariant to the one that says why, if there is one."""
    subject = _subject(item)
    if subject is None or doubt.cause is not Cause.CONTROL:
        return doubt
    with contextlib.suppress(ServerError):  # it went away: nothing more can be found out
        return control_failed(doubt, resumption.plain_trouble(subject))
    return doubt


def keep(item: pytest.Item, outcome: CheckOutcome) -> None:
    """Write a bundle of a violation, if asked to, and name it in the evidence."""
    options, subject = options_of(item.config), _subject(item)
    if options.out and subject and outcome.verdict in {Verdict.VIOLATION, Verdict.NOT_MET}:
        several = len(options.adapters) > 1
        folder = options.out / bundle.safe(outcome.adapter) if several else options.out
        outcome.evidence["bundle"] = bundle.write(folder / "bundles", subject, outcome).name


def as_pytest(outcome: CheckOutcome, error: BaseException, options: CheckOptions) -> BaseException:
    """Choose what pytest sees: a failure, a skip, or an expected failure.

    Expected is an unclaimed SHOULD, and what another check of this run tells the cause of.
    """
    if outcome.verdict is Verdict.NOT_APPLICABLE:
        return pytest.skip.Exception(outcome.reason, allow_module_level=False)
    if outcome.verdict is Verdict.NOT_MET:
        return pytest.xfail.Exception(outcome.reason)
    if outcome.told_by and _is_judged(outcome.told_by, options):
        return pytest.xfail.Exception(f"the cause is told by {outcome.told_by}: {outcome.reason}")
    return error


def _is_judged(invariant: str, options: CheckOptions) -> bool:
    """Whether this run judges an invariant, too."""
    known = load_catalogue(options.catalogue).invariants
    asked = options.profiles, options.only, options.claims, options.budget
    return invariant in known and is_chosen(known[invariant], *asked)


def block(outcome: CheckOutcome, options: CheckOptions) -> str:
    """Print a violation for a terminal: id, promise, reason, evidence, how to reproduce it."""
    invariant = load_catalogue().invariants.get(outcome.invariant)
    lines = [f"{outcome.verdict} {outcome.invariant}  {outcome.adapter}"]
    if invariant:
        lines += [f"  promise   {invariant.statement}", f"  why       {invariant.why}"]
    lines.append(f"  found     {outcome.reason}")
    if origin := load_catalogue().origins.get(outcome.origin):
        lines += [f"  cause     {origin.statement}", f"  owner     {origin.owner}"]
    lines += [f"  {key:<9} {value}" for key, value in outcome.evidence.items()]
    if invariant and outcome.verdict in {Verdict.VIOLATION, Verdict.NOT_MET}:
        lines.append(f"  fix       {invariant.remedy}")
    lines.append(f"  reproduce: {reproduce(outcome, options)}")
    return "\n".join(lines)


def reproduce(outcome: CheckOutcome, options: CheckOptions) -> str:
    """Write the one command that runs this check again, with the same choices."""
    return requests.reproduce(
        outcome.adapter,
        outcome.invariant,
        seed=outcome.seed,
        budget=options.budget,
        claims=options.claims,
        catalogue=options.catalogue,
        device=options.device,
        written_by=options.written_by,
        deadline=options.deadline,
    )


def _promise(item: pytest.Item, invariant: str) -> str:
    """Quote the manager's own documentation, if its adapter does."""
    subject = _subject(item)
    return str(subject.info.promises.get(invariant, "")) if subject else ""


def _remarks(item: pytest.Item) -> Remarks:
    """Copy what the certificate must say of how the check was made: the next check empties it."""
    subject = _subject(item)
    return copy.deepcopy(subject.remarks) if subject else Remarks()


def _is_must(item: pytest.Item, invariant: str, origin: str) -> bool:
    options = options_of(item.config)
    catalogue = load_catalogue(options.catalogue)
    entry = catalogue.invariants[invariant]
    is_claimed = bool(set(options.claims) & set(entry.profiles))
    return is_claimed or level_of(entry, catalogue.origins.get(origin)) == "MUST"


def _told_by(violation: Violation, invariant: str) -> str:
    """Name the invariant that tells the cause of a violation; empty if it is this one."""
    origin = load_catalogue().origins.get(violation.origin)
    return origin.told_by if origin and origin.told_by != invariant else ""


def _name(item: pytest.Item) -> str:
    return f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"
