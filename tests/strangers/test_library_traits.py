"""What is a library's own way, and no fault, costs no verdict: each way has a small manager."""

from __future__ import annotations

import os
import sys
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

HERE = Path(__file__).parent
ADAPTERS = tuple(
    f"library_traits:{name}" for name in ("counts_itself", "removes_first", "aborts", "asks_psutil")
)
pytestmark = pytest.mark.xdist_group("library-traits")  # they share a server


@pytest.fixture(scope="module")
def traits() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, sys.path)]))
        patch.syspath_prepend(str(HERE))
        with Server(ADAPTERS) as started:
            yield started


def outcomes(name: str, server: Server, *only: str) -> list[CheckOutcome]:
    """Return the outcomes of a manager, each check of an invariant on its own."""
    return run_session(SessionOptions((f"library_traits:{name}",), only=only, server=server.socket))


def told(found: list[CheckOutcome]) -> dict[str, str]:
    """Return, by check, what is neither kept nor not applicable, and why."""
    good = {Verdict.PASS, Verdict.NOT_APPLICABLE}
    return {
        f"{one.invariant} {one.check.rpartition('::')[2]}": f"{one.verdict}: {one.reason}"
        for one in found
        if one.verdict not in good
    }


@pytest.mark.slow
@pytest.mark.parametrize("invariant", ["CKC-ASYN-001", "CKC-ASYN-003", "CKC-ASYN-009"])
def test_a_trainer_that_counts_its_own_steps_saves_a_step_twice(
    invariant: str, traits: Server
) -> None:
    """A state that is saved again is another one, of the same step: the job's count is saved, too.

    What an adapter does not hold is not asked for.
    """
    found = outcomes("counts_itself", traits, invariant)
    assert told(found) == {}
    assert Verdict.PASS in {one.verdict for one in found}


@pytest.mark.slow
def test_a_step_that_such_a_trainer_loses_is_told(traits: Server) -> None:
    (outcome,) = outcomes("removes_first", traits, "CKC-ASYN-009")
    assert outcome.verdict is Verdict.VIOLATION, outcome.reason
    assert "a save of a step that is there failed" in outcome.reason


def test_what_another_manager_raises_may_be_no_exception(traits: Server) -> None:
    found = outcomes("aborts", traits, "CKC-SIDE-007")
    assert [one.verdict for one in found] == [Verdict.PASS] * 2, told(found)


def test_who_asks_psutil_for_a_process_with_a_number_that_others_have_gets_its_own(
    traits: Server,
) -> None:
    pytest.importorskip("psutil", reason="psutil is not installed: pip install psutil")
    found = outcomes("asks_psutil", traits, "CKC-SIDE-018")
    assert [one.verdict for one in found] == [Verdict.PASS] * 3, told(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "invariant", [*(f"CKC-ASYN-00{number}" for number in (6, 7, 9)), "CKC-SIDE-012"]
)
def test_a_call_that_has_another_number_in_each_run_is_hit(invariant: str, traits: Server) -> None:
    """The last call that was counted has a smaller number, or is none, where fewer are made."""
    found = outcomes("varies", traits, invariant)
    assert [one.verdict for one in found] == [Verdict.PASS], told(found)
