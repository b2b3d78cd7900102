"""Takes what a process opens from the audit events of Python (PEP 578), and notes it.

A note is written before the event goes on: so a SIGKILL loses nothing. Nothing that goes wrong here
may reach who caused the event; where a note is lost, that is noted.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import mmap
import os
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from ckpt_conformance.contract import installed
from ckpt_conformance.contract.file_kinds import kinds_of
from ckpt_conformance.harness import bytecode
from ckpt_conformance.harness.made import Made
from ckpt_conformance.harness.opened import LOST, STAMPED, stamp_of
from ckpt_conformance.harness.own_places import OwnPlaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from _typeshed import StrOrBytesPath

# Bound now: injectors of faults replace these functions later.
_open, _write, _close = os.open, os.write, os.close
IMPORTS = "<frozen importlib._bootstrap_external>"
WRITES = os.O_WRONLY | os.O_RDWR
MOST_MOVED = 2000  # files of a folder that is moved; of a larger one nothing is kept
# What needs a file or a folder to be there, and says so if it is not.
ON_A_PATH = (
    *("os.chmod", "os.chown", "os.utime", "os.chdir", "os.listxattr", "os.getxattr"),
    *("os.setxattr", "os.removexattr"),
)
BYTECODE = tuple(importlib.machinery.BYTECODE_SUFFIXES)


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
        self.made = Made()
        self.busy = threading.local()
        self.is_paused = False
        self.of_folders = "folder"  # the kind of a note that a folder was listed
        self.handlers: Mapping[str, Callable[..., None]] = {
            "open": self._opens,
            "import": self._imports,
            "os.listdir": self._lists,
            "os.scandir": self._lists,
            "os.link": self._links,
            "os.symlink": self._links_by_name,
            "os.rename": self._renames,
            "os.remove": self._removes,
            "os.rmdir": self._removes_folder,
            "os.mkdir": self._makes_a_folder,
            "os.truncate": self._cuts,
            **dict.fromkeys(ON_A_PATH, self._acts_on),
            "ctypes.dlopen": self._loads,
            "subprocess.Popen": self.starts,
            "os.system": self.starts_by_shell,
            "os.exec": self.starts,
            "os.posix_spawn": self.starts,
            "sqlite3.connect": self._opens_database,
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

    def asks(self, path: object, folder: int | None, kind: str) -> None:
        """Take a question about a path that opens nothing; `folder`: what it is relative to."""
        self._guarded(self._asks, (path, -1 if folder is None else folder, kind))

    def lose(self, what: str) -> None:
        """Take that something could not be seen, and what."""
        self._guarded(self._note, ("unseen", what))

    def looks_for(self, name: str, places: Iterable[object]) -> None:
        """Take that a module is looked for; a folder without code would be one, too (PEP 420)."""
        self._guarded(self._looks_for, (name, places))

    def _looks_for(self, name: str, places: Iterable[object]) -> None:
        for place in places:
            if isinstance(place, str):
                folder = _absolute(place or ".")
                if not installed.has_version(folder):
                    self._note_file(f"{folder}/{name}", "exists")

    def _guarded(self, handler: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.is_paused or getattr(self.busy, "now", False):  # its own open
            return
        self.busy.now = True
        try:
            handler(*arguments)
        except Exception:  # noqa: BLE001  of a full disk, a limit of memory, or an odd argument
            self.lost[0] = 1
        finally:
            self.busy.now = False

    def _opens(self, path: object, _mode: object, flags: int) -> None:
        if not _is_path(path) or flags & os.O_TMPFILE == os.O_TMPFILE:
            return  # a descriptor, or a file without a name
        name = _absolute(path)
        if self.made.holds(name):
            return
        if flags & WRITES:
            self._opens_to_write(name, flags)
        else:
            self._note_file(name)

    def _opens_to_write(self, name: str, flags: int) -> None:
        """Note what comes of it: whether the file was there, what was in it, or neither."""
        is_alone = bool(flags & os.O_CREAT and flags & os.O_EXCL)  # refused where there is one
        is_made = flags & os.O_CREAT and not kinds_of(name)
        if is_alone or flags & (os.O_TRUNC | os.O_CREAT) == os.O_TRUNC:
            self._note_file(name, "exists")
        elif not flags & os.O_TRUNC:
            self._note_file(name, "file" if flags & os.O_RDWR else "written")
        if flags & os.O_TRUNC or (is_made and (is_alone or flags & os.O_RDWR)):
            self.made.add(name)

    def _opens_database(self, path: object) -> None:
        """Take the files of a database of SQLite, which opens them by itself."""
        name = _database(path) if _is_path(path) else ""
        if not name or self.made.holds(name):
            return
        files = [f"{name}{ending}" for ending in ("", "-wal", "-journal")]
        is_new = not kinds_of(name)
        for file in files:
            self._note_file(file, "exists" if is_new else "file")
            if is_new:
                self.made.add(file)

    def _asks(self, path: object, folder: int, kind: str) -> None:
        if _is_path(path):
            self._note_of_others(_absolute(path, folder), kind)

    def _links(self, source: object, target: object, *folders: int) -> None:
        """Take that a file gets another name, by which it may be read."""
        self._renames(source, target, *folders, is_kept=True)

    def _links_by_name(self, _source: object, target: object, folder: int = -1) -> None:
        if _is_path(target):
            self._note_entry(name := _absolute(target, folder))
            self.made.forget(name)

    def _renames(
        self, source: object, target: object, *folders: int, is_kept: bool = False
    ) -> None:
        if not (_is_path(source) and _is_path(target)):
            return
        source_in, target_in = (*folders, -1, -1)[:2]
        before, after = _absolute(source, source_in), _absolute(target, target_in)
        is_own = self.made.holds_entry(before) or not self.places.seen_as(before)
        if not is_own:
            self._note_all_of(before)
            self.made.forget(after)
        elif is_kept:
            self.made.add_entry(after)
        else:
            self.made.move(before, after)

    def _note_all_of(self, name: str) -> None:
        """Note a file, or all that is in a folder: what is read later may be read at its new place.

        There it may lie in a folder that this process has made, and looks like its own.
        """
        self._note_file(name)
        if os.path.islink(name):  # noqa: PTH114  what it leads to stays where it is
            return
        number = 0
        for folder, _, files in os.walk(name):
            self._note_file(folder, "folder")
            for file in files:
                self._note_file(f"{folder}/{file}")
            number += len(files)
            if number > MOST_MOVED:
                self._note("unseen", f"it moves {name}, with more than {MOST_MOVED:,} files")
                return

    def _removes(self, path: object, folder: int = -1) -> None:
        if _is_path(path):
            self._note_entry(name := _absolute(path, folder))
            self.made.forget(name)

    def _removes_folder(self, path: object, folder: int = -1) -> None:
        """Take that a folder is removed, which needs it to be empty."""
        if _is_path(path) and not self.made.holds_entry(name := _absolute(path, folder)):
            self._note_file(name, "folder")
        self._removes(path, folder)

    def _makes_a_folder(self, path: object, _mode: object, folder: int = -1) -> None:
        if _is_path(path):
            name = _absolute(path, folder)
            is_new = not kinds_of(name)
            self._note_entry(name)
            if is_new:
                self.made.add_entry(name)

    def _cuts(self, path: object, _length: object) -> None:
        if _is_path(path):
            self._note_of_others(_absolute(path), "written")

    def _acts_on(self, path: object, *_: object) -> None:
        if _is_path(path):
            self._note_of_others(_absolute(path), "exists")

    def _note_entry(self, name: str) -> None:
        """Note whether something is there, where that is not of this process."""
        if not self.made.holds_entry(name):
            self._note_file(name, "exists")

    def _imports(self, _module: str, file: object, *_: object) -> None:
        if isinstance(file, str):
            self._note_file(_absolute(file))

    def _lists(self, path: object) -> None:
        # Whose call it is stands behind _guarded and hook.
        caller = sys._getframe(3)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        kind = "modules" if caller.f_code.co_filename == IMPORTS else self.of_folders
        if isinstance(path, int):
            self._note_of_others(_folder(path), kind)
        elif path is None or _is_path(path):
            self._note_of_others(_absolute(path or "."), kind)

    def _note_of_others(self, name: str, kind: str) -> None:
        """Note what this process has not made itself."""
        if not self.made.holds(name):
            self._note_file(name, kind)

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
        is_folder = kind == "file" and os.path.isdir(seen)  # noqa: PTH112
        self._note("exists" if is_folder else kind, seen)

    def _note(self, kind: str, name: str) -> None:
        if (kind, name) in self.seen:
            return
        self.seen.add((kind, name))
        if kind in STAMPED and not _is_text(name):
            kind, name = "unseen", f"it opens {name!a}, a name that is no UTF-8"
        stamp = STAMPED[kind](name) if kind in STAMPED else ()
        line = json.dumps({"kind": kind, "name": name, "stamp": stamp}).encode() + b"\n"
        descriptor = _open(self.log, self.flags, 0o600)
        try:
            if _write(descriptor, line) != len(line):
                self.lost[0] = 1
        finally:
            _close(descriptor)


def _is_text(name: str) -> bool:
    """Return whether a name can be written down, and read again."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_path(value: object) -> TypeGuard[StrOrBytesPath]:
    """Return whether a value names a file, and is no descriptor."""
    return isinstance(value, str | bytes | os.PathLike)


def _database(path: StrOrBytesPath) -> str:
    """Return the file of a database of SQLite, by its path or URI; "" for one in memory."""
    name = os.fsdecode(path)
    if name.startswith("file:"):
        uri = urllib.parse.urlsplit(name)
        name = "" if "mode=memory" in uri.query else urllib.parse.unquote(uri.path)
    return "" if name in {"", ":memory:"} else _absolute(name)


def _absolute(path: StrOrBytesPath, folder: int = -1) -> str:
    """Return a path from the root; `folder` is a descriptor that it is relative to, -1 for none.

    Links in it stay, and what leads up from one: `link/..` is above what the link leads to.
    """
    name = os.fsdecode(path)
    if not name.startswith("/"):
        name = f"{_folder(folder) if folder >= 0 else os.getcwd()}/{name}"  # noqa: PTH109
    parts = [part for part in name.split("/") if part not in {"", "."}]
    return f"/{'/'.join(parts)}"


def _folder(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115


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
