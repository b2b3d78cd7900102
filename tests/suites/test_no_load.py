"""A manager whose every load fails is told so once: other checks refer to CKC-SMOK-001."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.session import run_session

if TYPE_CHECKING:
    from ckpt_conformance.harness.client import Server

OTHERS = ("CKC-DISC-001", "CKC-DISC-009", "CKC-RETN-008")


@pytest.mark.parametrize(("mutant", "owner"), [("S02", "CKC-SMOK-001"), ("B10", "")])
def test_a_load_that_always_fails_is_no_finding_of_others(
    mutant: str, owner: str, server: Server
) -> None:
    """B10 takes a wrong step, and loads: that stays a violation of CKC-DISC-001."""
    options = SessionOptions(
        (f"mutant:{mutant}",), only=OTHERS, server=server.socket, pretends=True
    )
    own = {one.invariant: (one.verdict, one.see) for one in run_session(options)}
    if owner:
        assert own == dict.fromkeys(OTHERS, (Verdict.UNKNOWN, owner))
    else:
        assert own["CKC-DISC-001"] == (Verdict.VIOLATION, "")
