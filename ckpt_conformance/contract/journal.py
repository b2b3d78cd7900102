"""The journal: what happened, written so that it survives SIGKILL.

One JSON line per event, one write on an O_APPEND descriptor, outside the manager's directory.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract import StepRecord


class ChildJournal:
    """The journal of one child; hooks run after the event is written."""

    def __init__(self, path: Path, rank: int | None = None) -> None:
        """Open the file for appending; with `rank` every event says whose it is."""
        self.whose = {} if rank is None else {"rank": rank}
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.on_begun: Callable[[int], None] = lambda _: None
        self.on_acknowledged: Callable[[int], None] = lambda _: None
        self.on_failed: Callable[[int], None] = lambda _: None
        self.records: list[StepRecord] = []

    def note(self, event: str, **fields: Any) -> None:  # noqa: ANN401  JSON-plain fields
        """Write one event."""
        line = json.dumps({"event": event, **fields, **self.whose}, default=str)
        os.write(self.descriptor, line.encode() + b"\n")

    def begun(self, step: int) -> None:
        """Note that a save of `step` starts."""
        self.note("begun", step=step)
        self.on_begun(step)

    def acknowledged(self, step: int) -> None:
        """Note that the save of `step` returned success."""
        self.note("acknowledged", step=step)
        self.on_acknowledged(step)

    def failed(self, step: int, error: BaseException) -> None:
        """Note that the save of `step` raised."""
        self.on_failed(step)
        self.note("failed", step=step, error=f"{type(error).__name__}: {error}"[:300])

    def record(self, step_record: StepRecord) -> None:
        """Note one training step."""
        self.records.append(step_record)
        self.note("trained", **vars(step_record))


def read(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """Read the events from byte `start` on; a torn last line and a missing file are no events."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read().split(b"\n")
    return [json.loads(line) for line in lines if line.endswith(b"}")]
