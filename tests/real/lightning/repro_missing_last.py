"""Lightning: where last.ckpt is gone, `fit(ckpt_path="last")` starts at step 0, with a warning.

The checkpoint of the newest step is there. Ends with 1 where that shows.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import tiny

with tempfile.TemporaryDirectory() as folder:
    tiny.fit(folder, 4)
    (Path(folder) / "last.ckpt").unlink()
    print(f"there: {sorted(path.name for path in Path(folder).iterdir())}")
    begun: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny.fit(folder, 6, "last", lambda step, _: begun.append(step))
    told = [str(each.message) for each in caught if "no last checkpoint" in str(each.message)]
print(f"warned: {told}")
print(f"fit(ckpt_path='last') began at step {begun[0]}")
sys.exit(begun[0] == 0)
