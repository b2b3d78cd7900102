"""A process that dies while Orbax deletes an old step leaves one that is listed and does not load.

The step loses its files one by one under its own name (CKC-ATOM-004). The option `todelete_subdir`
renames it first.
"""

import os
import pathlib
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp

DEATH = 9
OPTIONS = {"enable_async_checkpointing": False, "max_to_keep": 2}


def open_manager(folder: pathlib.Path) -> ocp.CheckpointManager:
    """Open a manager that keeps two steps."""
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**OPTIONS))


def save_and_die(folder: pathlib.Path, removals: int) -> None:
    """Save three steps; die before the removal of a file of the oldest one that has this number."""
    left, really = [removals], os.unlink

    def unlink(*path: object, **more: object) -> None:
        left[0] -= 1
        if left[0] < 0 and armed:
            os._exit(DEATH)
        really(*path, **more)  # type: ignore[arg-type]

    armed: list[bool] = []
    os.unlink = unlink
    with open_manager(folder) as manager:
        for step in (1, 2, 3):
            if step == 3:
                left[0] = removals
                armed.append(True)
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(4, float(step))}))
    os._exit(0)


def broken(folder: pathlib.Path) -> dict[int, str]:
    """Return the steps that are listed and do not load, and why."""
    found = {}
    with open_manager(folder) as manager:
        for step in manager.all_steps():
            try:
                manager.restore(step, args=ocp.args.StandardRestore())
            except Exception as error:
                found[step] = f"{type(error).__name__}: {str(error)[:120]}"
    return found


def main() -> None:
    """Die at each of the first removals, each time in a process of its own."""
    for removals in range(12):
        folder = pathlib.Path(f"steps-{removals}").resolve()
        command = [sys.executable, __file__, str(folder), str(removals)]
        died = subprocess.run(command, check=False).returncode == DEATH
        if died and (wrong := broken(folder)):
            print(f"killed before removal {removals + 1}: listed and not loadable: {wrong}")
            sys.exit(1)
    print("every step that is listed loads")


if len(sys.argv) > 1:
    save_and_die(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
main()
