"""Fsck on large runs: samples, many files on a slow disk; and what it counts on request."""

from __future__ import annotations

import json
import math
import os
import pickle
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file
from test_cli_fsck import cli
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from ckpt_conformance.fsck.formats import manifest
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.judge.reference import contradictions
from ckpt_conformance.fsck.source import disk
from ckpt_conformance.fsck.source.findings import Kind, NotFinite, State

if TYPE_CHECKING:
    from pathlib import Path

FLOATS = [
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128),
]


# -- a slow disk -----------------------------------------------------------------------------------


class SlowDisk:
    """Looks at files, and answers the first of them only when `together` ask at once."""

    def __init__(self, together: int) -> None:
        """Take how many must ask at once."""
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self._waiting = 0
        self._together = together
        self._enough = threading.Condition()

    def __call__(self, path: Any) -> os.stat_result:  # noqa: ANN401  as os.lstat
        with self._enough:
            self.calls.append(os.fspath(path))
            self.threads.add(threading.get_ident())
            if self._waiting >= 0:
                self._waiting += 1
                if self._waiting >= self._together:
                    self._waiting = -1  # from here on nobody waits
                    self._enough.notify_all()
                elif not self._enough.wait_for(lambda: self._waiting < 0, timeout=60):
                    raise AssertionError("files are looked at one after the other")
        return os.lstat(path)


def shards(folder: Path, count: int) -> Path:
    """Write a DCP of one tensor in a shard for each chunk, as a job of many ranks does."""
    folder.mkdir(parents=True)
    chunks = [
        metadata.ChunkStorageMetadata(torch.Size([at]), torch.Size([1])) for at in range(count)
    ]
    stored = {
        metadata.MetadataIndex("w", one.offsets): filesystem._StorageInfo(f"__{at}_0.distcp", 0, 9)
        for at, one in enumerate(chunks)
    }
    properties = metadata.TensorProperties(torch.float32)
    tensor = metadata.TensorStorageMetadata(properties, torch.Size([count]), chunks)
    whole = metadata.Metadata({"w": tensor}, storage_data=stored)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    for at in range(count):
        (folder / f"__{at}_0.distcp").write_bytes(b"123456789")
    return folder


def test_many_shards_are_looked_at_once_each_and_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 2000
    run = shards(tmp_path / "run" / "step_5", count).parent
    slow = SlowDisk(together=16)
    monkeypatch.setattr(disk, "lstat", slow)
    judged = judge(run, Options(metadata_only=True))
    assert judged.state is State.WHOLE, judged.reports[0].findings
    assert judged.reports[0].size == count * 9 + (run / "step_5" / ".metadata").stat().st_size
    assert len(slow.calls) <= count + 10
    assert len(slow.threads) >= 16


def test_a_missing_shard_among_many_is_named(tmp_path: Path) -> None:
    folder = shards(tmp_path / "step_5", 50)
    (folder / "__7_0.distcp").unlink()
    (report,) = judge(tmp_path, Options(metadata_only=True)).reports
    assert report.state is State.INCOMPLETE
    assert [one.file for one in report.findings] == ["__7_0.distcp"]


# -- a sample --------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A checkpoint of 40 files, each with a tensor of 1 KiB."""
    folder = tmp_path / "run" / "step_5"
    folder.mkdir(parents=True)
    for at in range(40):
        torch.save({"w": torch.full((256,), float(at))}, folder / f"part_{at}.pt")
    return folder


def flip(path: Path, needle: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(needle)] ^= 1
    path.write_bytes(data)


def test_a_sample_reads_its_share_and_says_so(parts: Path) -> None:
    whole = judge(parts).reports[0]
    assert whole.unread == 0
    (report,) = judge(parts, Options(sample=0.25)).reports
    total = report.crc + report.unread
    assert total == whole.crc
    assert 0.25 <= report.crc / total <= 0.28
    assert report.uncovered == whole.uncovered
    done = cli("fsck", parts, "--sample", "25%", "--json")
    told = json.loads(done.stdout)
    assert told["sample"] == {"share": 0.25, "seed": 0}
    assert told["checkpoints"][0]["bytes"]["unread"] == report.unread
    said = cli("fsck", parts, "--sample", "0.25", "--seed", "3").stdout
    assert f"a sample: {report.crc:,} of {total:,} bytes" in said
    assert "seed 3" in said


def test_samples_of_all_seeds_find_what_one_may_miss(parts: Path) -> None:
    for at in (3, 17):
        value = torch.full((256,), float(at))
        flip(parts / f"part_{at}.pt", value.numpy().tobytes())
    found = [judge(parts, Options(sample=0.2, seed=seed)) for seed in range(20)]
    states = [one.state for one in found]
    assert {State.WHOLE, State.DAMAGED} == set(states)
    again = [judge(parts, Options(sample=0.2, seed=seed)).state for seed in range(20)]
    assert states == again
    files = {one.file for judged in found for one in judged.reports[0].findings}
    assert files == {"part_3.pt", "part_17.pt"}


def test_a_sample_of_anything_reads_something(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "step_1.pt")
    flip(tmp_path / "step_1.pt", torch.ones(4).numpy().tobytes())
    assert judge(tmp_path, Options(sample=1e-9)).state is State.DAMAGED


@pytest.mark.parametrize("words", [("--sample", "0"), ("--sample", "101%"), ("--sample", "x")])
def test_a_share_that_is_none_is_refused(words: tuple[str, ...], parts: Path) -> None:
    done = cli("fsck", parts, *words)
    assert done.returncode == 2
    assert "is no share" in done.stderr
    assert cli("fsck", parts, "--metadata-only", "--sample", "1%").returncode == 2


# -- NaNs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("form", ["torch", "dcp", "safetensors"])
def test_nans_and_infinities_are_counted_in_every_width(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    if form == "safetensors" and dtype is torch.complex128:
        pytest.skip("safetensors has no complex128")
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0, math.nan])
    bad = values.to(dtype)
    infinite = 0 if dtype is torch.float8_e4m3fn else 2  # it has none: torch takes the largest
    state = {"bad": bad, "good": torch.ones(5).to(dtype), "ids": torch.arange(3)}
    folder = tmp_path / "step_1"
    if form == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=folder)
    else:
        folder.mkdir()
        torch.save(state, folder / "a.pt") if form == "torch" else save_file(
            state, folder / "a.safetensors"
        )
    (report,) = judge(tmp_path, Options(nan=True, jobs=2)).reports
    assert report.state is State.WHOLE
    assert report.not_finite == [NotFinite("bad", 2, infinite, 6)]
    assert judge(tmp_path).reports[0].not_finite is None


def test_nans_are_told_and_change_no_state(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([math.nan, 1.0])}, tmp_path / "step_2.pt")
    torch.save({"w": torch.tensor([2.0, 1.0])}, tmp_path / "step_1.pt")
    done = cli("fsck", tmp_path, "--nan")
    assert done.returncode == 0
    assert "    not finite  w: 1 NaN, 0 infinite of 2" in done.stdout
    assert "no NaN and no infinity" in done.stdout
    assert judge_newest(tmp_path, Options(nan=True)).reports[0].not_finite


# -- what formats record ---------------------------------------------------------------------------


def test_ties_are_counted(tmp_path: Path) -> None:
    weight = torch.ones(3, 2)
    state = {"embed": weight, "head": weight, "part": weight[1:], "own": weight.clone()}
    torch.save(state, tmp_path / "step_1.pt")
    assert judge(tmp_path).reports[0].ties == 1
    assert "(1 group of tied ones)" in cli("fsck", tmp_path).stdout


def written(files: dict[str, Any], **changes: Any) -> manifest.Manifest:  # noqa: ANN401  JSON
    """Make a manifest as the reference manager spells it, and read it."""
    listed = {name: {"size": 100, "blake3": "0" * 64} for name in files}
    tensors = {
        key: {"file": name, "offset": at, "nbytes": 4}
        for name, places in files.items()
        for key, at in places.items()
    }
    body = {"schema_version": 1, "kind": "model", "step": 5, "world_size": 1, "ties": []}
    body |= {"files": listed, "tensors": tensors} | changes

    def spelled(value: Any) -> bytes:  # noqa: ANN401  JSON
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    digest = blake3(spelled(body)).hexdigest()
    return manifest.read(spelled(body | {"manifest_digest": digest}))


def test_a_manifest_is_held_against_its_own_ranks_and_ties() -> None:
    model = {"model_000005.pt": {"model.a": 0, "model.b": 0, "model.c": 8}}
    ranks = {f"optim_000005_rank{rank}.pt": {} for rank in range(2)}
    for files, changes, expected in (
        (model, {"ties": [["a", "b"]]}, ""),
        (model, {"ties": [["a", "c"]]}, "ties 'a', 'c'"),
        (model, {"ties": [["a", "gone"]]}, "ties 'a', 'gone'"),
        (model | ranks, {"world_size": 2}, ""),
        (model | ranks, {"world_size": 3}, "of 3 ranks, and lists files of the ranks [0, 1]"),
        (model | ranks, {"world_size": 1}, "of 1 ranks"),
        ({"__3_0.distcp": {}}, {"kind": "dcp", "world_size": 4}, ""),
        ({"__4_0.distcp": {}}, {"kind": "dcp", "world_size": 4}, "a file of rank 4"),
    ):
        found = list(contradictions(written(files, **changes)))
        assert len(found) == bool(expected), (changes, found)
        assert expected in "".join(why for why, _ in found)


def test_the_world_size_that_names_say_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_7" / "actor"
    folder.mkdir(parents=True)
    for rank in range(3):
        torch.save({"w": torch.ones(2)}, folder / f"model_world_size_3_rank_{rank}.pt")
    (report,) = judge(tmp_path).reports
    assert report.world_size == 3
    assert "verl-fsdp, step 7, 3 ranks: 3 tensors" in cli("fsck", tmp_path).stdout


@pytest.mark.parametrize(
    "name",
    [
        *(".metadata.tmp", "tmp-checkpoint-500", "checkpoint-500.tmp", "step_5.ckpt.part"),
        *("model.pt.tmp.1234", "5.orbax-checkpoint-tmp-17", "tmp_model.bin", "x.pt.incomplete"),
        *(".model.safetensors.swp", "meta.json~", "dcp_000005.corpus.e754f06eb0eb.old"),
    ],
)
def test_work_in_progress_is_told_and_stays(name: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "step_1.pt")
    (tmp_path / name).write_bytes(b"half")
    judged = judge(tmp_path)
    assert judged.leftovers == [name]
    assert [one.step for one in judged.reports] == [1]
    assert (tmp_path / name).read_bytes() == b"half"


def test_a_file_of_another_rank_is_noted(tmp_path: Path) -> None:
    """The manifest of the reference manager says which files belong to a step."""
    import fsck_corpus

    root = fsck_corpus.write("reference", tmp_path / "run")
    torch.save({}, root / "optim_000005_rank7.pt")
    report = judge(root).reports[0]
    assert report.state is State.WHOLE
    assert [(one.kind, one.file) for one in report.findings] == [
        (Kind.NOTE, "optim_000005_rank7.pt")
    ]
