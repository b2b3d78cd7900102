"""What the recorder's tests share: recorded commands, a replay, and a reader of strace's output."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.trace.operations import Kind, Operation, Recording

if TYPE_CHECKING:
    from pathlib import Path

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed: apt-get install strace"
)
DRIVER = """
import sys
from pathlib import Path
from ckpt_conformance.trace.recorder import Recorder
root, folder, *command = sys.argv[1:]
recorder = Recorder(Path(root), Path(folder))
if command[0].endswith(".py"):
    import runpy
    sys.argv = command
    recorder.function(lambda: runpy.run_path(command[0], run_name="__main__"), outlive=True)
else:
    recorder.command(command, outlive=True)
sys.exit(recorder.code)
"""
CALLS = (
    "openat,open,creat,openat2,write,pwrite64,writev,pwritev,pwritev2,rename,renameat,renameat2,"
    "mkdir,mkdirat,rmdir,unlink,unlinkat,link,linkat,symlink,symlinkat,truncate,ftruncate,"
    "fallocate,fsync,fdatasync,sync,syncfs,chmod,fchmod,fchmodat,utimensat,copy_file_range,sendfile"
)


def record(tmp_path: Path, script: str, *, by: str = "function") -> Recording:
    """Record a script; `by` is function, command or strace. `sys.argv[1]` is the root."""
    root, file = tmp_path / "root", tmp_path / "script.py"
    file.write_text(script)
    command = [str(file), str(root)]
    if by != "function":
        command = [sys.executable, "-B", *command]
    if by == "strace":
        trace = ["strace", "-f", "-y", "-s", "4096", "-e", f"trace={CALLS}", "-o"]
        command = [*trace, str(tmp_path / "strace"), *command]
    driver = [sys.executable, "-B", "-c", DRIVER, str(root), str(tmp_path / "record"), *command]
    done = subprocess.run(driver, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return Recording.read(tmp_path / "record")


def replay(recording: Recording, target: Path) -> None:
    """Do all operations again in a copy of what was there before."""
    shutil.copytree(recording.folder / "initial", target, symlinks=True)
    nameless = target.parent / "nameless"
    nameless.mkdir()
    for operation in recording.operations:
        _replay_one(recording, operation, target, nameless)
    shutil.rmtree(nameless)


def _at(root: Path, nameless: Path, path: str, parent: int) -> Path:
    """Return where a name is; one with an absolute path is in a directory without a name here."""
    if not path.startswith("/"):
        return root / path
    *_, folder, name = path.split("/")
    found = (at for one in (str(parent), folder) for at in nameless.rglob(one))
    return next(found, nameless) / name


def _replay_one(  # noqa: C901  one branch for each kind
    recording: Recording, op: Operation, root: Path, nameless: Path
) -> None:
    path = nameless / str(op.object)
    if op.path:
        path = _at(root, nameless, op.path, op.parent)
    target = _at(root, nameless, op.target, op.new_parent)
    kind = op.kind
    if kind is Kind.CREATE:
        path.touch(exist_ok=False)
        path.chmod(op.mode)
    elif kind is Kind.MKDIR:
        path.mkdir()
        path.chmod(op.mode)
    elif kind is Kind.SYMLINK:
        path.symlink_to(op.target)
    elif kind in {Kind.WRITE, Kind.TRUNCATE, Kind.ALLOCATE}:
        _replay_data(recording, op, _file_of(op, root, nameless))
    elif kind is Kind.LINK:
        os.link(path, target, follow_symlinks=False)
    elif kind is Kind.RENAME:
        path.rename(target)
    elif kind is Kind.EXCHANGE:
        path.rename(nameless / "x")
        target.rename(path)
        (nameless / "x").rename(target)
    elif kind is Kind.UNLINK:
        path.rename(nameless / str(op.object))
    elif kind is Kind.RMDIR:
        path.rmdir()
    elif kind is Kind.CHMOD:
        path.chmod(op.mode)


def _file_of(op: Operation, root: Path, nameless: Path) -> Path:
    kept = nameless / str(op.object)
    return kept if kept.exists() else _at(root, nameless, op.path, op.parent)


def _replay_data(recording: Recording, op: Operation, path: Path) -> None:
    if not path.exists():
        return  # lost its last name to a rename, and is written on
    if op.kind is Kind.TRUNCATE:
        os.truncate(path, op.size)
        return
    with path.open("r+b") as file:
        if op.kind is Kind.WRITE:
            file.seek(op.offset)
            file.write(recording.bytes_of(op))
        elif path.stat().st_size < op.stop:
            file.truncate(op.stop)


def tree(root: Path) -> dict[str, object]:
    """Give what a directory holds, byte for byte."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name, mode = str(path.relative_to(root)), path.lstat().st_mode
        if path.is_symlink():
            found[name] = path.readlink()
        else:
            found[name] = (oct(mode), None if path.is_dir() else path.read_bytes())
    return found


def plain(recording: Recording) -> list[tuple[str, ...]]:
    """Give operations as strace can tell them."""
    found: list[tuple[str, ...]] = []
    for op in recording.operations:
        size = str(op.size) if op.kind in {Kind.WRITE, Kind.TRUNCATE, Kind.ALLOCATE} else ""
        kind = "write" if op.kind is Kind.ALLOCATE else str(op.kind)
        found.append((kind, op.path, "" if op.kind is Kind.SYMLINK else op.target, size))
    return found


def is_seen_so(
    recording: Recording, seen: list[tuple[str, ...]], spans: list[tuple[int, int]] | None = None
) -> bool:
    """Tell whether a witness saw these operations in an order that they allow.

    Calls of two threads that overlap may be seen either way round; all others may not. `spans`
    are the first and last line of each call in what the witness wrote: strace writes that a call
    has ended when it comes to it, so of two that it saw overlap neither is the first.
    """
    told, places = plain(recording), defaultdict[tuple[str, ...], deque[int]](deque)
    if sorted(told) != sorted(seen):
        return False
    for at, one in enumerate(told):
        places[one].append(at)
    order = [recording.operations[places[one].popleft()] for one in seen]
    spans = spans or [(at, at) for at in range(len(seen))]
    return not any(
        later.precedes(first) and spans[i][1] < spans[j][0]
        for (i, first), (j, later) in itertools.combinations(enumerate(order), 2)
    )


_LINE = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+)(.*)$")
_UNFINISHED = re.compile(r"^(\d+) +(\w+)\((.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$")


@dataclass
class Witness:
    """Reads strace's output into the words of `plain`."""

    root: Path
    found: list[tuple[str, ...]] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)  # name -> an upper bound of its size
    half: dict[str, tuple[int, str]] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)  # first and last line of each

    def read(self, path: Path) -> list[tuple[str, ...]]:
        for at, line in enumerate(path.read_text().splitlines()):
            self.line(at, line)
        return self.found

    def line(self, at: int, line: str) -> None:
        begin = at
        if cut := _UNFINISHED.match(line):
            self.half[cut[1]] = at, f"{cut[1]} {cut[2]}({cut[3]}"
            return
        if rest := _RESUMED.match(line):
            begin, half = self.half.pop(rest[1])
            line = half + rest[3]
        self.whole(line)
        self.spans += [(begin, at)] * (len(self.found) - len(self.spans))

    def whole(self, line: str) -> None:
        if whole := _LINE.match(line):
            value = int(whole[4])
            if value >= 0:
                self.call(whole[2], _split(whole[3]), value, whole[5])

    def call(self, name: str, args: list[str], value: int, rest: str) -> None:
        """Take one call that succeeded."""
        if name in {"openat", "open", "openat2", "creat"}:
            self.open(" ".join(args), self.below(rest.strip()[1:-1]))
        elif "write" in name or name in {"fsync", "fdatasync", "ftruncate", "fallocate", "fchmod"}:
            self.data(name, args, value)
        elif name in {"copy_file_range", "sendfile"}:
            path = self.of(args[2 if name == "copy_file_range" else 0])
            if path is not None and value:
                self.say("write", path, size=value)
        elif name in {"sync", "syncfs"}:
            self.say("sync", "")
        else:
            self.naming(name, args)

    def say(self, kind: str, path: str, target: str = "", size: int | None = None) -> None:
        self.found.append((kind, path, target, "" if size is None else str(size)))
        if kind in {"write", "truncate"}:
            self.known[path] = size or 0

    def open(self, args: str, path: str | None) -> None:
        if path is None:
            return
        if "O_TMPFILE" in args:
            self.say("create", "")
        elif "O_CREAT" in args and path not in self.known:
            self.say("create", path)
            self.known[path] = 0
        elif "O_TRUNC" in args and self.known.get(path):
            self.say("truncate", path, size=0)

    def data(self, name: str, args: list[str], value: int) -> None:
        path = self.of(args[0])
        if path is None:
            return
        if name == "fallocate":
            self.say("write", path, size=int(args[3]))
        elif name == "ftruncate":
            self.say("truncate", path, size=int(args[1]))
        elif "write" in name:
            self.say("write", path, size=value)
        else:
            self.say(name.replace("fchmod", "chmod"), path)

    def naming(self, name: str, args: list[str]) -> None:
        at = name.endswith(("at", "at2"))
        if name in {"rename", "renameat", "renameat2", "link", "linkat"}:
            old = self.at(args[0], args[1]) if at else self.at("", args[0])
            new = self.at(args[2], args[3]) if at else self.at("", args[1])
            if new is None:
                return
            kind = "link" if name.startswith("link") else "rename"
            kind = "exchange" if "RENAME_EXCHANGE" in args[-1] else kind
            self.say(kind, "" if "/proc/" in args[1] else old or "", new)
            if kind == "rename":
                self.move(old or "", new)
            else:
                self.known.setdefault(new, 1)
            return
        if name in {"symlink", "symlinkat"}:
            path = self.at(args[1], args[2]) if at else self.at("", args[1])
        else:
            path = self.at(args[0], args[1]) if at else self.at("", args[0])
        if path is None:
            return
        kind = name.removesuffix("2").removesuffix("at") if at else name
        if "AT_REMOVEDIR" in args[-1]:
            kind = "rmdir"
        if kind in {"unlink", "rmdir"}:
            self.known.pop(path, None)
        elif kind == "mkdir":
            self.known[path] = 0
        size = int(args[1]) if kind == "truncate" else None
        renamed = {"utimens": "utime", "fchmod": "chmod"}
        self.say(renamed.get(kind, kind), path, size=size)

    def move(self, old: str, new: str) -> None:
        for name in [n for n in self.known if n == old or n.startswith(f"{old}/")]:
            self.known[new + name[len(old) :]] = self.known.pop(name)

    def of(self, descriptor: str) -> str | None:
        """Give the path that strace shows behind a descriptor."""
        return self.below(descriptor.partition("<")[2].rstrip(">").removesuffix(">(deleted)"))

    def at(self, folder: str, path: str) -> str | None:
        base = folder.partition("<")[2].rstrip(">") or str(self.root)
        if path == "NULL":
            return self.below(base)
        joined = os.path.join(base, path.strip('"'))  # noqa: PTH118  it is normalised as text
        return self.below(os.path.normpath(joined))

    def below(self, path: str) -> str | None:
        root = str(self.root)
        if path == root:
            return ""
        inside = path[len(root) + 1 :] if path.startswith(root + "/") else None
        return "" if inside is not None and inside.startswith("#") else inside


def _split(args: str) -> list[str]:
    """Split arguments at commas outside of quotes, brackets and angles."""
    found, depth, quoted, start = [], 0, False, 0
    for at, char in enumerate(args):
        if char == '"' and (at == 0 or args[at - 1] != "\\"):
            quoted = not quoted
        elif not quoted and char in "[{(<":
            depth += 1
        elif not quoted and char in "]})>":
            depth -= 1
        elif not quoted and char == "," and depth == 0:
            found.append(args[start:at].strip())
            start = at + 1
    return [*found, args[start:].strip()]
