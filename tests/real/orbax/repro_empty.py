"""Orbax refuses a tree that has an array without elements (CKC-RTRP-011)."""

import pathlib
import sys

import numpy as np
import orbax.checkpoint as ocp


def main() -> None:
    """Save a tree with and without such an array."""
    state = {"weight": np.ones(3), "empty": np.zeros((0, 8))}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(pathlib.Path("steps").resolve(), options=options) as manager:
        manager.save(1, args=ocp.args.StandardSave({"weight": state["weight"]}))
        try:
            manager.save(2, args=ocp.args.StandardSave(state))
        except ValueError as error:
            print(f"steps {manager.all_steps()}; a tree with a [0, 8] array: {error}")
            sys.exit(1)
    print("a tree with a [0, 8] array was saved")


main()
