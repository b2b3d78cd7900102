"""From what a check raised to its outcome, and to what pytest shows."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract import requests
from ckpt_conformance.contract.verdicts import (
    CONTROL,
    CheckOutcome,
    NotApplicable,
    Unknown,
    Verdict,
    Violation,
    control_failed,
)
from ckpt_conformance.harness.client import ServerError
from ckpt_conformance.plugin import NEEDS, STATE, adapter_of
from ckpt_conformance.subject import bundle, resumption

if TYPE_CHECKING:
    from ckpt_conformance.contract.catalogue import Invariant
    from ckpt_conformance.subject.subject import Subject


def require(subject: Subject, invariant: Invariant) -> None:
    """Raise NotApplicable if the adapter lacks a capability, a component or the shape."""
    subject.need(*invariant.capabilities, holds=invariant.needs)
    if subject.info.shape not in invariant.shapes:
        shapes = " or ".join(invariant.shapes)
        msg = f"asks for the {shapes} shape; this adapter is a {subject.info.shape}"
        raise NotApplicable(msg)


def passed(item: pytest.Item, invariant: str) -> CheckOutcome:
    """Give a PASS."""
    remember(item, "")
    return CheckOutcome(
        adapter_of(item),
        invariant,
        _name(item),
        Verdict.PASS,
        evidence=_remarks(item),
        seed=_seed(item),
        crash=_explored(item),
    )


def remember(item: pytest.Item, violated: str) -> None:
    """Keep what a check found, empty if nothing: as a control of others it need not run again."""
    subject, _ = item.stash.get(NEEDS, (None, None))
    if subject is not None:
        subject.controls[_name(item)] = violated


def _explored(item: pytest.Item) -> dict[str, Any]:
    """Take what was explored since the last outcome; each exploration is carried once."""
    subject, _ = item.stash.get(NEEDS, (None, None))
    return dict(subject.notes.pop("crash", {})) if subject else {}


def of_error(item: pytest.Item, invariant: str, error: BaseException) -> CheckOutcome:
    """Give the outcome of an exception; what is no verdict of ours is the harness's: UNKNOWN."""
    common: dict[str, Any] = {
        "adapter": adapter_of(item),
        "invariant": invariant,
        "check": _name(item),
        "seed": _seed(item),
        "crash": _explored(item),
    }
    if isinstance(error, Violation):
        remember(item, str(error))
        promised = _promise(item, invariant)
        evidence = error.evidence | ({"promised": promised} if promised else {}) | _remarks(item)
        must = promised or _is_must(item, invariant)
        verdict = Verdict.VIOLATION if must else Verdict.NOT_MET
        return CheckOutcome(
            **common, verdict=verdict, reason=str(error), evidence=evidence, rate=error.rate
        )
    if isinstance(error, NotApplicable):
        return CheckOutcome(**common, verdict=Verdict.NOT_APPLICABLE, reason=str(error))
    if isinstance(error, Unknown):
        reason, evidence = _referred(item, str(error)), _remarks(item)
        return CheckOutcome(**common, verdict=Verdict.UNKNOWN, reason=reason, evidence=evidence)
    lines = traceback.format_exception(error)[-6:]
    return CheckOutcome(
        **common,
        verdict=Verdict.UNKNOWN,
        reason=f"the harness failed: {type(error).__name__}: {error}",
        evidence={"trace": lines},
    )


def _referred(item: pytest.Item, reason: str) -> str:
    """Refer a failed control that names no invariant to the one that says why, if there is one."""
    subject, _ = item.stash.get(NEEDS, (None, None))
    if subject is None or not reason.startswith(CONTROL):
        return reason
    with contextlib.suppress(ServerError):  # it went away: nothing more can be found out
        return str(control_failed(reason, resumption.plain_trouble(subject)))
    return reason


def keep(item: pytest.Item, outcome: CheckOutcome, subject: Subject | None) -> None:
    """Write a bundle of a violation, if asked to, and name it in the evidence."""
    given = item.config.option.ckpt_bundles
    if given and subject and outcome.verdict in {Verdict.VIOLATION, Verdict.NOT_MET}:
        several = len(item.config.stash[STATE].adapters) > 1
        folder = Path(given) / bundle.safe(outcome.adapter) if several else Path(given)
        outcome.evidence["bundle"] = bundle.write(folder / "bundles", subject, outcome).name


def as_pytest(outcome: CheckOutcome, error: BaseException) -> BaseException:
    """Choose what pytest sees: a failure, a skip, or an expected failure (an unclaimed SHOULD)."""
    if outcome.verdict is Verdict.NOT_APPLICABLE:
        return pytest.skip.Exception(outcome.reason, allow_module_level=False)
    if outcome.verdict is Verdict.NOT_MET:
        return pytest.xfail.Exception(outcome.reason)
    return error


def block(outcome: dict[str, Any], config: pytest.Config) -> str:
    """Print a violation for a terminal: id, promise, reason, evidence, how to reproduce it."""
    from ckpt_conformance.contract.catalogue import load_catalogue

    invariant = load_catalogue().invariants.get(outcome.get("invariant", ""))
    lines = [f"{outcome.get('verdict')} {outcome.get('invariant')}  {outcome.get('adapter')}"]
    if invariant:
        lines += [f"  promise   {invariant.statement}", f"  why       {invariant.why}"]
    lines.append(f"  found     {outcome.get('reason')}")
    lines += [f"  {key:<9} {value}" for key, value in outcome.get("evidence", {}).items()]
    lines.append(f"  reproduce: {reproduce(outcome, config)}")
    return "\n".join(lines)


def reproduce(outcome: dict[str, Any], config: pytest.Config) -> str:
    """Give the one command that runs this check again, with the same choices."""
    given = config.option
    return requests.reproduce(
        str(outcome.get("adapter")),
        str(outcome.get("invariant")),
        seed=int(outcome.get("seed", 0)),
        budget=given.ckpt_budget,
        claims=given.ckpt_claim,
        catalogue=given.ckpt_catalogue,
        device=given.ckpt_device,
    )


def _promise(item: pytest.Item, invariant: str) -> str:
    """Quote the manager's own documentation, if its adapter does."""
    subject, _ = item.stash.get(NEEDS, (None, None))
    return str(subject.info.promises.get(invariant, "")) if subject else ""


def _remarks(item: pytest.Item) -> dict[str, Any]:
    """Give what the certificate must say of how the check was made."""
    subject, _ = item.stash.get(NEEDS, (None, None))
    return dict(subject.remarks) if subject else {}


def _is_must(item: pytest.Item, invariant: str) -> bool:
    from ckpt_conformance.contract.catalogue import load_catalogue

    entry = load_catalogue(item.config.option.ckpt_catalogue).invariants[invariant]
    claims = set[str](item.config.option.ckpt_claim)
    return entry.level == "MUST" or bool(claims & set(entry.profiles))


def _seed(item: pytest.Item) -> int:
    return int(item.config.option.ckpt_seed)


def _name(item: pytest.Item) -> str:
    return f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"
