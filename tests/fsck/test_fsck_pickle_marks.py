"""A mark in a pickle keeps what lies below it from being taken, and buffers stand outside of it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from unsafe_corpus import Evil

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.pickled import pickles
from ckpt_conformance.fsck.pickled.faults import Broken
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = {
    "a tuple": b"N(\x85.",
    "append": b"](Na.",
    "put": b"N(q\x00.",
    "memoize": b"N(\x94.",
    "dup": b"N(2.",
    "the end": b"N(.",
    "a state": b"cargparse\nNamespace\n)\x81(}b.",
    "a call": b"ccollections\nOrderedDict\n()R.",
    "appends": b"](N(Ne.",
    "an item": b"}(NNs1.",
    "a name": b"X\x02\0\0\0os(X\x06\0\0\0getpid\x93.",
    "pop below": b"N(00.",
    "a buffer": b"\x97.",
    "a buffer that is none": b"N\x98.",
}
LOADED = {
    "what lies above": b"N(NN1.",
    "pop of the mark": b"N(0.",
    "two marks": b"((N(t.",
    "a buffer": b"C\x01a\x98.",
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_python_refuses_is_a_fault(way: str) -> None:
    data = b"\x80\x05" + REFUSED[way]
    with pytest.raises((pickle.UnpicklingError, TypeError, AttributeError)):
        pickle.loads(data)  # noqa: S301  nothing in it is called
    with pytest.raises(Broken):
        pickles.load(data)


@pytest.mark.parametrize("way", LOADED)
def test_what_python_loads_is_read(way: str) -> None:
    data = b"\x80\x05" + LOADED[way]
    pickle.loads(data)  # noqa: S301  nothing in it is called
    pickles.load(data)


@pytest.mark.parametrize("front", [b"\x970", b"\x97\x980", b"N\x980"])
@pytest.mark.parametrize("name", ["extra", "state.pkl", "model.pt"])
def test_code_behind_a_buffer_is_unsafe(front: bytes, name: str, tmp_path: Path) -> None:
    """A program that has the buffers runs it."""
    step = tmp_path / "step_2"
    step.mkdir()
    torch.save({"w": torch.ones(3)}, step / "weights.pt")
    (step / name).write_bytes(b"\x80\x05" + front + pickle.dumps(Evil(), 2)[2:])
    assert judge(step).state is State.UNSAFE


def test_a_plain_pickle_with_a_buffer_outside_is_damaged(tmp_path: Path) -> None:
    step = tmp_path / "step_2"
    step.mkdir()
    torch.save({"w": torch.ones(3)}, step / "weights.pt")
    (step / "state.pkl").write_bytes(b"\x80\x05}X\x01\0\0\0a\x97s.")
    assert judge(step).state is State.DAMAGED
