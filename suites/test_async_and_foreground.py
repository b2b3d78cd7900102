"""A save in the foreground that is called while one goes on in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.harness.messages import Close, EndSaves, Save, SaveResult, Train
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.background_saves import (
    LATER,
    NEWEST,
    require_each,
    require_good_end,
    undisturbed,
    up_to_newest,
)
from ckpt_conformance.suites.test_async_save import (
    ALL,
    begin_first,
    due_to_the_overlap,
    require_overlap,
    saved_over,
    standing_on,
    test_saves_that_overlap_keep_their_order,
    test_what_the_job_does_after_the_call_is_not_saved,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Subject


@check("CKC-ASYN-003")
def test_a_save_in_the_foreground_is_the_later_one(subject: Subject) -> None:
    """A save in the foreground is newer than one that was begun before it and still goes on.

    Why: the save at the end of a run, or after SIGTERM, returned; then the one that the job had
    begun before it took the same name, or moved the pointer back (C03, D10).
    How: begin to save step 4 and keep that from going on; train, save step 6 in the foreground, let
    the first one go on, and close: a new process must get step 6, and step 4 by request. Then the
    second save is of step 4, too: a new process gets that one. A save that waits for the one before
    it keeps the order, and so does one that raises meanwhile.
    """
    undisturbed(subject)
    legal = subject.legal(subject.golden(ALL))
    subject.reset()
    with standing_on(
        subject,
        test_what_the_job_does_after_the_call_is_not_saved,
        test_saves_that_overlap_keep_their_order,
    ):
        _require_order(subject, legal)
        if subject.info.saves_over:
            _require_the_later(subject, legal)


def _require_order(subject: Subject, legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless both steps are there, and the one in the foreground is the newest."""
    saving = _during_one(subject, Train(n=2), Save(go_on=True))
    with due_to_the_overlap(subject, legal):
        steps = {NEWEST: f"step {NEWEST}, whose save went on meanwhile,"}
        if not _is_refused(saving):
            require_good_end(subject, saving, "a save in the foreground fails beside another one")
            steps[LATER] = f"step {LATER}, which was saved in the foreground,"
        require_each(subject, steps, legal)
    require_overlap(subject, saving, legal)


def _require_the_later(subject: Subject, legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless a step that is saved again in the foreground is the later save."""
    wanted = saved_over(subject, legal[NEWEST])
    subject.reset()
    saving = _during_one(subject, Train(n=1), Save(step=NEWEST, go_on=True))
    if _is_refused(saving):
        wanted = legal[NEWEST]
    else:
        require_good_end(subject, saving, "the second save of one step fails")
    resumed = subject.resume()
    if differs := oracle.differences(oracle.arrival(resumed)[1], wanted, subject.holds):
        evidence = {**subject.evidence(resumed), "differs": differs}
        message = "the save that was begun first takes the place of the one that returned later"
        raise Violation(message, evidence=evidence)
    require_overlap(subject, saving, legal)


def _during_one(subject: Subject, train: Train, save: Save) -> ProcessResult:
    """Begin to save step 4, train and save meanwhile, wait for what was begun, and close."""
    first = begin_first(subject)
    return subject.execute(*up_to_newest(), first, train, save, EndSaves(), Close())


def _is_refused(saving: ProcessResult) -> bool:
    """Return whether the save in the foreground has raised, and all else went well."""
    return saving.reached(SaveResult) and bool(saving.of(SaveResult).error)
