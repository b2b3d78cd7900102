"""Make the golden checkpoints of two ranks, of the format version that they write now.

    python tests/golden/make_ranks.py

As with those of one process, a released version is never made anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "support"))

from rank_worlds import Worlds  # noqa: E402  beside the tests

from ckpt_conformance.reference_impl.manifest import RANKS_SCHEMA_VERSION  # noqa: E402


def make(target: Path) -> None:
    """Save a job of two ranks in both formats, write down what it was."""
    worlds = Worlds()
    try:
        for kind in ("model", "dcp"):
            given = {"root": str(target / kind), "use_dcp": kind == "dcp", "run_id": "golden"}
            saved = worlds.results(2, "rank_cases:save_golden", **given)[0]
    finally:
        worlds.close()
    (target / "digests.json").write_text(json.dumps(saved, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    folder = FOLDER / f"ranks-schema-{RANKS_SCHEMA_VERSION}"
    if folder.exists():
        sys.exit(f"{folder} exists: golden files of a released version are never made anew")
    make(folder)
