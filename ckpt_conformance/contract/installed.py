"""Where packages are installed, and Python itself: what lies there counts by its version."""

from __future__ import annotations

import functools
import importlib.metadata
import site
import sys
import sysconfig
from pathlib import Path


@functools.cache
def places() -> frozenset[Path]:
    """Return the folders, without links in their paths."""
    paths = sysconfig.get_paths()
    found = {*site.getsitepackages(), site.getusersitepackages()}
    found |= {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    if sys.prefix != sys.base_prefix:  # an environment is all its own
        found.add(sys.prefix)
    return frozenset(Path(place).resolve() for place in found)


def has_version(path: str) -> bool:
    """Return whether a file is part of Python, of a distribution or of an environment.

    A file that somebody put beside the distributions in `site-packages` is not.
    """
    for place in _sites():
        if path.startswith(f"{place}/"):
            name = path.removeprefix(f"{place}/").partition("/")[0]
            return name in _distributed(place)
    return path.startswith(tuple(f"{place}/" for place in places()))


@functools.cache
def _sites() -> tuple[str, ...]:
    """Return the folders that distributions are installed in, those within others first."""
    paths = sysconfig.get_paths()
    found = {*site.getsitepackages(), site.getusersitepackages(), paths["purelib"]}
    found.add(paths["platlib"])
    return tuple(sorted({str(Path(place).resolve()) for place in found}, key=len, reverse=True))


@functools.cache
def _distributed(place: str) -> frozenset[str]:
    """Return the names in a folder of distributions that are of one."""
    names = {"__pycache__"}
    for one in importlib.metadata.distributions(path=[place]):
        record = one.read_text("RECORD") or ""
        names |= {line.partition("/")[0].partition(",")[0] for line in record.splitlines()}
        if not record:  # installed by Debian, or as an egg: no list, but its modules
            for top in (one.read_text("top_level.txt") or "").split():
                names |= {top, f"{top}.py"}
            names.add(getattr(one, "_path", Path(place)).name)
    return frozenset(names)
