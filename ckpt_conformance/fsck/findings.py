"""What is said of a checkpoint: its state, what is wrong where, and how much of it is protected."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


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

    """

    path: Path
    layout: str
    step: int | None = None
    findings: list[Finding] = field(default_factory=list[Finding])
    tensors: int = 0
    size: int = 0
    digest: int = 0
    crc: int = 0
    structure: int = 0

    @property
    def state(self) -> State:
        """The worst of the findings."""
        found = (STATES[one.kind] for one in self.findings)
        return max(found, key=SEVERITY.index, default=State.WHOLE)

    @property
    def uncovered(self) -> int:
        """Bytes that nothing protects: a flipped bit there may be served."""
        return max(self.size - self.digest - self.crc - self.structure, 0)

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
                "uncovered": self.uncovered,
            },
            "findings": [one.to_json() for one in self.findings],
        }
