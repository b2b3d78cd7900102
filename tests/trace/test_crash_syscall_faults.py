"""Faults at system calls: the N-th below the directory, over all processes, and really fired."""

from __future__ import annotations

import json
import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

DRIVER = """
import json, os, sys
from pathlib import Path
import msgspec
from ckpt_conformance.trace.faults import Fault
from ckpt_conformance.trace.syscall_faults import trial
root, fault = Path(sys.argv[1]), json.loads(sys.argv[2])
root.mkdir(parents=True)
outside = root.parent / "outside"
W, C = os.O_WRONLY, os.O_CREAT
def careful(path, data):
    fd = os.open(path, W | C)
    while data:
        data = data[os.write(fd, data):]
    os.fsync(fd)
    os.close(fd)
def careless(path, data):
    fd = os.open(path, W | C); os.write(fd, data); os.fsync(fd); os.close(fd)
def work():
    WORK
found = trial(root, work, msgspec.convert(fault, Fault))
print(json.dumps(msgspec.to_builtins(found)))
"""
DATA = bytes(range(250)) * 40
FAMILY = """
    outside.write_bytes(b"not counted")
    if os.fork() == 0:
        careful(root / "child", b"c" * 100); os._exit(0)
    os.wait()
    import threading
    thread = threading.Thread(target=careful, args=(root / "thread", b"t" * 100))
    thread.start(); thread.join()
    os.rename(root / "thread", root / "renamed")
"""


def run(tmp_path: Path, work: str, before: str = "", **fault: Any) -> dict[str, Any]:  # noqa: ANN401
    script = DRIVER.replace("    WORK", work.strip("\n"))
    script = script.replace("found = trial", f"{dedent(before)}found = trial")
    command = [sys.executable, "-B", "-c", script, str(tmp_path / "root"), json.dumps(fault)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "stderr": done.stderr}


def test_calls_are_counted_over_the_whole_tree_below_the_directory_only(tmp_path: Path) -> None:
    found = run(tmp_path, FAMILY)
    told = [(entry["what"], entry["path"]) for entry in found["log"]]
    one = [("openat", "child"), ("write", "child"), ("fsync", "child")]
    two = [("openat", "thread"), ("write", "thread"), ("fsync", "thread"), ("rename", "thread")]
    assert told == one + two
    assert (found["calls"], found["fired"], found["code"]) == (7, 0, 0)


STAGED = """
    def staged(data):
        careful(root.parent / "draft", data)
        os.rename(root.parent / "draft", root / "a")
    careful(root.parent / "log", b"never moved in")
    staged(b"abc")
    staged(b"again")
"""


def test_calls_at_files_made_elsewhere_are_counted_where_that_is_asked_for(tmp_path: Path) -> None:
    calls = ["openat", "write", "fsync"]
    found = run(tmp_path, STAGED, elsewhere=True)
    seen = [(call["what"], call["path"], call["elsewhere"]) for call in found["log"]]
    log, place = str(tmp_path / "log"), [(what, "a", False) for what in [*calls, "rename"]]
    assert seen == [*((what, log, True) for what in calls), *place, *place]
    plain = run(tmp_path / "plain", STAGED)
    assert [call["what"] for call in plain["log"]] == ["rename"] * 2


def test_a_call_at_a_file_made_elsewhere_fails_as_asked(tmp_path: Path) -> None:
    found = run(tmp_path, STAGED, elsewhere=True, at=5, error="ENOSPC")
    assert (found["fired"], found["code"]) == (1, 1)
    assert "No space left" in found["stderr"]
    assert found["log"][4] == {
        **found["log"][4],
        "what": "write",
        "path": str(tmp_path / "draft"),
        "elsewhere": True,
        "injected": True,
    }


CHANGES = """
    import mmap
    (root / "old").mkdir()
    careful(root / "old" / "a", b"a")
    os.link(root / "old" / "a", root / "b")
    careful(root / "b", b"both")
    os.unlink(root / "b")
    os.rename(root / "old", root / "new")
    careful(root / "new" / "c", b"c" * 5000)
    os.truncate(root / "new" / "c", 4096)
    os.symlink("../../elsewhere", root / "link")
    with open(root / "mapped", "w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096) as stored:
            stored[:5] = b"first"
            careful(root / "d", b"d")
            stored[:5] = b"later"
            careful(root / "e", b"e")
    os.replace(root / "d", root / "e")
    careful(root / "last", b"")
"""


def test_the_trees_at_calls_are_those_that_a_whole_look_gives(tmp_path: Path) -> None:
    fault = {"error": "kill", "keep": str(tmp_path / "kept")}
    found = run(tmp_path, CHANGES, **fault)
    forgets = """
    from ckpt_conformance.trace.syscall_faults import FaultSupervisor
    FaultSupervisor._touched = lambda _: None
"""
    looked = run(tmp_path / "looked", CHANGES, before=forgets, **fault)
    assert [call["tree"] for call in found["log"]] == [call["tree"] for call in looked["log"]]
    assert (found["code"], len(found["log"])) == (0, len(looked["log"]))
    assert len({str(call["tree"]) for call in found["log"]}) > 15


@pytest.mark.parametrize("writer", ["careful", "careless"])
def test_a_short_write_really_writes_half(writer: str, tmp_path: Path) -> None:
    found = run(tmp_path, f"    {writer}(root / 'a', {DATA!r})", at=1, error="short")
    written = (tmp_path / "root" / "a").read_bytes()
    assert found["fired"] == 1
    assert written == (DATA if writer == "careful" else DATA[: len(DATA) // 2])


@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EDQUOT"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_errno_reaches_the_program(error: str, persistent: bool, tmp_path: Path) -> None:  # noqa: FBT001
    work = """
    for name in "ab":
        try: careful(root / name, b"x")
        except OSError as problem: print(name, problem, file=sys.stderr)
"""
    found = run(tmp_path, work, at=2, error=error, persistent=persistent)
    assert found["stderr"].count("[Errno") == (2 if persistent else 1)
    assert found["fired"] == (2 if persistent else 1)
    assert [entry["injected"] for entry in found["log"]][:2] == [False, True]


def test_an_interrupted_call_is_made_again(tmp_path: Path) -> None:
    found = run(tmp_path, "    careful(root / 'a', b'abc')", at=2, error="EINTR")
    assert (found["fired"], found["calls"], found["code"]) == (1, 3, 0)
    assert (tmp_path / "root" / "a").read_bytes() == b"abc"


def test_from_there_on_every_other_call_is_interrupted(tmp_path: Path) -> None:
    work = """
    for name in "abc":
        careful(root / name, b"abc")
"""
    found = run(tmp_path, work, at=1, error="EINTR", persistent=True)
    told = [(entry["what"], entry["injected"]) for entry in found["log"]]
    assert told == [(what, hit) for what in ["openat", "write"] * 3 for hit in (True, False)]
    assert [(tmp_path / "root" / name).read_bytes() for name in "abc"] == [b"abc"] * 3


def test_a_writer_that_counts_bytes_survives_short_writes_only(tmp_path: Path) -> None:
    work = f"    careful(root / 'a', {DATA!r})"
    found = run(tmp_path, work, at=1, error="short", persistent=True)
    assert (tmp_path / "root" / "a").read_bytes() == DATA
    assert found["fired"] == found["calls"] > 10  # each half of what is left


def test_a_kill_inside_a_write_leaves_whole_pages_of_the_file(tmp_path: Path) -> None:
    work = """
    fd = os.open(root / "a", W | C | os.O_APPEND)
    os.write(fd, b"x" * 3000)
    os.write(fd, b"y" * 9000)
"""
    found = run(tmp_path, work, at=3, error="kill", moment="half")
    assert found["code"] == -9
    assert (tmp_path / "root" / "a").stat().st_size == 4096  # 3000 + 4500, cut at a page


def test_only_a_sync_fails(tmp_path: Path) -> None:
    found = run(tmp_path, "    careful(root / 'a', b'abc')", at=1, only=["fsync", "fdatasync"])
    assert [entry["what"] for entry in found["log"]] == ["fsync"]
    assert found["code"] == 1
    assert "Input/output error" in found["stderr"]


@pytest.mark.parametrize(("moment", "size"), [("before", 0), ("half", 4096), ("after", 10000)])
def test_a_kill_ends_every_process_of_the_tree(moment: str, size: int, tmp_path: Path) -> None:
    work = """
    if os.fork() == 0:
        careful(root / "child", b"c" * 10000)
        careful(root / "later", b"")
        os._exit(0)
    os.wait()
    careful(root / "parent", b"p")
"""
    found = run(tmp_path, work, at=2, error="kill", moment=moment)
    assert (found["code"], found["fired"]) == (-9, 1)
    held = {path.name: path.stat().st_size for path in (tmp_path / "root").iterdir()}
    assert held == {"child": size}


def test_every_call_of_a_run_can_fail_once_and_from_there_on(tmp_path: Path) -> None:
    for persistent in (False, True):
        for at in range(1, 8):
            found = run(tmp_path / f"{persistent}{at}", FAMILY, at=at, persistent=persistent)
            assert found["fired"] >= 1
            assert found["log"][at - 1]["injected"]


def test_a_fault_may_last_for_the_files_of_one_kind_of_name(tmp_path: Path) -> None:
    work = """
    for name in ("part-1", "whole", "part-22"):
        try: careful(root / name, b"x")
        except OSError as problem: print(name, problem, file=sys.stderr)
"""
    found = run(tmp_path, work, at=1, error="EIO", persistent=True, alike="part-#")
    assert found["stderr"].count("[Errno 5]") == 2
    assert [call["path"] for call in found["log"]] == ["part-1", "part-22"]
    assert (tmp_path / "root" / "whole").read_bytes() == b"x"


def test_a_call_is_held_until_another_process_has_looked(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    before = f"""
    from ckpt_conformance.processes import rendezvous
    gate = Path({str(gate)!r})
    rendezvous.make(gate)
    if os.fork() == 0:
        rendezvous.enter(gate)
        (gate / "seen").write_text(" ".join(sorted(os.listdir(root))))
        rendezvous.leave(gate)
        os._exit(0)
"""
    work = """
    careful(root / "a", b"a")
    os.rename(root / "a", root / "b")
"""
    only = ["rename"]
    found = run(tmp_path, work, before=before, at=1, error="hold", only=only, gate=str(gate))
    assert (found["fired"], found["code"]) == (1, 0)
    assert (gate / "seen").read_text() == "a"
    assert (tmp_path / "root" / "b").read_bytes() == b"a"


WRITERS = {
    "thread": """
    import threading
    thread = threading.Thread(target=careful, args=(root / "later", b"abc"))
    thread.start()
    for _ in range(200):
        careful(root / "own", b"x")
    print(sorted(os.listdir(root)), file=sys.stderr)
    thread.join()
    print(sorted(os.listdir(root)), file=sys.stderr)
""",
    "process": """
    if (child := os.fork()) == 0:
        careful(root / "later", b"abc"); os._exit(0)
    for _ in range(200):
        careful(root / "own", b"x")
    print(sorted(os.listdir(root)), file=sys.stderr)
    os.waitpid(child, 0)
    print(sorted(os.listdir(root)), file=sys.stderr)
""",
}


@pytest.mark.parametrize("writer", WRITERS)
def test_late_calls_wait_until_the_first_thread_waits(tmp_path: Path, writer: str) -> None:
    """Those of its own are neither counted nor late; the others are made when it sleeps."""
    found = run(tmp_path, WRITERS[writer], at=1, error="late")
    assert found["stderr"].splitlines() == ["['own']", "['later', 'own']"]
    assert {call["path"] for call in found["log"]} == {"later"}
    assert (found["calls"], found["fired"], found["code"]) == (3, 1, 0)
    assert (tmp_path / "root" / "later").read_bytes() == b"abc"


def test_late_calls_of_who_is_not_waited_for_are_never_made(tmp_path: Path) -> None:
    """The process ends, and its daemon thread in the midst of a file."""
    work = """
    import threading
    started = threading.Event()
    def write():
        fd = os.open(root / "torn", W | C)
        started.set()
        os.write(fd, b"abc")
    threading.Thread(target=write, daemon=True).start()
    while not started.is_set():
        pass
"""
    found = run(tmp_path, work, at=2, error="late")
    assert found["code"] == 0
    assert (tmp_path / "root" / "torn").read_bytes() == b""


def test_a_writer_is_killed_at_a_call_of_its_own(tmp_path: Path) -> None:
    """Calls of the process itself are not counted, and it goes on."""
    work = """
    careful(root / "own", b"x")
    if (child := os.fork()) == 0:
        careful(root / "theirs", b"abc"); os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), file=sys.stderr)
    careful(root / "own", b"y")
"""
    found = run(tmp_path, work, at=2, error="kill-writer")
    assert (found["stderr"], found["fired"], found["code"]) == ("-9\n", 1, 0)
    assert [(call["what"], call["path"]) for call in found["log"]] == [
        ("openat", "theirs"),
        ("write", "theirs"),
    ]
    assert (tmp_path / "root" / "theirs").read_bytes() == b""
    assert (tmp_path / "root" / "own").read_bytes() == b"y"
