"""What pytest shows of an outcome."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_conformance.contract.catalogue import load_catalogue
from ckpt_conformance.contract.verdicts import Cause, CheckOutcome, Verdict
from ckpt_conformance.plugin import outcomes
from ckpt_conformance.plugin.options import SessionOptions

NAME = "CKC-ATOM-001"
REMEDY = load_catalogue().invariants[NAME].remedy


def shown(verdict: Verdict, **more: Any) -> list[str]:  # noqa: ANN401  fields of an outcome
    outcome = CheckOutcome("toy", NAME, "s::c", verdict, "it broke", {"blame": "a rename"}, **more)
    return outcomes.block(outcome, SessionOptions(adapters=("toy",))).splitlines()


@pytest.mark.parametrize("verdict", [Verdict.VIOLATION, Verdict.NOT_MET])
def test_what_is_broken_is_shown_with_its_fix_behind_the_blame(verdict: Verdict) -> None:
    *_, blame, fix, command = shown(verdict)
    assert blame == "  blame     a rename"
    assert fix == f"  fix       {REMEDY}"
    assert command.startswith("  reproduce: ckpt-conformance certify toy --only CKC-ATOM-001")


def test_what_is_unknown_has_no_fix() -> None:
    assert not any(REMEDY in line for line in shown(Verdict.UNKNOWN, cause=Cause.HARNESS))
