"""Orbax: a process whose last line comes while a save goes on does not end (CKC-ASYN-006).

Its threads hand work to a pool, which takes none once the interpreter ends; other threads wait for
what the first ones should tell them.
"""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp

PATIENCE = 60  # seconds; a save takes less than one


def begin_to_save() -> None:
    """Save step 1, begin to save step 2 on a disk that is slow, and let the process end."""
    make = os.mkdir

    def slowly(*path: object, **more: object) -> None:
        time.sleep(1)
        make(*path, **more)  # type: ignore[arg-type]

    manager = ocp.CheckpointManager(pathlib.Path("steps").resolve())
    manager.save(1, args=ocp.args.StandardSave({"weight": np.ones(3)}))
    manager.wait_until_finished()
    os.mkdir = slowly
    manager.save(2, args=ocp.args.StandardSave({"weight": np.ones(3)}))


def main() -> None:
    """Let another process do that, and wait for its end."""
    command = [sys.executable, __file__, "child"]
    try:
        subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired as late:
        told = (late.stderr or b"").decode()
        error = next((line for line in told.splitlines() if "cannot schedule" in line), "no error")
        print(f"{PATIENCE} s after its last line it has not ended: {error}")
        sys.exit(1)
    print("it has ended")


if len(sys.argv) > 1:
    begin_to_save()
else:
    main()
