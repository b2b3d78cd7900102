"""Notes which source files run, in every process that inherits the environment.

It knows nothing of how the suite finds out what a check depends on: it watches calls of functions.
A process appends the name of a file when the first function of it is called, so that nothing is
lost by SIGKILL. `CKC_RAN` names the file for the notes, `CKC_RAN_BELOW` the folders that count.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

NOTES = os.environ.get("CKC_RAN", "")
BELOW = tuple(filter(None, os.environ.get("CKC_RAN_BELOW", "").split(os.pathsep)))
_seen: set[str] = set()


def note(frame: Any, event: str, _argument: object) -> None:  # noqa: ANN401  a frame
    """Take a profiler's event."""
    if event != "call":
        return
    code = frame.f_code
    name = code.co_filename
    if name in _seen or code.co_name == "<module>":
        return
    _seen.add(name)
    path = os.path.realpath(name)
    if path.startswith(BELOW):
        descriptor = os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{path}\n".encode())
        os.close(descriptor)


def begin() -> None:
    """Watch from here on, and forget what was seen before."""
    _seen.clear()
    threading.setprofile(note)
    sys.setprofile(note)


def end() -> None:
    """Watch no more in this process."""
    threading.setprofile(None)
    sys.setprofile(None)


if NOTES and "CKC_RAN_LATER" not in os.environ:
    begin()
