"""Steps that are symbolic links out of the folder that is judged, or to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source.findings import Kind

if TYPE_CHECKING:
    from ckpt_conformance.fsck.source.findings import Report
    from ckpt_conformance.fsck.source.source import Folder


def hides_a_folder(folder: Folder, name: str) -> bool:
    """Tell whether a link hides a folder from whoever judges: one elsewhere, or one that is gone.

    A link to a folder inside is judged where that lies.
    """
    where = folder.root / name
    if isinstance(where, Path) and not where.exists():
        return True
    return bool(folder.strayed(name)) and (where.is_dir() or not isinstance(where, Path))


def link_part(folder: Folder, report: Report, name: str) -> None:
    """Say where a link leads: nobody here can vouch for what it shows."""
    where = folder.root / name
    if isinstance(where, Path) and not where.exists():
        what = f"a symbolic link to {where.readlink()}, which is not there"
        report.say(Kind.MISSING, name, what)
    else:
        report.say(Kind.DAMAGED, name, f"{folder.strayed(name)}: give the path that it leads to")
