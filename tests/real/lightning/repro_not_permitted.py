"""Lightning: in a directory that may not be written, a save reports success and writes nothing.

`_atomic_save` catches PermissionError and raises it no more. Ends with 1 where that shows.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import tiny

NOBODY = 65534


def close(folder: Path) -> None:
    """Take the right to write in a folder away; root writes everywhere, and becomes nobody."""
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)


def before(step: int, _: object) -> None:
    """Close the folder before the third step."""
    if step == 2:
        close(saves)


with tempfile.TemporaryDirectory() as name:
    stage, saves = Path(name) / "stage", Path(name) / "saves"
    for path in (Path(name), stage, saves):
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
    tempfile.tempdir = str(stage)  # where Lightning stages what it moves
    try:
        tiny.fit(str(saves), 4, hook=before)
        error = None
    except OSError as raised:
        error = raised
    if os.getuid() == 0:
        os.seteuid(0)
    saves.chmod(0o777)
    there = sorted(path.name for path in saves.iterdir())
    step = tiny.torch.load(saves / "last.ckpt", weights_only=False)["global_step"]
    tempfile.tempdir = None
print(f"four saves, and no right to write from the third on: fit() raised {error!r}")
print(f"reported as saved: 4 steps; last.ckpt is of step {step}, and there is {there}")
sys.exit(error is None and step == 2)
