"""What an older version of the reference manager wrote still loads, bit for bit (J13, M03)."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.manifest import SCHEMA_VERSION
from ckpt_conformance.reference_impl.trainer import parts
from ckpt_conformance.workload.job import Job

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))

from make import SEED, STEP, lasting  # noqa: E402  beside the files that it made

VERSIONS = sorted(path.name for path in GOLDEN.glob("schema-*"))


@pytest.mark.parametrize("kind", ["model", "dcp"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_stored_checkpoint_loads_bit_for_bit(version: str, kind: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(GOLDEN / version / kind, root)
    job = Job("mixed", SEED + 1)
    result = CheckpointManager(root).load(**parts(job))
    job.extra.load_state_dict(result.extra)
    assert result.step == STEP
    assert result.refused == []
    assert lasting(job) == json.loads((GOLDEN / version / "digests.json").read_text())


def test_the_version_that_is_written_now_has_golden_files() -> None:
    assert f"schema-{SCHEMA_VERSION}" in VERSIONS, "run: python tests/golden/make.py"
