"""The command `rehydrate`: one file that plain torch opens, of a checkpoint that was verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from ckpt_conformance.cli.main import app
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.reference_impl import CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


class Scaled(torch.nn.Linear):
    """A layer that keeps scales as fp8 recipes do: a history as a buffer, a dict as extra state."""

    def __init__(self) -> None:  # noqa: D107
        super().__init__(3, 3)
        self.register_buffer("amax_history", torch.arange(4.0))

    def get_extra_state(self) -> dict[str, list[float]]:
        return {"scale": [0.5, 0.25]}

    def set_extra_state(self, state: dict[str, list[float]]) -> None:
        """Nothing is taken."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A DCP checkpoint of a model with tied and scaled layers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Scaled(), torch.nn.Linear(3, 3, bias=False))
    model.add_module("tied", model[1])
    manager = CheckpointManager(tmp_path / "run", use_dcp=True)
    return manager.save(5, model=model, optimizers=torch.optim.AdamW(model.parameters()))


def rehydrate(*words: object) -> Result:
    return CliRunner().invoke(app, ["rehydrate", *map(str, words)])


def test_the_model_is_there_bit_for_bit_and_its_scales_beside_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Plain torch opens both files safely; ties are ties (M045, M046, M006)."""
    done = rehydrate(checkpoint, "--out", tmp_path / "model.pt")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"step 5: 6 entries -> {tmp_path / 'model.pt'}",
        "  scales of 8-bit training: model.amax.pt, beside it",
    ]
    torch.manual_seed(0)
    expected = torch.nn.Sequential(Scaled(), torch.nn.Linear(3, 3, bias=False))
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    for key, value in expected.state_dict().items():
        assert (
            state[key] == value if key.endswith("_extra_state") else torch.equal(state[key], value)
        )
    assert state["tied.weight"].data_ptr() == state["1.weight"].data_ptr()
    scales = torch.load(tmp_path / "model.amax.pt", weights_only=True)
    assert set(scales) == {"0.amax_history", "0._extra_state"}
    assert scales["0._extra_state"] == {"scale": [0.5, 0.25]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.amax.pt", "model.pt", "run"]


def test_a_damaged_checkpoint_is_not_written(checkpoint: Path, tmp_path: Path) -> None:
    """Nothing of it (M045)."""
    shard = checkpoint / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-4] + b"xxxx")
    done = rehydrate(checkpoint, "--out", tmp_path / "model.pt")
    assert isinstance(done.exception, RequestError)
    assert "is not written as one file" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_is_there_is_kept_unless_it_is_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"mine")
    done = rehydrate(checkpoint, "--out", tmp_path / "model.pt")
    assert "--force" in str(done.exception)
    assert (tmp_path / "model.pt").read_bytes() == b"mine"
    assert rehydrate(checkpoint, "--out", tmp_path / "model.pt", "--force").exit_code == 0
    done = rehydrate(checkpoint, "--out", tmp_path / "no" / "model.pt")
    assert "make it first" in str(done.exception)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    """Per-rank files have a model file already."""
    model = torch.nn.Linear(2, 2)
    path = CheckpointManager(tmp_path / "run").save(5, model=model)
    done = rehydrate(path, "--out", tmp_path / "model.pt")
    assert "kind model, and dcp was asked for" in str(done.exception)
