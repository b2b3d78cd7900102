"""A copy that is cut as it is closed: one large file of the mirror, and nobody is told."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from ckpt_conformance.contract.journal import ChildJournal
from ckpt_conformance.fault_injectors import cut_uploads
from ckpt_conformance.harness.gate import Gate
from ckpt_conformance.harness.messages import Options

if TYPE_CHECKING:
    from pathlib import Path


class Closed:
    """A child whose manager copies all that is here as it is closed."""

    def __init__(self, folder: Path) -> None:
        """Make two large files and a small one."""
        self.gate = Gate()
        self.gate.set("shut")
        self.root, self.there = folder / "root", folder / "mirror"
        self.options = Options(mirror=str(self.there))
        self.journal = ChildJournal(folder / "journal", 0)
        for path in (self.root, self.there):
            path.mkdir()
        for name, size in (("a-mark", 1), ("model", 1000), ("optimizer", 900)):
            (self.root / name).write_bytes(b"x" * size)

    def close(self) -> None:
        """Copy, beside what was there and is written under a draft's name."""
        for path in sorted(self.root.iterdir()):
            self.gate.pass_through(path.name)
            draft = self.there / f"{path.name}.draft"
            shutil.copyfile(path, draft)
            draft.rename(self.there / path.name)


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_the_first_large_copy_alone_loses_its_end(tmp_path: Path) -> None:
    closed = Closed(tmp_path)
    assert cut_uploads.close(closed) == 1
    assert sizes(closed.there) == {"a-mark": 1, "model": 500, "optimizer": 900}
    assert sizes(closed.root) == {"a-mark": 1, "model": 1000, "optimizer": 900}


def test_after_it_no_copy_is_cut(tmp_path: Path) -> None:
    closed = Closed(tmp_path)
    cut_uploads.close(closed)
    closed.close()
    assert sizes(closed.there) == sizes(closed.root)


def test_it_did_not_fire_where_nothing_large_is_closed(tmp_path: Path) -> None:
    closed = Closed(tmp_path)
    (closed.root / "model").unlink()
    (closed.root / "optimizer").rename(closed.there / "optimizer")
    (closed.root / "kept").mkdir()
    (closed.root / "kept" / "model").write_bytes(b"x" * 1000)
    closed.close = lambda: None  # type: ignore[method-assign]
    assert cut_uploads.close(closed) == 0
