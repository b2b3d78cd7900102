"""What the parts of one checkpoint share while they are judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source.sums import DIVIDED, Sizes, unreadable

if TYPE_CHECKING:
    from ckpt_conformance.fsck.source.findings import Malformed, Report
    from ckpt_conformance.fsck.source.source import Folder


@dataclass(frozen=True)
class Context:
    """What the parts of one checkpoint share: folder, report, and how work is divided."""

    folder: Folder
    report: Report
    sizes: Sizes = DIVIDED

    def refuse(self, name: str, error: OSError | Malformed) -> None:
        """Add that a file could not be read."""
        self.report.findings.append(unreadable(name, error))
