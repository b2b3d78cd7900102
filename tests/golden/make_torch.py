"""Pack what one release of torch wrote, so that every later one is held to it.

    ckpt-conformance write ADAPTER --out WRITTEN/ADAPTER     (under that release, for each adapter)
    python tests/golden/make_torch.py WRITTEN

Kept are a plain job and, where the adapter has ranks, the job of two ranks. Like all golden files
what a release wrote is never made anew: an archive that exists is left alone.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract import trees, written
from ckpt_conformance.subject.writing import OF_RANKS, PLAIN

if TYPE_CHECKING:
    from ckpt_conformance.contract.written import WrittenFolder

FOLDER = Path(__file__).parent / "torch"
KEPT = (PLAIN, OF_RANKS)


def keep(source: WrittenFolder, target: Path) -> None:
    """Copy the runs that are kept, with a record of these alone."""
    runs = [run for run in source.record.runs if run.folder in KEPT]
    for run in runs:
        trees.copy(source.tree(run), target / run.folder)
    files = {
        name: digest
        for name, digest in source.record.files.items()
        if name.partition("/")[0] in KEPT
    }
    record = msgspec.structs.replace(source.record, runs=runs, files=files)
    text = json.dumps(msgspec.to_builtins(record), indent=1)
    (target / written.RECORD).write_text(text + "\n")


def pack(folder: Path) -> Path:
    """Pack every folder that was written below one; return the archive. All are of one release."""
    found = written.find(folder)
    (release,) = {one.record.release for one in found}
    archive = FOLDER / f"torch-{release}.tar.xz"
    if archive.exists():
        sys.exit(f"{archive} exists: golden files are never made anew")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(archive, "w:xz") as tar:
        for one in sorted(found, key=lambda one: one.record.adapter):
            written.check_files(one)
            keep(one, Path(scratch) / one.record.adapter)
            tar.add(Path(scratch) / one.record.adapter, one.record.adapter)
    return archive


if __name__ == "__main__":
    sys.stdout.write(f"{pack(Path(sys.argv[1]))}\n")
