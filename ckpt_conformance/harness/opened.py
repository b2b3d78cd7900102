"""What a run opens: files that it reads, folders that it lists, variables, programs that it starts.

The fork server and each child of a session that keeps results install an audit hook (PEP 578). It
notes each name once, in a file of the adapter's own, before the event goes on: so a SIGKILL loses
nothing. `read` gives what was noted until now. A note says, too, what a file was when it was first
seen, so that one that changed since is told from one that did not.

What is not seen: files that C code opens by itself, beyond libraries; `os.stat`; files that are
opened relative to a descriptor; and whatever a program does that was started, so it is named.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import msgspec

from ckpt_conformance.harness import bytecode
from ckpt_conformance.harness.own_places import OwnPlaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from _typeshed import StrOrBytesPath

FOLDER = "opened"  # in that of the server
LOST = "lost"  # a byte: whether a note could not be written
BEGUN = "begun"  # a file that is as old as the server
EVERYBODY = "all"  # notes of the server itself, which every child begins with
VARIABLE = "CKC_OPENED"  # for a child that becomes a new interpreter: its notes
# Bound now: injectors of faults replace these functions later.
_open, _write, _close, _stat = os.open, os.write, os.close, os.stat
Stamp = tuple[int, ...]  # of a file: device, inode, size, times; empty if there is none
STAMPED = {"file", "folder"}
IMPORTS = "<frozen importlib._bootstrap_external>"
WRITES = os.O_WRONLY | os.O_RDWR
BYTECODE = tuple(importlib.machinery.BYTECODE_SUFFIXES)


class Note(msgspec.Struct, frozen=True):
    """One name that was seen; `kind`: file, folder, modules, variable(s), program, address, stale.

    `modules` is a folder that an import has looked into, `variables` are the names of all, `stale`
    is compiled code that is not of its source.
    """

    kind: str
    name: str
    stamp: Stamp = ()


class Opened(msgspec.Struct, frozen=True):
    """All that was noted for an adapter; `is_whole` is False where a note was lost.

    `begun` is when the server was started, in ns as `stat` has it.
    """

    notes: tuple[Note, ...] = ()
    is_whole: bool = True
    begun: int = 0


def stamp_of(path: str) -> Stamp:
    """Return what tells one content of a file from another one; empty if it is not there."""
    try:
        found = _stat(path)
    except (OSError, ValueError):
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read(server: Path, adapter: str) -> Opened:
    """Return what children of an adapter, and the server in this folder, have opened so far."""
    folder = server / FOLDER
    try:
        is_whole = (folder / LOST).read_bytes() == b"\0"
        texts = [path.read_bytes() for path in _logs(folder, adapter) if path.exists()]
        lines = {line for text in texts for line in text.splitlines()}  # children repeat each other
        notes = tuple(msgspec.json.decode(line, type=Note) for line in sorted(lines))
        begun = (folder / BEGUN).stat().st_ctime_ns
    except (OSError, msgspec.DecodeError):
        return Opened(is_whole=False)
    return Opened(notes, is_whole, begun)


def prepare(server: Path) -> None:
    """Make the folder of the notes, before the server starts."""
    folder = server / FOLDER
    folder.mkdir()
    (folder / LOST).write_bytes(b"\0")
    (folder / BEGUN).touch()


def _logs(folder: Path, adapter: str) -> tuple[Path, Path]:
    named = hashlib.blake2b(adapter.encode(), digest_size=8).hexdigest()
    return folder / EVERYBODY, folder / named


class Recorder:
    """Takes the events of one process and of its forks."""

    def __init__(self, folder: Path, log: Path) -> None:
        """Note into a file below a folder of `prepare`."""
        self.folder, self.log = folder, str(log)
        self.flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with (folder / LOST).open("r+b") as file:
            self.lost = mmap.mmap(file.fileno(), 1)
        self.places = OwnPlaces(folder.parent)
        self.seen: set[tuple[str, str]] = set()
        self.made: set[str] = set()  # files that this process wrote: what it reads there is its own
        self.busy = threading.local()
        self.handlers: Mapping[str, Callable[..., None]] = {
            "open": self._opens,
            "import": self._imports,
            "os.listdir": self._lists,
            "os.link": self._opens_again,
            "os.scandir": self._lists,
            "ctypes.dlopen": self._loads,
            "subprocess.Popen": self.starts,
            "os.system": self.starts_by_shell,
            "os.exec": self.starts,
            "os.posix_spawn": self.starts,
            "socket.connect": self._connects,
            "socket.sendto": self._connects,
        }

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an audit event; nothing that goes wrong here may reach who caused it."""
        handler = self.handlers.get(event)
        if handler is not None:
            self._guarded(handler, arguments)

    def looks_up(self, name: object) -> None:
        """Take the name of a variable of the environment."""
        if isinstance(name, str | bytes):  # of `os.environ`, of `os.environb`
            self._guarded(self._note, ("variable", os.fsdecode(name)))

    def looks_through(self) -> None:
        """Take that the names of all variables are asked for."""
        self._guarded(self._note, ("variables", ""))

    def _guarded(self, handler: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if getattr(self.busy, "now", False):  # its own open
            return
        self.busy.now = True
        try:
            handler(*arguments)
        except Exception:  # noqa: BLE001  of a full disk, a limit of memory, or an odd argument
            self.lost[0] = 1
        finally:
            self.busy.now = False

    def _opens(self, path: object, _mode: object, flags: int) -> None:
        if not _is_path(path):
            return  # a descriptor
        name = _absolute(path)
        is_new = flags & os.O_TRUNC or (flags & os.O_CREAT and not stamp_of(name))
        if is_new and flags & WRITES:
            self.made.add(name)
        elif flags & os.O_ACCMODE != os.O_WRONLY and name not in self.made:
            self._note_file(name)

    def _opens_again(self, path: object, *_: object) -> None:
        """Take that a file gets another name, by which it may be read."""
        if _is_path(path) and _absolute(path) not in self.made:
            self._note_file(_absolute(path))

    def _imports(self, _module: str, file: object, *_: object) -> None:
        if isinstance(file, str):
            self._note_file(_absolute(file))

    def _lists(self, path: object) -> None:
        # Whose call it is stands behind _guarded and hook.
        caller = sys._getframe(3)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        kind = "modules" if caller.f_code.co_filename == IMPORTS else "folder"
        if isinstance(path, int):
            self._note_file(os.readlink(f"/proc/self/fd/{path}"), kind)  # noqa: PTH115
        elif path is None or _is_path(path):
            self._note_file(_absolute(path or "."), kind)

    def _loads(self, name: object) -> None:
        if not _is_path(name):
            return  # the program itself
        found = os.fsdecode(name)
        for path in [_absolute(name)] if "/" in found else _libraries(found):
            self._note_file(path)

    def _connects(self, _socket: object, address: object) -> None:
        if isinstance(address, tuple):
            parts = cast("tuple[object, ...]", address)
            self._note("address", ":".join(map(str, parts[:2])))
        elif isinstance(address, str | bytes) and self.places.seen_as(_absolute(address)):
            self._note("address", os.fsdecode(address))

    def starts(self, program: Any, *_: object) -> None:  # noqa: ANN401  as the caller has it
        """Note a program that is started."""
        if isinstance(program, list | tuple):
            words = cast("Sequence[Any]", program)
            program = words[0] if words else ""
        if program is not None:
            self._note("program", os.fsdecode(program))

    def starts_by_shell(self, command: str | bytes) -> None:
        """Note a command of the shell by its first word."""
        self._note("program", os.fsdecode(command).partition(" ")[0])

    def _note_file(self, name: str, kind: str = "file") -> None:
        opened, name = name, _source_of(name) if name.endswith(BYTECODE) else name
        if not (seen := self.places.seen_as(name)):
            return
        if opened != name and bytecode.is_stale(opened, name):
            self._note("stale", opened)
        self._note(kind, seen)

    def _note(self, kind: str, name: str) -> None:
        if (kind, name) in self.seen:
            return
        self.seen.add((kind, name))
        stamp = stamp_of(name) if kind in STAMPED else ()
        line = json.dumps({"kind": kind, "name": name, "stamp": stamp}).encode() + b"\n"
        descriptor = _open(self.log, self.flags, 0o600)
        try:
            if _write(descriptor, line) != len(line):
                self.lost[0] = 1
        finally:
            _close(descriptor)


def _is_path(value: object) -> TypeGuard[StrOrBytesPath]:
    """Return whether a value names a file, and is no descriptor."""
    return isinstance(value, str | bytes | os.PathLike)


def _absolute(path: StrOrBytesPath) -> str:
    """Return a path from the root; links in it stay."""
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100


def _libraries(name: str) -> Iterator[str]:
    """Give where the loader looks for a library without a path, until it is there."""
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        path = _absolute(Path(folder, name))
        yield path
        if stamp_of(path):
            return


def _source_of(name: str) -> str:
    """Return the source that compiled code of a cache stands for, if that is there.

    The cache is a `__pycache__`, or a folder that PYTHONPYCACHEPREFIX names.
    """
    try:
        source = importlib.util.source_from_cache(name)
    except ValueError:
        return name
    return source if stamp_of(source) else name


_recorder: list[Recorder] = []  # of this process: a hook is never removed


def install(server: Path) -> None:
    """Take the events of this process, which is the server, and of what it forks."""
    folder = server / FOLDER
    _install(Recorder(folder, folder / EVERYBODY))


def begin(adapter: str, root: str) -> None:
    """Note for one adapter from here on, in a child whose manager works below `root`.

    Nothing happens without a hook.
    """
    for recorder in _recorder:
        recorder.places.add_root(root)
        recorder.log = str(_logs(recorder.folder, adapter)[1])


def hand_over() -> None:
    """Let the interpreter that this process becomes take its notes; nothing without a hook."""
    for recorder in _recorder:
        os.environ[VARIABLE] = recorder.log
        recorder.handlers = {}  # the program that is started is our own


def take_over() -> None:
    """Go on with the notes of the process that became this one, if there was a hook."""
    log = os.environ.pop(VARIABLE, "")
    if log:
        _install(Recorder(Path(log).parent, Path(log)))


def _install(recorder: Recorder) -> None:
    _recorder.append(recorder)
    sys.addaudithook(recorder.hook)
    kind: Any = type(os.environ)
    look_up = kind.__getitem__

    @functools.wraps(look_up)
    def noted(self: object, key: object) -> object:
        recorder.looks_up(key)
        return look_up(self, key)

    kind.__getitem__ = noted
    _watch_names(recorder, kind)
    _watch_interpreters(recorder)


def _watch_names(recorder: Recorder, kind: Any) -> None:  # noqa: ANN401  os._Environ
    """Note who asks for the names of all variables: to copy them, or to find some by a prefix."""
    for name in ("__iter__", "__len__"):
        ask = getattr(kind, name)

        def noted(self: object, ask: Callable[[object], object] = ask) -> object:
            recorder.looks_through()
            return ask(self)

        setattr(kind, name, functools.wraps(ask)(noted))


def _watch_interpreters(recorder: Recorder) -> None:
    """Note the interpreters that multiprocessing starts: no event tells of these."""
    from multiprocessing import util

    tools: Any = util
    start = tools.spawnv_passfds

    @functools.wraps(start)
    def noted(path: bytes, arguments: list[Any], descriptors: list[int]) -> int:
        if not any("resource_tracker" in os.fsdecode(word) for word in arguments):
            recorder.starts(path)
        return int(start(path, arguments, descriptors))

    tools.spawnv_passfds = noted
