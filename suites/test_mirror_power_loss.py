"""A power loss takes the node and its mirror at once: what was deleted here is durable there."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Violation, control_failed
from ckpt_conformance.crash.explore import two_places
from ckpt_conformance.crash.explore.two_places import MIRROR
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Subject

OLDEST = 2
TRIED = 6  # contents at the quick budget


@check("CKC-MIRR-008")
def test_a_power_loss_does_not_take_both_copies(subject: Subject) -> None:
    """After a power loss of node and mirror a step that was deleted here loads from the mirror.

    Why: a copy that nobody had synced counted as uploaded; its original was deleted, and then the
    power failed (A05, D05).
    How: record saves that rotate, with the mirror below the manager's directory; of the contents
    that ext4, xfs and btrfs may hold after a deletion take those that have something else in the
    mirror; load the step from there, or else from the directory itself.
    """
    keep = subject.info.min_keep
    steps = range(OLDEST, OLDEST + 2 * (keep + 1), 2)
    wanted = subject.loaded(subject.golden(), OLDEST)
    recording = two_places.record(subject, steps, keep)
    found = two_places.losses(subject, recording, OLDEST)
    for loss in found if subject.budget == "full" else itertools.islice(found, TRIED):
        two_places.place(recording, loss, subject.root)
        if _loads(subject, subject.root / MIRROR, wanted):
            continue
        if loss.model == two_places.NOTHING_LOST:
            raise control_failed(f"step {OLDEST} does not load from the mirror", "CKC-MIRR-003")
        if _loads(subject, subject.root, wanted):
            continue
        two_places.place(recording, loss, subject.root)  # where a bundle takes it from
        operation = recording.operations[loss.state.point - 1]
        evidence = {
            "model": loss.model,
            "power loss": f"after {operation.kind} of {operation.path}",
            "state": loss.state.why,
            "source": operation.source,
            "left": sorted(loss.state.names)[:12],
        }
        message = f"a power loss ({loss.model}) takes step {OLDEST} here and in the mirror"
        raise Violation(message, evidence=evidence)


def _loads(subject: Subject, root: Path, wanted: Leaves) -> bool:
    """Return whether the oldest step loads from a directory when it is asked for."""
    if not root.is_dir():
        return False
    arrived, state = oracle.arrival(subject.resume(OLDEST, root=root))
    return arrived == OLDEST and oracle.same(state, wanted, subject.holds)
