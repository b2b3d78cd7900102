"""Directories that are made elsewhere and renamed in: what ext4 leaves of them is legal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from recording import record
from test_crash_real_fs import judged

from ckpt_conformance.crash.explore import real_fs
from ckpt_conformance.crash.explore.real_states import real_states

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import os, sys
from pathlib import Path
root = Path(sys.argv[1])
away = root.parent / "elsewhere"
folder = away / "d"
folder.mkdir(parents=True)
(folder / "sub").mkdir()
for name in ("x", "sub/y"):
    with open(folder / name, "wb") as file:
        file.write(name.encode() * 3000)
        if {syncs}:
            file.flush(); os.fsync(file.fileno())
os.rename(folder / "x", folder / "z")
if {syncs}:
    for path in (folder / "sub", folder):
        os.fsync(os.open(path, os.O_RDONLY))
os.rename(folder, root / "m")
os.fsync(os.open(root, os.O_RDONLY))
(root / "m" / "z").unlink()
"""


@pytest.mark.parametrize("syncs", [True, False])
def test_what_ext4_leaves_of_a_directory_that_came_in_is_legal(
    *, syncs: bool, tmp_path: Path
) -> None:
    missing = real_fs.unavailable("ext4")
    if missing:
        pytest.skip(missing)
    recording = record(tmp_path, SCRIPT.format(syncs=syncs))
    assert recording.unsupported == []
    renamed = next(one.index for one in recording.operations if one.target == "m")
    points = range(renamed - 1, len(recording.operations) + 1)
    count = 0
    for state in real_states(recording, "ext4", points, rounds=1):
        judged(recording, "ext4", state)
        count += 1
    assert count >= len(points) - 1
