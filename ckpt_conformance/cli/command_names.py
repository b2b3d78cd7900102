"""What a command names: files and folders, programs, and the packages of their interpreters."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.crash.script.command import OUT
from ckpt_conformance.work import own_code, packages
from ckpt_conformance.work.sources import code_in, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpt_conformance.work.cache import KeyParts

MOST_BYTES = 4 << 30
"""Bytes of the files in folders that a command names: they are read before each run."""
_FIRST = 4096  # bytes in which the first line of a script ends
_OF_ALL = {Path(place) for place in ("/", "/bin", "/sbin", "/usr/bin", "/usr/sbin")}


def described(words: Iterable[str], cwd: str) -> KeyParts:
    """Return digests of all that the words of a command name, in plain values.

    That is files, and code beside those of code; all in the folders; of programs the file, what
    lies beside it if it is a script of the user's own, and the packages of the Python that it
    belongs to. Of more than can be read nothing is the same twice.
    """
    pieces = list(_pieces(words))
    paths = [Path(cwd, piece) for piece in pieces]
    files = [path for path in paths if path.is_file()]
    programs = sorted({*_found(pieces), *(path for path in files if _first_line(path))})
    places = sorted({str(place) for one in programs for place in _sites_of(one)})
    beside = {path.parent for path in programs if _is_own_script(path)}
    beside |= {path.resolve().parent for path in files if own_code.CODE.fullmatch(path.name)}
    return {
        "files": {str(path): digest_of(path) for path in sorted({*files, *programs})},
        "folders": {str(path): _digest_of(path) for path in paths if path.is_dir()},
        "beside": code_in([*sorted(beside), *packages.edited_in_place(places)]),
        "packages": packages.described(places) if places else [],
    }


def _pieces(words: Iterable[str]) -> Iterator[str]:
    """Yield words, what stands behind `=` in them, and the words of a line for a shell."""
    for word in words:
        inner = [word]
        with contextlib.suppress(ValueError):  # a quote that is not closed
            inner += shlex.split(word)
        for one in dict.fromkeys(inner):
            yield from (part for part in (one, one.partition("=")[2]) if part and OUT not in part)


def _found(pieces: Iterable[str]) -> Iterator[Path]:
    """Yield the programs that are looked for by a name without a folder."""
    for piece in pieces:
        if "/" not in piece and (program := shutil.which(piece, path=os.environ.get("PATH"))):
            yield Path(program)


def _first_line(path: Path) -> str:
    """Return how a script names its interpreter; empty for what is no script."""
    try:
        with path.open("rb") as file:
            first = file.read(_FIRST).split(b"\n", 1)[0]
    except OSError:
        return ""
    return os.fsdecode(first[2:]).strip() if first.startswith(b"#!") else ""


def _sites_of(program: Path) -> Iterator[Path]:
    """Yield where the packages of a program's Python are: of itself, or of what runs it."""
    interpreter = _first_line(program).partition(" ")[0]
    for one in (program, Path(interpreter)) if interpreter else (program,):
        yield from one.parent.parent.glob("lib/python*/site-packages")


def _is_own_script(path: Path) -> bool:
    """Return whether a script lies in a folder of the user's own: what it imports lies there."""
    folder = path.resolve().parent
    is_of_environment = (folder.parent / "pyvenv.cfg").exists() or own_code.is_installed(folder)
    return bool(_first_line(path)) and not is_of_environment and folder not in _OF_ALL


def _digest_of(folder: Path) -> str:
    """Digest the names and contents below a folder; another word each time if that is too much."""
    found, left = hashlib.blake2b(digest_size=16), MOST_BYTES
    for count, path in enumerate(_below(folder)):
        left -= path.stat().st_size
        if left < 0 or count >= own_code.MOST_NAMES:
            return secrets.token_hex(16)
        found.update(f"{path.relative_to(folder)}\0".encode(errors="surrogateescape"))
        found.update(digest_of(path).encode())
    return found.hexdigest()


def _below(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder, in one order; hidden folders are left out."""
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(base, name) for name in sorted(names))
        yield from (path for path in paths if path.is_file())
