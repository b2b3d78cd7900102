"""Orbax: JsonSave takes a scalar of NumPy, and JsonRestore gives a float (CKC-COMP-012)."""

import os
import sys

import numpy as np
import orbax.checkpoint as ocp

with ocp.CheckpointManager(os.path.abspath("kept"), item_names=("rest",)) as manager:
    saved = {"mean": np.float64(1 / 3)}
    manager.save(1, args=ocp.args.Composite(rest=ocp.args.JsonSave(saved)))
    manager.wait_until_finished()
    found = manager.restore(1, args=ocp.args.Composite(rest=ocp.args.JsonRestore()))["rest"]
same = float(found["mean"]) == 1 / 3
print(f"{type(saved['mean'])} came back as {type(found['mean'])}; the number is the same: {same}")
sys.exit(not isinstance(found["mean"], np.float64))
