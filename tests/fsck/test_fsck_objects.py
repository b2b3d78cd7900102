"""Arrays of numpy: their objects are a pickle, however the header says that there are objects."""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import unsafe_corpus as evil

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Array = np.ndarray[Any, Any]

WAYS = {
    "as numpy writes it": "'|O'",
    "by name": "'object'",
    "as an escape": r"'\x4f'",
    "by its name in Unicode": r"'\N{LATIN CAPITAL LETTER O}'",
    "in a field": "[('a','object')]",
    "in the second field": "[('a','<i4',(1,)),('b','O')]",
    "in a list in one text": "'i4,object'",
    "with a shape": "('object',(1,))",
    "in a field in a field": r"[('a',[('b','\x4f')])]",
    "as a text of Python 2": "u'object'",
}
PADDED = {"": 0, "behind 9 kB": 9000, "behind 60 kB": 60_000}  # bytes of blanks in the header


def header_of(descr: str, blanks: int) -> bytes:
    """Write the header of an array of one element, with a dtype as it is written here."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,), }}{' ' * blanks}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("kind", [".npy", ".npz"])
@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize("way", WAYS)
def test_however_a_dtype_of_objects_is_written_the_pickle_is_read(
    way: str, padded: str, kind: str, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "run" / "step_5"
    folder.mkdir(parents=True)
    evil.benign(folder / "model.pt")
    objects = evil.pickles(marker)["reduce, protocol 4"]
    array = header_of(WAYS[way], PADDED[padded]) + objects
    path = folder / f"a{kind}"
    path.write_bytes(array)
    if kind == ".npz":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.npy", array)
    assert judge(tmp_path / "run").state is State.UNSAFE
    with contextlib.suppress(Exception):  # what comes of it is no array
        loaded = np.load(path, allow_pickle=True)
        assert kind == ".npy" or loaded["a"] is not None
    assert marker.exists(), "numpy runs none of it: the case says nothing"


@pytest.mark.parametrize(
    "array",
    [
        np.arange(300, dtype=np.float32),
        np.frombuffer(pickle.dumps({"a": 1}), np.uint8),
        np.zeros(3, [("a", "<i4"), ("b", "<f8", (2,)), ("Object", "S3")]),
        np.array(["O", "object"]),
        np.zeros(2, "datetime64[ns]"),
        np.zeros((), "V7"),
    ],
    ids=["float32", "bytes of a pickle", "fields", "text", "datetime64", "V7"],
)
def test_an_array_without_objects_is_no_pickle(array: Array, tmp_path: Path) -> None:
    evil.benign(tmp_path / "model.pt")
    np.save(tmp_path / "a.npy", array)
    (report,) = judge(tmp_path).reports
    assert report.state is State.WHOLE
    assert not [one for one in report.findings if one.what.startswith("a.npy")]


def broken_name(data: bytes) -> bytes:
    """Give the pickle another name where it lies than in the directory."""
    return data.replace(b"data.pkl", b"data.pkX", 1)


def broken_crc(data: bytes) -> bytes:
    """Change a bit of the CRC that the directory has of the first member."""
    at = data.index(b"PK\x01\x02") + 16
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("break_it", [broken_name, broken_crc])
def test_damage_that_torch_does_not_see_hides_no_code(
    break_it: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """The loader of torch goes by the place of a record alone, and holds no CRC against it."""
    marker, path = tmp_path / "marker", tmp_path / "model.pt"
    evil.zipped(path, evil.pickles(marker)["reduce, protocol 2"])
    path.write_bytes(break_it(path.read_bytes()))
    assert judge(path).state is State.UNSAFE
    with contextlib.suppress(Exception):  # what comes of it is no state
        torch.load(path, weights_only=False)
    assert marker.exists(), "torch runs none of it: the case says nothing"
