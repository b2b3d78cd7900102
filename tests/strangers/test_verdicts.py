"""Managers that nobody wrote for this suite get the verdict that their own documentation says.

What is expected stands beside each, by profile or by invariant; nothing that the kernel shows is
UNKNOWN.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.harness.client import Server
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.session import run_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.contract.verdicts import CheckOutcome

pytestmark = pytest.mark.slow  # certificates of whole managers
HERE = Path(__file__).parent
KILLED = tuple(f"CKC-ATOM-00{number}" for number in range(1, 6))
GOOD = {Verdict.PASS, Verdict.NOT_APPLICABLE}
ADAPTERS = ("databases:extra", "databases:truncate", "native:in_place", "native:renamed")


@pytest.fixture(scope="module")
def strangers() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(HERE), *filter(None, sys.path)]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.syspath_prepend(str(HERE))
        with Server(ADAPTERS) as started:
            yield started


def verdicts(adapter: str, server: Server, *only: str) -> dict[str, list[CheckOutcome]]:
    """Return the outcomes of an adapter by invariant."""
    found: dict[str, list[CheckOutcome]] = defaultdict(list)
    for outcome in run_session(SessionOptions((adapter,), only=only, server=server.socket)):
        found[outcome.invariant].append(outcome)
    return found


def others(found: dict[str, list[CheckOutcome]]) -> dict[str, str]:
    """Return the reasons of what is neither kept nor not applicable."""
    return {
        invariant: f"{one.verdict}: {one.reason}"
        for invariant, outcomes in found.items()
        for one in outcomes
        if one.verdict not in GOOD
    }


@pytest.mark.parametrize("adapter", ["databases:extra", "databases:truncate", "native:renamed"])
def test_a_native_writer_that_stands_kills_is_seen_to(adapter: str, strangers: Server) -> None:
    found = verdicts(adapter, strangers, *KILLED, "CKC-RETN-001", "CKC-SIDE-003", "CKC-INTN-003")
    assert others(found) == {}
    assert {one.verdict for one in found["CKC-ATOM-001"]} == {Verdict.PASS}
    assert {one.verdict for one in found["CKC-SIDE-003"]} == {Verdict.PASS}


def test_a_native_writer_in_place_is_violated(strangers: Server) -> None:
    found = verdicts("native:in_place", strangers, *KILLED[:2])
    outcomes = [one for invariant in KILLED[:2] for one in found[invariant]]
    assert {one.verdict for one in outcomes} == {Verdict.VIOLATION}
    killed = next(one for one in outcomes if "sigkill_truncation" in one.check)
    assert "step-00000004" in killed.reason
