"""Code of the user's own that Python runs at its start, before it can be noted what it opens.

`site` imports `sitecustomize` and `usercustomize`, and runs the lines of lists of paths (`.pth`)
that begin with `import`. What a distribution brings counts by its version.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from ckpt_conformance.contract import installed

HOOKS = ("sitecustomize", "usercustomize")
OF_ENVIRONMENTS = {"_virtualenv.pth"}  # which virtualenv and uv write, and which opens nothing


@functools.cache
def files() -> tuple[str, ...]:
    """Return the paths of the files that are run so, in order."""
    lists = (path for path in installed.loose() if path.endswith(".pth"))
    running = [path for path in lists if _runs(Path(path))]
    return tuple(sorted({*running, *filter(None, map(_place_of, HOOKS))}))


def _runs(path: Path) -> bool:
    if path.name in OF_ENVIRONMENTS:
        return False
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return True  # nobody can say
    return any(line.startswith(("import ", "import\t")) for line in lines)


def _place_of(module: str) -> str | None:
    """Return the file of a module that is the user's own; None where there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec else None
    return None if origin is None or installed.has_version(str(Path(origin).resolve())) else origin
