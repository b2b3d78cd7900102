"""What an older version of the reference manager wrote still loads, bit for bit (J13, M03)."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from ckpt_conformance.reference_impl import CheckpointManager, dcp_format
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


@pytest.mark.parametrize(
    "archive", sorted((GOLDEN / "torch").glob("*.tar.xz")), ids=lambda p: p.stem
)
def test_metadata_of_every_release_of_torch_reads(archive: Path, tmp_path: Path) -> None:
    """Since 2.15 the properties of a tensor have one value more, which older releases refuse."""
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (path,) = (tmp_path / "reference-dcp" / "mixed").glob("dcp_000004/.metadata")
    with path.open("rb") as file:
        items = dcp_format.read_metadata(file)
    tensors = [item for item in items.values() if isinstance(item, dcp_format.StoredTensor)]
    assert {str(tensor.dtype) for tensor in tensors} >= {"torch.float32", "torch.bfloat16"}


def test_the_version_that_is_written_now_has_golden_files() -> None:
    assert f"schema-{SCHEMA_VERSION}" in VERSIONS, "run: python tests/golden/make.py"
