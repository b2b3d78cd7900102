"""transformers: `save_total_limit` deletes directories that Trainer never wrote.

The rotation sorts whatever is called checkpoint-* by its time, so the oldest goes, whatever it is:
here notes of the user's, and a copy of a checkpoint that is kept under another name. Ends with 1
where that shows.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import tiny

HOUR = 3600  # seconds

with tempfile.TemporaryDirectory() as folder:
    names = ("checkpoint-notes", "checkpoint-2 (copy)")
    for name in names:
        path = Path(folder) / name
        path.mkdir()
        (path / "mine.txt").write_text("not Trainer's\n")
        times = path.stat().st_mtime - HOUR
        os.utime(path, (times, times))
    ended = tiny.in_child(tiny.trainer_of(folder, 6, save_total_limit=2).train)
    gone = [name for name in names if not (Path(folder) / name).exists()]
    left = sorted(path.name for path in Path(folder).iterdir())
print(f"train() ended with {ended}; left are {left}; deleted, and not Trainer's: {gone}")
sys.exit(ended == 0 and gone == list(names))
