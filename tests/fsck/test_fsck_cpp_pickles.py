"""Pickles of TorchScript: what `torch.jit.load` refuses is damaged, what it loads is whole."""

from __future__ import annotations

import io
import warnings
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path


class Layer(torch.nn.Module):
    """Has an attribute of each sort."""

    def __init__(self) -> None:  # noqa: D107
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.scale, self.names, self.places = 3, ["a", "b"], {"k": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def _members() -> dict[str, bytes]:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is old, and in many files
        torch.jit.save(torch.jit.script(Layer()), stream)
    with zipfile.ZipFile(stream) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _loads(path: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.jit.load(path)  # type: ignore[no-untyped-call]
        except RuntimeError:
            return False
    return True


def _states(path: Path, record: str, data: bytes) -> tuple[bool, State]:
    """Write a record anew; tell whether it is loaded, and what fsck says of it."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, held in _members().items():
            archive.writestr(name, data if name.endswith(f"/{record}") else held)
    return _loads(path), judge(path).state


def two(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


_TEXT = b"X\x01\0\0\0a"
_ZERO = b"G\0\0\0\0\0\0\0\0"
LOADED = {
    "a tuple": two(b")"),
    "a number of 8 bytes": two(b"\x8a\x08" + bytes(8) + b"\x85"),
    "a text": two(_TEXT + b"\x85"),
    "a text that is no UTF-8": two(b"X\x01\0\0\0\xff\x85"),
    "append": two(b"]Na\x85"),
    "appends": two(b"](NNe\x85"),
    "a list": two(b"(NNl\x85"),
    "a dict": two(b"(" + _TEXT + b"Nd\x85"),
    "an item": two(b"}" + _TEXT + b"Ns\x85"),
    "a float as a key": two(b"}" + _ZERO + b"Ns\x85"),
    "a gap in the memo": two(b")q\x05"),
    "what is in a gap": two(b"Nq\x05h\x02\x86"),
    "a mark that is left": two(b"()"),
    "what is below a mark": two(b"N(\x85"),
    "an OrderedDict": two(b"ccollections\nOrderedDict\n)R\x85"),
    "a storage": two(b"ctorch\nFloatStorage\n\x85"),
    "a complex number": two(b"cbuiltins\ncomplex\n" + _ZERO + _ZERO + b"\x86R\x85"),
    "bytes behind it": two(b")") + b"xxx",
}
REFUSED = {
    "a list and no tuple": two(b"]"),
    "None": two(b"N"),
    "protocol 3": b"\x80\x03).",
    "protocol 4": b"\x80\x04).",
    "protocol 0": b"(t.",
    "no protocol": b").",
    "two protocols": b"\x80\x02\x80\x02).",
    "two values": two(b"))"),
    "no value": two(b""),
    "pop": two(b"N0)"),
    "pop mark": two(b"(N1)"),
    "dup": two(b")20"),
    "memoize": two(b")\x94"),
    "a number of a byte": two(b"\x8a\x01\x05\x85"),
    "a short text": two(b"\x8c\x01a\x85"),
    "a text of protocol 1": two(b"U\x01a\x85"),
    "a number in a line": two(b"I5\n\x85"),
    "a key alone": two(b"(" + _TEXT + b"d\x85"),
    "a list as a key": two(b"}]Ns\x85"),
    "None as a key": two(b"}NNs\x85"),
    "a tuple as a key": two(b"})Ns\x85"),
    "no such place": two(b"h\x07\x85"),
    "bytes": two(b"C\x01a\x85"),
    "a frame": b"\x80\x02\x95\x02\0\0\0\0\0\0\0).",
    "a set": two(b"\x8f\x85"),
    "a buffer": two(b"\x97\x85"),
    "no end": b"\x80\x02)",
    "too few for a tuple": two(b"NN\x87"),
    "appended to a tuple": two(b")(Ne"),
    "an extension": two(b"\x82\x01\x85"),
    "a class of Python": two(b"ctorch\nSize\n)\x85R\x85"),
    "a class that is not there": two(b"c__torch__\nMissing\n\x85"),
}


@pytest.mark.parametrize("way", LOADED)
def test_constants_that_torch_loads_are_whole(way: str, tmp_path: Path) -> None:
    found = _states(tmp_path / "model.pt", "constants.pkl", LOADED[way])
    assert found == (True, State.WHOLE)


@pytest.mark.parametrize("way", REFUSED)
def test_constants_that_torch_refuses_are_damaged(way: str, tmp_path: Path) -> None:
    found = _states(tmp_path / "model.pt", "constants.pkl", REFUSED[way])
    assert found == (False, State.DAMAGED)


def _structure() -> bytes:
    return next(data for name, data in _members().items() if name.endswith("/data.pkl"))


def test_the_structure_is_read_so_too(tmp_path: Path) -> None:
    data, path = _structure(), tmp_path / "model.pt"
    tensor = b"K\x04tQ"
    assert tensor in data
    for changed, is_loaded in {
        data: True,
        data + b"behind": True,
        data.replace(tensor, b"K\x04NtQ"): True,  # what a legacy file says of a view
        b"\x80\x04" + data[2:]: False,
        two(b"N"): False,
        two(b"}"): False,
        data[:-1]: False,
    }.items():
        expected = State.WHOLE if is_loaded else State.DAMAGED
        assert _states(path, "data.pkl", changed) == (is_loaded, expected), changed


def test_what_python_would_run_of_it_is_unsafe(tmp_path: Path) -> None:
    """Whoever takes the record out, and unpickles it: torch's reader refuses it before."""
    call = two(b"N0cposix\nsystem\nX\x04\0\0\0true\x85R\x85")
    assert _states(tmp_path / "model.pt", "constants.pkl", call) == (False, State.UNSAFE)


def test_a_storage_of_six_parts_is_damage_in_other_archives(tmp_path: Path) -> None:
    """They are of files before torch 1.6: of an archive torch takes five."""
    stream, path = io.BytesIO(), tmp_path / "model.pt"
    torch.save({"w": torch.ones(4)}, stream)
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"K\x04tq\x07", b"K\x04Ntq\x07"))
    with pytest.raises(ValueError, match="unpack"):
        torch.load(path, weights_only=False)
    assert judge(path).state is State.DAMAGED
