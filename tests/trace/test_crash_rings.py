"""An io_uring: what touches no file below the directory is harmless, the rest is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from recording import record

if TYPE_CHECKING:
    from pathlib import Path

# io_uring_setup, the submission queue's ring and its entries, io_uring_enter: by hand.
RING = """
import ctypes, mmap, os, struct, sys
from pathlib import Path
root = Path(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
params = ctypes.create_string_buffer(120)
def setup(flags=0):
    struct.pack_into("=III", params, 0, 0, 0, flags)
    ring = libc.syscall(425, 8, params)
    if ring < 0:
        sys.exit(77)
    return ring
def submit(ring, *entries):
    queue = mmap.mmap(ring, 1 << 16, mmap.MAP_SHARED)
    slots = mmap.mmap(ring, 8 * 64, mmap.MAP_SHARED, offset=0x10000000)
    _, tail, _, _, _, _, array, _ = struct.unpack_from("=8I", params, 40)
    at = struct.unpack_from("=I", queue, tail)[0]
    for index, (opcode, flags, fd, address, size) in enumerate(entries):
        struct.pack_into("=BBHiQQI", slots, 64 * index, opcode, flags, 0, fd, 0, address, size)
        slots[64 * index + 28:64 * index + 64] = bytes(36)
        if array:
            struct.pack_into("=I", queue, array + 4 * index, index)
    struct.pack_into("=I", queue, tail, at + len(entries))
    done = libc.syscall(426, ring, len(entries), len(entries), 1, None, 0)
    assert done == len(entries), (done, ctypes.get_errno())
NOP, FSYNC, WRITE, RENAMEAT, FIXED = 0, 3, 23, 35, 1
text = ctypes.create_string_buffer(b"hello")
def bytes_to(path):
    return os.open(path, os.O_RDWR | os.O_CREAT), ctypes.addressof(text), 5
"""
SEEN = {
    "nothing": ("submit(setup(), (NOP, 0, -1, 0, 0))", []),
    "a file elsewhere": (
        "submit(setup(), (WRITE, 0, *bytes_to(root.parent / 'elsewhere')))",
        [],
    ),
    "a file below": (
        "submit(setup(), (NOP, 0, -1, 0, 0), (WRITE, 0, *bytes_to(root / 'm')))",
        [("io_uring_enter", "m")],
    ),
    "a sync": (
        "submit(setup(), (FSYNC, 0, bytes_to(root / 'm')[0], 0, 0))",
        [("io_uring_enter", "m")],
    ),
    "a file by its number in the ring": (
        "r = setup(); submit(r, (WRITE, FIXED, 0, ctypes.addressof(text), 5))",
        [("io_uring_enter", "")],
    ),
    "a name": ("submit(setup(), (RENAMEAT, 0, -100, 0, 0))", [("io_uring_enter", "")]),
    "a polled ring": ("setup(2)", [("io_uring_setup", "")]),
}


@pytest.mark.parametrize("indices", ["with", "without"])
@pytest.mark.parametrize("name", SEEN)
def test_only_what_touches_the_directory_is_named(name: str, indices: str, tmp_path: Path) -> None:
    script, named = SEEN[name]
    if indices == "without":  # IORING_SETUP_NO_SQARRAY: as libuv has it
        script = script.replace("setup()", "setup(1 << 16)")
    try:
        recording = record(tmp_path, RING + script)
    except RuntimeError as error:
        if not str(error).strip():  # exit status 77
            pytest.skip("io_uring is not allowed here")
        raise
    assert [(one.call, one.path) for one in recording.unsupported] == named
    if name == "a file elsewhere":
        assert (tmp_path / "elsewhere").read_bytes() == b"hello"
