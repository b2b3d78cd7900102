"""Names of others in folders that a manager has made: they disturb neither a load nor a save."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Outcome, Violation, control_failed
from ckpt_conformance.harness.messages import Close
from ckpt_conformance.subject import names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Golden, Subject


def require_undisturbed_within(
    subject: Subject, golden: Golden, legal: Mapping[int, Leaves], similar: Sequence[str]
) -> None:
    """Raise Violation if names in folders of the manager disturb a load, or a save after it."""
    go_on = partial(subject.run, 6, (6,), resume=True, then=[Close()])
    subject.materialize(golden, 4)
    shown = names.plant_all(subject.root, similar)[:4]
    result = go_on()
    message = "a foreign name within a folder of its own disturbs discovery"
    subject.judge(
        result, legal, {Outcome.NEW}, message, newest=4, acknowledged={2, 4}, planted=shown
    )
    if not result.went_well:
        subject.materialize(golden, 4)
        undisturbed = go_on()
        if not undisturbed.went_well:
            raise control_failed(f"a resumed job does not save: {subject.tell(undisturbed)}")
        evidence = subject.evidence(result, planted=shown)
        raise Violation(
            "a foreign name within a folder of its own breaks the save", evidence=evidence
        )
