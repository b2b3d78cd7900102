"""Make the golden checkpoints of the format version that the reference manager writes now.

    python tests/golden/make.py

A released version is never made anew: what it wrote then must load for ever. This script refuses to
touch a folder that exists.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.manifest import SCHEMA_VERSION
from ckpt_conformance.reference_impl.trainer import parts
from ckpt_conformance.workload import digests
from ckpt_conformance.workload.job import Job

FOLDER = Path(__file__).parent
STEP, SEED = 3, 11


def lasting(job: Job) -> dict[str, str]:
    """Digest what means the same in every release of torch: no option of an optimizer's groups."""
    leaves: dict[str, dict[str, str]] = job.leaves()
    leaves["optimizer"] = {
        path: bits for path, bits in leaves["optimizer"].items() if path.startswith("state.")
    }
    del leaves["scheduler"]
    return {name: digests.combine(found) for name, found in sorted(leaves.items())}


def make(target: Path) -> None:
    """Train a job, save it in both formats, write down what it was."""
    job = Job("mixed", SEED)
    job.train(STEP)
    extra: dict[str, Any] = job.extra.state_dict()
    for kind in ("model", "dcp"):
        manager = CheckpointManager(target / kind, use_dcp=kind == "dcp", run_id="golden")
        manager.save(STEP, **parts(job), extra=extra)
    text = json.dumps(lasting(job), indent=1, sort_keys=True)
    (target / "digests.json").write_text(text + "\n")


if __name__ == "__main__":
    folder = FOLDER / f"schema-{SCHEMA_VERSION}"
    if folder.exists():
        sys.exit(f"{folder} exists: golden files of a released version are never made anew")
    make(folder)
