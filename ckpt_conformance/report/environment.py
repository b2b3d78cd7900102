"""What surrounds a run: the machine, and the folder of its files.

Nothing here imports torch: `ckpt-conformance list` and a certificate that is judged again must stay
quick.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.subject import bundle

if TYPE_CHECKING:
    from collections.abc import Sequence

MOUNTS = Path("/proc/self/mountinfo")
PACKAGE = Path(__file__).resolve().parents[1]
GIT_SECONDS = 10
MARK = "ckpt-conformance"  # stands near the beginning of every file that is ours
FILES = ("result.json", "report.html", "junit.xml", "summary.md")


class OutputError(ValueError):
    """A folder that the certificate cannot be written to."""


def describe_environment(scratch: Path) -> dict[str, str | int | None]:
    """Describe this machine; `scratch` is a path on the file system that held the checkpoints."""
    return {
        "python": platform.python_version(),
        "torch": distribution_version("torch"),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "filesystem": filesystem_type(scratch),
        "cpus": usable_cpus(),
    }


def distribution_version(name: str) -> str | None:
    """Return the installed version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cpus() -> int:
    """Count the cores this process may use; a container often has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def filesystem_type(path: Path, mounts: Path = MOUNTS) -> str:
    """Name the file system type under `path` ("ext4"), or "unknown" where it cannot be read."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return "unknown"  # not Linux, or /proc is not mounted
    target = path.resolve()
    innermost = "unknown"
    depth = -1
    for point, kind in filter(None, map(_mount, lines)):
        # `>=`: a later mount on the same point hides the earlier one.
        if len(point.parts) >= depth and target.is_relative_to(point):
            innermost, depth = kind, len(point.parts)
    return innermost


def _mount(line: str) -> tuple[Path, str] | None:
    """Read mount point and type from one line of mountinfo (proc(5)); None for a foreign line."""
    left, separator, right = line.partition(" - ")
    fields, kinds = left.split(" "), right.split(" ")
    mount_point = 4
    if not separator or len(fields) <= mount_point:
        return None
    # The kernel writes space, tab, newline and backslash as three octal digits.
    point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[mount_point])
    return Path(point), kinds[0]


def suite_commit(package: Path = PACKAGE) -> str | None:
    """Return the commit of this suite, with "-dirty" after local changes; None when installed.

    A wheel inside somebody else's checkout is not that checkout's commit: git must track us.
    """
    if _git(package, "ls-files", "--error-unmatch", "contract/verdicts.py") is None:
        return None
    commit = _git(package, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(package, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """Run a git command that only reads; None where git is absent or says no."""
    command = ["git", "-C", str(folder), *arguments]
    # Only reads: `status` would otherwise refresh the index of the user's checkout.
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(  # noqa: S603  our own arguments, no shell
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            check=True,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def output_folders(out: Path, adapters: Sequence[str]) -> dict[str, Path]:
    """Return the folder of each adapter: `out` itself for one, `out`/<name> for several."""
    if len(adapters) == 1:
        return {adapters[0]: out}
    folders: dict[str, Path] = {}
    for adapter in adapters:
        stem = bundle.safe(adapter)  # the session puts bundles/ there, by the same rule
        stem = stem if stem.strip(".-") else "adapter"
        taken = {folder.name.casefold() for folder in folders.values()}
        names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, 2**31))
        folders[adapter] = out / next(name for name in names if name.casefold() not in taken)
    return folders


def folders_to_make(folder: Path) -> list[Path]:
    """Return a folder and those above it that are not there yet, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that a command has made for nothing; what is in one stays, and so does it."""
    for path in folders:
        with contextlib.suppress(OSError):
            path.rmdir()


def prepare_output(folder: Path) -> None:
    """Make sure, before anything runs, that the certificate can be written into `folder`.

    Raises:
        OutputError: it is no folder, cannot be written, or holds files of these names that are not
            ours.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # asking for permission is not enough: a file system can be full or read-only
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder}: {error.strerror}; name another folder with --out"
        ) from error
    for name in FILES:
        _refuse_foreign(folder / name)


def _refuse_foreign(path: Path) -> None:
    if not path.exists():
        return
    ours = False
    if path.is_file():
        with path.open("rb") as file:
            ours = MARK.encode() in file.read(1024)
    if not ours:
        raise OutputError(
            f"{path} was not written by {MARK} and would be overwritten; move it away or name "
            "another folder with --out"
        )
