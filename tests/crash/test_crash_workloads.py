"""Why a workload that could not be recorded says nothing: what the child's typed end decides."""

from __future__ import annotations

import pytest

from ckpt_conformance.contract.verdicts import Cause, NotApplicable, Unknown
from ckpt_conformance.crash.explore import workloads
from ckpt_conformance.harness.client import ProcessResult
from ckpt_conformance.harness.messages import ExitKind, JobSpec, Program
from ckpt_conformance.trace.notify import NotAvailableError

WORDS = "ckpt_conformance.trace.notify.NotAvailableError: not allowed here"


def ended(exit_kind: ExitKind, code: int) -> ProcessResult:
    program = Program(
        adapter="reference",
        root="root",
        journal="journal",
        result="result",
        output="output",
        job=JobSpec(kind="plain", seed=1),
        ops=(),
    )
    return ProcessResult(exit_kind, (), [], WORDS, program, code=code)


@pytest.mark.parametrize("name", ["first", "same", "resumed"])
def test_a_machine_that_can_follow_no_child_is_named(name: str) -> None:
    result = ended(ExitKind.CRASHED, NotAvailableError.EXIT_STATUS)
    with pytest.raises(Unknown, match="this machine can't record this adapter: in words") as raised:
        workloads._give_up(workloads.WORKLOADS[name], result, "in words")
    assert raised.value.cause is Cause.MACHINE


@pytest.mark.parametrize(
    ("exit_kind", "code"),
    [(ExitKind.CRASHED, 70), (ExitKind.HANG, -9), (ExitKind.ENDED, NotAvailableError.EXIT_STATUS)],
)
def test_no_sentence_blames_the_machine(exit_kind: ExitKind, code: int) -> None:
    with pytest.raises(Unknown) as raised:
        workloads._give_up(workloads.WORKLOADS["first"], ended(exit_kind, code), WORDS)
    assert raised.value.cause is not Cause.MACHINE
    with pytest.raises(NotApplicable, match="CKC-DISC-008"):
        workloads._give_up(workloads.WORKLOADS["same"], ended(exit_kind, code), WORDS)
