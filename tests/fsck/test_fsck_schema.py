"""What `fsck --json` prints of every layout is what its schema says, whole or damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable  # noqa: TC003  of a table
from pathlib import Path
from typing import Any

import fsck_corpus
import jsonschema
import megatron_layouts
import pytest
import torch
from fsck_runs import Finished
from safetensors.torch import save_file

from ckpt_conformance.fault_injectors import drills

pytestmark = pytest.mark.xdist_group("fsck")

GOLDEN = Path(__file__).parents[1] / "golden" / "fsck"
FAULTS = ("truncation-half", "missing-file", "bit-flip", "zeroed-block")


@pytest.fixture(scope="module")
def validate(repository: Path) -> Callable[[dict[str, Any]], None]:
    schema = repository / "ckpt_conformance" / "report" / "schemas" / "fsck.schema.json"
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
    return validator.validate


def judged(path: Path, *words: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(Finished("fsck", path, "--json", *words).out)
    return told


def every_way(path: Path, scratch: Path, validate: Callable[[dict[str, Any]], None]) -> set[str]:
    """Judge it as it is, by each option, and with each fault; return the layouts that were seen."""
    told = [judged(path), judged(path, "--metadata-only"), judged(path, "--sample", "20%", "--nan")]
    for fault in FAULTS:
        copy = scratch / fault / path.name
        copy.parent.mkdir()
        with drills.copied(path, copy) as draft:
            drills.damage(draft, fault, random.Random(fault))  # noqa: S311
        told.append(judged(copy))
    for one in told:
        validate(one)
    return {report["layout"] for one in told for report in one["checkpoints"]}


@pytest.mark.parametrize("name", sorted(one.name for one in GOLDEN.iterdir() if one.is_dir()))
def test_of_what_other_libraries_wrote(
    name: str, tmp_path: Path, validate: Callable[[dict[str, Any]], None]
) -> None:
    assert every_way(GOLDEN / name, tmp_path, validate)


def hf_shards(root: Path) -> None:
    for rank in (1, 2):
        name = f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        part = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [3 * rank - 3]}})}
        save_file({"w": torch.ones(3)}, root / name, {"format": "pt", **part})


def linked(root: Path) -> None:
    (root / "step_1").symlink_to(root.parent)


def empty(root: Path) -> None:
    torch.save({"w": torch.ones(3)}, (root / "step_1").mkdir() or root / "step_1" / "m.pt")
    (root / "step_2").mkdir()


OTHERS: dict[str, Callable[[Path], object]] = {
    "verl-megatron": megatron_layouts.v2,
    "verl-megatron-pre-v2": megatron_layouts.pre_v2,
    "hf-shards": hf_shards,
    "link": linked,
    "unknown": empty,
}


@pytest.mark.parametrize("layout", OTHERS)
def test_of_other_layouts(
    layout: str, tmp_path: Path, validate: Callable[[dict[str, Any]], None]
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    OTHERS[layout](root)
    if layout in ("link", "unknown"):
        validate(told := judged(root))
        assert layout in {one["layout"] for one in told["checkpoints"]}
    else:
        assert layout in every_way(root, tmp_path, validate)


@pytest.mark.parametrize("layout", fsck_corpus.WRITERS)
def test_of_what_torch_and_the_reference_wrote(
    layout: str,
    corpus: dict[str, Path],
    tmp_path: Path,
    validate: Callable[[dict[str, Any]], None],
) -> None:
    assert every_way(corpus[layout], tmp_path, validate)
