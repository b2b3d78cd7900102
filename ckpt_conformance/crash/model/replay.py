"""Applies operations to names and to contents; each step costs no more than what is alive.

A content is made from extents, so no bytes are moved here. A slot is one name in one directory:
(object of the directory, name). Slots hold objects; paths follow from them.
"""

from __future__ import annotations

from bisect import bisect_right
from posixpath import basename, dirname
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.states import BEFORE, Content, Extent
from ckpt_conformance.trace.operations import NAMING, ROOT, Kind, Operation, Recording

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

BLOCK = 4096  # bytes: the page of the kernel and the block of the file systems
EMPTY = Content(0)

Slot = tuple[int, str]


# ---- contents ------------------------------------------------------------------------------------


def clip(content: Content, start: int, stop: int) -> tuple[Extent, ...]:
    """Return the extents of [start, stop), cut to it."""
    extents = content.extents
    if not extents or start >= stop:
        return ()
    if start <= extents[0].offset and extents[-1].offset + extents[-1].size <= stop:
        return extents
    first = max(0, bisect_right(extents, start, key=lambda extent: extent.offset) - 1)
    kept: list[Extent] = []
    for extent in extents[first:]:
        if extent.offset >= stop:
            break
        low, high = max(start, extent.offset), min(stop, extent.offset + extent.size)
        if low < high:
            whole = low == extent.offset and high - low == extent.size
            kept.append(extent if whole else Extent(low, high - low, extent.source))
    return tuple(kept)


def written(content: Content, operation: Operation, stop: int = -1) -> Content:
    """Apply a WRITE, or its part before `stop`."""
    start, stop = operation.offset, operation.stop if stop < 0 else min(stop, operation.stop)
    if stop <= start:
        return content
    new = Extent(start, stop - start, operation.index)
    size = max(content.size, stop)
    below = clip(content, 0, start)
    return Content(size, (*below, new, *clip(content, stop, content.size)))


def resized(content: Content, size: int) -> Content:
    """Apply a TRUNCATE: shorter, or longer with zeros."""
    return content if size == content.size else Content(size, clip(content, 0, size))


def changed(content: Content, operation: Operation) -> Content:
    """Apply one operation on data."""
    if operation.kind is Kind.WRITE:
        return written(content, operation)
    if operation.kind is Kind.TRUNCATE:
        return resized(content, operation.size)
    return resized(content, max(content.size, operation.stop))


def cut(under: Content, over: Content, at: int) -> Content:
    """Return `over` before the offset `at` and `under` from there on."""
    size = max(under.size, min(over.size, at))
    return Content(size, clip(over, 0, at) + clip(under, at, size))


def without(under: Content, over: Content, start: int, stop: int) -> Content:
    """Return `over`, but `under` in [start, stop)."""
    middle = clip(under, start, min(stop, over.size))
    return Content(over.size, clip(over, 0, start) + middle + clip(over, stop, over.size))


# ---- names ---------------------------------------------------------------------------------------


def slot_events(operation: Operation) -> list[tuple[Slot, int]]:
    """Return what an operation does to slots: (slot, the object that it holds then; 0: none)."""
    old = (operation.parent, basename(operation.path))
    new = (operation.new_parent, basename(operation.target))
    match operation.kind:
        case Kind.CREATE | Kind.MKDIR | Kind.SYMLINK:
            return [(old, operation.object)] if operation.path else []
        case Kind.LINK:
            return [(new, operation.object)]
        case Kind.RENAME:
            return [(old, 0), (new, operation.object)]
        case Kind.EXCHANGE:
            return [(old, operation.replaced), (new, operation.object)]
        case Kind.UNLINK | Kind.RMDIR:
            return [(old, 0)]
        case _:
            return []


def put(slots: dict[Slot, int], events: Iterable[tuple[Slot, int]]) -> None:
    """Apply events to slots."""
    for slot, held in events:
        if held:
            slots[slot] = held
        else:
            slots.pop(slot, None)


def initial_slots(recording: Recording) -> dict[Slot, int]:
    """Return the slots before the first operation."""
    objects = {entry.path: entry.object for entry in recording.initial} | {"": ROOT}
    return {
        (objects[dirname(entry.path)], basename(entry.path)): entry.object
        for entry in recording.initial
    }


def initial_contents(recording: Recording) -> dict[int, Content]:
    """Return the contents of regular files before the first operation, by object."""
    return {
        entry.object: Content(entry.size, (Extent(0, entry.size, BEFORE),) if entry.size else ())
        for entry in recording.initial
        if entry.kind == "file"
    }


def directories(recording: Recording) -> frozenset[int]:
    """Return the objects that are directories, at any time of the recording."""
    before = {entry.object for entry in recording.initial if entry.kind == "dir"}
    made = {op.object for op in recording.operations if op.kind is Kind.MKDIR}
    return frozenset(before | made | {ROOT})


def paths(slots: Mapping[Slot, int], folders: frozenset[int]) -> dict[str, int]:
    """Return the objects that can be reached from the root, by path and in order of the paths.

    A directory stands at one path only, the first: a disk can't hold it twice.
    """
    within: dict[int, list[tuple[str, int]]] = {}
    for (parent, name), held in slots.items():
        within.setdefault(parent, []).append((name, held))
    named: dict[str, int] = {}
    entered = {ROOT}
    todo = [(ROOT, "")]
    while todo:
        parent, prefix = todo.pop()
        for name, held in within.get(parent, ()):
            if held in entered:
                continue
            named[prefix + name] = held
            if held in folders:
                entered.add(held)
                todo.append((held, f"{prefix}{name}/"))
    return dict(sorted(named.items()))


# ---- what an operation changes -------------------------------------------------------------------


def inodes(operation: Operation) -> tuple[int, ...]:
    """Return the objects whose inode an operation changes: times, links, size or entries."""
    number, parent, new_parent = operation.object, operation.parent, operation.new_parent
    match operation.kind:
        case Kind.CREATE | Kind.MKDIR | Kind.SYMLINK | Kind.UNLINK | Kind.RMDIR:
            return (number, parent) if parent else (number,)
        case Kind.LINK:
            return (number, new_parent)
        case Kind.RENAME | Kind.EXCHANGE:
            return tuple({number, operation.replaced, parent, new_parent} - {0})
        case Kind.WRITE | Kind.TRUNCATE | Kind.ALLOCATE | Kind.CHMOD | Kind.UTIME:
            return (number,)
        case _:
            return ()


def is_metadata(operation: Operation) -> bool:
    """Whether a journal keeps the order of this operation; data of WRITE comes when it comes."""
    on_inodes = {Kind.TRUNCATE, Kind.ALLOCATE, Kind.CHMOD, Kind.UTIME}
    return operation.kind in NAMING or operation.kind in on_inodes
