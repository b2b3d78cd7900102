"""What a result was found to depend on while it ran: files, folders, variables, by their digests.

A result is kept with these (`cache.Entry.opened`), and is taken only where each of them is the same
again. Who reads the same code and the same contents opens the same again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.contract.file_kinds import kinds_of
from ckpt_conformance.work import own_code, packages
from ckpt_conformance.work.own_code import CODE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ABSENT = "absent"
# How names of variables begin that are there only while checks run.
SET_BY_US = ("CKC_", "PYTEST_", "HYPOTHESIS_STORAGE_DIRECTORY")
OF_PATHS = {"file", "folder", "listed", "modules", "exists", "link"}  # kinds
Opened = dict[str, str]
"""Digests by kind and name: `file ./settings.json`, relative below the working directory."""


def key(kind: str, name: str) -> str:
    """Write what was opened, as the same on another machine with its own working directory."""
    here = str(Path.cwd())
    if kind in OF_PATHS and f"{name}/".startswith(f"{here}/"):
        return f"{kind} .{name.removeprefix(here)}"
    return f"{kind} {name}"


def leave_out(paths: Iterable[Path]) -> None:
    """Leave files and folders that this command makes out of the names in folders."""
    _made_here.update(os.path.realpath(path) for path in paths)


def noted(names: Iterable[tuple[str, str]], *, anywhere: bool = True) -> Opened:
    """Return what was opened, by kind and name, with its digests as they are now.

    A name outside of the working directory may be made of where code lies: another checkout has
    another file there. So where one is near the places of code, these places count, too; unless
    what was noted is taken in this place alone, and not `anywhere`.
    """
    names = list(names)
    found = {key(*one): digest(*one) for one in names}
    if not anywhere:
        return found
    tops = {part for place in _places() for part in Path(place).parts[1:2]}
    outside = (one.partition(" ") for one in found)
    near = (Path(name).parts[1:2] for kind, _, name in outside if kind in OF_PATHS)
    if any(part and part[0] in tops for part in near):
        found["places "] = digest("places", "")
    return found


def digest(kind: str, name: str) -> str:
    """Return a digest of what it is now; raises KeyError for an unknown kind."""
    return _DIGESTS[kind](name)


def is_as_it_was(opened: Mapping[str, str]) -> bool:
    """Return whether all that a result depends on is the same now."""
    return changed(opened) is None


def changed(opened: Mapping[str, str]) -> str | None:
    """Say what is another one now of what a result depends on; None where nothing is."""
    for one, was in opened.items():
        kind, _, name = one.partition(" ")
        if kind not in _DIGESTS or digest(kind, name) != was:
            return _WORDS.get(kind, "{}").format(name)
    return None


def _of_variable(name: str) -> str:
    value = os.environ.get(name)
    return ABSENT if value is None else _short(value)


def _of_variables(_: str) -> str:
    """Digest the names of all variables but those that a session of ours or of pytest sets."""
    return _short("\0".join(sorted(name for name in os.environ if not name.startswith(SET_BY_US))))


def _of_file(name: str) -> str:
    try:
        found = Path(name).stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe is never opened: nobody may write to it
            return f"of kind {stat.S_IFMT(found.st_mode):o}"
        stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if _read.get(name, ((), ""))[0] != stamp:
            with Path(name).open("rb") as file:
                _read[name] = (stamp, hashlib.file_digest(file, _hash).hexdigest())
        return _read[name][1]
    except (OSError, ValueError):
        return ABSENT


def _of_existence(name: str) -> str:
    return " ".join(f"{kind:o}" for kind in kinds_of(name)) or ABSENT


def _of_link(name: str) -> str:
    try:
        return _short(str(Path(name).readlink()))
    except (OSError, ValueError):
        return ABSENT


def _of_folder(name: str) -> str:
    try:
        with os.scandir(name) as entries:
            return _short("\0".join(sorted(entry.name + _sign_of(entry) for entry in entries)))
    except (OSError, ValueError):
        return ABSENT


def _of_listing(name: str) -> str:
    """Digest the names in a folder but those of reports, recordings and caches of ours."""
    try:
        with os.scandir(name) as entries:
            theirs = [entry for entry in entries if not _is_ours(entry)]
    except (OSError, ValueError):
        return ABSENT
    return _short("\0".join(sorted(entry.name + _sign_of(entry) for entry in theirs)))


def _is_ours(entry: os.DirEntry[str]) -> bool:
    is_made_here = os.path.realpath(entry.path) in _made_here
    return is_made_here or (entry.is_dir() and own_code.is_written_by_us(Path(entry.path)))


def _of_modules(name: str) -> str:
    """Digest the names in a folder that an import may find; other files come and go there."""
    try:
        names = _names_in(name)
    except (OSError, ValueError):
        return ABSENT
    here = Path(name)
    found = (one for one in names if CODE.fullmatch(one) or (here / one / "__init__.py").exists())
    return _short("\0".join(found))


def _places() -> list[str]:
    """Return the folders of code that is not installed, and the working directory."""
    places = (Path.cwd(), *own_code.places_outside(), *_edited_in_place())
    return sorted(set(map(str, places)))


@functools.cache
def _edited_in_place() -> tuple[Path, ...]:
    return tuple(packages.edited_in_place())


def _of_places(_: str) -> str:
    return _short("\0".join(_places()))


def _sign_of(entry: os.DirEntry[str]) -> str:
    """Tell files, folders and links apart, as a listing does; of a link what it leads to, too."""
    if entry.is_symlink():
        return f"@{'/' if entry.is_dir() else '.' if entry.is_file() else ''}"
    return "/" if entry.is_dir() else ""


def _names_in(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _short(text: str) -> str:
    return _hash(text.encode(errors="surrogateescape")).hexdigest()


def _hash(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


_WORDS = {
    "file": "the file {}",
    "folder": "the names in the folder {}",
    "listed": "the names in the folder {}",
    "modules": "what can be imported from {}",
    "exists": "whether there is {}",
    "link": "where the link {} leads",
    "variable": "the environment variable {}",
    "variables": "which environment variables there are (the code reads all of them)",
    "places": "where the code lies",
}
"""What each kind is for a reader, who asks why a result was not taken."""
_made_here: set[str] = set()
_read: dict[str, tuple[tuple[int, ...], str]] = {}  # of files: when they were read, and the digest
_DIGESTS: dict[str, Callable[[str], str]] = {
    "file": _of_file,
    "folder": _of_folder,
    "listed": _of_listing,
    "modules": _of_modules,
    "exists": _of_existence,
    "link": _of_link,
    "variable": _of_variable,
    "variables": _of_variables,
    "places": _of_places,
}
