"""Where a run took place: what the numbers and the crash states of a certificate depend on.

Nothing here imports torch: `ckpt-conformance list` and a certificate that is judged again must stay
quick.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
PACKAGE = Path(__file__).resolve().parent
GIT_SECONDS = 10


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
    """Give the installed version of a distribution, or None where it is not installed."""
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
    found = "unknown"
    depth = -1
    for point, kind in filter(None, map(_mount, lines)):
        # `>=`: a later mount on the same point hides the earlier one.
        if len(point.parts) >= depth and target.is_relative_to(point):
            found, depth = kind, len(point.parts)
    return found


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
    """Give the commit of this suite, with "-dirty" after local changes; None when it was installed.

    A wheel inside somebody else's checkout is not that checkout's commit: git must track us.
    """
    if _git(package, "ls-files", "--error-unmatch", "verdicts.py") is None:
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
