"""Unix sockets with a path of any length.

The kernel takes 107 bytes (unix(7), sun_path), and the temporary folder of a cluster's job may be
longer than that. Such a socket is reached through its folder, which is opened for it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Generator

LONGEST = 107  # bytes, without the zero at the end


def bind(listener: socket.socket, path: str) -> None:
    """Bind a Unix socket to a path; raises OSError as `socket.bind` does."""
    with _short(path) as short:
        listener.bind(short)


def connect(client: socket.socket, path: str) -> None:
    """Connect to the Unix socket at a path; raises OSError as `socket.connect` does."""
    with _short(path) as short:
        client.connect(short)


@contextlib.contextmanager
def _short(path: str) -> Generator[str]:
    """Yield another path of the same file, if its own is too long."""
    if len(os.fsencode(path)) <= LONGEST:
        yield path
        return
    folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{Path(path).name}"
    finally:
        os.close(folder)
