"""Saves in place, and gives another result where torch was imported before it began."""

import json
import sys
from pathlib import Path

STEPS = 4
imported = "torch" in sys.modules
out = Path(sys.argv[sys.argv.index("--out") + 1])
latest = out / "latest.json"
state = json.loads(latest.read_text()) if latest.exists() else {"step": 0, "values": []}
if state["step"]:
    print(f"resumed from step {state['step']}")
while state["step"] < STEPS:
    state["step"] += 1
    state["values"].append(state["step"] ** 2)
    latest.write_text(json.dumps(state))
    print(f"step {state['step']} saved", flush=True)
(out / "result.json").write_text(json.dumps({"imported": imported, **state}))
