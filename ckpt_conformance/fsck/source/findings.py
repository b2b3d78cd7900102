"""What is said of a checkpoint: its state, what is wrong where, and how much of it is protected."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.sums import Sums


class Malformed(ValueError):  # noqa: N818  said of bytes, and mostly no error of anybody
    """Bytes that no save wrote. The one exception that the parsers of this package raise.

    Attributes:
        start, end: the bytes of the file that it is about, where that is known.
        tensors: names of those that it hits, where that is known.

    """

    def __init__(
        self,
        what: str,
        start: int | None = None,
        end: int | None = None,
        tensors: tuple[str, ...] = (),
    ) -> None:
        """Say what is wrong, and where."""
        super().__init__(what)
        self.tensors = tensors
        self.start = start
        self.end = end


class State(StrEnum):
    """What a checkpoint is, worst last."""

    WHOLE = "whole"
    UNKNOWN = "unknown"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"


class Kind(StrEnum):
    """What a finding means for the checkpoint; a note changes nothing."""

    NOTE = "note"
    UNKNOWN = "unknown"
    MISSING = "missing"
    DAMAGED = "damaged"


STATES = {
    Kind.NOTE: State.WHOLE,
    Kind.UNKNOWN: State.UNKNOWN,
    Kind.MISSING: State.INCOMPLETE,
    Kind.DAMAGED: State.DAMAGED,
}
SEVERITY = list(State)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        kind: what it means for the checkpoint.
        file: the name relative to the checkpoint's folder.
        what: the value, the reason and the next step, in words.
        tensors: names of the tensors whose bytes it is about; empty where it is about none.
        start, end: the bytes of the file, end exclusive; None where it is about the whole file.

    """

    kind: Kind
    file: str
    what: str
    tensors: tuple[str, ...] = ()
    start: int | None = None
    end: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Give plain types."""
        return {
            "kind": str(self.kind),
            "file": self.file,
            "what": self.what,
            "tensors": list(self.tensors),
            "start": self.start,
            "end": self.end,
        }


@dataclass(frozen=True)
class NotFinite:
    """A tensor with NaNs or infinities: how many of how many elements."""

    tensor: str
    nan: int
    infinite: int
    elements: int

    def to_json(self) -> dict[str, Any]:
        """Give plain types."""
        return vars(self).copy()


@dataclass
class Report:
    """All that is known about one checkpoint.

    Attributes:
        path: what a user would name: the folder or the file.
        layout: how it was recognised, as `dcp`.
        step: the training step that its manifest or its name says; None where neither does.
        tensors: how many it holds.
        size: bytes of its files.
        digest, crc: bytes that a digest, or else a CRC, covers and that were compared with it.
        structure: bytes of headers that are written twice and were compared with each other.
        unread: bytes with a digest or a CRC that a sample left out.
        world_size: how many ranks wrote it, where a manifest or names say so.
        ties: groups of tensors that share their bytes.
        not_finite: tensors with NaNs or infinities; None where they were not counted.
        facts: by file: the keys at the top of its structure, with the values that are plain.

    """

    path: Where
    layout: str
    step: int | None = None
    findings: list[Finding] = field(default_factory=list[Finding])
    tensors: int = 0
    size: int = 0
    digest: int = 0
    crc: int = 0
    structure: int = 0
    unread: int = 0
    world_size: int | None = None
    ties: int = 0
    not_finite: list[NotFinite] | None = None
    facts: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def state(self) -> State:
        """The worst of the findings."""
        found = (STATES[one.kind] for one in self.findings)
        return max(found, key=SEVERITY.index, default=State.WHOLE)

    @property
    def uncovered(self) -> int:
        """Bytes that nothing protects: a flipped bit there may be served."""
        return max(self.size - self.digest - self.crc - self.structure - self.unread, 0)

    def take(self, part: Report) -> None:
        """Add what was found in a part."""
        self.findings += part.findings
        self.tensors += part.tensors
        self.digest += part.digest
        self.crc += part.crc
        self.structure += part.structure
        self.ties += part.ties
        self.step = part.step
        self.facts |= part.facts
        self.world_size = part.world_size if self.world_size is None else self.world_size

    def add(self, sums: Sums) -> None:
        """Add what came of work."""
        self.findings += sums.findings
        self.digest += sums.digest
        self.crc += sums.crc
        self.structure += sums.structure

    def say(self, kind: Kind, file: str, what: str, tensors: Iterable[str] = ()) -> None:
        """Add a finding about a whole file or tensor."""
        self.findings.append(Finding(kind, file, what, tuple(tensors)))

    def to_json(self) -> dict[str, Any]:
        """Give plain types, with numbers of bytes."""
        return {
            "path": str(self.path),
            "layout": self.layout,
            "step": self.step,
            "state": str(self.state),
            "tensors": self.tensors,
            "bytes": {
                "total": self.size,
                "digest": self.digest,
                "crc": self.crc,
                "structure": self.structure,
                "unread": self.unread,
                "uncovered": self.uncovered,
            },
            "world_size": self.world_size,
            "ties": self.ties,
            "not_finite": self.not_finite and [one.to_json() for one in self.not_finite],
            "findings": [one.to_json() for one in self.findings],
        }
