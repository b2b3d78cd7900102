"""What is installed, and Python itself: what lies there counts by its version.

A distribution lists its files (RECORD, PEP 376). A file beside them that no list has is the user's
own, wherever it lies: in the folder of a package, too.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import site
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPILED = "__pycache__"  # beside each source, and of it


@functools.cache
def sites() -> tuple[str, ...]:
    """Return the folders that distributions are installed in, those within others first.

    Each as `sys.path` has it, and without links in its path.
    """
    paths = sysconfig.get_paths()
    found = {*site.getsitepackages(), site.getusersitepackages(), paths["purelib"]}
    return tuple(sorted(_spelled({*found, paths["platlib"]}), key=len, reverse=True))


@functools.cache
def places() -> frozenset[Path]:
    """Return the folders of distributions and of Python, however they are spelled."""
    return frozenset(Path(place) for place in (*sites(), *_of_python()))


def has_version(path: str) -> bool:
    """Return whether a file is part of Python or listed by a distribution.

    Of folders in `site-packages` all are: `loose` tells what else lies there.
    """
    for place in sites():
        if f"{path}/".startswith(f"{place}/"):
            return _is_listed(path, place) or os.path.isdir(path)  # noqa: PTH112  a cheap one
    return f"{path}/".startswith(_below_python())


def loose() -> tuple[str, ...]:
    """Return the files in `site-packages` that no distribution lists, by their paths, in order.

    A module or a setting that somebody put there, and lists of paths (`.pth`) among them.
    """
    real = {place for place in sites() if str(Path(place).resolve()) == place}
    return tuple(sorted(path for place in real for path in _loose_in(place)))


def _of_python() -> set[str]:
    paths = sysconfig.get_paths()
    return _spelled({paths["stdlib"], paths["platstdlib"]})


def _spelled(places: set[str]) -> set[str]:
    return {str(path) for place in places for path in (Path(place), Path(place).resolve())}


@functools.cache
def _below_python() -> tuple[str, ...]:
    return tuple(f"{place}/" for place in _of_python())


def _loose_in(place: str) -> Iterator[str]:
    for base, folders, names in os.walk(place):
        folders[:] = [name for name in folders if _is_walked(f"{base}/{name}", place)]
        paths = (f"{base}/{name}" for name in names)
        yield from (path for path in paths if not _is_listed(path, place))


def _is_walked(folder: str, place: str) -> bool:
    is_whole = folder in _listed(place)  # of a distribution without a list
    return not (is_whole or folder in sites() or folder.endswith(f"/{COMPILED}"))


def _is_listed(path: str, place: str) -> bool:
    listed = _listed(place)
    if path in listed or f"/{COMPILED}/" in path:
        return True
    top = path.removeprefix(f"{place}/").partition("/")[0]
    return f"{place}/{top}" in listed  # a name of a distribution without a list


@functools.cache
def _listed(place: str) -> frozenset[str]:
    """Return the paths that distributions in a folder list; of one without a list its top names.

    A path with `..` in it is of a script, which lies elsewhere.
    """
    found: set[str] = set()
    for one in importlib.metadata.distributions(path=[place]):
        record = one.read_text("RECORD")
        names = _names_in(record) if record else _tops_of(one)
        found |= {f"{place}/{name}" for name in names}
    return frozenset(found)


def _names_in(record: str) -> Iterator[str]:
    """Give the names in a RECORD; one with a comma in it is quoted."""
    for line in record.splitlines():
        name = line.rsplit(",", 2)[0]
        yield name[1:-1].replace('""', '"') if name.startswith('"') else name


def _tops_of(one: importlib.metadata.Distribution) -> Iterator[str]:
    """Give the top names of what Debian installed, or of an egg."""
    for top in (one.read_text("top_level.txt") or "").split():
        yield from (top, f"{top}.py")
    yield getattr(one, "_path", Path("unknown")).name
