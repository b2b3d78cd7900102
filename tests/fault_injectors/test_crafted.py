"""Crafted files: the canary runs where a careless reader would run it, and nowhere else."""

from __future__ import annotations

import pickle
import warnings
import zipfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import Literal

import pytest
import torch

from ckpt_conformance.fault_injectors import crafted


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "state.pt"
    torch.save({"weight": torch.arange(64.0), "step": 100}, path)
    return path


def test_the_canary_runs_in_a_plain_pickle_and_changes_nothing_of_it(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for protocol in (2, 5):
        path = tmp_path / f"plain-{protocol}"
        path.write_bytes(pickle.dumps({"a": [1, 2]}, protocol))
        (spot, _) = crafted.spots(tmp_path, [path.name])
        crafted.plant(tmp_path, spot, marker)
        assert pickle.loads(path.read_bytes()) == {"a": [1, 2]}  # noqa: S301  our own bytes
        assert marker.exists()
        marker.unlink()


@pytest.mark.parametrize("how", ["record", "whole"])
@pytest.mark.parametrize("safe", [True, False])
def test_the_canary_runs_in_an_unsafe_load_only(saved: Path, how: str, safe: bool) -> None:  # noqa: FBT001
    marker = saved.with_name("marker")
    crafted.plant(saved.parent, crafted.Spot(saved.name, how), marker)
    with pytest.raises((pickle.UnpicklingError, RuntimeError)) if safe or how == "whole" else _ok():
        torch.load(saved, weights_only=safe)
    assert marker.exists() is not safe


def _ok() -> warnings.catch_warnings[None]:
    return warnings.catch_warnings()


def test_an_item_of_a_shard_is_found_and_overwritten(saved: Path) -> None:
    marker, shard = saved.with_name("marker"), saved.with_name("shard")
    plain = saved.with_name("plain.pt")
    torch.save({"step": 3}, plain)
    shard.write_bytes(saved.read_bytes() + plain.read_bytes())
    items = [spot for spot in crafted.spots(shard.parent, [shard.name]) if spot.how == "item"]
    assert [spot.at for spot in items] == [0, saved.stat().st_size]
    crafted.plant(shard.parent, items[1], marker)
    item = BytesIO(shard.read_bytes()[items[1].at :])
    with pytest.raises(RuntimeError, match="magic number"):
        torch.load(item, weights_only=False)
    assert marker.exists()


def test_a_bomb_is_a_valid_archive_that_inflates_to_two_gib(saved: Path) -> None:
    crafted.bomb(saved.parent, saved.name, "/data/0")
    with zipfile.ZipFile(saved) as archive:
        records = archive.infolist()
        record = next(record for record in records if record.filename.endswith("/data/0"))
        with archive.open(record) as stream:
            assert stream.read(1 << 20) == bytes(1 << 20)
    assert record.file_size == crafted.BOMB
    assert saved.stat().st_size < 4 << 20


@pytest.mark.slow
def test_the_checksum_of_a_bomb_is_right() -> None:
    checksum, block = 0, bytes(1 << 24)
    for _ in range(crafted.BOMB >> 24):
        checksum = zlib.crc32(block, checksum)
    assert checksum == crafted.BOMB_CRC


def test_each_claim_changes_its_header(saved: Path) -> None:
    shards = saved.with_name("header")
    shards.write_bytes((30).to_bytes(8, "little") + b'{"w":{"data_offsets":[10,1234]}}')
    text = saved.with_name("index.json")
    text.write_text('{"size": 1234, "shape": [16, 8]}')
    metadata = saved.with_name(".metadata")
    metadata.write_bytes(pickle.dumps({"size": 1234}))
    files = [saved.name, shards.name, text.name, metadata.name]
    headers = crafted.claims(saved.parent, files)
    assert {header.how for header in headers} == {
        *("record sizes", "storage sizes", "all integers"),
        *("header length", "header offsets", "json", "pickle"),
    }
    for header in headers:
        path = saved.parent / header.file
        before = path.read_bytes()
        crafted.claim(saved.parent, header)
        assert path.read_bytes() != before, header
        path.write_bytes(before if header.how not in {"json", "pickle"} else path.read_bytes())
    assert text.read_text() == f'{{"size": {10**15}, "shape": [{10**15}, 8]}}'
    assert pickle.loads(metadata.read_bytes()) == {"size": 10**15}  # noqa: S301  our own bytes


@pytest.mark.parametrize(("order", "width"), [("little", 8), ("big", 8), ("little", 4)])
def test_the_length_of_a_record_that_was_appended_claims_too_much(
    tmp_path: Path, order: Literal["little", "big"], width: int
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    record = b"RECORD" + (1000).to_bytes(width, order) + bytes(1000)
    for folder, count in ((old, 1), (new, 2)):
        folder.mkdir()
        (folder / "log").write_bytes(record * count)
    headers = crafted.claims(new, ["log"], old)
    assert headers == [crafted.Header("log", "length", len(record) + 6, width, order)]
    crafted.claim(new, headers[0])
    log = (new / "log").read_bytes()
    assert log[: len(record)] == record
    claimed = log[len(record) + 6 : len(record) + 6 + width]
    assert int.from_bytes(claimed, order) >= min(10**15, 2**32 - 16)


def test_a_name_is_led_outside_in_text_and_in_a_pickle(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "shard_0").write_bytes(b"payload")
    (folder / "index").write_text('{"files": ["shard_0"]}')
    (folder / "meta").write_bytes(pickle.dumps({"file": "shard_0", "also": ["shard_0"]}))
    names = ["step/index", "step/meta", "step/shard_0"]
    pairs = crafted.names_in(tmp_path, names)
    assert pairs == [("step/index", "step/shard_0"), ("step/meta", "step/shard_0")]
    for file, named in pairs:
        assert crafted.lead_outside(tmp_path, [file], named) == tmp_path / "shard_0"
    assert (folder / "index").read_text() == '{"files": ["../shard_0"]}'
    led = pickle.loads((folder / "meta").read_bytes())  # noqa: S301  our own bytes
    assert led == {"file": "../shard_0", "also": ["../shard_0"]}


def test_a_file_gets_another_name_inside_wherever_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "shard_0").write_bytes(b"payload")
    (tmp_path / "index").write_text('{"files": ["shard_0"]}')
    (tmp_path / "meta").write_bytes(pickle.dumps({"file": "shard_0"}))
    crafted.lead_inside(tmp_path, ["index", "meta"], "shard_0")
    assert (tmp_path / "xhard_0").read_bytes() == b"payload"
    assert (tmp_path / "index").read_text() == '{"files": ["xhard_0"]}'
    assert pickle.loads((tmp_path / "meta").read_bytes()) == {"file": "xhard_0"}  # noqa: S301  our own bytes


def test_what_pickles_import_is_listed(saved: Path) -> None:
    assert "torch._utils._rebuild_tensor_v2" in crafted.globals_of(saved.read_bytes())
    model = torch.nn.Linear(2, 2)
    torch.save(torch.optim.AdamW(model.parameters()), saved)
    assert "torch.optim.adamw.AdamW" in crafted.globals_of(saved.read_bytes())
    assert crafted.globals_of(pickle.dumps(Path("a"), 4)) == {"pathlib.PosixPath"}
