"""Whether a run that saves is the run that does not: else what it serves later tells nothing."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Violation, control_failed
from ckpt_conformance.harness.messages import Run, RunResult
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.checks import check, key_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from ckpt_conformance.subject.subject import Subject

_SAVE, _END = 2, 4  # steps


@check("CKC-SIDE-001")
def saves_leave_the_run(subject: Subject) -> None:
    """Raise Violation where a run that saves ends in another state than the run that does not."""
    plain = subject.execute(Run(until=_END, final=True))
    saved = subject.execute(Run(until=_END, save_at=(_SAVE,), final=True))
    for result, what in ((plain, "without a save"), (saved, "with one")):
        if not result.went_well:
            raise control_failed(f"a run {what} does not end well: {subject.tell(result)}")
    left, right = plain.of(RunResult).final or {}, saved.of(RunResult).final or {}
    if differing := oracle.differences(right, left, set(left)):
        message = "a run that saves is not the run that does not"
        raise Violation(message, evidence={"with saves != without": differing})


@contextmanager
def unless_saves_alone_do_it(subject: Subject) -> Generator[None]:
    """Turn a violation into Unknown where saves alone make another run: that is its cause.

    A run whose saves draw from a generator is another one after each save: its generators, and all
    that is trained with them, are not where those of a run without, or with other saves, are.
    """
    try:
        yield
    except Violation:
        require(subject)
        raise


def require(subject: Subject) -> None:
    """Raise Unknown where saves alone make another run, as runs in an empty directory show.

    Some managers refuse a step that is there: what a check has left is gone after it.
    """
    if key_of(saves_leave_the_run) not in subject.controls:
        trees.clear(subject.root)
    controls.require(saves_leave_the_run, subject)
