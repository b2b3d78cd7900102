"""An error at the listing that puts a save together is passed over, and the step does not load.

Each process writes its arrays into a database of its own, and at the end these are listed and put
together. A disk that answers EIO to that listing makes it an empty one: `save` returns, and the
step is listed and has no arrays (CKC-IOER-007). Needs strace, which injects the error.
"""

import pathlib
import shutil
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp

STEPS = pathlib.Path("steps").resolve()
LISTED = STEPS / "2.orbax-checkpoint-tmp" / "default.orbax-checkpoint-tmp"
ERROR = ["-e", "trace=getdents64", "-e", "inject=getdents64:error=EIO"]


def open_manager() -> ocp.CheckpointManager:
    """Open a manager that saves before `save` returns."""
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    return ocp.CheckpointManager(STEPS, options=options)


def save(step: int) -> None:
    """Save a step of a thousand numbers."""
    with open_manager() as manager:
        manager.save(step, args=ocp.args.StandardSave({"weight": np.full(1000, float(step))}))


def main() -> None:
    """Save step 1, and step 2 in another process whose disk does not list one folder; load it."""
    if shutil.which("strace") is None:
        print("strace is not installed: apt-get install strace")
        sys.exit(2)
    save(1)
    trace = ["strace", "-f", "-qq", "-o", "calls", "-P", str(LISTED), *ERROR]
    done = subprocess.run(
        [*trace, sys.executable, __file__, "2"], capture_output=True, text=True, check=False
    )
    failed = pathlib.Path("calls").read_text().count("EIO")
    if done.returncode or not failed:
        told = (done.stderr.strip().splitlines() or [""])[-1]
        print(f"{failed} listings failed, and the save ended with {done.returncode}: {told[:200]}")
        sys.exit(0)
    with open_manager() as manager:
        try:
            manager.restore(2, args=ocp.args.StandardRestore())
        except Exception as error:
            print(
                f"{failed} listings failed, and save(2) returned; steps are {manager.all_steps()}, "
                f"and restore(2) raises {type(error).__name__}: {str(error)[:120]}"
            )
            sys.exit(1)
    print("step 2 loads")


if len(sys.argv) > 1:
    save(int(sys.argv[1]))
else:
    main()
