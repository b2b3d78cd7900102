"""Calls that open, make, move, link and remove: done by the supervisor in place of the caller.

Each function prepares: it finds out what the call is about and returns an Action, or None for one
that is not about the directory.

A file or a directory that was made elsewhere on the same disk is followed from its creation, as one
that has no name yet, and so is what is made in such a directory; a rename or a link gives it one.
Of anything else that comes from outside the content is not known: it is named, and the verdict is
UNKNOWN.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from ckpt_conformance.trace import calls, notify
from ckpt_conformance.trace.operations import Kind
from ckpt_conformance.trace.request import (
    AT_EMPTY_PATH,
    AT_FDCWD,
    AT_REMOVEDIR,
    AT_SYMLINK_FOLLOW,
    AT_SYMLINK_NOFOLLOW,
    Action,
    NewDescriptor,
    Place,
    Request,
    Result,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.trace.tracked import Tree

_TMPFILE = os.O_TMPFILE & ~os.O_DIRECTORY if hasattr(os, "O_TMPFILE") else 0
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
ITSELF = "the directory itself was removed or renamed"
NOREPLACE, EXCHANGE = 1, 2  # flags of renameat2
MOVED_IN = "it was moved or linked in from outside of the directory, with content that was not seen"
FOLDER_MOVED_IN = (
    "a directory was moved in that was made before the recording, or on another disk, and what is "
    "in it was not seen; make it in the save, on the disk of the manager's directory"
)
MOVED_OUT = "a directory was moved out of the directory"


def call_at(name: str, *arguments: object) -> int:
    """Make a system call by its name; return its value, or minus the errno."""
    return notify.syscall(calls.number_of(name), *arguments)


# -- opening ----------------------------------------------------------------------------------


def prepare_open(request: Request) -> Action | None:
    """open, creat, openat, openat2."""
    if request.name == "openat2":
        flags, mode, _ = request.memory(request.word(2), "=QQQ")
        return _open(request, request.number(0), request.string(1), flags, mode)
    if request.name == "openat":
        return _open(
            request, request.number(0), request.string(1), request.number(2), request.number(3)
        )
    if request.name == "creat":
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        return _open(request, AT_FDCWD, request.string(0), flags, request.number(1))
    return _open(request, AT_FDCWD, request.string(0), request.number(1), request.number(2))


def _open(request: Request, dirfd: int, path: bytes, flags: int, mode: int) -> Action | None:
    if flags & os.O_PATH:
        return None
    exclusive = flags & os.O_CREAT and flags & os.O_EXCL
    place = request.place(dirfd, path, follow=not (exclusive or flags & os.O_NOFOLLOW))
    if place.magic:
        return _reopen(request, place, flags)
    if _TMPFILE and flags & _TMPFILE:
        return _nameless(request, place, flags, mode)
    if place.parent is None:
        return _open_outside(request, place, flags, mode)
    return _open_inside(request, place, place.parent, flags, mode)


def _open_inside(
    request: Request, place: Place, parent: int, flags: int, mode: int
) -> Action | None:
    if place.info is not None and not _is_regular(place.info):
        return None
    shown = request.tree.join(parent, place.plain)
    if not flags & _WRITES:
        return Action(shown, None)
    return Action(shown, lambda _: _do_open(request, place, parent, flags, mode))


def _open_outside(request: Request, place: Place, flags: int, mode: int) -> Action | None:
    """Follow a file that is made on the same disk: a rename or a link may take it in."""
    tree, info = request.tree, place.info
    if info is None:
        makes = flags & os.O_CREAT and request.follows
        if not makes or os.fstat(place.folder).st_dev != tree.device:
            return None
        path = _absolute(place)
        return Action(
            "", lambda _: _do_open_outside(request, place, path, flags, mode), elsewhere=path
        )
    number = tree.numbers.get((info.st_dev, info.st_ino), 0)
    if number in tree.outside and flags & os.O_TRUNC and info.st_size:
        tree.unclear[number] = "it was opened anew and emptied"
    return None


def _absolute(place: Place) -> str:
    """Return the absolute path of a name."""
    return os.path.join(os.readlink(f"/proc/self/fd/{place.folder}"), place.plain)  # noqa: PTH115, PTH118


def _do_open_outside(request: Request, place: Place, path: str, flags: int, mode: int) -> Result:
    """Make a file that has no name below the root, as O_TMPFILE does."""
    try:
        descriptor = os.open(place.name, flags | os.O_CLOEXEC, mode & 0o7777, dir_fd=place.folder)
    except OSError as error:
        return -(error.errno or errno.EIO)
    info = os.fstat(request.keep(descriptor))
    number = request.tree.add_outside(info, path)
    request.make(Kind.CREATE, object=number, mode=stat.S_IMODE(info.st_mode))
    return NewDescriptor(descriptor, flags & os.O_CLOEXEC)


def _do_open(request: Request, place: Place, parent: int, flags: int, mode: int) -> Result:
    try:
        descriptor = os.open(place.name, flags | os.O_CLOEXEC, mode & 0o7777, dir_fd=place.folder)
    except OSError as error:
        return -(error.errno or errno.EIO)
    request.keep(descriptor)
    info, tree = os.fstat(descriptor), request.tree
    number = tree.find(info) if place.info is not None else None
    path = tree.join(parent, place.plain)
    if number is None:
        if place.info is not None:
            request.cannot_in(parent, path, "it was made by a process that is not recorded")
        number = tree.add(info, parent, place.plain)
        request.make(
            Kind.CREATE, object=number, path=path, parent=parent, mode=stat.S_IMODE(info.st_mode)
        )
    elif flags & os.O_TRUNC and place.info is not None and place.info.st_size:
        request.make(Kind.TRUNCATE, object=number, path=path, parent=parent)
    return NewDescriptor(descriptor, flags & os.O_CLOEXEC)


def _nameless(request: Request, place: Place, flags: int, mode: int) -> Action | None:
    """O_TMPFILE: the path is that of a directory."""
    folder = request.tree.find(place.info) if place.info is not None else None
    if folder is None:
        return None

    def perform(_: int | None) -> Result:
        try:
            file = os.open(place.name, flags | os.O_CLOEXEC, mode & 0o7777, dir_fd=place.folder)
        except OSError as error:
            return -(error.errno or errno.EIO)
        info = os.fstat(request.keep(file))
        number = request.tree.add(info, folder, "")
        request.make(Kind.CREATE, object=number, parent=folder, mode=stat.S_IMODE(info.st_mode))
        return NewDescriptor(file, flags & os.O_CLOEXEC)

    return Action(request.tree.path(folder), perform)


def _reopen(request: Request, place: Place, flags: int) -> Action | None:
    """Open through /proc/self/fd: only O_TRUNC changes something."""
    info = os.stat(place.name, dir_fd=place.folder)
    number = request.tree.find(info)
    if number is None or not _is_regular(info) or not flags & os.O_TRUNC:
        return None
    path = request.tree.path(number)

    def perform(_: int | None) -> Result:
        if info.st_size:
            request.make(
                Kind.TRUNCATE, object=number, path=path, parent=request.tree.parent(number)
            )
        return None

    return Action(path, perform, number)


def _is_regular(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode)


# -- making -----------------------------------------------------------------------------------


def prepare_mkdir(request: Request) -> Action | None:
    """mkdir, mkdirat."""
    at = request.name == "mkdirat"
    place = request.place(request.number(0) if at else AT_FDCWD, request.string(at), follow=False)
    mode = request.number(2 if at else 1) & 0o7777
    if place.parent is None:
        return _make_outside(request, place, mode)
    return _make(
        request, place, Kind.MKDIR, lambda: call_at("mkdirat", place.folder, place.name, mode)
    )


def _make_outside(request: Request, place: Place, mode: int) -> Action | None:
    """Follow a directory that is made on the same disk: a rename may take it in."""
    tree = request.tree
    is_near = os.fstat(place.folder).st_dev == tree.device
    if place.info is not None or not request.follows or not is_near:
        return None
    path = _absolute(place)

    def perform(_: int | None) -> Result:
        value = call_at("mkdirat", place.folder, place.name, mode)
        if value >= 0:
            info = os.stat(place.plain, dir_fd=place.folder, follow_symlinks=False)
            number = tree.add_outside(info, path)
            request.make(Kind.MKDIR, object=number, mode=stat.S_IMODE(info.st_mode))
        return value

    return Action("", perform, elsewhere=path)


def prepare_mknod(request: Request) -> Action | None:
    """mknod, mknodat: of a regular file; others hold no bytes."""
    at = request.name == "mknodat"
    place = request.place(request.number(0) if at else AT_FDCWD, request.string(at), follow=False)
    mode = request.number(2 if at else 1)
    if stat.S_IFMT(mode) not in {0, stat.S_IFREG}:
        return None
    return _make(
        request, place, Kind.CREATE, lambda: call_at("mknodat", place.folder, place.name, mode, 0)
    )


def prepare_symlink(request: Request) -> Action | None:
    """symlink, symlinkat."""
    at = request.name == "symlinkat"
    target = request.string(0)
    place = request.place(
        request.number(1) if at else AT_FDCWD, request.string(1 + at), follow=False
    )
    return _make(
        request,
        place,
        Kind.SYMLINK,
        lambda: call_at("symlinkat", target, place.folder, place.name),
        target=os.fsdecode(target),
    )


def _make(
    request: Request, place: Place, kind: Kind, call: Callable[[], int], target: str = ""
) -> Action | None:
    if place.parent is None:
        return None
    parent, path = place.parent, request.tree.join(place.parent, place.plain)

    def perform(_: int | None) -> Result:
        value = call()
        if value >= 0:
            info = os.stat(place.plain, dir_fd=place.folder, follow_symlinks=False)
            number = request.tree.add(info, parent, place.plain)
            mode = 0 if kind is Kind.SYMLINK else stat.S_IMODE(info.st_mode)
            request.make(kind, object=number, path=path, parent=parent, mode=mode, target=target)
        return value

    return Action(path, perform)


# -- removing ---------------------------------------------------------------------------------


def prepare_unlink(request: Request) -> Action | None:
    """unlink, rmdir, unlinkat."""
    at = request.name == "unlinkat"
    flags = request.number(2) if at else AT_REMOVEDIR * (request.name == "rmdir")
    place = request.place(request.number(0) if at else AT_FDCWD, request.string(at), follow=False)
    if place.parent is None:
        if request.is_root(place):
            request.cannot("", ITSELF)
        request.tree.leave(place.info)
        return None
    parent, path = place.parent, request.tree.join(place.parent, place.plain)

    def perform(_: int | None) -> Result:
        value = call_at("unlinkat", place.folder, place.name, flags)
        if value >= 0 and (number := request.tree.unname(parent, place.plain)):
            request.tree.leave(place.info)
            kind = Kind.RMDIR if flags & AT_REMOVEDIR else Kind.UNLINK
            request.make(kind, object=number, path=path, parent=parent)
        return value

    return Action(path, perform, request.tree.at(parent, place.plain))


# -- moving and linking -----------------------------------------------------------------------


def prepare_rename(request: Request) -> Action | None:
    """rename, renameat, renameat2."""
    at = request.name != "rename"
    flags = request.number(4) if request.name == "renameat2" else 0
    old = request.place(request.number(0) if at else AT_FDCWD, request.string(at), follow=False)
    new = request.place(
        request.number(2) if at else AT_FDCWD, request.string(3 if at else 1), follow=False
    )
    if old.parent is None and new.parent is None:
        if request.is_root(old) or request.is_root(new):
            request.cannot("", ITSELF)
        if old.info != new.info:
            request.tree.leave(new.info)
        return None
    path = request.tree.join(*_inside(new if old.parent is None else old))

    def perform(_: int | None) -> Result:
        value = call_at("renameat2", old.folder, old.name, new.folder, new.name, flags)
        if value == -errno.ENOSYS and not flags:
            value = call_at("renameat", old.folder, old.name, new.folder, new.name)
        if value >= 0:
            _note_rename(request, old, new, flags)
        return value

    number = request.tree.at(old.parent, old.plain) if old.parent is not None else 0
    return Action(path, perform, number)


def _inside(place: Place) -> tuple[int, str]:
    return place.parent or 0, place.plain


def _note_rename(request: Request, old: Place, new: Place, flags: int) -> None:
    tree = request.tree
    if old.parent is None:
        _note_moved_in(request, new, flags)
        return
    path = tree.join(*_inside(old))
    number = tree.at(old.parent, old.plain)
    if new.parent is None or (new.parent in tree.outside and number not in tree.outside):
        _note_moved_out(request, old, new, flags)
        return
    target, replaced = tree.join(*_inside(new)), tree.at(new.parent, new.plain)
    comes_in = old.parent in tree.outside and new.parent not in tree.outside
    if comes_in and (not number or flags & EXCHANGE):
        request.cannot(target, MOVED_IN)
    if flags & ~(NOREPLACE | EXCHANGE):
        request.cannot(path, f"renameat2 with flags {flags:#x}")
    if number == replaced and number:
        return  # two names of one file: rename does nothing
    tree.unname(old.parent, old.plain)
    if replaced:
        tree.unname(new.parent, new.plain)
    if number:
        tree.name(number, new.parent, new.plain)
    if flags & EXCHANGE and replaced:
        tree.name(replaced, old.parent, old.plain)
    if comes_in and number:
        _require_seen(request, number, new)
    kind = Kind.EXCHANGE if flags & EXCHANGE else Kind.RENAME
    fields = {"path": path, "target": target, "parent": old.parent, "new_parent": new.parent}
    request.make(kind, object=number, replaced=replaced, **fields)


def _note_moved_out(request: Request, old: Place, new: Place, flags: int) -> None:
    """Note that a name below the root, or in a directory that is followed, went elsewhere."""
    tree, parent = request.tree, old.parent or 0
    path = tree.join(parent, old.plain)
    tree.leave(new.info)
    if new.parent is not None:  # a directory elsewhere, which may come in
        tree.unname(new.parent, new.plain)
        tree.unclear[new.parent] = MOVED_IN
    number = tree.unname(parent, old.plain)
    request.make(Kind.UNLINK, object=number, path=path, parent=parent)
    if number in tree.outside:
        tree.unclear[number] = MOVED_IN
    elif flags or number in tree.children:
        request.cannot(path, MOVED_OUT)


def _note_moved_in(request: Request, new: Place, flags: int) -> None:
    """Note that a name below the root came from elsewhere, and lost what it named before."""
    tree, parent = request.tree, new.parent or 0
    target = tree.join(parent, new.plain)
    info = os.stat(new.plain, dir_fd=new.folder, follow_symlinks=False)
    number, replaced = tree.find(info), tree.unname(parent, new.plain)
    if number is None or number not in tree.outside or flags & ~NOREPLACE:
        is_folder = stat.S_ISDIR(info.st_mode)
        request.cannot_in(parent, target, FOLDER_MOVED_IN if is_folder else MOVED_IN)
        return
    _take_in(request, number, new)
    request.make(Kind.RENAME, object=number, replaced=replaced, target=target, new_parent=parent)


def _take_in(request: Request, number: int, new: Place) -> None:
    """Give something from outside a name; it stays outside in a directory that is."""
    tree, parent = request.tree, new.parent or 0
    tree.name(number, parent, new.plain)
    if parent not in tree.outside:
        _require_seen(request, number, new)


def _require_seen(request: Request, number: int, new: Place) -> None:
    """Have something come in; it is unsupported if not all that it holds was seen."""
    tree = request.tree
    path = tree.join(*_inside(new))
    unclear = dict.fromkeys(tree.take_in(number))
    for why in unclear:
        request.cannot(path, why)
    is_folder = number in tree.children
    if is_folder and not unclear and _holds_unseen(tree, number, f"{tree.root}/{path}"):
        request.cannot(path, FOLDER_MOVED_IN)


def _holds_unseen(tree: Tree, number: int, path: str) -> bool:
    """Return whether a directory, or one in it, holds a name that nobody was seen to make."""
    known = tree.children[number]
    for entry in os.scandir(path):
        below = known.get(entry.name, 0)
        if not below or (below in tree.children and _holds_unseen(tree, below, entry.path)):
            return True
    return False


def prepare_link(request: Request) -> Action | None:
    """link, linkat; also of a file that has no name yet."""
    at = request.name == "linkat"
    flags = request.number(4) if at else 0
    new = request.place(
        request.number(2) if at else AT_FDCWD, request.string(3 if at else 1), follow=False
    )
    if new.parent is None:
        return None
    source = request.string(at)
    if not source and flags & AT_EMPTY_PATH:
        taken = request.take(0)
        folder, name, flags = AT_FDCWD, b"/proc/self/fd/%d" % taken, AT_SYMLINK_FOLLOW
        info = os.fstat(taken)
    else:
        old = request.place(
            request.number(0) if at else AT_FDCWD, source, follow=bool(flags & AT_SYMLINK_FOLLOW)
        )
        folder, name = old.folder, old.name
        if old.magic and not flags & AT_SYMLINK_FOLLOW:
            return None  # a link of the name itself: /proc is another file system, EXDEV
        info = os.stat(name, dir_fd=folder, follow_symlinks=old.magic)
        flags = AT_SYMLINK_FOLLOW if old.magic else 0
    number, parent = request.tree.find(info), new.parent
    path = request.tree.join(parent, new.plain)

    def perform(_: int | None) -> Result:
        value = call_at("linkat", folder, name, new.folder, new.name, flags)
        if value >= 0:
            _note_link(request, number, new)
        return value

    return Action(path, perform, number or 0)


def _note_link(request: Request, number: int | None, new: Place) -> None:
    tree, parent = request.tree, new.parent or 0
    path = tree.join(parent, new.plain)
    if number is None:
        request.cannot_in(parent, path, MOVED_IN)
        return
    before = tree.path(number) if tree.names[number] else ""
    above = tree.parent(number)
    _take_in(request, number, new)
    request.make(
        Kind.LINK, object=number, path=before, target=path, parent=above, new_parent=parent
    )


# -- modes and times --------------------------------------------------------------------------


def prepare_chmod(request: Request) -> Action | None:
    """chmod, fchmod, fchmodat, fchmodat2."""
    at = request.name.startswith("fchmodat")
    mode = request.number(2 if at else 1) & 0o7777
    if request.name == "fchmod":
        target = request.take(0)
    else:
        follow = not (request.name == "fchmodat2" and request.number(3) & AT_SYMLINK_NOFOLLOW)
        target = _target(request, request.number(0) if at else AT_FDCWD, request.string(at), follow)
    number = request.tree.find(os.fstat(target), f"/proc/self/fd/{target}")
    if number is None:
        return None
    path = request.tree.path(number)

    def perform(_: int | None) -> Result:
        try:
            os.chmod(f"/proc/self/fd/{target}", mode)  # noqa: PTH101
        except OSError as error:
            return -(error.errno or errno.EIO)
        request.make(
            Kind.CHMOD, object=number, path=path, parent=request.tree.parent(number), mode=mode
        )
        return 0

    return Action(path, perform, number)


def prepare_utime(request: Request) -> Action | None:
    """utime, utimes, futimesat, utimensat: done by the kernel; no model looks at times."""
    at = request.name in {"futimesat", "utimensat"}
    if at and not request.word(1):
        target = request.take(0)
    else:
        nofollow = request.name == "utimensat" and request.number(3) & AT_SYMLINK_NOFOLLOW
        dirfd = request.number(0) if at else AT_FDCWD
        target = _target(request, dirfd, request.string(at), not nofollow)
    number = request.tree.find(os.fstat(target), f"/proc/self/fd/{target}")
    if number is None:
        return None
    path = request.tree.path(number)

    def perform(_: int | None) -> Result:
        request.make(Kind.UTIME, object=number, path=path, parent=request.tree.parent(number))
        return None

    return Action(path, perform, number)


def _target(request: Request, dirfd: int, path: bytes, follow: bool) -> int:  # noqa: FBT001
    place = request.place(dirfd, path, follow=follow)
    flags = os.O_PATH | os.O_CLOEXEC | (0 if place.magic else os.O_NOFOLLOW)
    return request.keep(os.open(place.name, flags, dir_fd=place.folder))


PREPARE: dict[str, Callable[[Request], Action | None]] = {
    **dict.fromkeys(("open", "creat", "openat", "openat2"), prepare_open),
    **dict.fromkeys(("mkdir", "mkdirat"), prepare_mkdir),
    **dict.fromkeys(("mknod", "mknodat"), prepare_mknod),
    **dict.fromkeys(("symlink", "symlinkat"), prepare_symlink),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), prepare_unlink),
    **dict.fromkeys(("rename", "renameat", "renameat2"), prepare_rename),
    **dict.fromkeys(("link", "linkat"), prepare_link),
    **dict.fromkeys(("chmod", "fchmod", "fchmodat", "fchmodat2"), prepare_chmod),
    **dict.fromkeys(("utime", "utimes", "futimesat", "utimensat"), prepare_utime),
}
