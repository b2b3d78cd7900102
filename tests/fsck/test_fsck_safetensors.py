"""Headers of safetensors files: what fsck says of them is what the library says."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest
from safetensors import SafetensorError, safe_open

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path

EMPTY = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def loads(path: Path) -> bool:
    """Return whether the library gives every tensor of a file."""
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dict
                file.get_tensor(name)
    except (SafetensorError, UnicodeError):
        return False
    return True


def written(path: Path, header: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def of_shape(*sizes: int) -> bytes:
    entry = {"dtype": "F32", "shape": list(sizes), "data_offsets": [0, 0]}
    return json.dumps({"a": entry}).encode()


@pytest.mark.parametrize(
    ("header", "loaded"),
    [
        (of_shape(2**32, 2**32, 0), False),
        (of_shape(2**60, 16, 0), False),
        (of_shape(0, 2**32, 2**32), True),
        (of_shape(2**32, 0, 2**32), True),
        (of_shape(2**32, 2**31, 0), True),
        (b'{"\\ud800":%b}' % EMPTY, False),
        (b'{"a\\udc00":%b}' % EMPTY, False),
        (b'{"\\ud83d\\ude00":%b}' % EMPTY, True),
        (b'{"__metadata__":{"k":"\\ud800"},"a":%b}' % EMPTY, False),
        (b'{"__metadata__":{"\\udfff":"v"},"a":%b}' % EMPTY, False),
        (b'{"__metadata__":null,"a":%b}' % EMPTY, True),
        (b'{"\\u0000":%b}' % EMPTY, True),
    ],
)
def test_a_header_is_whole_if_the_library_loads_it(
    header: bytes, *, loaded: bool, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.safetensors", header)
    assert loads(path) is loaded
    judged = judge(path)
    assert judged.state is (State.WHOLE if loaded else State.DAMAGED), judged.reports[0].findings
