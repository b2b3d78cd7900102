"""Generators of NumPy in a pickle: one that NumPy does not have is damage, as its load fails."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from fsck_readers import torch_bytes

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.pickled import pickles
from ckpt_conformance.fsck.pickled.faults import Broken
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path

BITS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
MADE = {
    "old": np.random.RandomState(1),
    **{name: np.random.Generator(getattr(np.random, name)(1)) for name in BITS},
    **{f"{name} alone": getattr(np.random, name)(1) for name in BITS},
}


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("kind", MADE)
def test_what_numpy_writes_is_read(kind: str, protocol: int) -> None:
    pickles.load(pickle.dumps(MADE[kind], protocol))


_MAKES = b"\x80\x02cnumpy.random._pickle\n"
_STATE = b"}X\x0d\x00\x00\x00bit_generatorX%c\x00\x00\x00%ssb."


def _state(name: bytes) -> bytes:
    return _STATE % (len(name), name)


@pytest.mark.parametrize(
    "data",
    [
        _MAKES + b"__randomstate_ctor\nX\x06\0\0\0MT1993\x85R.",
        _MAKES + b"__generator_ctor\nX\x04\0\0\0PCG6\x85R.",
        _MAKES + b"__bit_generator_ctor\nX\x04\0\0\0PCG6\x85R.",
        _MAKES + b"__bit_generator_ctor\nC\x05PCG64\x85R.",
        _MAKES + b"__bit_generator_ctor\nX\x05\0\0\0PCG64\x85R" + _state(b"PCG6"),
        _MAKES + b"__bit_generator_ctor\nX\x05\0\0\0PCG64\x85R" + _state(b"SFC64"),
        _MAKES + b"__randomstate_ctor\nX\x07\0\0\0MT19937\x85R" + _state(b"PCG64"),
    ],
)
def test_one_that_numpy_does_not_have_is_a_fault(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        pickle.loads(data)  # noqa: S301  names of NumPy alone
    with pytest.raises(Broken, match="a generator of NumPy"):
        pickles.load(data)


def test_such_a_file_of_torch_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rng.pt"
    whole = torch_bytes({"numpy": MADE["old"]})
    path.write_bytes(whole)
    assert judge(path).state is State.WHOLE
    assert whole.count(b"MT19937") > 1
    path.write_bytes(_repacked(whole))
    with pytest.raises(ValueError, match="PRNG"):
        torch.load(path, weights_only=False)
    assert judge(path).state is State.DAMAGED


def _repacked(data: bytes) -> bytes:
    """Change the name in the state, with the CRC made to fit."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"\x07\0\0\0MT19937", b"\x07\0\0\0MT19938"))
    return out.getvalue()
