"""Python imports this at its start: an uncaught error ends with 2, as 1 says that a fault shows."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


def end_with_2(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print as always, and end."""
    sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    os._exit(2)


sys.excepthook = end_with_2
