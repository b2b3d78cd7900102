"""Smoke: the adapter works and its claims hold. Everything else builds on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.checks import check
from ckpt_conformance.verdicts import Violation

if TYPE_CHECKING:
    from ckpt_conformance.subject import Subject


@check("CKC-SMOK-001")
def test_a_new_process_loads_what_was_saved(subject: Subject) -> None:
    """A process that never saw the save loads the newest step.

    Why: one save path that omits a file which the loader requires makes every restart fail (B11).
    How: save two steps, end the process, load the latest in a fresh one.
    """
    subject.run(4, (2, 4), then=[{"op": "close"}])
    ending = subject.resume()
    if subject.tell(ending) != "step 4":
        raise Violation(
            "the newest step does not load in a new process", evidence=subject.evidence(ending)
        )
