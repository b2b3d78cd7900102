"""What comes out for the bundled recipes, recorded for real: nothing here knows a recipe's name.

The table is what the recipes are known to do; the reference manager passes every model.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
from recording import record

from ckpt_conformance.crash.explore import engine, workloads
from ckpt_conformance.crash.explore.audit import audit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.subject.subject import Subject

FIXED, PER_STEP = "torch-save-atomic-fixed-name", "torch-save-atomic-per-step"
NAMES = (
    *("torch-save-inplace", FIXED, PER_STEP, "safetensors-per-step"),
    *("dcp-per-step", "dcp-overwrite", "reference", "reference-dcp"),
)
MODELS = ("kill", "ext4", "xfs")
LIMITS = engine.Limits(candidates=600, recoveries=40, alone=3, rounds=0, onward=0)
REFUSED, LOST_ALL, LOST_STEP = {"REFUSED_UNTYPED"}, {"LOST_ALL"}, {"LOST_STEP"}

# (recipe, workload): the classes of violation under kill, ext4 and xfs.
KNOWN = {
    ("torch-save-inplace", "second"): (LOST_ALL, LOST_ALL | LOST_STEP, LOST_ALL | LOST_STEP),
    (FIXED, "first"): (set(), LOST_ALL, LOST_ALL),
    # The rename may wait for the next commit, so the older step comes back: whole. Or the commit
    # comes before the flush that the rename began on ext4 has ended: then all is zeros.
    (FIXED, "second"): (set(), LOST_ALL | LOST_STEP, LOST_ALL | LOST_STEP),
    (PER_STEP, "second"): (set(), REFUSED | LOST_STEP, REFUSED | LOST_STEP),
    ("safetensors-per-step", "second"): (set(), REFUSED | LOST_STEP, REFUSED | LOST_STEP),
    ("dcp-per-step", "second"): (set(), LOST_STEP, LOST_STEP),
    ("dcp-overwrite", "second"): (LOST_ALL, LOST_ALL, LOST_ALL),
    ("reference", "second"): (set(), set(), set()),
    ("reference", "same"): (set(), set(), set()),
    ("reference", "rotated"): (set(), set(), set()),
    ("reference-dcp", "second"): (set(), set(), set()),
    ("reference-dcp", "same"): (set(), set(), set()),
}
DCP = """
import sys, torch
import torch.distributed.checkpoint as dcp
dcp.save({"weight": torch.ones(300)}, checkpoint_id=f"{sys.argv[1]}/step-1")
"""


@pytest.fixture(scope="module")
def subjects(new_subject: Callable[..., Subject]) -> Callable[[str], Subject]:
    return cache(new_subject)


@pytest.mark.parametrize(("name", "workload"), KNOWN, ids=["-".join(each) for each in KNOWN])
def test_a_recipe_ends_as_it_is_known_to(
    name: str, workload: str, subjects: Callable[[str], Subject]
) -> None:
    subject = subjects(name)
    recorded = workloads.record(subject, workload)
    result = engine.explore(subject, recorded, MODELS, LIMITS)
    assert not result.unknown
    found = tuple(set(map(str, result.models[model].worst)) for model in MODELS)
    assert found == KNOWN[name, workload]
    if name.startswith("reference"):
        assert result.audit == []
    else:
        assert all(finding.source for finding in result.audit)
        assert all(violation.source for violation in result.violations)


MOUNTED = ("kill", "ext4", "xfs", "btrfs", "fuse-object:s3fs")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mounted"), [("reference", set()), ("reference-dcp", LOST_STEP)])
def test_a_folder_that_is_renamed_in_a_bucket_loses_a_step(
    name: str, mounted: set[str], subjects: Callable[[str], Subject]
) -> None:
    """Where a bucket is mounted, a folder is moved file by file: no other model loses the step.

    Why: the step that is saved again is moved away as a folder before the new one comes.
    """
    subject = subjects(name)
    recorded = workloads.record(subject, "same", closing=True)
    result = engine.explore(subject, recorded, MOUNTED, LIMITS)
    found = [set(map(str, result.models[model].worst)) for model in MOUNTED]
    assert found == [set(), set(), set(), set(), mounted]
    # The flat manager links; it copies where that is refused, which no recording on a disk shows.
    assert bool(result.models["fuse-object:s3fs"].refused) is (name == "reference")


def test_dcp_syncs_its_metadata_before_it_is_flushed(tmp_path: Path) -> None:
    """A metadata file that fits into Python's buffer is written after its fsync."""
    rules = {finding.rule: finding.path for finding in audit(record(tmp_path, DCP))}
    assert rules["fsync-before-flush"] == "step-1/.metadata"
