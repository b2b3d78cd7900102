"""The recorder: its operations equal those that strace reports, and give the real directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from recording import Witness, needs_strace, plain, record, replay, tree

from ckpt_conformance.trace.operations import Kind

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
import ctypes, os, subprocess, sys, threading
from pathlib import Path
root = Path(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
W, C = os.O_WRONLY, os.O_CREAT
here = os.open(root, os.O_RDONLY)
"""
SCRIPTS = {
    "plain": """
with open(root / "a", "wb") as f:
    f.write(b"x" * 5000); f.flush(); os.fsync(f.fileno()); f.write(b"tail")
os.replace(root / "a", root / "b"); os.fsync(here)
(root / "b").write_bytes(b"again")
""",
    "offsets": """
fd = os.open(root / "a", os.O_RDWR | C)
two = os.dup(fd)
os.write(fd, b"0123456789"); os.write(two, b"abc"); os.lseek(two, 3, 0); os.write(fd, b"XY")
os.pwrite(fd, b"pp", 20); os.writev(fd, [b"v1", b"", b"v2"]); os.pwritev(fd, [b"q", b"r"], 30)
os.pwritev(fd, [b"s"], 31, os.RWF_DSYNC)
more = os.open(root / "a", W | os.O_APPEND)
os.write(more, b"end"); os.pwrite(more, b"end2", 0); os.write(fd, b"Z"); os.ftruncate(fd, 25)
os.truncate(root / "a", 40)
""",
    "flags": """
for flag in (os.O_SYNC, os.O_DSYNC):
    fd = os.open(root / "a", W | C | flag); os.write(fd, b"durable")
os.open(root / "a", W | os.O_TRUNC)
os.sync(); libc.syncfs(here); os.fdatasync(fd); libc.sync_file_range(fd, 0, 0, 7)
import mmap
block = mmap.mmap(-1, 8192); block.write(b"d" * 8192)
try:
    direct = os.open(root / "direct", W | C | os.O_DIRECT)
    os.write(direct, block)
except OSError as error:
    print("no O_DIRECT here", error)
nameless = os.open(root, os.O_TMPFILE | os.O_RDWR, 0o600)
os.write(nameless, b"named later"); os.fsync(nameless)
libc.linkat(-100, b"/proc/self/fd/%d" % nameless, -100, os.fsencode(root / "late"), 0x400)
""",
    "copies": """
(root / "a").write_bytes(bytes(range(256)) * 64)
source, target = os.open(root / "a", os.O_RDONLY), os.open(root / "b", os.O_RDWR | C)
os.copy_file_range(source, target, 5000); os.copy_file_range(source, target, 100, 10, 20)
os.sendfile(target, source, None, 300); os.sendfile(target, source, 7, 300)
os.posix_fallocate(target, 0, 20000)
""",
    "names": """
os.chdir(root)
os.mkdir("d", 0o750); os.makedirs("e/f"); os.mkdir("g", dir_fd=here)
Path("d/x").write_bytes(b"1"); Path("e/f/y").write_bytes(b"22")
sub = os.open("e", os.O_RDONLY)
os.rename("d", "e/d"); Path("e/d/x").write_bytes(b"333")
os.rename("e/f", "moved"); os.link("moved/y", "hard"); os.symlink("moved/y", "soft")
os.symlink("x", "s2", dir_fd=here); os.unlink("s2", dir_fd=here)
os.rename("g", "gg", src_dir_fd=here, dst_dir_fd=sub); os.rename("e/gg", "g")
os.open("new", W | C, dir_fd=sub)
with open("soft", "ab") as f: f.write(b"through a link")
os.rename("hard", "g/hard")
Path("p").write_bytes(b"p"); Path("q").write_bytes(b"qq")
libc.renameat2(-100, b"p", -100, b"q", 2)
assert libc.renameat2(-100, b"p", -100, b"q", 1) == -1
os.chmod("p", 0o640); os.utime("p", (1, 2)); os.fchmod(sub, 0o700)
os.unlink("g/hard"); os.rmdir("g"); os.unlink("q")
os.umask(0o077); Path("private").write_bytes(b"")
kept = os.open("p", W); os.unlink("p"); os.write(kept, b"gone")
""",
    "children": """
Path(root / "a").write_bytes(b"a")
work = f"cd {root}; echo one > sh; mkdir k; mv sh k/; cp a k/b; sync"
subprocess.run(["sh", "-c", work], check=True)
if os.fork() == 0:
    Path(root / "forked").write_bytes(b"f" * 100)
    os._exit(0)
os.wait()
""",
    "threads": """
def work(n):
    for i in range(10):
        path = root / f"{n}-{i}"
        with open(path, "wb") as f:
            f.write(b"t" * (i + 1)); f.flush(); os.fsync(f.fileno())
        os.rename(path, root / f"done-{n}-{i}")
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
""",
    "libraries": """
import torch, torch.distributed.checkpoint as dcp, safetensors.torch, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(1)
state = {"w": torch.arange(70000.0), "b": torch.ones(3)}
torch.save(state, root / "a.tmp"); os.rename(root / "a.tmp", root / "a.pt")
safetensors.torch.save_file(state, root / "b.safetensors")
dcp.save(state, checkpoint_id=root / "dcp")
dcp.save(state, checkpoint_id=root / "dcp")
""",
}


@needs_strace
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "libraries" else []) for name in SCRIPTS],
)
def test_operations_equal_those_of_strace(name: str, tmp_path: Path) -> None:
    recording = record(tmp_path, HEAD + SCRIPTS[name], by="strace")
    seen = Witness(tmp_path / "root").read(tmp_path / "strace")
    mine = plain(recording)
    assert mine
    if name in {"threads", "children"}:  # strace orders threads by what it saw first
        assert sorted(mine) == sorted(seen)
    else:
        assert mine == seen
    assert recording.unsupported == []
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")


LATER = {
    "linked, and written on": """
nameless = os.open(root, os.O_TMPFILE | os.O_RDWR, 0o600)
os.write(nameless, b"named later")
libc.linkat(-100, b"/proc/self/fd/%d" % nameless, -100, os.fsencode(root / "late"), 0x400)
os.write(nameless, b"!")
""",
    "a rename to its own second name does nothing": """
(root / "a").write_bytes(b"a"); os.link(root / "a", root / "b"); os.rename(root / "a", root / "b")
""",
    "through /dev/fd and a link to a directory": """
os.mkdir(root / "d"); os.symlink("d", root / "l"); (root / "l" / "x").write_bytes(b"x" * 10)
os.symlink(root / "d" / "y", root / "absolute"); (root / "absolute").write_bytes(b"y")
fd = os.open(root / "l" / "x", W)
os.open(f"/dev/fd/{fd}", W | os.O_TRUNC); os.write(fd, b"shorter")
""",
    "holes": """
fd = os.open(root / "a", W | C)
os.write(fd, b"x" * 20000)
holes = (3, 4096, 4096), (3, 16384, 9000), (16, 100, 50), (16, 19000, 3000), (1, 0, 99999)
for mode, at, size in holes:
    if libc.fallocate(fd, mode, ctypes.c_long(at), ctypes.c_long(size)):
        print("not here", mode)
""",
    "many writes at once": """
os.writev(os.open(root / "a", W | C), [bytes([i % 251]) * 3000 for i in range(1000)])
(root / "b").write_bytes(os.urandom(5 << 20))
""",
}


@pytest.mark.parametrize("name", LATER)
def test_replay_gives_the_real_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "root" / "old").mkdir(parents=True)
    (tmp_path / "root" / "old" / "file").write_bytes(b"before")
    recording = record(tmp_path, HEAD + LATER[name])
    assert recording.unsupported == []
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")
    assert (tmp_path / "root" / "old" / "file").read_bytes() == b"before"


UNSUPPORTED = {
    "rename": """
os.rename(__file__, root / "m")
""",
    "linkat": """
os.link(__file__, root / "m", follow_symlinks=False)
""",
    "renameat2": """
Path(root.parent / "outside").write_bytes(b"x"); (root / "m").write_bytes(b"y")
old, new = os.fsencode(root.parent / "outside"), os.fsencode(root / "m")
assert libc.renameat2(-100, old, -100, new, 2) == 0
""",
    "splice": """
r, w = os.pipe(); os.write(w, b"abc"); os.splice(r, os.open(root / "m", W | C), 3)
""",
}


@pytest.mark.parametrize("call", UNSUPPORTED)
def test_what_cannot_be_followed_is_named(call: str, tmp_path: Path) -> None:
    recording = record(tmp_path, HEAD + UNSUPPORTED[call])
    assert [(one.call, one.path) for one in recording.unsupported] == [(call, "m")]
    assert recording.unsupported[0].why


def test_a_removed_root_is_named(tmp_path: Path) -> None:
    recording = record(tmp_path, HEAD + "os.rmdir(root); root.mkdir()")
    assert [(one.call, one.path) for one in recording.unsupported] == [("rmdir", "")]


def test_reading_through_a_mapping_is_harmless(tmp_path: Path) -> None:
    script = HEAD + "import mmap\n(root / 'm').write_bytes(b'abc')\n"
    script += "f = open(root / 'm', 'rb'); mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ).close()\n"
    assert record(tmp_path, script).unsupported == []


def test_operations_carry_their_source_line(tmp_path: Path) -> None:
    script = (HEAD + SCRIPTS["threads"]).splitlines()
    recording = record(tmp_path, "\n".join(script))
    for operation in recording.operations:
        word = {Kind.RENAME: "os.rename", Kind.FSYNC: "os.fsync"}.get(operation.kind, "open(")
        line = next(number for number, text in enumerate(script, 1) if word in text and number > 9)
        assert operation.source == f"script.py:{line} work", operation


def test_threads_overlap_and_each_is_in_order(tmp_path: Path) -> None:
    recording = record(tmp_path, HEAD + SCRIPTS["threads"])
    by_thread: dict[int, list[int]] = {}
    for operation in recording.operations:
        assert operation.begin < operation.end
        by_thread.setdefault(operation.thread, []).extend((operation.begin, operation.end))
    assert len(by_thread) == 4
    for ticks in by_thread.values():
        assert ticks == sorted(ticks)


def test_a_command_and_its_children_are_recorded(tmp_path: Path) -> None:
    recording = record(tmp_path, HEAD + SCRIPTS["children"], by="command")
    assert len({operation.process for operation in recording.operations}) >= 4
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")


def test_signals_do_not_repeat_a_call(tmp_path: Path) -> None:
    script = (
        HEAD
        + """
import signal
hits = []
signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for i in range(300):
    fd = os.open(root / "a", W | C | os.O_APPEND); os.write(fd, b"%03d " % i); os.close(fd)
signal.setitimer(signal.ITIMER_REAL, 0)
assert hits
"""
    )
    recording = record(tmp_path, script)
    expected = b"".join(b"%03d " % i for i in range(300))
    assert (tmp_path / "root" / "a").read_bytes() == expected
    replay(recording, tmp_path / "replayed")
    assert (tmp_path / "replayed" / "a").read_bytes() == expected
