"""Unix sockets with a path of any length.

The kernel takes 107 bytes (unix(7), sun_path), and the temporary folder of a cluster's job may be
longer than that. Such a socket is reached through its folder, which is opened for it; its own name
may have 80 bytes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Generator

LONGEST = 107  # bytes, without the zero at the end
OF_MULTIPROCESSING = 32  # bytes: /pymp-xxxxxxxx/listener-xxxxxxxx


def bind(listener: socket.socket, path: str) -> None:
    """Bind a Unix socket to a path; raises OSError as `socket.bind` does."""
    with _short(path) as short:
        listener.bind(short)


def connect(client: socket.socket, path: str) -> None:
    """Connect to the Unix socket at a path; raises OSError as `socket.connect` does."""
    with _short(path) as short:
        client.connect(short)


def shorten_those_of_multiprocessing() -> None:
    """Let `multiprocessing` make its sockets at a short path, where the temporary folder's is long.

    Workers of a data loader pass descriptors by them. Python 3.14 falls back to /tmp by itself.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + OF_MULTIPROCESSING <= LONGEST:
        return
    made = tempfile.mkdtemp(prefix="pymp-")
    opened = os.open(made, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    config: dict[str, str] = vars(multiprocessing.current_process())["_config"]
    config["tempdir"] = f"/proc/{os.getpid()}/fd/{opened}"  # of all that this process starts, too


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
