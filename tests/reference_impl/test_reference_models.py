"""Models of every make: wrapped, laid out in any way, views of one storage, empty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from test_reference_job import KINDS, Quick, listing, same

from ckpt_conformance.reference_impl import CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path


WRAPPERS = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "data_parallel": torch.nn.DataParallel,
    "inner_compile": lambda model: torch.nn.Sequential(torch.compile(model, backend="eager")),
    "plain_inner": torch.nn.Sequential,
}


@KINDS
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("compile", None),
        (None, "compile"),
        ("data_parallel", "compile"),
        ("inner_compile", "plain_inner"),
        ("plain_inner", "inner_compile"),
    ],
)
def test_keys_do_not_depend_on_wrappers(
    tmp_path: Path, kind: str, saved: str | None, loaded: str | None
) -> None:
    """Saved wrapped, loaded bare, and the reverse; the optimizer follows (M04, M05, G05)."""

    def build(seed: int, wrapper: str | None) -> dict[str, Any]:
        torch.manual_seed(seed)
        inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.AdamW(inner.parameters(), lr=0.1 * (seed + 1))
        inner(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        return {
            "model": WRAPPERS[wrapper](inner) if wrapper else inner,
            "optimizers": optimizer,
            "inner": inner,
        }

    job, other = build(0, saved), build(1, loaded)
    inner, other_inner = job.pop("inner"), other.pop("inner")
    path = Quick(tmp_path, use_dcp=kind == "dcp").save(1, **job)
    CheckpointManager(tmp_path).load(**other)
    assert same(dict(other_inner.state_dict()), dict(inner.state_dict()))
    assert same(other["optimizers"].state_dict(), job["optimizers"].state_dict())
    assert b"_orig_mod" not in b"".join(listing(tmp_path).values())
    assert path.exists()


@KINDS
def test_layouts_and_views_of_memory(tmp_path: Path, kind: str) -> None:
    """Bits survive any stride, conjugation, and views of one storage (S01, O05, D10)."""

    class Views(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            draw = torch.Generator().manual_seed(seed)
            flat = torch.randn(100_000, generator=draw)
            self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.turned = torch.nn.Parameter(torch.randn(5, 3, generator=draw).t())
            self.register_buffer("first", flat[:6])
            self.register_buffer("second", flat[6:12].view(2, 3))
            self.register_buffer("inner", self.first[2:4])
            self.register_buffer("column", torch.randn(4, 2, generator=draw)[:, 1])
            self.register_buffer("entry", torch.randn(1, 2, generator=draw)[:, 1])
            self.register_buffer(
                "conj", torch.randn(3, dtype=torch.complex64, generator=draw).conj()
            )
            self.register_buffer("flags", torch.rand(9, generator=draw) > 0.5)

    model, other = Views(1), Views(2)
    path = Quick(tmp_path, use_dcp=kind == "dcp").save(1, model=model)
    CheckpointManager(tmp_path).load(model=other)
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key
        assert other.state_dict()[key].stride() == value.stride(), key
    assert other.inner.data_ptr() == other.first.data_ptr() + 8
    size = (
        sum(one.stat().st_size for one in path.rglob("*")) if kind == "dcp" else path.stat().st_size
    )
    assert size < 40_000  # not the 400,000 bytes of the storage that two buffers are views of


@KINDS
@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Identity(),
        torch.nn.ParameterList([torch.zeros(0, 3)]),
        torch.nn.ParameterList([torch.ones(3, 5)[:, :0]]),  # with the strides of the whole
    ],
)
def test_a_model_of_nothing(tmp_path: Path, kind: str, model: torch.nn.Module) -> None:
    """No tensor at all, or empty ones only, is a state too (I02)."""
    Quick(tmp_path, use_dcp=kind == "dcp").save(np.int64(3), model=model, tokens_seen=np.int32(7))
    result = CheckpointManager(tmp_path).load(model=model)
    assert (result.step, result.tokens_seen) == (3, 7)


def test_a_relative_root_is_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that changes its working directory saves to where it saved before (B13)."""
    monkeypatch.chdir(tmp_path)
    manager = Quick("ckpt")
    manager.save(1, model=torch.nn.Identity())
    monkeypatch.chdir("/")
    manager.save(2, model=torch.nn.Identity())
    assert CheckpointManager(tmp_path / "ckpt").steps() == [1, 2]
