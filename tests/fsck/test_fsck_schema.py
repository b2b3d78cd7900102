"""What `fsck --json` prints of every layout is what its schema says, whole or damaged."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsck_corpus
import jsonschema
import pytest
from fsck_runs import Finished

from ckpt_conformance.fault_injectors import drills

if TYPE_CHECKING:
    from collections.abc import Callable

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


@pytest.mark.parametrize("layout", fsck_corpus.WRITERS)
def test_of_what_torch_and_the_reference_wrote(
    layout: str,
    corpus: dict[str, Path],
    tmp_path: Path,
    validate: Callable[[dict[str, Any]], None],
) -> None:
    assert every_way(corpus[layout], tmp_path, validate)
