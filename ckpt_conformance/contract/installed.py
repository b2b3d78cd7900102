"""Where packages are installed, and Python itself: what lies there counts by its version."""

from __future__ import annotations

import functools
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
