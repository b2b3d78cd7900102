"""Damaged files: the reference manager refuses them, and says which and why."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_reference_job import KINDS, Job, Quick, flip, listing, resume, same, save

from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
)
from ckpt_conformance.reference_impl.manifest import parse_manifest

if TYPE_CHECKING:
    from pathlib import Path


def small(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 3)
    return {"model": model, "optimizers": torch.optim.SGD(model.parameters(), momentum=0.9)}


@KINDS
def test_one_flipped_bit_anywhere_is_found(tmp_path: Path, kind: str) -> None:
    """A flip in any file, at a sweep of offsets, is refused untouched (O01, MX1, M025)."""
    Quick(tmp_path, use_dcp=kind == "dcp").save(1, **small())
    job = small(7)
    before = [one.detach().clone() for one in job["model"].parameters()]
    draw = random.Random(0)  # noqa: S311 - a reproducible sweep
    names = [name for name in listing(tmp_path) if name not in ("latest", "run_id")]
    assert len(names) == 4
    for name in names:
        path = tmp_path / name
        size = path.stat().st_size
        for offset in {0, size - 1, *(draw.randrange(size) for _ in range(25))}:
            bit = draw.randrange(8)
            flip(path, offset, bit)
            with pytest.raises(CheckpointDamaged):
                CheckpointManager(tmp_path).load(**job)
            flip(path, offset, bit)
    assert all(map(torch.equal, before, job["model"].parameters()))
    assert CheckpointManager(tmp_path).load(**job).step == 1


@KINDS
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long", "zeros", "directory"])
def test_any_damage_of_any_file_is_found(tmp_path: Path, kind: str, damage: str) -> None:
    """Each file missing, empty, cut, grown, zeroed or a directory: refused (O04, M040, MX3)."""
    original = tmp_path / "good"
    Quick(original, use_dcp=kind == "dcp").save(1, **small())
    for name in listing(original):
        if name in ("latest", "run_id"):
            continue
        root = tmp_path / name.replace("/", "-")
        Quick(root, use_dcp=kind == "dcp").save(1, **small())
        path = root / name
        data = path.read_bytes()
        changed = {"empty": b"", "short": data[:-1], "long": data + b"x", "zeros": bytes(len(data))}
        path.unlink()
        if damage == "directory":
            path.mkdir()
        elif damage != "missing":
            path.write_bytes(changed[damage])
        with pytest.raises(CheckpointDamaged):
            CheckpointManager(root).load(**small(3))


def test_load_corrupt_model_file_raises(tmp_path: Path) -> None:
    """A truncated model file raises and serves nothing (M025, M038)."""
    path = save(tmp_path, Job(), 1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointDamaged, match=r"model_000001\.pt has \d+ bytes instead of"):
        resume(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"a":1,"a":2}', b"\xff\xfe\x00", b"[" * 10**6, b"null"]
)
def test_load_corrupt_meta_file_raises(tmp_path: Path, data: bytes) -> None:
    """Truncated, non-UTF-8, duplicate keys, nested without end: refused by type (M026, M039)."""
    save(tmp_path, Job(), 1)
    (tmp_path / "meta_000001.json").write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=r"meta_000001\.json"):
        resume(tmp_path)


@KINDS
def test_a_file_of_another_save_is_refused(tmp_path: Path, kind: str) -> None:
    """A shard of the same layout from another save has another digest (MX3, A10)."""
    for step, seed in ((1, 1), (2, 2)):
        Quick(tmp_path, use_dcp=kind == "dcp").save(step, **small(seed))
    old, new = (
        ("dcp_000001/__0_0.distcp", "dcp_000002/__0_0.distcp")
        if kind == "dcp"
        else ("model_000001.pt", "model_000002.pt")
    )
    (tmp_path / new).write_bytes((tmp_path / old).read_bytes())
    result = CheckpointManager(tmp_path).load(**small(5))
    assert (result.step, "digest" in result.refused[0].reason) == (1, True)


def test_load_missing_optimizer_returns_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost optimizer file is damage; a cold start is asked for on purpose, and is loud (M027).

    An optimizer that was never saved loads cold with a warning.
    """
    job = Job()
    job.train(2)
    save(tmp_path, job, 1)
    save(tmp_path, job, 2)
    (tmp_path / "optim_000002_rank0.pt").unlink()
    assert CheckpointManager(tmp_path).steps() == [1]
    assert resume(tmp_path)[1].step == 1
    with pytest.raises(CheckpointDamaged, match=r"optim_000002_rank0\.pt is missing"):
        resume(tmp_path, step=2)
    fresh = Job(9)
    result = CheckpointManager(tmp_path).load(**fresh.parts, allow_missing={"optimizer"})
    assert (result.step, result.cold, len(fresh.optimizer.state)) == (2, ["optimizer"], 0)
    assert same(fresh.model.state_dict(), job.model.state_dict())
    assert "holds no optimizer: it starts COLD" in caplog.text
    Quick(tmp_path).save(3, **{**job.parts, "optimizers": {}, "dataloader": None})
    result = CheckpointManager(tmp_path).load(**fresh.parts)
    assert (result.step, result.cold) == (3, ["optimizer", "dataloader"])
    assert "the epoch begins anew" in caplog.text


def test_a_manifest_has_one_spelling(tmp_path: Path) -> None:
    """The same content in another spelling is refused: a flipped bit never passes for it (O01)."""
    CheckpointManager(tmp_path, config={"lr": 1e-05}).save(1, **small())
    data = (tmp_path / "meta_000001.json").read_bytes()
    assert parse_manifest(data, "m").to_bytes() == data
    for other in (data.replace(b"1e-05", b"1E-05"), data[:-1], data + b" ", b" " + data):
        with pytest.raises(CheckpointDamaged):
            parse_manifest(other, "m")


def test_a_disk_that_changes_its_mind_is_found(tmp_path: Path) -> None:
    """What is served is hashed again: bytes that change after verification are refused (O01)."""

    class Slow(CheckpointManager):
        def fill(self, *given: Any) -> None:  # noqa: ANN401
            flip(tmp_path / "model_000001.pt", 900)
            super().fill(*given)

    save(tmp_path, Job(), 1)
    with pytest.raises(CheckpointDamaged, match="changed between"):
        Slow(tmp_path).load(**Job(2).parts)
