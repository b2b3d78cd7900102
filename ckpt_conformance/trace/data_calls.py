"""Calls that write, cut, allocate, copy and sync: done by the supervisor in place of the caller.

They go through a copy of the caller's own descriptor, so that its offset, O_APPEND, O_DIRECT and
O_SYNC hold, and so that a short write is really short.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from typing import TYPE_CHECKING

from ckpt_conformance.trace import calls, limits, mapped, notify, rings
from ckpt_conformance.trace.operations import Kind
from ckpt_conformance.trace.request import AT_FDCWD, Action, Request, Result

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 1 << 20  # bytes; a write of a caller is copied in pieces that stay in the cache
# Page-aligned, as O_DIRECT asks for. Private: supervisors that are forked from one server must not
# copy through the same pages, or one child's bytes end up in another's file.
_BUFFER = mmap.mmap(-1, CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
_VIEW = memoryview(_BUFFER)
_ADDRESS = ctypes.addressof(ctypes.c_char.from_buffer(_BUFFER))
_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE, _UNSHARE, _COLLAPSE, _INSERT = 1, 2, 16, 64, 8, 32
_RWF_SYNC, _RWF_APPEND = 2 | 4, 16
_MOST = 0x7FFFF000  # bytes that one call copies at most
_VECTORS = 1024  # IOV_MAX: of one call


def _opened(request: Request, index: int) -> tuple[int, os.stat_result, int] | None:
    """Copy a descriptor of a regular file below the root: descriptor, stat, number."""
    taken = request.take(index)
    info = os.fstat(taken)
    if not stat.S_ISREG(info.st_mode):
        return None
    number = request.tree.find(info, f"/proc/self/fd/{taken}")
    if number is None:
        request.written_elsewhere = (taken, info)
        return None
    return taken, info, number


# -- writing ----------------------------------------------------------------------------------


def prepare_write(request: Request) -> Action | None:
    """write, pwrite64, writev, pwritev, pwritev2."""
    opened = _opened(request, 0)
    if opened is None:
        return None
    file, info, number = opened
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if flags & os.O_ACCMODE == os.O_RDONLY:
        return None
    pieces, offset, write_flags = _pieces(request)
    size = sum(length for _, length in pieces)
    if not size:
        return None
    path = request.tree.path(number)

    def perform(limit: int | None) -> Result:
        if flags & os.O_DIRECT and limit is not None:
            limit &= -notify.PAGE
        start = request.sink.size if request.sink else 0
        done = _copy_out(request, file, _cut(pieces, limit), offset, write_flags)
        if done is not None and done > 0:
            request.make(
                Kind.WRITE,
                object=number,
                path=path,
                parent=request.tree.parent(number),
                offset=written_at(done),
                size=done,
                data=start,
                sync=bool(flags & os.O_DSYNC or write_flags & _RWF_SYNC),
            )
        return done

    appends = bool(flags & os.O_APPEND or write_flags & _RWF_APPEND)

    def written_at(done: int) -> int:
        if offset is None:
            return os.lseek(file, 0, os.SEEK_CUR) - done
        return os.fstat(file).st_size - done if appends else offset

    begin = os.lseek(file, 0, os.SEEK_CUR) if offset is None else offset
    unit = notify.PAGE if flags & os.O_DIRECT else 1
    return Action(path, perform, number, size, info.st_size if appends else begin, unit)


def _pieces(request: Request) -> tuple[list[tuple[int, int]], int | None, int]:
    """Return (address, size) of the bytes, the offset (None: the file's own), flags of pwritev2."""
    if request.name in {"write", "pwrite64"}:
        offset = request.long(3) if request.name == "pwrite64" else None
        return [(request.word(1), request.word(2))], offset, 0
    count = request.number(2)
    if not 0 <= count <= _VECTORS:
        raise OSError(errno.EINVAL, "too many vectors")
    words = request.memory(request.word(1), f"={2 * count}Q")
    pieces = list(zip(words[::2], words[1::2], strict=True))
    offset = None if request.name == "writev" else request.long(3)
    if request.name != "pwritev2":
        return pieces, offset, 0
    return pieces, None if offset == -1 else offset, request.number(5)


def _cut(pieces: list[tuple[int, int]], limit: int | None) -> list[tuple[int, int]]:
    """Cut pieces into chunks, and to a limit in bytes."""
    chunks: list[tuple[int, int]] = []
    left = _MOST if limit is None else limit
    for address, size in pieces:
        chunks.extend(
            (address + start, min(CHUNK, size - start, left - start))
            for start in range(0, min(size, left), CHUNK)
        )
        left -= min(size, left)
    return chunks


def _copy_out(
    request: Request, file: int, chunks: list[tuple[int, int]], offset: int | None, write_flags: int
) -> int | None:
    """Copy chunks of the caller's memory to the file and into the record."""
    done = 0
    for address, size in chunks:
        try:
            got = notify.read_into(request.thread, address, _ADDRESS, size)
        except OSError:
            return done or None  # the kernel says it better
        if not done and not request.is_valid():
            return None
        try:
            with limits.as_of(request):
                at = None if offset is None else offset + done
                wrote = _write(file, _VIEW[:got], at, write_flags)
        except OSError as error:
            return done or -(error.errno or errno.EIO)
        request.sunk(_VIEW[:wrote])
        done += wrote
        if wrote < size:
            break
    return done


def _write(file: int, view: memoryview, offset: int | None, write_flags: int) -> int:
    if write_flags:
        return os.pwritev(file, [view], -1 if offset is None else offset, write_flags)
    return os.write(file, view) if offset is None else os.pwrite(file, view, offset)


# -- copying inside the kernel ----------------------------------------------------------------


def prepare_copy(request: Request) -> Action | None:
    """copy_file_range, sendfile."""
    is_range = request.name == "copy_file_range"
    opened = _opened(request, 2 if is_range else 0)
    if opened is None:
        return None
    target, _, number = opened
    source = request.take(0 if is_range else 1)
    inward, outward = (1, 3) if is_range else (2, -1)
    size = min(request.word(4 if is_range else 3), _MOST)
    path = request.tree.path(number)

    def perform(limit: int | None) -> Result:
        try:
            at = [_offset(request, index) for index in (inward, outward)]
        except OSError:
            return None  # the kernel says it better
        count = size if limit is None else limit
        try:
            with limits.as_of(request):
                if is_range:
                    done = os.copy_file_range(source, target, count, at[0], at[1])
                else:
                    done = os.sendfile(target, source, at[0], count)
        except OSError as error:
            return -(error.errno or errno.EIO)
        for index, before in zip((inward, outward), at, strict=True):
            if before is not None:
                moved = (before + done).to_bytes(8, "little", signed=True)
                with contextlib.suppress(OSError):  # it was killed meanwhile
                    notify.write_memory(request.thread, request.word(index), moved)
        if done:
            start = os.lseek(target, 0, os.SEEK_CUR) - done if at[1] is None else at[1]
            _note_copy(request, target, number, start, done)
        return done

    return Action(path, perform, number, size)


def _offset(request: Request, index: int) -> int | None:
    """Read the offset that an argument points at, if it does."""
    return (
        request.memory(request.word(index), "=q")[0] if index >= 0 and request.word(index) else None
    )


def _note_copy(request: Request, target: int, number: int, start: int, size: int) -> None:
    """Read back what the kernel copied."""
    again = request.keep(os.open(f"/proc/self/fd/{target}", os.O_RDONLY | os.O_CLOEXEC))
    data = request.sink.size if request.sink else 0
    for at in range(0, size if request.sink else 0, CHUNK):
        request.sunk(os.pread(again, min(CHUNK, size - at), start + at))
    path, parent = request.tree.path(number), request.tree.parent(number)
    fields = {"object": number, "path": path, "parent": parent}
    sync = bool(fcntl.fcntl(target, fcntl.F_GETFL) & os.O_DSYNC)
    request.make(Kind.WRITE, **fields, offset=start, size=size, data=data, sync=sync)


# -- sizes ------------------------------------------------------------------------------------


def prepare_truncate(request: Request) -> Action | None:
    """truncate, ftruncate."""
    size = request.long(1)
    if request.name == "ftruncate":
        opened = _opened(request, 0)
        if opened is None:
            return None
        target, _, number = opened
    else:
        place = request.place(AT_FDCWD, request.string(0), follow=True)
        target = request.keep(os.open(place.name, os.O_PATH | os.O_CLOEXEC, dir_fd=place.folder))
        known = request.tree.find(os.fstat(target), f"/proc/self/fd/{target}")
        if known is None:
            return None
        number = known
    path = request.tree.path(number)

    def perform(_: int | None) -> Result:
        try:
            with limits.as_of(request):
                if request.name == "ftruncate":
                    os.ftruncate(target, size)
                else:
                    os.truncate(f"/proc/self/fd/{target}", size)
        except OSError as error:
            return -(error.errno or errno.EIO)
        parent = request.tree.parent(number)
        request.make(Kind.TRUNCATE, object=number, path=path, parent=parent, size=size)
        return 0

    return Action(path, perform, number)


def prepare_fallocate(request: Request) -> Action | None:
    """fallocate: more room, a hole, or a range of zeros."""
    opened = _opened(request, 0)
    if opened is None:
        return None
    file, info, number = opened
    mode, offset, size = request.number(1), request.long(2), request.long(3)
    path = request.tree.path(number)

    def perform(_: int | None) -> Result:
        try:
            with limits.as_of(request):
                _allocate(file, mode, offset, size)
        except OSError as error:
            return -(error.errno or errno.EIO)
        if mode & (_COLLAPSE | _INSERT):
            request.cannot_object(number, "fallocate moved the bytes behind a range")
            return 0
        fields = {"object": number, "path": path, "parent": request.tree.parent(number)}
        keeps = mode & _KEEP_SIZE
        if mode & (_PUNCH_HOLE | _ZERO_RANGE):
            end = min(offset + size, info.st_size) if keeps else offset + size
            if end > offset:
                request.make(Kind.WRITE, **fields, offset=offset, size=end - offset)
        elif not keeps:
            request.make(Kind.ALLOCATE, **fields, offset=offset, size=size)
        return 0

    return Action(path, perform, number)


def _allocate(file: int, *arguments: int) -> None:
    value = notify.syscall(calls.number_of("fallocate"), file, *arguments)
    if value < 0:
        raise OSError(-value, "fallocate")


# -- syncing ----------------------------------------------------------------------------------


def prepare_sync(request: Request) -> Action | None:
    """fsync, fdatasync, sync, syncfs."""
    if request.name == "sync":
        return Action("", lambda _: _do_sync(request, os.sync, Kind.SYNC, {}))
    target = request.take(0)
    info = os.fstat(target)
    if request.name == "syncfs":
        if info.st_dev != request.tree.device:
            return None
        return Action("", lambda _: _do_sync(request, lambda: _syncfs(target), Kind.SYNC, {}))
    number = request.tree.find(info, f"/proc/self/fd/{target}")
    if number is None:
        return None
    path, parent = request.tree.path(number), request.tree.parent(number)
    kind = Kind.FSYNC if request.name == "fsync" else Kind.FDATASYNC
    real = os.fsync if kind is Kind.FSYNC else os.fdatasync
    fields: dict[str, int | str] = {"object": number, "path": path, "parent": parent}
    return Action(path, lambda _: _do_sync(request, lambda: real(target), kind, fields), number)


def _syncfs(target: int) -> None:
    value = notify.syscall(calls.number_of("syncfs"), target)
    if value < 0:
        raise OSError(-value, "syncfs")


def _do_sync(
    request: Request, work: Callable[[], None], kind: Kind, fields: dict[str, int | str]
) -> Result:
    code = 0
    try:
        work()
    except OSError as error:
        code = error.errno or errno.EIO
    request.make(kind, **fields, error=code)
    return -code


# -- mapping ----------------------------------------------------------------------------------

_MS_SYNC = 4


def prepare_mmap(request: Request) -> Action | None:
    """mmap, shared, of a file: done by the kernel; what is stored there is looked for from now on.

    Of a file that is open to read alone nothing can be stored. A mapping that can't be written yet
    may be later, by mprotect(2).
    """
    opened = _opened(request, 4)
    if opened is None:
        return None
    file, _, number = opened
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
        if request.mapped is None:
            request.tree.mapped.add(number)  # an injector has no error for a store
            return None
        why = request.mapped.mapping(number, file, request.process, request.thread)
        if why:
            request.cannot_object(number, why)
    return None


def prepare_msync(request: Request) -> Action | None:
    """msync: done by the kernel. MS_SYNC is fdatasync(2) of a range; others wait for nothing."""
    address, size, flags = request.word(0), _whole_pages(request.word(1)), request.number(2)
    parts = [
        (number, *mapping.part(address, size))
        for mapping in mapped.maps_of(request.process)
        if mapping.part(address, size)[1] > 0
        and (number := mapped.number_of(mapping, request.tree)) is not None
    ]
    if not parts:
        return None
    tree = request.tree

    def perform(_: int | None) -> Result:
        for number, offset, count in parts if flags & _MS_SYNC else ():
            place = {"object": number, "path": tree.path(number), "parent": tree.parent(number)}
            request.make(Kind.FDATASYNC, **place, offset=offset, size=count)
        return None

    number, offset, count = parts[0]
    return Action(tree.path(number), perform, number, count, offset)


def _whole_pages(size: int) -> int:
    return -(-size // notify.PAGE) * notify.PAGE


def prepare_close(request: Request) -> Action | None:
    """close, exit_group: the kernel does it."""
    if request.name == "exit_group":
        if request.process not in request.writers:
            return None
        request.writers.discard(request.process)
        request.make(Kind.CLOSE)
        return Action("")
    opened = _opened(request, 0)
    if opened is None or fcntl.fcntl(opened[0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return None
    path = request.tree.path(opened[2])
    request.make(Kind.CLOSE, object=opened[2], path=path)
    return Action(path, object=opened[2])


# -- what can't be followed, and reading ------------------------------------------------------


def prepare_foreign(request: Request) -> Action | None:
    """splice, io_submit, an io_uring, open_by_handle_at: named, done by the kernel."""
    why = calls.UNSUPPORTED[request.name]
    if request.name == "io_uring_enter":
        rings.enter(request)
    elif request.name == "io_uring_setup":
        rings.setup(request)
    elif request.name == "open_by_handle_at":
        if os.fstat(request.take(0)).st_dev == request.tree.device:
            request.cannot("", why)
    elif request.name == "io_submit":
        _foreign_submit(request, why)
    else:
        opened = _opened(request, 2)
        if opened and fcntl.fcntl(opened[0], fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            request.cannot_object(opened[2], why)
    return None


def _foreign_submit(request: Request, why: str) -> None:
    """io_submit: name the file of each control block."""
    blocks = request.memory(request.word(2), f"={request.number(1)}Q")
    for block in blocks:
        operation, _, descriptor = request.memory(block + 16, "=Hhi")
        taken = request.keep(request.processes.take(request.thread, descriptor))
        number = request.tree.find(os.fstat(taken), f"/proc/self/fd/{taken}")
        if number is not None and operation not in {0, 7}:  # PREAD, PREADV
            request.cannot_object(number, why)


def prepare_clone(request: Request) -> Action | None:
    """Handle FICLONE and its like: refused, as by a file system without them; callers copy."""
    opened = _opened(request, 0)
    if opened is None:
        return None
    if opened[2] in request.tree.outside:
        request.cannot_object(opened[2], "its bytes were cloned from another file")
        return None
    return Action(request.tree.path(opened[2]), lambda _: -errno.EOPNOTSUPP, opened[2])


def prepare_duplicate(request: Request) -> Action | None:
    """dup2, dup3, fcntl(F_DUPFD): done by the kernel; one number is the recorder's own."""
    opened = _opened(request, 0)
    if opened is not None:
        request.cannot_object(opened[2], calls.NOTES_TAKEN)
    return None


def prepare_read(request: Request) -> Action | None:
    """Reads: asked about only by an injector, done by the kernel."""
    taken = request.take(0)
    number = request.tree.find(os.fstat(taken), f"/proc/self/fd/{taken}")
    return None if number is None else Action(request.tree.path(number), None, number)


PREPARE: dict[str, Callable[[Request], Action | None]] = {
    **dict.fromkeys(("write", "pwrite64", "writev", "pwritev", "pwritev2"), prepare_write),
    **dict.fromkeys(("copy_file_range", "sendfile"), prepare_copy),
    **dict.fromkeys(("truncate", "ftruncate"), prepare_truncate),
    "fallocate": prepare_fallocate,
    **dict.fromkeys(("fsync", "fdatasync", "sync", "syncfs"), prepare_sync),
    "mmap": prepare_mmap,
    "msync": prepare_msync,
    **dict.fromkeys(calls.UNSUPPORTED, prepare_foreign),
    "ioctl": prepare_clone,
    **dict.fromkeys(("dup2", "dup3", "fcntl"), prepare_duplicate),
    **dict.fromkeys(calls.READING, prepare_read),
    **dict.fromkeys(calls.CLOSING, prepare_close),
}
