"""JSON files beside weights: objects and lists are right if Python's json reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path


def loads(data: bytes) -> bool:
    try:
        json.loads(data.decode())
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("data", "loaded"),
    [
        (b"[]", True),
        (b' \n[1, {"a": [2]}]\n', True),
        (b'["a", "b"', False),
        (b"[1, 2]]", False),
        (b"[\x00\x00\x00]", False),
        (b'["\xff"]', False),
        (b"[" * 100_000, False),
    ],
)
def test_a_list_is_parsed(data: bytes, *, loaded: bool, tmp_path: Path) -> None:
    step = tmp_path / "step_5"
    step.mkdir()
    torch.save({"w": torch.ones(2)}, step / "model.pt")
    (step / "tokens.json").write_bytes(data)
    if len(data) < 1000:  # a deep one is an error of another sort
        assert loads(data) is loaded
    judged = judge(tmp_path)
    assert judged.state is (State.WHOLE if loaded else State.DAMAGED)
    assert diff(step, step).is_judged is loaded
