"""The fallback recorder: Python's own entry points are replaced in the process that saves.

For machines without seccomp user notification. It sees `open`, `os` and `torch.save`, of one
process, and nothing of writers in C++ or Rust: a file whose size is not the one that it saw
written is named as unsupported, and the recording says `recorder="patched"`.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import stat
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.trace import control, events, sources
from ckpt_conformance.trace.operations import (
    ENTRY_POINTS,
    Kind,
    Operation,
    Recording,
    Unsupported,
)
from ckpt_conformance.trace.request import Sink
from ckpt_conformance.trace.tracked import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

UNSEEN = "its bytes did not come through Python's own calls"
STACK = 30  # frames that are looked at for the manager's line
_SYNC = os.O_SYNC | os.O_DSYNC


class PatchedRecorder:
    """Records this process below `root` between `install` and `finish`."""

    def __init__(self, root: Path, folder: Path, journal: Path | None = None) -> None:
        """Copy what is there into `folder`, which is made."""
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        trees.copy(root, folder / "initial")
        self.tree, self.folder, self.sink = Tree(root), folder, Sink(folder / "data")
        self.operations: list[Operation] = []
        self.unsupported: list[Unsupported] = []
        held = journal.stat() if journal is not None else None
        self.journal = (held.st_dev, held.st_ino) if held is not None else None
        self.sizes = {e.object: e.size for e in self.tree.initial if e.kind == "file"}
        self._undo: list[tuple[Any, str, Any]] = []
        self.lock = threading.RLock()  # one call at a time: their order is what we saw

    # -- installing ---------------------------------------------------------------------------

    def install(self) -> None:
        """Replace the entry points."""
        self._patch(io, "open", self._open_file)
        self._patch(builtins, "open", io.open)
        self._patch(shutil, "_USE_CP_SENDFILE", new=False)  # it copies by read and write then
        for name in ("rename", "replace", "link", "symlink", "mkdir", "rmdir", "unlink", "remove"):
            self._wrap(os, name, getattr(self, f"_{name}"))
        for name in ("open", "write", "pwrite", "fsync", "fdatasync", "truncate", "ftruncate"):
            self._wrap(os, name, getattr(self, f"_{name}"))
        if "torch" in sys.modules:
            self._wrap(sys.modules["torch"], "save", self._torch_save)

    def finish(self) -> Recording:
        """Put everything back; check what was not seen; write the recording and return it."""
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)
        recording = self.write()
        named = {call.path for call in recording.unsupported}
        wrong = control.differing(recording, self.tree)  # a store into a mapping, among others
        self.unsupported += [call for call in wrong if call.path not in named]
        return self.write()

    def write(self) -> Recording:
        """Write the recording as it is now."""
        recording = Recording(
            self.tree.root,
            self.folder,
            self.tree.initial,
            self.operations,
            [*self.unsupported, *self._unseen()],
            ENTRY_POINTS,
        )
        recording.save()
        return recording

    def _unseen(self) -> list[Unsupported]:
        """Name files with another size than was seen."""
        unseen: list[Unsupported] = []
        for base, _, names in os.walk(self.tree.root):
            for name in names:
                info = os.lstat(f"{base}/{name}")
                number = self.tree.numbers.get((info.st_dev, info.st_ino), 0)
                if stat.S_ISREG(info.st_mode) and self.sizes.get(number) != info.st_size:
                    path = os.path.relpath(f"{base}/{name}", self.tree.root)
                    unseen.append(Unsupported("unknown", path, UNSEEN))
        return unseen

    def _patch(self, owner: object, name: str, new: object) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _wrap(self, owner: object, name: str, ours: Callable[..., Any]) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def called(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the real one
            with self.lock:
                return ours(real, *args, **kwargs)

        self._patch(owner, name, called)

    # -- noting -------------------------------------------------------------------------------

    def note(self, kind: Kind, **fields: Any) -> None:  # noqa: ANN401  of Operation
        """Append one operation."""
        index = len(self.operations)
        stack = reversed(traceback.extract_stack(limit=STACK))
        source = sources.choose([(f.filename, str(f.lineno), f.name) for f in stack])
        self.operations.append(
            Operation(
                index,
                kind,
                source="" if kind is Kind.MARK else source,
                begin=2 * index + 1,
                end=2 * index + 2,
                process=os.getpid(),
                thread=threading.get_native_id(),
                **fields,
            )
        )

    def mark(self, event: str, step: int) -> None:
        """Note an event of the journal, and write what is known until now."""
        self.note(Kind.MARK, mark=event, step=step)
        self.write()

    def _place(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:  # noqa: ANN401
        """Return the number of a path's directory and the name in it; None outside of the root."""
        text = os.fsdecode(path).rstrip("/")
        head, _, name = text.rpartition("/")
        folder = head or ("/" if text != name else ".")
        info = os.stat(folder, dir_fd=dir_fd)
        number = self.tree.find(info)
        return None if number is None or not name else (number, name)

    def _note_on(self, kind: Kind, number: int, **fields: Any) -> None:  # noqa: ANN401  of Operation
        """Append one operation on an object, by the name that it has now."""
        path, parent = self.tree.path(number), self.tree.parent(number)
        self.note(kind, object=number, path=path, parent=parent, **fields)

    def _number(self, file: int) -> int | None:
        info = os.fstat(file)
        kinds = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
        return self.tree.find(info) if kinds else None

    # -- files --------------------------------------------------------------------------------

    def _open(self, real: Any, path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:  # noqa: ANN401
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        place = self._place(os.path.realpath(path), kwargs.get("dir_fd")) if writes else None
        before = self.tree.at(*place) if place else 0
        file: int = real(path, flags, mode, **kwargs)
        if place is None:
            return file
        info = os.fstat(file)
        if not before:
            number = self.tree.add(info, *place)
            self.sizes[number] = 0
            self._note_on(Kind.CREATE, number, mode=stat.S_IMODE(info.st_mode))
        elif flags & os.O_TRUNC and self.sizes.get(before):
            self.sizes[before] = 0
            self._note_on(Kind.TRUNCATE, before)
        return file

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Open in Python: the lowest layer is one that writes by `os.write`."""
        real = self._undo[0][2]  # io.open
        if not set(mode) & set("wax+"):
            return real(file, mode, *args, **kwargs)
        opener = kwargs.pop("opener", None) or _opener
        binary = mode.replace("t", "").replace("b", "")
        raw = _Raw(file, binary, kwargs.get("closefd", True), None if _is_fd(file) else opener)
        buffering = args[0] if args else kwargs.get("buffering", -1)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return buffered
        text = {k: v for k, v in kwargs.items() if k in {"encoding", "errors", "newline"}}
        return io.TextIOWrapper(buffered, line_buffering=buffering == 1, **text)

    def _write(self, real: Any, file: int, data: Any) -> int:  # noqa: ANN401
        number, done = self._number(file), int(real(file, data))
        if number is not None and done:
            self._note_write(number, file, os.lseek(file, 0, os.SEEK_CUR) - done, data, done)
        elif self.journal is not None:
            info = os.fstat(file)
            if (info.st_dev, info.st_ino) == self.journal:
                self._read_event(bytes(data))
        return done

    def _read_event(self, line: bytes) -> None:
        """Note what a child wrote into its journal."""
        event = events.decode(line)
        if isinstance(event, events.Marked):
            self.mark(event.event, event.step)

    def _pwrite(self, real: Any, file: int, data: Any, offset: int) -> int:  # noqa: ANN401
        number, done = self._number(file), int(real(file, data, offset))
        if number is not None and done:
            self._note_write(number, file, offset, data, done)
        return done

    def _note_write(self, number: int, file: int, offset: int, data: Any, size: int) -> None:  # noqa: ANN401
        import fcntl

        at = self.sink.append(memoryview(data).cast("B")[:size])
        self.sizes[number] = max(self.sizes.get(number, 0), offset + size)
        sync = bool(fcntl.fcntl(file, fcntl.F_GETFL) & _SYNC)
        self._note_on(Kind.WRITE, number, offset=offset, size=size, data=at, sync=sync)

    def _ftruncate(self, real: Any, file: int, size: int) -> None:  # noqa: ANN401
        real(file, size)
        if (number := self._number(file)) is not None:
            self.sizes[number] = size
            self._note_on(Kind.TRUNCATE, number, size=size)

    def _truncate(self, real: Any, path: Any, size: int) -> None:  # noqa: ANN401
        real(path, size)
        if (number := self.tree.find(Path(path).stat())) is not None:
            self.sizes[number] = size
            self._note_on(Kind.TRUNCATE, number, size=size)

    def _fsync(self, real: Any, file: Any, kind: Kind = Kind.FSYNC) -> None:  # noqa: ANN401
        number = self._number(file if isinstance(file, int) else file.fileno())
        code = 0
        try:
            real(file)
        except OSError as error:
            code = error.errno or 0
            raise
        finally:
            if number is not None:
                self._note_on(kind, number, error=code)

    def _fdatasync(self, real: Any, file: Any) -> None:  # noqa: ANN401
        self._fsync(real, file, Kind.FDATASYNC)

    def _torch_save(self, real: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        if not isinstance(f, str | os.PathLike):
            real(obj, f, *args, **kwargs)
            return
        with self._open_file(f, "wb") as file:
            real(obj, file, *args, **kwargs)

    # -- names --------------------------------------------------------------------------------

    def _note_new(self, kind: Kind, path: Any, dir_fd: int | None, target: str = "") -> None:  # noqa: ANN401
        place = self._place(path, dir_fd)
        if place is not None:
            number = self.tree.add(os.stat(path, dir_fd=dir_fd, follow_symlinks=False), *place)
            self._note_on(kind, number, target=target)

    def _mkdir(self, real: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:  # noqa: ANN401
        real(path, mode, dir_fd=dir_fd)
        self._note_new(Kind.MKDIR, path, dir_fd)

    def _symlink(self, real: Any, src: Any, dst: Any, **kwargs: Any) -> None:  # noqa: ANN401
        real(src, dst, **kwargs)
        self._note_new(Kind.SYMLINK, dst, kwargs.get("dir_fd"), os.fsdecode(src))

    def _unlink(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:  # noqa: ANN401
        self._remove_name(Kind.UNLINK, real, path, dir_fd)

    _remove = _unlink

    def _rmdir(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:  # noqa: ANN401
        self._remove_name(Kind.RMDIR, real, path, dir_fd)

    def _remove_name(self, kind: Kind, real: Any, path: Any, dir_fd: int | None) -> None:  # noqa: ANN401
        place = self._place(path, dir_fd)
        real(path, dir_fd=dir_fd)
        if place is not None and (number := self.tree.at(*place)):
            path = self.tree.join(*place)
            self.tree.unname(*place)
            self.note(kind, object=number, path=path, parent=place[0])

    def _rename(self, real: Any, src: Any, dst: Any, **kwargs: Any) -> None:  # noqa: ANN401
        old = self._place(src, kwargs.get("src_dir_fd"))
        new = self._place(dst, kwargs.get("dst_dir_fd"))
        real(src, dst, **kwargs)
        if old is None and new is None:
            return
        if old is None or new is None:
            path = self.tree.join(*(old or new or (0, "")))
            self.unsupported.append(Unsupported("rename", path, "across the directory's border"))
            return
        path, target = self.tree.join(*old), self.tree.join(*new)
        number, replaced = self.tree.unname(*old), self.tree.unname(*new)
        self.tree.name(number, *new)
        self.note(
            Kind.RENAME,
            object=number,
            replaced=replaced,
            path=path,
            target=target,
            parent=old[0],
            new_parent=new[0],
        )

    _replace = _rename

    def _link(self, real: Any, src: Any, dst: Any, **kwargs: Any) -> None:  # noqa: ANN401
        real(src, dst, **kwargs)
        new = self._place(dst, kwargs.get("dst_dir_fd"))
        number = self.tree.find(Path(dst).lstat()) if new else None
        if new is not None and number is not None:
            path, parent = self.tree.path(number), self.tree.parent(number)
            self.tree.name(number, *new)
            self.note(
                Kind.LINK,
                object=number,
                path=path,
                parent=parent,
                target=self.tree.join(*new),
                new_parent=new[0],
            )


class _Raw(io.FileIO):
    """A file that writes by `os.write`, which is recorded."""

    def __init__(self, file: Any, mode: str, closefd: bool, opener: Any) -> None:  # noqa: ANN401, FBT001
        super().__init__(file, mode, closefd, opener)
        self.name = file

    def write(self, data: Any) -> int:  # noqa: ANN401
        return os.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        wanted = self.tell() if size is None else size
        os.ftruncate(self.fileno(), wanted)
        return wanted


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o666)


def _is_fd(file: object) -> bool:
    return isinstance(file, int)
