"""A power loss of a node and of its mirror at once: what was deleted here has to be durable there.

The mirror lies below the manager's directory, so one recording orders the calls of both. Of the
contents that a disk may hold those matter in which a name of a step is gone here that had been
there: what is left of the step is in the mirror.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Cause, NotApplicable, Unknown, control_failed
from ckpt_conformance.crash.explore.exploration import QUICK, complete
from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.crash.model.states import Content
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import Close, Options, Run
from ckpt_conformance.subject import names
from ckpt_conformance.trace.operations import Kind, Recording

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.subject.subject import Subject

    Held = tuple[tuple[str, Content], ...]  # by path, what a file has

MIRROR = "mirror"  # its name below the manager's directory
NOTHING_LOST = "nothing lost"
MODELS_OF_DISKS = ("ext4", "xfs", "btrfs")
LEAVING = frozenset({Kind.RENAME, Kind.EXCHANGE, Kind.UNLINK, Kind.RMDIR})
NO_CONTENT = Content(-1)  # of a directory or a link


@dataclass(frozen=True)
class Loss:
    """A content that a disk may hold after a power loss, and the model that allows it."""

    model: str
    state: State


def record(subject: Subject, steps: Sequence[int], keep: int) -> Recording:
    """Record saves of which `keep` stay, each mirrored before the next one.

    Raises Unknown where that does not end well, or can't be followed.
    """
    folder = subject.folder / "recorded" / "mirrored"
    trees.clear(folder)
    trees.clear(subject.root)
    ops = [op for step in steps for op in (Run(until=step, save_at=(step,)), Close())]
    options = Options(keep_last=keep, mirror=str(subject.root / MIRROR))
    result = subject.execute(*ops, options=options, record=str(folder))
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
    for model in MODELS_OF_DISKS:
        rng = random.Random(subject.seed)  # noqa: S311
        for state in MODELS[model].states(recording, rng, QUICK.candidates):
            mirrored = _mirrored(state, step)
            is_gone = state.point > removals[0] and not there <= state.names.keys()
            if is_gone and mirrored not in seen:
                seen.add(mirrored)
                yield Loss(model, state)


def _mirrored(state: State, step: int) -> Held:
    """Return what a state has of a step in the mirror, by path."""
    number = re.compile(rf"(?<!\d)0*{step}(?!\d)")
    below = {path: state.names[path] for path in state.names if path.startswith(f"{MIRROR}/")}
    own = {path: below[path] for path in below if number.search(path)} or below
    return tuple(sorted((path, state.contents.get(own[path], NO_CONTENT)) for path in own))


def place(recording: Recording, loss: Loss, root: Path) -> None:
    """Put a content that may be left onto a disk."""
    Materializer(recording, root).apply(loss.state)
