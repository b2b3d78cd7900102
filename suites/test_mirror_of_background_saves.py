"""Saves and uploads in the background: `close()` waits for both, in that order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Unknown, Violation, control_failed
from ckpt_conformance.harness.messages import (
    BeginSave,
    Close,
    CloseResult,
    ExitKind,
    Options,
    Save,
)
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites import background_saves as saves
from ckpt_conformance.suites import mirrors

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject


@check("CKC-MIRR-016")
def test_close_mirrors_what_was_saved_in_the_background(subject: Subject) -> None:
    """When `close()` returns, a save that was begun in the background is in the mirror, too.

    Why: close waited for the uploads that were queued, and then for the saves; what these queued
    was never sent, and the job's last step went with its node (D11, D05).
    How: save step 2, begin to save step 4 in the background, let no other thread run until the
    caller waits for one, and close; load from the mirror alone. A `close()` that raises has not
    said that all is there. The control saves both steps in the foreground.
    """
    begun, known = saves.begun_by(subject), subject.legal(subject.golden())
    trees.clear(subject.root)
    trees.clear(mirrors.mirror_of(subject))
    saving = subject.execute(
        *saves.up_to_newest(),
        BeginSave(faults=(begun.late,)),
        Close(go_on=True),
        options=Options(mirror=str(mirrors.mirror_of(subject))),
    )
    if saving.exit_kind is not ExitKind.ENDED or not saving.reached(CloseResult):
        raise Unknown(f"a save in the background, with a mirror, ends: {subject.tell(saving)}")
    saves.require_held(subject, saving)
    if saving.of(CloseResult).error:
        return
    legal = {**known, **mirrors.as_original(subject)}
    message = "close() has returned, and the mirror does not serve the save that was begun"
    try:
        mirrors.compare(subject, legal, message)
    except Violation:
        _require_in_the_foreground(subject)
        raise


def _require_in_the_foreground(subject: Subject) -> None:
    """Raise Unknown where a mirror of saves in the foreground does not load like the original."""
    trees.clear(subject.root)
    trees.clear(mirrors.mirror_of(subject))
    ops = (*saves.up_to_newest(), Save(), Close())
    subject.execute(*ops, options=Options(mirror=str(mirrors.mirror_of(subject))))
    try:
        mirrors.compare(subject, mirrors.as_original(subject))
    except Violation as error:
        raise control_failed(str(error), "CKC-MIRR-003") from error
