"""Where a checkpoint may be: a path of this machine, or a URL that fsspec reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeGuard

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.source.disk import DiskFolder
from ckpt_conformance.fsck.source.remote import Files, RemoteFolder, Url, open_url

Where = Path | Url

_SHORT = 200  # characters of a path that a message shows
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")


def place(text: str) -> Where:
    """Return the path or the URL in a text; RequestError for an empty one or an unknown scheme."""
    if not text.strip():
        raise RequestError(f"{text!r} is no path; is a variable of the script empty?")
    return open_url(text) if _URL.match(text) else Path(text)


def named(text: str) -> Where:
    """Return a place that is known by its name alone: of a URL nothing is installed or asked."""
    return Url(text, text, Files(None, text, text)) if _URL.match(text) else Path(text)


def check_there(where: Where) -> None:
    """Raise RequestError where nothing exists, or where permissions hide it."""
    try:
        exists = where.exists()
    except OSError as error:  # no permission above it, a name that is too long
        short = str(where) if len(str(where)) < _SHORT else f"{str(where)[:_SHORT]}..."
        raise RequestError(f"{short} cannot be looked at: {error.strerror}") from error
    if not exists:
        raise RequestError(f"{where} does not exist; give the folder of a run")


def folder_at(root: Where, boundary: Where | None = None) -> DiskFolder | RemoteFolder:
    """Return a folder; links of a path are followed below the boundary, those of a URL never."""
    if isinstance(root, Url):
        return RemoteFolder(root)
    return DiskFolder(root, boundary if isinstance(boundary, Path) else None)


def anew(where: Where) -> Where:
    """Return a place of which nothing is remembered; a path that is a link is what it leads to."""
    if isinstance(where, Url):
        return where.anew()
    return where.resolve() if where.is_symlink() else where


def is_far(where: Where) -> TypeGuard[Url]:
    """Return whether each request takes its time: it is a URL."""
    return isinstance(where, Url)


def changed(where: Where) -> float:
    """Return when something was changed, in seconds since 1970; 0 where that is unknown."""
    if isinstance(where, Url):
        return where.changed()
    try:
        return where.lstat().st_mtime
    except OSError:
        return 0.0


def below(where: Where, top: Where) -> str | None:
    """Return the name of something relative to a folder; None where it is not below it."""
    if isinstance(where, Url) or isinstance(top, Url):
        head = f"{top}/"
        return str(where).removeprefix(head) if str(where).startswith(head) else None
    return str(where.relative_to(top)) if where.is_relative_to(top) else None


def check_reached(where: Where) -> None:
    """Refuse to choose where a store did not answer: what it hides may be the newest whole one."""
    if isinstance(where, Url) and where.files.failures:
        raise RequestError(f"{where} was not read to its end: {where.files.failures[0]}")
