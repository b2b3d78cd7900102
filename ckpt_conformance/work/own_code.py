"""Code of the user's own: the files below a folder that may run, and the folders they lie in.

What is installed counts by its version, what is of this suite by the modules that run. All else
that may be code is found here, by one walk: for keys of the cache, for what shards and workers must
have alike, and for what a recording is of.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.contract import installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PACKAGE = Path(__file__).resolve().parents[1]
OURS = "ckpt_conformance"
BESIDE = ("suites", "fault_injectors", "reference_impl")  # packages that may lie beside it
CODE = re.compile(r".*\.(py|pyc|pyd|pth|sh|bash|so(\.[0-9]+)*)")
ARCHIVES = (".zip", ".egg", ".whl", ".pyz")  # code if there is Python in them
PASSED_OVER = {"__pycache__", "node_modules"}
OF_A_REPORT = ("result.json", "report.html")  # its bundles have scripts, which nobody imports
OF_A_CACHE = "ckpt-conformance-cache"  # a file that says what its folder is
OF_EVIDENCE = ("violation.json", "recorded.json")  # of a bundle, of `explore --record`
MOST_FILES = 20_000  # of code
MOST_NAMES = 200_000  # of files of any kind: a link may lead to a folder of data


class TooMuchError(Exception):
    """There are more files below a folder than anybody wants to read before each run."""


def our_packages(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the packages of this suite by dotted name, wherever it is installed."""
    beside = {f"{OURS}.{name}": (package / name).resolve() for name in BESIDE}
    return {OURS: package, **beside}


def is_installed(path: Path) -> bool:
    """Return whether a path lies where packages are installed, or Python itself."""
    return any(path.is_relative_to(place) for place in installed.places())


def places_outside() -> list[Path]:
    """Return the folders and archives that modules come from, without those of installed ones."""
    places = {Path(entry or ".").resolve() for entry in (".", *sys.path)}
    ours = {path.resolve() for path in our_packages().values()}
    return sorted(
        place
        for place in places
        if place.exists() and place not in ours and not is_installed(place)
    )


def is_code(path: Path) -> bool:
    """Return whether a file may run: by its suffix, or without one by what it is."""
    if CODE.fullmatch(path.name):
        return True
    if path.suffix in ARCHIVES:
        return _holds_python(path)
    return not path.suffix and _is_program(path)


def files_below(places: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield each file of code below folders, by its path relative to the folder, and its path.

    Raises TooMuchError beyond `MOST_FILES` of them, or `MOST_NAMES` of any kind.
    """
    count, names = 0, 0
    for place in places:
        for path in _walk(place):
            names += 1
            if names > MOST_NAMES:
                raise TooMuchError
            if is_code(path):
                count += 1
                if count > MOST_FILES:
                    raise TooMuchError
                yield (path.relative_to(place) if path != place else Path(place.name)), path


def _walk(place: Path) -> Iterator[Path]:
    """Yield all files below a folder in one order; links to folders are followed, each one once."""
    if place.is_file():
        yield place
        return
    ours = {path.resolve() for path in our_packages().values()}
    been = {os.path.realpath(place)}
    for base, folders, names in os.walk(place, followlinks=True):
        folders[:] = [name for name in sorted(folders) if _is_new(Path(base, name), ours, been)]
        yield from (Path(base, name) for name in sorted(names))


def _is_new(folder: Path, ours: set[Path], been: set[str]) -> bool:
    """Return whether a folder is to be walked; that of an environment counts as installed."""
    if folder.name.startswith(".") or folder.name in PASSED_OVER:
        return False
    real = Path(os.path.realpath(folder))
    if real in ours or str(real) in been or (folder.is_symlink() and is_installed(real)):
        return False
    been.add(str(real))
    return not (folder / "pyvenv.cfg").exists() and not is_written_by_us(folder)


def is_written_by_us(folder: Path) -> bool:
    """Return whether a folder is a report, a bundle, a recording or a cache.

    Nobody imports their code.
    """
    return all((folder / file).exists() for file in OF_A_REPORT) or any(
        (folder / file).exists() for file in (*OF_EVIDENCE, OF_A_CACHE)
    )


def _holds_python(path: Path) -> bool:
    import zipfile  # half a megabyte, and few have archives

    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith((".py", ".pyc")) for name in archive.namelist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return False


def _is_program(path: Path) -> bool:
    """Return whether a file is executable, or begins as a script does."""
    if not path.is_file():  # a pipe is never opened: nobody may write to it
        return False
    if os.access(path, os.X_OK) and path.stat().st_mode & 0o111:
        return True
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False
