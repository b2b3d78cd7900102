"""What is done in place of a caller comes out as if the kernel had done it, or is named.

Each script says what came of its calls. Without a recorder it says the same; where it would not,
the recording names the call, so that nothing is concluded from it.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from recording import record, replay, tree
from test_crash_recorder import HEAD

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.trace.operations import Recording

SAY = """
def say(what, value):
    number = ctypes.get_errno() if isinstance(value, int) and value < 0 else 0
    with open(root.parent / "said", "a") as file:
        file.write(f"{what}: {os.strerror(number) if number else 'done'}\\n")
def told(what, work):
    try:
        work()
    except OSError as error:
        ctypes.set_errno(error.errno or 0)
        return say(what, -1)
    say(what, 0)
"""
SAME = {
    "a link of a name in /proc is no link of the file": """
fd = os.open(root / "a", os.O_RDWR | C)
say("link", libc.link(b"/proc/self/fd/%d" % fd, os.fsencode(root / "b")))
say("linkat", libc.linkat(-100, b"/proc/self/fd/%d" % fd, -100, os.fsencode(root / "c"), 0))
""",
    "more vectors than one call takes": """
fd = os.open(root / "a", os.O_RDWR | C)
class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_char_p), ("size", ctypes.c_size_t))
for count in (1024, 1025):
    say(f"writev {count}", libc.writev(fd, (Vector * count)(*[(b"x", 1)] * count), count))
    say(f"pwritev {count}", libc.pwritev(fd, (Vector * count)(*[(b"x", 1)] * count), count, 9))
say("writev -1", libc.writev(fd, None, -1))
""",
    "a limit of the size of files": """
import resource
fd = os.open(root / "a", os.O_RDWR | C)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 9000))
told("first", lambda: say("short", os.write(fd, b"x" * 6000) == 5000 or -1))
told("past it", lambda: os.write(fd, b"x"))
told("pwrite below it", lambda: os.pwrite(fd, b"y" * 100, 100))
told("truncate past it", lambda: os.ftruncate(fd, 6000))
told("truncate by name", lambda: os.truncate(root / "a", 6000))
told("allocate past it", lambda: os.posix_fallocate(fd, 4000, 3000))
other = os.open(root / "b", os.O_RDWR | C)
told("copy past it", lambda: os.copy_file_range(fd, other, 5000, 0, 4900))
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
told("again", lambda: os.pwrite(fd, b"z" * 100, 5000))
""",
    "a limit that ends the process": """
import resource, signal
if os.fork() == 0:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    fd = os.open(root / "a", os.O_RDWR | C)
    os.write(fd, b"x" * 10)
    os.write(fd, b"y")
    os._exit(3)
say(f"ended by {os.waitstatus_to_exitcode(os.wait()[1])}", 0)
""",
}
NAMED = {
    "a descriptor of ours that is taken": """
fd = os.open(root / "a", os.O_RDWR | C)
os.dup2(fd, 1009)
os.write(1009, b"unseen")
""",
    "a copy with a number from there on": """
import fcntl
fd = os.open(root / "a", os.O_RDWR | C)
os.closerange(1009, 1010)
copy = fcntl.fcntl(fd, fcntl.F_DUPFD, 1009)
os.write(copy, b"unseen")
""",
    "a descriptor of ours that was closed and is given anew": """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 4096))
os.closerange(1009, 1010)
names = [os.open(root / f"file-{number}", os.O_RDWR | C) for number in range(1010)]
os.write(1009, b"unseen")
""",
    "a caller that gave up its rights": """
if os.getuid() != 0:
    raise SystemExit
(root / "a").write_bytes(b"of root")
(root / "a").chmod(0o600)
if os.fork() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    told("open", lambda: os.open(root / "a", os.O_WRONLY))
    told("make", lambda: os.mkdir(root / "new"))
    os._exit(0)
os.wait()
""",
    "a call of another architecture": """
import mmap
if os.uname().machine != "x86_64":
    raise SystemExit
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("534989c889f889f389d14489c2cd805bc3"))  # rdi: number, rsi, rdx, rcx
call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_long] * 4)(
    ctypes.addressof(ctypes.c_char.from_buffer(code)))
low = libc.mmap
low.restype, low.argtypes = ctypes.c_void_p, [ctypes.c_long] * 6
place = low(0, 4096, 3, 0x62, -1, 0)  # MAP_32BIT: pointers of 32 bits reach it
name = os.fsencode(root / "old") + b"\\0"
ctypes.memmove(place, name, len(name))
if call(5, place, os.O_RDWR | C, 0o644) < 0:  # open(2) of i386
    raise SystemExit
""",
}

WHYS = {
    "a descriptor of ours that is taken": "descriptor 1009",
    "a copy with a number from there on": "descriptor 1009",
    "a descriptor of ours that was closed and is given anew": "descriptor 1009",
    "a caller that gave up its rights": "other rights",
    "a call of another architecture": "32 bits",
}


def said(tmp_path: Path) -> str:
    return (tmp_path / "said").read_text() if (tmp_path / "said").exists() else ""


def alone(tmp_path: Path, script: str) -> str:
    """Run a script without a recorder; return what it says."""
    root = tmp_path / "root"
    root.mkdir(parents=True)
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-B", str(tmp_path / "script.py"), str(root)]
    subprocess.run(command, check=True, timeout=60)
    return said(tmp_path)


@pytest.mark.parametrize("name", SAME)
def test_a_call_has_the_same_result_as_without_a_recorder(name: str, tmp_path: Path) -> None:
    script = HEAD + SAY + SAME[name]
    expected = alone(tmp_path / "alone", script)
    (tmp_path / "recorded").mkdir()
    recording = record(tmp_path / "recorded", script)
    assert said(tmp_path / "recorded") == expected
    assert recording.unsupported == []
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "recorded" / "root")


@pytest.mark.parametrize("name", NAMED)
def test_what_cannot_be_done_as_the_caller_would_is_named(name: str, tmp_path: Path) -> None:
    if name.startswith("a call of") and platform.machine() != "x86_64":
        pytest.skip("a machine of one architecture")
    script = HEAD + SAY + NAMED[name]
    (tmp_path / "recorded").mkdir()
    recording: Recording = record(tmp_path / "recorded", script)
    if not changed(tmp_path / "recorded" / "root"):
        pytest.skip("this machine refuses the calls of the script: run it as root, on x86-64")
    whys = [call.why for call in recording.unsupported]
    assert any(WHYS[name] in why for why in whys), whys
    expected = alone(tmp_path / "alone", script)
    assert said(tmp_path / "recorded") == expected


def changed(root: Path) -> bool:
    """Return whether the script came to its end."""
    return any(root.iterdir())
