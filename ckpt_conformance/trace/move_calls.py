"""Calls that rename and link: done by the supervisor in place of the caller.

A file that was made elsewhere on the same disk is followed from its creation, as one that has no
name yet; a rename or a link gives it one. Of anything else that comes from outside the content is
not known: it is named, and the verdict is UNKNOWN.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from ckpt_conformance.trace.name_calls import ITSELF, call_at
from ckpt_conformance.trace.operations import Kind
from ckpt_conformance.trace.request import (
    AT_EMPTY_PATH,
    AT_FDCWD,
    AT_SYMLINK_FOLLOW,
    Action,
    Place,
    Request,
    Result,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NOREPLACE, EXCHANGE = 1, 2
MOVED_IN = "it was moved or linked in from outside of the directory, with content that was not seen"
MOVED_OUT = "a directory was moved out of the directory"


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
    if new.parent is None:
        tree.leave(new.info)
        number = tree.unname(old.parent, old.plain)
        request.make(Kind.UNLINK, object=number, path=path, parent=old.parent)
        if flags or number in tree.children:
            request.cannot(path, MOVED_OUT)
        return
    target = tree.join(*_inside(new))
    number, replaced = tree.at(old.parent, old.plain), tree.at(new.parent, new.plain)
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
    kind = Kind.EXCHANGE if flags & EXCHANGE else Kind.RENAME
    fields = {"path": path, "target": target, "parent": old.parent, "new_parent": new.parent}
    request.make(kind, object=number, replaced=replaced, **fields)


def _note_moved_in(request: Request, new: Place, flags: int) -> None:
    """Give a file that was made elsewhere its name."""
    tree, parent = request.tree, new.parent or 0
    target = tree.join(parent, new.plain)
    number = tree.find(os.stat(new.plain, dir_fd=new.folder, follow_symlinks=False))
    replaced = tree.unname(parent, new.plain)
    if number is None or number not in tree.outside or flags & ~NOREPLACE:
        request.cannot(target, MOVED_IN)
        return
    _take_in(request, number, new)
    request.make(Kind.RENAME, object=number, replaced=replaced, target=target, new_parent=parent)


def _take_in(request: Request, number: int, new: Place) -> None:
    """Have a file below the root; name it if not all of its bytes were seen."""
    tree, parent = request.tree, new.parent or 0
    tree.outside.discard(number)
    tree.name(number, parent, new.plain)
    why = tree.unclear.pop(number, "")
    if why:
        request.cannot(tree.join(parent, new.plain), why)


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
        request.cannot(path, MOVED_IN)
        return
    before = tree.path(number) if tree.names[number] else ""
    above = tree.parent(number)
    _take_in(request, number, new)
    request.make(
        Kind.LINK, object=number, path=before, target=path, parent=above, new_parent=parent
    )


PREPARE: dict[str, Callable[[Request], Action | None]] = {
    **dict.fromkeys(("rename", "renameat", "renameat2"), prepare_rename),
    **dict.fromkeys(("link", "linkat"), prepare_link),
}
