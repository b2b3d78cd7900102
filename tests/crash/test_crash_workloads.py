"""Why a workload that could not be recorded says nothing: what the child's typed end decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.verdicts import Cause, NotApplicable, Unknown
from ckpt_conformance.crash.explore import engine, workloads
from ckpt_conformance.harness.client import ProcessResult
from ckpt_conformance.harness.messages import ExitKind, JobSpec, Program
from ckpt_conformance.trace.notify import NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.subject.subject import Subject

LIMITS = engine.Limits(candidates=300, recoveries=60, alone=10, rounds=2)
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


def broken(subject: Subject, name: str) -> bool:
    """Tell whether a power loss on ext4 in this workload leaves what violates."""
    result = engine.explore(subject, workloads.record(subject, name), ("ext4",), LIMITS)
    assert not result.unknown
    return bool(result.violations)


def test_a_small_job_shows_a_buffer_that_no_sync_reached(
    new_subject: Callable[..., Subject],
) -> None:
    subject = new_subject("mutant:A04-buffer")
    assert [name for name in ("first", "small") if broken(subject, name)] == ["small"]
    assert not broken(new_subject("reference"), "small")
