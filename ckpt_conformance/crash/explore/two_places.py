"""A power loss of a node and of its mirror at once: what was deleted here has to be durable there.

The mirror lies below the manager's directory, so one recording orders the calls of both. Of the
contents that a disk may hold those matter in which a name of a step is gone here that had been
there: what is left of the step is in the mirror. Beside these: the mirror's disk alone loses power
during an upload, and the job goes on; what it then deletes here has to be there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Cause, NotApplicable, Unknown, control_failed
from ckpt_conformance.crash.explore.exploration import QUICK, complete, complete_at
from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.crash.model.models import MODELS, OF_POWER_LOSS
from ckpt_conformance.crash.model.states import Content
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import Close, Options, Run
from ckpt_conformance.subject import names
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.trace.operations import Kind, Recording

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.harness.messages import AnyOp
    from ckpt_conformance.subject.subject import Subject

    Held = tuple[tuple[str, Content], ...]  # by path, what a file has

Mirrored = Recording  # what `record` gives: of saves with the mirror below the manager's directory
MIRROR = "mirror"  # its name below the manager's directory
NOTHING_LOST = "nothing lost"
DEATH = "kill"
ANY_DISK = "posix"  # of a mirror, whose file system nobody knows
LEAVING = frozenset({Kind.RENAME, Kind.EXCHANGE, Kind.UNLINK, Kind.RMDIR})
OF_AN_UPLOAD = 5000  # states that are made: a plan for fewer may leave the upload itself out
NO_CONTENT = Content(-1)  # of a directory or a link


@dataclass(frozen=True)
class Loss:
    """A content that a disk may hold after a power loss, and the model that allows it."""

    model: str
    state: State


RECORDED: Slot[Recording] = Slot("the recording of saves with a mirror")


def record(subject: Subject, steps: Sequence[int], keep: int) -> Recording:
    """Record saves of which `keep` stay, each mirrored before the next one; once per adapter.

    Raises Unknown where that does not end well, or can't be followed.
    """
    return subject.once(RECORDED, lambda: _record(subject, steps, keep), tuple(steps), keep)


def _record(subject: Subject, steps: Sequence[int], keep: int) -> Recording:
    folder = subject.folder / "recorded" / "mirrored"
    trees.clear(folder)
    trees.clear(subject.root)
    options = mirroring(subject, keep)
    result = subject.execute(*saves(steps), options=options, record=str(folder))
    end = subject.tell(result)
    if is_unsupervised(result):
        raise Unknown(f"this machine can't record this adapter: {end}", cause=Cause.MACHINE)
    if not result.went_well:
        raise control_failed(f"saves with a mirror below the manager's directory end: {end}")
    recording = Recording.read(folder)
    if recording.unsupported:
        call = recording.unsupported[0]
        raise Unknown(f"{call.call} of {call.path} can't be followed: {call.why}")
    return recording


def mirroring(subject: Subject, keep: int) -> Options:
    """Return with what a manager is opened whose mirror lies below its directory."""
    return Options(keep_last=keep, mirror=str(subject.root / MIRROR))


def saves(steps: Sequence[int], *, resume: bool = False) -> list[AnyOp]:
    """Return the operations that save steps, each uploaded before the next one."""
    return [
        op for step in steps for op in (Run(until=step, save_at=(step,), resume=resume), Close())
    ]


def losses(subject: Subject, recording: Recording, step: int) -> Iterator[Loss]:
    """Yield contents after a power loss in which a name of a step is gone, and what is mirrored.

    The first one has all that was issued; of the others each has something else in the mirror.
    Raises NotApplicable where no name of the step is gone in the end.
    """
    whole = complete(recording, len(recording.operations))
    there = {name.path for name in names.of_step(subject.golden(), step)}
    removals = [o.index for o in recording.operations if o.kind in LEAVING and o.path in there]
    if not removals or there <= whole.names.keys():
        raise NotApplicable(f"rotation has not deleted step {step}, which is in the mirror")
    seen = {_mirrored(whole, step)}
    yield Loss(NOTHING_LOST, whole)
    for model in OF_POWER_LOSS:
        rng = random.Random(subject.seed)  # noqa: S311
        for state in MODELS[model].states(recording, rng, QUICK.candidates):
            mirrored = _mirrored(state, step)
            is_gone = state.point > removals[0] and not there <= state.names.keys()
            if is_gone and mirrored not in seen:
                seen.add(mirrored)
                yield Loss(model, state)


def unsettled(recording: Recording, step: int) -> Iterator[Loss]:
    """Yield contents in which the mirror's disk has lost what it had not yet kept of a first step.

    The node has all that was issued. Each has something else in the mirror; the latest moments of
    the upload come first, for then the most is believed to be there.
    """
    begun = [o.index for o in recording.operations if o.mark == "begun" and o.step != step]
    upload = replace(recording, operations=recording.operations[: min(begun, default=None)])
    rng = random.Random(0)  # noqa: S311
    found: dict[Held, State] = {}
    for state in MODELS[ANY_DISK].states(upload, rng, OF_AN_UPLOAD):
        held = _mirrored(state, step)
        if held not in found or found[held].point < state.point:
            found[held] = state
    whole = complete_at(recording, {state.point for state in found.values()})
    for state in sorted(found.values(), key=lambda state: -state.point):
        here = whole[state.point]
        if _mirrored(state, step) != _mirrored(here, step):
            yield Loss(ANY_DISK, _of_two_disks(here, state))


def half_sent(recording: Recording, step: int) -> list[Loss]:
    """Return what there is when a process is killed inside of the copy of a file to the mirror.

    One content of each kind of name in the upload of a first step: of a file that has a part of its
    bytes, or none where no call leaves a part.
    """
    begun = [o.index for o in recording.operations if o.mark == "begun" and o.step != step]
    upload = replace(recording, operations=recording.operations[: min(begun, default=None)])
    sent = complete(upload, len(upload.operations))
    whole = {path: sent.contents[of] for path, of in sent.names.items() if of in sent.contents}
    found: dict[str, tuple[bool, State]] = {}
    for state in MODELS[DEATH].states(upload, random.Random(0), QUICK.candidates):  # noqa: S311
        for path in state.names:
            content = state.contents.get(state.names[path])
            if content is None or not path.startswith(f"{MIRROR}/"):
                continue
            if content == whole.get(path):
                continue
            kind, is_part = trees.pattern(path), bool(content.extents)
            if kind not in found or (is_part and not found[kind][0]):
                found[kind] = is_part, state
    return [Loss(DEATH, state) for _, state in found.values()]


def _of_two_disks(here: State, there: State) -> State:
    """Return a state that is one outside of the mirror, and another one in it."""
    below = f"{MIRROR}/"
    names = {path: of for path, of in here.names.items() if not path.startswith(below)}
    names |= {path: of for path, of in there.names.items() if path.startswith(below)}
    if any(path.startswith(below) for path in names):
        names[MIRROR] = here.names[MIRROR]
    contents = {
        of: (there if path.startswith(below) else here).contents[of]
        for path, of in names.items()
        if of in here.contents or of in there.contents
    }
    return replace(here, names=names, contents=contents, why=there.why)


def not_uploaded(recording: Recording) -> Loss:
    """Return the whole content of the moment before the mirror gets anything."""
    there = (o.index for o in recording.operations if o.path.split("/")[0] == MIRROR)
    return Loss(NOTHING_LOST, complete(recording, next(there, 0)))


def _mirrored(state: State, step: int) -> Held:
    """Return what a state has of a step in the mirror, by path."""
    below = {path: state.names[path] for path in state.names if path.startswith(f"{MIRROR}/")}
    own = {path: below[path] for path in below if trees.carries(path, step)} or below
    return tuple(sorted((path, state.contents.get(own[path], NO_CONTENT)) for path in own))


def place(recording: Recording, loss: Loss, root: Path) -> None:
    """Put a content that may be left onto a disk."""
    Materializer(recording, root).apply(loss.state)
