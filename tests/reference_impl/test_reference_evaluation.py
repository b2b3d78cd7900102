"""Evaluation beside a running job, and the configuration that a checkpoint was saved with."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from test_reference_job import KINDS, Job, flip, resume, same, save

from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointMismatch,
    CheckpointNotFound,
    ExpertsChanged,
    load_model,
    resolve,
)

if TYPE_CHECKING:
    from pathlib import Path

    from rank_worlds import Worlds


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002, S311


@KINDS
def test_an_evaluation_gets_the_model_and_disturbs_nothing(tmp_path: Path, kind: str) -> None:
    """Bit for bit; the generators of the process go on as they would have (M006)."""
    job = Job()
    job.train(3)
    path = save(tmp_path, job, 3, kind)
    other = Job(seed=5)
    before = torch.get_rng_state()
    expected = draws()
    torch.set_rng_state(before)
    state = random.getstate()
    assert load_model(path, other.model).kind == kind
    assert same(dict(other.model.state_dict()), dict(job.model.state_dict()))
    assert (random.getstate(), draws()[2]) == (state, expected[2])


def test_eval_cpp_loader_preserves_explicit_dcp_intent_over_same_step_model_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The article's own words; the model file appears while the DCP directory is read (M031)."""
    job, newer = Job(), Job(seed=3)
    path = save(tmp_path, job, 3, "dcp")
    real = CheckpointManager.open_verified

    def in_the_middle(self: CheckpointManager, *given: Any) -> Any:  # noqa: ANN401
        """Another process exports a model file of this step, of another state."""
        opened = real(self, *given)
        other = tmp_path / "other"
        save(other, newer, 3, "model")
        for file in other.iterdir():
            if "000003" in file.name:
                file.rename(tmp_path / file.name)
        return opened

    monkeypatch.setattr(CheckpointManager, "open_verified", in_the_middle)
    model = Job(seed=5).model
    for kind in (None, "dcp"):
        assert load_model(path, model, kind).path == path
        assert same(dict(model.state_dict()), dict(job.model.state_dict()))
        monkeypatch.undo()
    assert resolve.resolve_checkpoint_reference(tmp_path / "model_000003.pt").kind == "model"
    with pytest.raises(CheckpointNotFound, match="kind model, and dcp was asked for"):
        load_model(tmp_path / "model_000003.pt", model, "dcp")


def test_what_does_not_fit_or_is_damaged_leaves_the_model(tmp_path: Path) -> None:
    """Everything is verified before the first byte is written."""
    path = save(tmp_path, Job(), 3, "dcp")
    model = torch.nn.Linear(3, 3)
    before = model.weight.clone()
    with pytest.raises(CheckpointMismatch):
        load_model(path, model)
    assert torch.equal(model.weight, before)
    job = Job(seed=5)
    state = {
        key: value.clone()
        for key, value in job.model.state_dict().items()
        if hasattr(value, "clone")
    }
    flip(path / "__0_0.distcp", 5000)
    with pytest.raises(CheckpointDamaged):
        load_model(path, job.model)
    now = job.model.state_dict()
    assert all(torch.equal(now[key], value) for key, value in state.items())


# ---- configuration -------------------------------------------------------------------------------


def test_keys_that_are_younger_than_a_checkpoint_are_off_and_told(tmp_path: Path) -> None:
    """The load says what it took the checkpoint to have been trained with (M037)."""
    save(tmp_path, Job(), 3, config={"layers": 2, "mamba_enabled": True})
    _, result = resume(tmp_path)
    assert result.config_added == {"engram_enabled": False, "dsa_enabled": False}
    assert result.config == {"layers": 2, "mamba_enabled": True, **result.config_added}


def test_a_feature_that_is_on_now_differs_from_an_old_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that is off does not (F07, M037)."""
    save(tmp_path, Job(), 3, config={"layers": 2})
    config = {"layers": 2, "engram_enabled": True, "dsa_enabled": False}
    CheckpointManager(tmp_path, config=config).load(**Job(seed=5).parts)
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warned == ["config.engram_enabled is True here and False in the checkpoint"]


def test_a_checkpoint_without_a_config_says_nothing(tmp_path: Path) -> None:
    save(tmp_path, Job(), 3)
    assert resume(tmp_path)[1].config_added == {}


@KINDS
@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ({"n_experts": 8}, {"n_experts": 16}),
        ({"moe": {"num_experts": 8}}, {"moe": {"num_experts": 4}}),
    ],
)
def test_another_number_of_experts_is_refused(
    tmp_path: Path, kind: str, saved: dict[str, Any], now: dict[str, Any]
) -> None:
    """By a type of its own, although every shape fits; nothing was touched (M036)."""
    save(tmp_path, Job(), 3, kind, config=saved)
    job = Job(seed=5)
    before = job.state()
    with pytest.raises(ExpertsChanged, match=r"experts is (16|4) here and 8 in the checkpoint"):
        CheckpointManager(tmp_path, config=now).load(**job.parts)
    assert same(job.state(), before)
    for fine in (saved, {"layers": 2}, {}):
        assert CheckpointManager(tmp_path, config=fine).load(**job.parts).step == 3


@pytest.mark.xdist_group("ranks-faults")
def test_another_number_of_experts_is_refused_on_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    """Every rank raises the same (M036, N07)."""
    given = {"root": str(tmp_path), "layout": "2:S0"}
    worlds.results(2, "rank_cases:save", config={"n_experts": 8}, **given)
    for outcome in worlds.run(2, "rank_cases:load", config={"n_experts": 4}, **given):
        assert "ExpertsChanged" in outcome["error"]["bases"]
