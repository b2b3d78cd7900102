"""A torch that refuses what it would write over: only where two values meet in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from ckpt_conformance.contract import journal
from ckpt_conformance.fault_injectors.torch_tie import TorchTie

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def tie(tmp_path: Path) -> Iterator[TorchTie]:
    injector = TorchTie(tmp_path, journal.ChildJournal(tmp_path / "journal"))
    injector.install()
    yield injector
    injector.remove()


def tied() -> nn.Module:
    """A module of two names for one tensor."""
    module = nn.Module()
    module.register_buffer("left", torch.zeros(3))
    module.register_buffer("right", module.get_buffer("left"))
    return module


def state(left: float, right: float) -> dict[str, Tensor]:
    return {"left": torch.full((3,), left), "right": torch.full((3,), right)}


def test_two_values_for_one_place_are_refused(tie: TorchTie) -> None:
    with pytest.raises(ValueError, match="right shares its memory"):
        tied().load_state_dict(state(1.0, 2.0))
    assert tie.fired


def test_one_value_for_both_is_loaded(tie: TorchTie) -> None:
    module = tied()
    module.load_state_dict(state(1.0, 1.0))
    assert module.get_buffer("left").tolist() == [1.0] * 3
    assert not tie.fired


def test_what_is_assigned_has_places_of_its_own(tie: TorchTie) -> None:
    module = tied()
    module.load_state_dict(state(1.0, 2.0), assign=True)
    assert module.get_buffer("right").tolist() == [2.0] * 3
    assert not tie.fired
