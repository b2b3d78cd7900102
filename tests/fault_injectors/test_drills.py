"""Faults at rest at places that a seed draws; a copy has its name once it is whole."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.fault_injectors import at_rest, drills, payload

if TYPE_CHECKING:
    from pathlib import Path

SEEDS = range(40)
NEEDS_JSON = {"edited-number", "edited-name", "non-utf8"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "weights.bin").write_bytes(random.Random(1).randbytes(9000))  # noqa: S311
    (root / "small.bin").write_bytes(b"abcdef")
    (root / "meta.json").write_text(json.dumps({"step": 5, "files": ["weights.bin"]}))
    (root / "empty").touch()
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in payload.names(root)}


def done(root: Path, copy: Path, fault: str, seed: int, file: str | None = None) -> at_rest.Damage:
    with drills.copied(root, copy) as draft:
        return drills.damage(draft, fault, random.Random(seed), file)  # noqa: S311


def test_all_faults_are_there() -> None:
    assert list(drills.FAULTS) == list(at_rest.AT_REST)


@pytest.mark.parametrize("fault", drills.FAULTS)
def test_it_fires_at_other_places_for_other_seeds(fault: str, root: Path, tmp_path: Path) -> None:
    before, places = contents(root), set[tuple[str, int | None, str]]()
    for seed in SEEDS:
        damage = done(root, tmp_path / f"{seed}", fault, seed)
        after = contents(tmp_path / f"{seed}")
        changed = {name for name in before | after if before.get(name) != after.get(name)}
        assert damage.file in changed
        assert len(changed) == (2 if fault == "swapped-files" else 1)
        places.add((damage.file, damage.offset, damage.detail))
    assert contents(root) == before
    is_one = fault == "extra-file" or fault in NEEDS_JSON
    assert is_one or len({file for file, _, _ in places}) > 2
    assert is_one or len(places) > 3 or "file" in fault or "truncation" in fault


@pytest.mark.parametrize("fault", drills.FAULTS)
def test_the_same_seed_does_the_same(fault: str, root: Path, tmp_path: Path) -> None:
    for copy in ("first", "second"):
        done(root, tmp_path / copy, fault, 5)
    assert contents(tmp_path / "first") == contents(tmp_path / "second") != contents(root)


@pytest.mark.parametrize("fault", ["bit-flip", "zeroed-block", "truncation-half", "missing-file"])
def test_any_file_can_be_named(fault: str, root: Path, tmp_path: Path) -> None:
    for name in ("deep/weights.bin", "small.bin", "meta.json"):
        copy = tmp_path / name.replace("/", "-")
        assert done(root, copy, fault, 1, name).file == name


def test_a_block_that_is_zero_already_is_no_damage(root: Path, tmp_path: Path) -> None:
    before = bytes(51_200) + b"x" * 512 + bytes(51_200)
    (root / "deep" / "weights.bin").write_bytes(before)
    hit = missed = 0
    for seed in SEEDS:
        copy = tmp_path / str(seed)
        try:
            done(root, copy, "zeroed-block", seed, "deep/weights.bin")
        except Unknown:
            missed += not copy.exists()
        else:
            hit += not any((copy / "deep" / "weights.bin").read_bytes())
    assert (hit + missed, hit > 0) == (len(SEEDS), True)


def test_zeros_alone_cannot_be_zeroed(root: Path, tmp_path: Path) -> None:
    (root / "small.bin").write_bytes(bytes(600))
    with pytest.raises(Unknown, match="zero already: try another seed"):
        done(root, tmp_path / "copy", "zeroed-block", 1, "small.bin")


def test_nothing_is_left_of_what_fails(root: Path, tmp_path: Path) -> None:
    for fault, file in (("zeroed-block", "empty"), ("edited-name", "small.bin")):
        with pytest.raises((Unknown, ValueError)):
            done(root, tmp_path / "copy", fault, 1, file)
    assert list(tmp_path.iterdir()) == [root]


def test_the_draft_of_somebody_else_stays(root: Path, tmp_path: Path) -> None:
    draft = drills.draft_of(tmp_path / "copy")
    draft.mkdir()
    (draft / "mine").touch()
    with pytest.raises(FileExistsError):
        done(root, tmp_path / "copy", "bit-flip", 1)
    assert [one.name for one in draft.iterdir()] == ["mine"]
