"""Files that are mapped into memory: what was stored there is recorded, page by page."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from recording import DRIVER, record, replay, tree
from test_crash_moved_in import START
from test_crash_recorder import HEAD

from ckpt_conformance.trace.operations import Kind, Operation, Recording, is_crash_point

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096
MAPS = (
    HEAD
    + """
import mmap, signal
def mapped(name, size, prot=3):
    fd = os.open(root / name, os.O_RDWR | C, 0o644)
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size, mmap.MAP_SHARED, prot)
libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def msync(m, start, size, flags):
    at = ctypes.addressof(ctypes.c_char.from_buffer(m)) + start
    if libc.msync(at, size, flags):
        raise OSError(ctypes.get_errno(), "msync")
"""
)
STORED = {
    "msync, fsync, rename": """
fd, m = mapped("tmp", 10000)
m[:5000] = b"a" * 5000; m.flush(); m[9000:9003] = b"end"; m.flush()
os.fsync(fd); os.rename(root / "tmp", root / "final"); os.fsync(here)
""",
    "the descriptor is closed first": """
fd, m = mapped("a", 8192); os.close(fd); m[:3] = b"abc"; os.mkdir(root / "d"); m[4096:4099] = b"xyz"
""",
    "after it was unlinked and renamed": """
fd, m = mapped("a", 4096); os.rename(root / "a", root / "b"); m[:1] = b"1"
os.link(root / "b", root / "c"); os.unlink(root / "b"); m[9:10] = b"2"
""",
    "beside write, truncate and punched holes": """
fd, m = mapped("a", 16384)
m[:16384] = b"m" * 16384; os.pwrite(fd, b"w" * 6000, 1000); m[100:104] = b"over"
libc.fallocate(fd, 3, ctypes.c_long(4096), ctypes.c_long(4096)); m[5000:5003] = b"new"
os.ftruncate(fd, 9000); m[8999:9000] = b"z"; os.ftruncate(fd, 12288); m[12287:12288] = b"e"
m.madvise(mmap.MADV_REMOVE, 0, 4096)
""",
    "two maps of one file, and one of another": """
fd, m = mapped("a", 4096); n = mmap.mmap(fd, 4096); m[:1] = b"m"; n[1:2] = b"n"
other, o = mapped("b", 4096); o[:1] = b"o"; m.close(); os.mkdir(root / "d"); n[2:3] = b"p"
""",
    "unmapped, and mapped again": """
for turn in range(3):
    fd, m = mapped("a", 8192); m[turn : turn + 1] = b"x"; m.close(); os.close(fd)
    os.mkdir(root / str(turn)); (root / "a").chmod(0o600)
    with open(root / "a", "r+b") as f: f.seek(10 + turn); f.write(b"y")
""",
    "read only, and writable later": """
fd, m = mapped("a", 4096, mmap.PROT_READ)
line = next(l for l in open("/proc/self/maps") if l.rstrip().endswith("root/a"))
at = int(line.split("-")[0], 16)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
assert libc.mprotect(at, 4096, 3) == 0; ctypes.memmove(at, b"late", 4)
""",
    "by children that inherit the map": """
fd, m = mapped("a", 12288)
if os.fork() == 0:
    m[:5] = b"child"; os.fsync(fd); m[4096:4101] = b"again"; os._exit(0)
os.wait(); m.close(); os.close(fd); os.mkdir(root / "d")
fd, m = mapped("a", 12288)
if os.fork() == 0:
    m[8192:8197] = b"third"; os._exit(0)
m.close(); os.mkdir(root / "e"); os.wait()
""",
    "by threads": """
fd, m = mapped("a", 16 * 4096)
def work(n):
    for i in range(4):
        at = (4 * n + i) * 4096
        m[at] = 65 + n; (root / f"{n}-{i}").write_bytes(b"x"); m[at + 1] = 97
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
""",
    "and killed without a word": """
fd, m = mapped("a", 8192); m[:1] = b"1"
if os.fork() == 0:
    m[4096:4097] = b"2"; os.kill(os.getpid(), signal.SIGKILL)
os.wait()
""",
    "large, and nearly empty": """
fd, m = mapped("a", 1 << 36)
m[:3] = b"abc"; m[(1 << 35) + 5] = 7; m.flush(); os.ftruncate(fd, 1 << 20)
""",
}


def stores(recording: Recording) -> list[Operation]:
    return [operation for operation in recording.operations if operation.mapped]


@pytest.mark.parametrize("name", STORED)
def test_what_was_stored_is_in_the_replay(name: str, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    recording = record(tmp_path, MAPS + STORED[name])
    assert recording.unsupported == []
    assert stores(recording)
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")


def told(recording: Recording) -> list[str]:
    """Give the operations on data and syncs, in few words."""
    kinds = {Kind.WRITE: "store", Kind.FDATASYNC: "fdatasync", Kind.FSYNC: "fsync"}
    told = [op for op in recording.operations if op.kind in {*kinds, Kind.MKDIR}]
    return [
        f"{kinds.get(op.kind, op.path)} {op.offset}+{op.size}"
        if op.size
        else kinds.get(op.kind, op.path)
        for op in told
    ]


def test_stores_stand_before_the_call_that_follows_them(tmp_path: Path) -> None:
    """Only pages that changed are written, whole ones; those side by side are one WRITE."""
    recording = record(
        tmp_path,
        MAPS
        + """
fd, m = mapped("a", 6 * 4096 + 10)
m[0] = 1; m[4096] = 1; m[6 * 4096 + 9] = 9; os.mkdir(root / "d1")
m[0] = 1; os.mkdir(root / "d2")
m[3 * 4096] = 3; os.fsync(fd); m[3 * 4096] = 4
""",
    )
    assert told(recording) == [
        *("store 0+8192", "store 24576+10", "d1", "d2", "store 12288+4096", "fsync"),
        "store 12288+4096",
    ]
    made = recording.operations[1:]  # none of them overlaps another in time
    assert all(one.precedes(other) for one, other in itertools.pairwise(made))


def test_between_two_stores_of_one_look_there_is_no_crash_point(tmp_path: Path) -> None:
    script = MAPS + "fd, m = mapped('a', 4 * 4096); m[8192] = 2; m[0] = 1; os.mkdir(root / 'd')"
    recording = record(tmp_path, script)
    assert [op.kind for op in recording.operations][-3:] == [Kind.WRITE, Kind.WRITE, Kind.MKDIR]
    count = len(recording.operations)
    assert [is_crash_point(recording.operations, at) for at in range(count + 1)] == [
        at != count - 2 for at in range(count + 1)
    ]


def test_msync_is_a_sync_of_its_pages(tmp_path: Path) -> None:
    """Stores that it covers in part are written in parts; MS_ASYNC makes nothing durable."""
    recording = record(
        tmp_path,
        MAPS
        + """
fd, m = mapped("a", 4 * 4096)
m[:] = b"x" * len(m); os.mkdir(root / "d")
msync(m, 4096, 100, 4); msync(m, 0, 4096, 1); m[0] = 1; msync(m, 0, 4096, 1); m[0] = 2; m.flush()
""",
    )
    assert told(recording) == [
        *("store 0+4096", "store 4096+4096", "store 8192+8192", "d", "fdatasync 4096+4096"),
        *("store 0+4096", "store 0+4096", "fdatasync 0+16384"),
    ]


def test_a_file_that_was_mapped_elsewhere_and_came_in_is_followed(tmp_path: Path) -> None:
    script = """
import mmap
with open(elsewhere / 'x', 'w+b') as f:
    f.truncate(4096)
    with mmap.mmap(f.fileno(), 4096) as m:
        m[:3] = b'abc'; os.rename(elsewhere / 'x', root / 'm'); m[3:6] = b'def'
"""
    recording = record(tmp_path, START + script)
    assert recording.unsupported == []
    replay(recording, tmp_path / "replayed")
    assert (tmp_path / "replayed" / "m").read_bytes() == b"abcdef".ljust(4096, b"\0")


@pytest.mark.parametrize(
    "flags", ["os.O_RDONLY, mmap.MAP_SHARED, 1", "os.O_RDWR, mmap.MAP_PRIVATE, 3"]
)
def test_a_mapping_that_writes_nothing_needs_nothing(flags: str, tmp_path: Path) -> None:
    opened, shared, prot = flags.split(", ")
    script = f"""
(root / "a").write_bytes(b"x" * 4096)
m = mmap.mmap(os.open(root / "a", {opened}), 4096, {shared}, {prot})
if {prot} == 3: m[:3] = b"own"
os.mkdir(root / "d")
"""
    recording = record(tmp_path, MAPS + script)
    assert (recording.unsupported, stores(recording)) == ([], [])


def driven(tmp_path: Path, before: str, script: str) -> Recording:
    """Record a script in a process where something was done before."""
    (tmp_path / "root").mkdir(exist_ok=True)
    (tmp_path / "script.py").write_text(script)
    paths = [str(tmp_path / name) for name in ("root", "record", "script.py", "root")]
    driver = DRIVER.replace("recorder = ", before + "\nrecorder = ", 1)
    done = subprocess.run(
        [sys.executable, "-B", "-c", driver, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Recording.read(tmp_path / "record")


BEFORE = """
import mmap, os
def mapped():
    fd = os.open(root + "/m", os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 4096)
    return mmap.mmap(fd, 4096)
"""


def test_a_map_from_before_the_recording_is_followed(tmp_path: Path) -> None:
    """Why: a forked child has the maps of the process that forked it."""
    before = BEFORE + "import builtins; builtins.held = mapped()"
    recording = driven(
        tmp_path, before, HEAD + "held[:3] = b'abc'; os.mkdir(root / 'd')\nheld[0] = 65"
    )
    assert recording.unsupported == []
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")
    assert len(stores(recording)) == 2


def test_what_nobody_saw_change_is_named(tmp_path: Path) -> None:
    """A process that is not recorded stores into the file."""
    before = (
        BEFORE
        + """
r, w = os.pipe(); back, done = os.pipe()
mapped().close()
if os.fork() == 0:
    m = mapped(); os.read(r, 1); m[:3] = b"abc"; os.write(done, b"x"); os._exit(0)
os.environ["PIPES"] = f"{w} {back}"
"""
    )
    script = "w, back = map(int, os.environ['PIPES'].split()); os.write(w, b'x'); os.read(back, 1)"
    recording = driven(tmp_path, before, HEAD + "(root / 'a').write_bytes(b'a')\n" + script)
    assert [(one.call, one.path) for one in recording.unsupported] == [("control", "m")]
    assert "is not what" in recording.unsupported[0].why


def test_more_than_can_be_compared_is_named(tmp_path: Path) -> None:
    before = "from ckpt_conformance.trace import mapped\nmapped.MOST = 8192"
    script = (
        MAPS + "fd, m = mapped('a', 16384); m[:] = b'x' * 16384; os.mkdir(root / 'd'); m[0] = 1"
    )
    recording = driven(tmp_path, before, script)
    assert [(one.call, one.path) for one in recording.unsupported] == [("mmap", "a")]
    assert "8192 bytes" in recording.unsupported[0].why


def test_a_process_that_shares_its_map_goes_on_with_its_locks(tmp_path: Path) -> None:
    """Why: a descriptor that was copied would keep the lock of its file alive."""
    script = (
        MAPS
        + """
import fcntl
fd, m = mapped("a", 4096); fcntl.flock(fd, fcntl.LOCK_EX); m[0] = 1; os.mkdir(root / "d")
m.close(); os.close(fd)
again = os.open(root / "a", os.O_RDWR); fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""
    )
    assert record(tmp_path, script).unsupported == []
    assert (tmp_path / "root" / "d").exists()
