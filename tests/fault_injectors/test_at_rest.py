"""Damage at rest: each fault changes bytes, says so, and touches nothing else."""

from __future__ import annotations

import json
import random
import shutil
import stat
import struct
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.fault_injectors import at_rest, payload
from ckpt_conformance.fault_injectors.payload import Place
from ckpt_conformance.harness.messages import PayloadSample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHT = bytes(range(1, 129))
SAMPLES = [PayloadSample(name="model/weight", bytes=WEIGHT[:64].hex(), size=128)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of a weight file, a second one and a JSON file."""
    folder = tmp_path / "root"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights.bin").write_bytes(b"head" + WEIGHT + bytes(100) + b"tail" * 40)
    (folder / "other.bin").write_bytes(bytes(reversed(WEIGHT)))
    (folder / "meta.json").write_text(json.dumps({"step": 4, "name": "läuft", "sizes": [1, 2]}))
    return folder


def seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311  choices, not secrets


def contents(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in payload.names(root)}


@pytest.mark.parametrize("fault", at_rest.AT_REST)
def test_every_fault_fires_and_proves_it(fault: str, root: Path) -> None:
    before = contents(root)
    damage = at_rest.AT_REST[fault](root, seeded(3), None)
    after = contents(root)
    assert damage.before != damage.after
    assert damage.after == at_rest.digest(root / damage.file)
    assert before.get(damage.file) != after.get(damage.file)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert len(changed) == (2 if fault == "swapped-files" else 1)
    assert json.dumps(damage.to_json())


@pytest.mark.parametrize("fault", at_rest.AT_REST)
def test_the_same_seed_does_the_same(fault: str, root: Path, tmp_path: Path) -> None:
    done = []
    for copy in ("first", "second"):
        at_rest.copy_damaged(root, tmp_path / copy, fault, seeded(5))
        done.append(contents(tmp_path / copy))
    assert done[0] == done[1] != contents(root)


def test_payload_is_found_by_the_bytes_of_a_tensor(root: Path) -> None:
    assert payload.find(root, SAMPLES) == [Place("deep/weights.bin", 4, 128, "model/weight")]


def test_without_a_match_the_middle_of_the_largest_file_stands_in(root: Path) -> None:
    absent = [PayloadSample(name="x", bytes=b"\xee".hex() * 64, size=64)]
    (place,) = payload.places(root, absent)
    assert place.file == "deep/weights.bin"
    assert not place.found
    assert 0 < place.offset < (root / place.file).stat().st_size


def test_a_directory_without_bytes_has_no_place(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="no file with a byte"):
        payload.middle(tmp_path)


def test_a_flip_stays_inside_its_place(root: Path) -> None:
    (place,) = payload.find(root, SAMPLES)
    before = (root / place.file).read_bytes()
    at_rest.flip_bits(root, place, seeded(1), bits=5)
    after = (root / place.file).read_bytes()
    differing = [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert 1 <= len(differing) <= 5
    assert all(4 <= at < 132 for at in differing)


def test_times_stay_because_a_disk_does_not_touch_them(root: Path) -> None:
    path = root / "other.bin"
    before = path.stat()
    at_rest.truncate(root, "other.bin", "half")
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_size == 64


@pytest.mark.parametrize(("cut", "left"), [("0", 0), ("1", 1), ("half", 64), ("len-1", 127)])
def test_a_truncation_leaves_what_it_says(cut: at_rest.Cut, left: int, root: Path) -> None:
    at_rest.truncate(root, "other.bin", cut)
    assert (root / "other.bin").read_bytes() == bytes(reversed(WEIGHT))[:left]


def test_a_file_grows_by_a_hole_and_takes_no_room(root: Path) -> None:
    before = (root / "other.bin").stat()
    damage = at_rest.grow(root, "other.bin", 1 << 34)
    after = (root / "other.bin").stat()
    assert after.st_size == 1 << 34
    assert (after.st_blocks, after.st_mtime_ns) == (before.st_blocks, before.st_mtime_ns)
    with (root / "other.bin").open("rb") as file:
        assert file.read(129) == bytes(reversed(WEIGHT)) + b"\0"
    assert damage.after != damage.before
    at_rest.remove_all(root / "other.bin")


def test_a_fault_that_changes_nothing_is_unknown(root: Path) -> None:
    (root / "empty").touch()
    with pytest.raises(Unknown, match="did not fire"):
        at_rest.truncate(root, "empty", "half")
    with pytest.raises(Unknown, match="did not fire"):
        at_rest.zero_block(root, Place("deep/weights.bin", 140, 32, "zeros"))
    with pytest.raises(Unknown, match="did not fire"):
        at_rest.remove(root, "absent")
    with pytest.raises(Unknown, match="no second file"):
        at_rest.AT_REST["swapped-files"](root / "deep", seeded(1), None)


def test_blocks_of_two_tensors_are_swapped(root: Path) -> None:
    (place,) = payload.find(root, SAMPLES)
    at_rest.swap_blocks(root, place, Place(place.file, 232, 128, "tail"))
    data = (root / place.file).read_bytes()
    assert data[4:132] == b"tail" * 32
    assert data[232:360] == WEIGHT


def test_edited_metadata_is_valid_and_differs_in_one_field(root: Path) -> None:
    before = json.loads((root / "meta.json").read_text())
    damage = at_rest.edit_json(root, "meta.json", seeded(2), "number")
    after = json.loads((root / "meta.json").read_text())
    assert before != after
    assert json.dumps(before)[:3] == json.dumps(after)[:3]
    assert "became" in damage.detail


def test_noise_keeps_the_size_and_nothing_else(root: Path) -> None:
    path = root / "deep" / "weights.bin"
    before = path.read_bytes()
    damage = at_rest.make_noise(root, "deep/weights.bin", seeded(1))
    assert len(path.read_bytes()) == len(before)
    same = sum(a == b for a, b in zip(before, path.read_bytes(), strict=True))
    assert same < len(before) / 16, "a byte in 256 stays by chance"
    assert damage.before != damage.after == at_rest.digest(path)


@pytest.mark.parametrize(
    ("kind", "is_it"),
    [("directory", stat.S_ISDIR), ("socket", stat.S_ISSOCK), ("FIFO", stat.S_ISFIFO)],
)
def test_what_is_no_file_stands_in_its_place(
    kind: at_rest.NoFile, is_it: Callable[[int], bool], root: Path
) -> None:
    damage = at_rest.put_in_place(root, "deep/weights.bin", kind)
    assert is_it((root / "deep" / "weights.bin").lstat().st_mode)
    assert damage.after == at_rest.ABSENT != damage.before
    at_rest.remove_all(root / "deep" / "weights.bin")
    assert not (root / "deep" / "weights.bin").exists()


def test_text_that_is_no_utf8(root: Path) -> None:
    at_rest.break_utf8(root, "meta.json")
    with pytest.raises(UnicodeDecodeError):
        (root / "meta.json").read_text("utf-8")


def test_files_of_a_step_are_those_its_save_made_or_changed(root: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    (before / "deep").mkdir(parents=True)
    (before / "other.bin").write_bytes(bytes(reversed(WEIGHT)))
    (before / "meta.json").write_text("{}")
    assert payload.changed(before, root) == ["deep/weights.bin", "meta.json"]
    assert payload.changed(None, root) == payload.names(root)


def test_all_of_a_step_can_be_put_under_another_name(root: Path, tmp_path: Path) -> None:
    """It is taken from where the step still is: a manager may keep the newest one alone."""
    older = tmp_path / "older"
    shutil.copytree(root, older)
    (root / "other.bin").unlink()
    damage = at_rest.copy_over(root, {"deep": "other", "other.bin": "meta.json"}, older)
    assert contents(root)["other/weights.bin"] == contents(root)["deep/weights.bin"]
    assert contents(root)["meta.json"] == contents(older)["other.bin"]
    assert (damage.file, damage.before) == ("other", at_rest.ABSENT)
    with pytest.raises(Unknown, match="did not fire"):
        at_rest.copy_over(root, {"deep": "other"}, older)


@pytest.mark.parametrize("order", ["<Q", ">I"])
def test_a_step_is_found_in_the_header_before_its_payload(order: str, tmp_path: Path) -> None:
    """What stands as the older step's number does, and not what is there by chance."""
    begin = 4 + struct.calcsize(order) + 4
    places: list[Place] = []
    for step in (2, 4):
        by_chance = struct.pack("<I", 4)
        body = by_chance + struct.pack(order, step) + b"head" + WEIGHT
        (tmp_path / f"step-{step}").write_bytes(body)
        places.append(Place(f"step-{step}", begin, 128, "w"))
    older, newer = places
    (found,) = payload.steps_beside(tmp_path, tmp_path, (2, 4), [older], [newer])
    lowest = 4 if order == "<Q" else 7
    assert (found.file, found.offset, found.length) == ("step-4", lowest, 1)


def test_a_step_is_found_in_text_behind_its_payload_in_a_file_that_was_written_over(
    tmp_path: Path,
) -> None:
    trees = {step: tmp_path / str(step) for step in (2, 4)}
    for step, tree in trees.items():
        tree.mkdir()
        (tree / "last").write_bytes(WEIGHT + b'{"step": %d}' % step)
    place = Place("last", 0, 128, "w")
    (found,) = payload.steps_beside(trees[2], trees[4], (2, 4), [place], [place])
    assert found.offset == 128 + len('{"step": ')


def test_copies_are_files_of_the_same_bytes(root: Path) -> None:
    shutil.copy(root / "other.bin", root / "deep" / "copy.bin")
    assert at_rest.copies_of(root, "other.bin") == ["deep/copy.bin"]
    at_rest.truncate_all(root, "other.bin")
    assert (root / "deep" / "copy.bin").stat().st_size == len(WEIGHT) // 2
