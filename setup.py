"""The packages of the wheel: every folder that holds Python, so that none is forgotten.

Everything else stands in pyproject.toml. Three folders lie beside the package and are subpackages
of it at run time. The build reads this map; the links inside `ckpt_conformance/` serve editors,
type checkers and a plain checkout, and may be missing (an archive, a clone without links).
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup

PACKAGE = "ckpt_conformance"
BESIDE = ("fault_injectors", "reference_impl", "suites")
FOLDERS = {PACKAGE: PACKAGE, **{f"{PACKAGE}.{name}": name for name in BESIDE}}


def packages_in(folder: Path, name: str) -> list[str]:
    """List a folder and those below it that hold Python, by dotted name; links are not followed."""
    found = [name] if any(folder.glob("*.py")) else []
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    return found + [one for path in below for one in packages_in(path, f"{name}.{path.name}")]


setup(
    packages=[one for name, path in FOLDERS.items() for one in packages_in(Path(path), name)],
    package_dir=FOLDERS,
)
