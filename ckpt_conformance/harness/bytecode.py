"""Compiled code that Python runs in the place of a source that it is not of.

Python takes a file of `__pycache__` for that of a source by the size and the time that are written
in it. Where a source was edited and has both again (an archive, a copy by `rsync`, an image with
fixed times), what runs is not what the source says.
"""

from __future__ import annotations

import importlib.util
import marshal
from pathlib import Path

HEADER = 16  # bytes: a number of the version, flags, and two words that say of which source it is
CHECKED = 3  # flags: by a digest of the source, which is held against it at each import


def is_stale(compiled: str, source: str) -> bool:
    """Return whether Python takes compiled code for that of a source that says something else."""
    try:
        data, text = Path(compiled).read_bytes(), Path(source).read_bytes()
        if not _is_taken(data, Path(source)):
            return False
        wanted = compile(text, source, "exec", dont_inherit=True)
        return bool(marshal.loads(data[HEADER:]) != wanted)  # noqa: S302  Python itself loads it
    except (OSError, ValueError, SyntaxError, EOFError, TypeError):
        return False  # Python refuses it, too, or says so


def _is_taken(data: bytes, source: Path) -> bool:
    """Return whether the header fits the source without a look at its text."""
    if data[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags = int.from_bytes(data[4:8], "little")
    if flags:
        return flags != CHECKED
    found = source.stat()
    time, size = (int.from_bytes(data[at : at + 4], "little") for at in (8, 12))
    return (time, size) == (int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF)
