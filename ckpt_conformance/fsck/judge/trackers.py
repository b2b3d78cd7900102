"""What a run's own pointer to its newest checkpoint says, held against what is there.

A trainer resumes from the checkpoint that the pointer names, whatever lies beside it:
`latest_checkpointed_iteration.txt` of Megatron-LM and verl has a step, `latest` of DeepSpeed a tag.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, TypedDict

from ckpt_conformance.fsck.source.findings import SEVERITY, Malformed, State
from ckpt_conformance.fsck.source.places import below, folder_at
from ckpt_conformance.fsck.source.source import EntryKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckpt_conformance.fsck.source.findings import Report
    from ckpt_conformance.fsck.source.places import Where

NAMES = ("latest_checkpointed_iteration.txt", "latest")
_MOST = 4096  # bytes of one
_BLANK = " \t\r\n\0"
_DEEPSPEED = "deepspeed"  # others have files named `latest`, too
_RELEASE = "release"  # a tag of Megatron-LM: weights without a step
_REFERENCE = "reference"  # whose `latest` is a hint that no load follows


class TrackerJson(TypedDict):
    """A `Tracker` in the output of `fsck --json`."""

    file: str
    names: str
    checkpoint: str | None
    state: str | None


@dataclass(frozen=True)
class Tracker:
    """A pointer to a checkpoint.

    Attributes:
        file: its name, in the folder that was judged.
        names: the step or the tag in it; empty where there is none.
        checkpoint: the checkpoint that it names; None where none of those that were judged is it.
        state: of that; None for no checkpoint.

    """

    file: str
    names: str
    checkpoint: str | None = None
    state: State | None = None

    def to_json(self) -> TrackerJson:
        """Return plain types."""
        state = None if self.state is None else str(self.state)
        return {
            "file": self.file,
            "names": self.names,
            "checkpoint": self.checkpoint,
            "state": state,
        }


def read(top: Where, reports: Sequence[Report]) -> list[Tracker]:
    """Read the pointers in a folder, and find what each of them names."""
    if not top.is_dir() or not reports:
        return []
    is_deepspeeds = any(one.layout == _DEEPSPEED for one in reports)
    return [
        _found(top, reports, file, text)
        for file, text in _texts(top)
        if text or file == NAMES[0] or is_deepspeeds
    ]


def _texts(top: Where) -> Iterator[tuple[str, str]]:
    """Yield each pointer with the text in it; nothing of one that is no pointer after all.

    An empty one, or one of zeros as a crash leaves it, may be a pointer that names nothing.
    """
    folder = folder_at(top)
    for name in NAMES:
        entry = folder.entry(name)
        if entry is None or entry.kind is not EntryKind.FILE or entry.size > _MOST:
            continue
        try:
            text = folder.read(name, _MOST).decode().strip(_BLANK)
        except (OSError, Malformed, UnicodeDecodeError):
            continue
        if re.fullmatch(r"[\w.\-/]{0,200}", text):
            yield name, text


def step_named(run: Where) -> int | None:
    """Return the step in the pointer that verl and Megatron-LM write last; None for none."""
    texts = (text for file, text in _texts(run) if file == NAMES[0] and text.isdecimal())
    return next(map(int, texts), None)


def _found(top: Where, reports: Iterable[Report], file: str, text: str) -> Tracker:
    """Find the checkpoints that a text names; of several roles of a step the worst counts."""
    named = [one for one in reports if text and _is_named(below(one.path, top) or "", one, text)]
    if not named:
        return Tracker(file, text)
    worst = max(named, key=lambda one: SEVERITY.index(one.state))
    return Tracker(file, text, str(worst.path), worst.state)


def _is_named(name: str, report: Report, text: str) -> bool:
    if text.isdecimal():
        return report.step == int(text)
    tag = PurePosixPath(text)
    return PurePosixPath(name) == tag or tag in PurePosixPath(name).parents


def dangling(trackers: Iterable[Tracker], reports: Iterable[Report]) -> list[Tracker]:
    """Return the pointers to what is not there, where a load would follow them."""
    if any(one.layout.startswith(_REFERENCE) for one in reports):
        return []
    return [one for one in trackers if one.state is None and one.names != _RELEASE]
