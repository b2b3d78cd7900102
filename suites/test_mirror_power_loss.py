"""A power loss takes the node and its mirror at once, or a kill the uploader: nothing is lost."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ckpt_conformance.contract import Capability
from ckpt_conformance.contract.verdicts import NotApplicable, Violation, control_failed
from ckpt_conformance.crash.explore import two_places
from ckpt_conformance.crash.explore.two_places import MIRROR
from ckpt_conformance.subject import names, oracle
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ckpt_conformance.crash.explore.two_places import Loss, Mirrored
    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Subject

OLDEST = 2
TRIED = 6  # contents at the quick budget
TRIED_LATER = 3  # contents at the quick budget with which a job goes on
KILLED = 2  # kinds of names, at the quick budget, of which a copy is cut short


@check("CKC-MIRR-008")
def test_a_power_loss_does_not_take_both_copies(subject: Subject) -> None:
    """After a power loss of node and mirror a step that was deleted here loads from the mirror.

    Why: a copy that nobody had synced counted as uploaded; its original was deleted, and then the
    power failed (A05, D05).
    How: record saves that rotate, with the mirror below the manager's directory; of the contents
    that ext4, xfs and btrfs may hold after a deletion take those that have something else in the
    mirror; load the step from there, or else from the directory itself. Then let the mirror's disk
    alone lose, at a moment of the first upload, what POSIX lets it lose; resume, and save so many
    steps that rotation deletes: what it deletes has to be in the mirror.
    """
    keep = subject.info.min_keep
    steps = _steps(keep)
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
        message = f"a power loss ({loss.model}) takes step {OLDEST} here and in the mirror"
        raise Violation(message, evidence=_evidence(subject, recording, loss))
    _go_on_after_a_loss(subject, recording, steps, wanted)


@check("CKC-MIRR-006")
def test_what_a_dead_uploader_has_half_sent_is_not_taken_for_sent(subject: Subject) -> None:
    """Half a file of an uploader that died is no part of the step that a later upload completes.

    Why: the next upload found a file of that name and passed it over; the step counted as mirrored,
    rotation deleted it here, and the mirror did not give it (D06).
    How: record a save, with the mirror below the manager's directory; lay out what a kill leaves
    inside of the copy of a file, of each kind of name; resume, save so many steps that rotation
    deletes: what it deletes has to be in the mirror.
    """
    subject.need(Capability.EXPLICIT_STEP, Capability.RETENTION)
    keep = subject.info.min_keep
    wanted = subject.loaded(subject.golden(), OLDEST)
    recording = two_places.record(subject, _steps(keep), keep)
    deaths = two_places.half_sent(recording, OLDEST)
    if not deaths:
        raise NotApplicable("no call of an upload leaves a part of a file in the mirror")
    _go_on(subject, recording, subject.sample(deaths, KILLED), _steps(keep + 1), wanted)


def _steps(keep: int) -> range:
    """Return so many steps that the oldest one is deleted where it is mirrored, or soon after."""
    return range(OLDEST, OLDEST + 2 * (keep + 1), 2)


def _go_on_after_a_loss(
    subject: Subject, recording: Mirrored, steps: range, wanted: Leaves
) -> None:
    """Raise Violation if a job deletes here what its mirror lost during the upload."""
    found = two_places.unsettled(recording, OLDEST)
    chosen = found if subject.budget == "full" else itertools.islice(found, TRIED_LATER)
    _go_on(subject, recording, chosen, steps, wanted)


def _go_on(
    subject: Subject, recording: Mirrored, losses: Iterable[Loss], steps: range, wanted: Leaves
) -> None:
    """Raise Violation if a job that goes on from one of these contents deletes the oldest step.

    Where a step goes that nobody has uploaded, and nothing was lost, that is not to blame.
    """
    for loss in losses:
        if _is_kept(subject, recording, loss, steps, wanted):
            continue
        if not _is_kept(subject, recording, two_places.not_uploaded(recording), steps, wanted):
            reason = f"step {OLDEST} is deleted after a restart, and was never uploaded"
            raise control_failed(reason, "CKC-MIRR-005")
        what = "a power loss of the mirror took its copy there"
        if loss.model == two_places.DEATH:
            what = "a kill of the uploader left half of its copy in the mirror"
        message = f"step {OLDEST} is deleted here, and does not load from there, after {what}"
        raise Violation(message, evidence=_evidence(subject, recording, loss))


def _evidence(subject: Subject, recording: Mirrored, loss: Loss) -> dict[str, object]:
    """Put a content where a bundle takes it from; tell what it is."""
    two_places.place(recording, loss, subject.root)
    operation = recording.operations[loss.state.point - 1]
    what = "kill" if loss.model == two_places.DEATH else "power loss"
    return {
        "model": loss.model,
        what: f"after {operation.kind} of {operation.path or 'the directory'}",
        "state": loss.state.why,
        "source": operation.source,
        "left": sorted(loss.state.names)[:12],
    }


def _is_kept(
    subject: Subject, recording: Mirrored, loss: Loss, steps: range, wanted: Leaves
) -> bool:
    """Let a job go on from a content; return whether the oldest step is then in either place."""
    there = [subject.root / name.path for name in names.of_step(subject.golden(), OLDEST)]
    two_places.place(recording, loss, subject.root)
    keep = subject.info.min_keep
    later = two_places.saves(steps[1:], resume=True)
    subject.execute(*later, options=two_places.mirroring(subject, keep))
    if all(path.exists() for path in there):
        return True
    roots = (subject.root / MIRROR, subject.root)
    return any(_loads(subject, root, wanted) for root in roots)


def _loads(subject: Subject, root: Path, wanted: Leaves) -> bool:
    """Return whether the oldest step loads from a directory when it is asked for."""
    if not root.is_dir():
        return False
    arrived, state = oracle.arrival(subject.resume(OLDEST, root=root))
    return arrived == OLDEST and oracle.same(state, wanted, subject.holds)
