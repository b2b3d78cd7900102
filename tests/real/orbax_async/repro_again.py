"""A failed save of two items is told twice, the second time by the next save (CKC-IOER-003).

Each item is written by a thread of its own. The manager raises the error of the first one that it
waits for, and keeps that of the other if it comes later: the next save, on a healthy disk, raises
it.
"""

import pathlib
import resource
import signal
import sys

import numpy as np
import orbax.checkpoint as ocp

ITEMS, TRIES = ("arrays", "rest"), 20


def attempt(manager: ocp.CheckpointManager, step: int) -> str:
    """Save, wait, and say what came of it."""
    items = ocp.args.Composite(
        arrays=ocp.args.StandardSave({"weight": np.full(1000, float(step))}),
        rest=ocp.args.JsonSave({"text": "of more than a hundred bytes" * 10}),
    )
    try:
        manager.save(step, args=items)
        manager.wait_until_finished()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    return "saved"


def main() -> None:
    """Save where no file may have more than 100 bytes, then without a limit; several times."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    manager = ocp.CheckpointManager(pathlib.Path("steps").resolve(), item_names=ITEMS)
    for step in range(0, 3 * TRIES, 3):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        ends = {step: attempt(manager, step)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        ends |= {later: attempt(manager, later) for later in (step + 1, step + 2)}
        if ends[step] != "saved" and ends[step + 1] != "saved":
            print(f"saves end so: {ends}; there is {sorted(manager.all_steps())}")
            sys.exit(1)
    print(f"after each of {TRIES} failed saves the next one is made")


main()
