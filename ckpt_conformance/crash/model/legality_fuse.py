"""Judges one content of a bucket that is mounted as a folder, from the rules alone.

What each file does to the bucket is written down file by file, over its whole life; then each path
is asked on its own. What stands there has to come from a request that was made, and that no later
one which had been answered undid. Then requests of one call that wait for each other are asked.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.mounts import Mount, When, usable
from ckpt_conformance.crash.model.states import BEFORE, ZEROS, Content
from ckpt_conformance.trace.operations import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Operation, Recording

GONE = 0  # instead of an object: a request that removes what stands at a path
FIRST = -1  # instead of an operation: what was there before
Pieces = tuple[tuple[int, int, int], ...]  # of a file: start, stop, source; no two could be one


@dataclass
class Request:
    """Something that a call makes of a path, and whether it has to."""

    call: int  # index of the operation
    path: str
    object: int
    must: bool = True
    needs: Request | None = None  # of the same call


def mounted(programs: Sequence[Mount], recording: Recording, state: State) -> str:
    """Return which rule a state breaks with each of some programs; empty if one may leave it."""
    reasons: list[str] = []
    for mount, last in usable(programs, recording):
        why = f"{state.point} is behind operation {last}, which it refuses"
        if state.point <= last:
            why = _life(mount, recording).wrong(state)
        if not why:
            return ""
        reasons.append(f"{mount.name}: {why}")
    return "; ".join(reasons)


_lives: dict[tuple[str, int], tuple[weakref.ref[Recording], Life]] = {}


def _life(mount: Mount, recording: Recording) -> Life:
    """Return what a program makes of a recording, worked out once."""
    key = mount.name, id(recording)
    known = _lives.get(key)
    if known is None or known[0]() is not recording or known[1].count != len(recording.operations):
        known = _lives[key] = weakref.ref(recording), Life(mount, recording)
        weakref.finalize(recording, _lives.pop, key, None)
    return known[1]


class Life:
    """All that one program asks of the bucket, by path, in the order of the calls."""

    def __init__(self, mount: Mount, recording: Recording) -> None:
        """Follow each object from its first name to its last."""
        self.mount = mount
        self.calls = recording.operations
        self.count = len(self.calls)
        self.before = {entry.object: entry for entry in recording.initial}
        made = [one for one in self.calls if one.kind in {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK}]
        kinds = {Kind.CREATE: "file", Kind.MKDIR: "dir", Kind.SYMLINK: "link"}
        self.kinds = {number: entry.kind for number, entry in self.before.items()}
        self.kinds |= {one.object: kinds[one.kind] for one in made}
        self.at = defaultdict[str, list[Request]](list)
        self.folders_at = defaultdict[str, set[tuple[int, int]]](set)  # (object, since which call)
        self.closed = defaultdict[int, list[int]](list)  # of a late one: calls that closed it
        self.called = defaultdict[int, set[str]](set)  # of a late one: its names
        self.own = defaultdict[int, list["Operation"]](list)  # calls, by file
        for one in self.calls:
            self.own[one.object].append(one)
        self._pieces: dict[tuple[int, int], tuple[int, Pieces]] = {}
        for number in self.kinds:
            for request in self._follow(number):
                self.at[request.path].append(request)
        for requests in self.at.values():
            requests.sort(key=lambda request: request.call)

    # ---- one object ----

    def _follow(self, number: int) -> Iterator[Request]:
        if self.kinds[number] == "file":
            return _OfFile(self, number).requests()
        return self._follow_other(number)

    def _follow_other(self, number: int) -> Iterator[Request]:
        """Yield what becomes of a folder or a link."""
        is_folder = self.kinds[number] == "dir"
        is_object = self.mount.folders or not is_folder
        for call, old, new in self.names_of(number):
            if is_folder and new:
                self.folders_at[new].add((number, call))
            if not is_object:
                continue
            made = Request(call, new, number) if new else None
            if made:
                yield made
            if old:
                yield Request(call, old, GONE, needs=made)

    def names_of(self, number: int) -> Iterator[tuple[int, str, str]]:
        """Yield calls that change the path of an object, its path before, and after; "": none."""
        entry = self.before.get(number)
        path = entry.path if entry else ""
        if entry:
            yield FIRST, "", path
        for one in self.calls:
            new = self._new_path(number, path, one)
            if new != path:
                yield one.index, path, new
                path = new

    def _new_path(self, number: int, path: str, one: Operation) -> str:
        """Return the path of an object after a call."""
        if one.object == number:
            if one.kind in {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK}:
                return one.path
            if one.kind in {Kind.UNLINK, Kind.RMDIR}:
                return ""
        if one.kind is not Kind.RENAME or not path:
            return path
        if path == one.path or path.startswith(one.path + "/"):
            return one.target + path[len(one.path) :]
        return "" if path == one.target else path

    # ---- bytes ----

    def pieces_after(self, number: int, call: int) -> tuple[int, Pieces]:
        """Return size and bytes of a file as the program saw it after a call."""
        if (number, call) not in self._pieces:
            self._pieces[number, call] = self._pieces_after(number, call)
        return self._pieces[number, call]

    def _pieces_after(self, number: int, call: int) -> tuple[int, Pieces]:
        entry = self.before.get(number)
        done = [one for one in self.own[number] if one.index <= call]
        size = entry.size if entry else 0
        layers = [(0, size, BEFORE)] if size else []
        for one in done:
            if one.kind is Kind.WRITE:
                layers.append((one.offset, one.stop, one.index))
                size = max(size, one.stop)
            elif one.kind is Kind.ALLOCATE:
                size = max(size, one.stop)
            elif one.kind is Kind.TRUNCATE:
                size = one.size
                layers.append((size, 1 << 62, ZEROS))
        edges = sorted({0, size, *(edge for layer in layers for edge in layer[:2] if edge <= size)})
        pieces = [
            (start, stop, next((s for a, b, s in reversed(layers) if a <= start < b), ZEROS))
            for start, stop in pairwise(edges)
        ]
        return size, _joined(pieces)

    def holds(self, number: int, call: int, content: Content) -> bool:
        """Whether a content is what a file held after a call."""
        pieces = [(e.offset, e.offset + e.size, e.source) for e in content.extents]
        size, seen = self.pieces_after(number, call)
        return (size, seen) == (content.size, _joined(pieces))

    # ---- a state ----

    def wrong(self, state: State) -> str:
        """Return which rule a state breaks."""
        looked = _Look(self, state)
        return looked.wrong_names() or looked.wrong_places() or looked.wrong_order()


def _joined(pieces: Sequence[tuple[int, int, int]]) -> Pieces:
    """Return pieces without zeros, and one for each run of bytes of one source."""
    joined: list[tuple[int, int, int]] = []
    for start, stop, source in pieces:
        if source == ZEROS or start >= stop:
            continue
        if joined and joined[-1][1:] == (start, source):
            start = joined.pop()[0]  # noqa: PLW2901  one piece with the last
        joined.append((start, stop, source))
    return tuple(joined)


@dataclass
class _OfFile:
    """What becomes of one file: where it is in the bucket, and whether that is the newest of it."""

    life: Life
    number: int
    path: str = ""  # as the training script has it
    place: str = ""  # in the bucket, once it is there
    unsaved: bool = False
    writer: int = 0
    is_late: bool = False  # its upload has no time

    @cached_property
    def _moves(self) -> dict[int, tuple[str, str]]:
        return {call: (old, new) for call, old, new in self.life.names_of(self.number)}

    def requests(self) -> Iterator[Request]:
        """Yield what is asked of the bucket for this file."""
        if FIRST in self._moves:
            self.path = self.place = self._moves[FIRST][1]
            yield Request(FIRST, self.path, self.number)
        for one in self.life.calls:
            if one.index in self._moves:
                yield from self._move(one, *self._moves[one.index])
            elif one.object == self.number:
                yield from self._own(one)
            elif one.kind is Kind.CLOSE and not one.object and one.process == self.writer:
                yield from self._closed(one)

    def _own(self, one: Operation) -> Iterator[Request]:
        """Yield what calls on the open file ask for."""
        mount = self.life.mount
        if one.kind in {Kind.WRITE, Kind.ALLOCATE, Kind.TRUNCATE}:
            self.unsaved, self.writer = True, one.process
            when = mount.truncates if one.kind is Kind.TRUNCATE else When.NEVER
        elif one.kind in {Kind.FSYNC, Kind.FDATASYNC} and self.unsaved:
            when = When.PERHAPS if one.error and mount.syncs is When.ALWAYS else mount.syncs
        elif one.kind is Kind.CLOSE:
            yield from self._closed(one)
            return
        else:
            return
        if when is When.NEVER or not self.path:
            return
        if one.kind is Kind.TRUNCATE and when is When.PERHAPS:
            yield _Older(one.index, self.path, self.number, must=False)
        self.unsaved = when is not When.ALWAYS
        yield Request(one.index, self.path, self.number, must=when is When.ALWAYS)

    def _closed(self, one: Operation) -> Iterator[Request]:
        """Yield what a close asks for: the upload, and a move that waited for it."""
        if not self.unsaved:
            return
        self.unsaved = False
        if self.life.mount.late:
            self._note_late(one.index)
            return
        if not self.path and not self.life.mount.waits:
            return
        put = Request(one.index, self.place or self.path, self.number)
        yield put
        if self.path and put.path != self.path:
            copy = Request(one.index, self.path, self.number, needs=put)
            yield copy
            yield Request(one.index, put.path, GONE, needs=copy)
        self.place = self.path or put.path

    def _note_late(self, call: int) -> None:
        self.is_late = True
        if self.path:
            self.life.closed[self.number].append(call)
            self.life.called[self.number].add(self.path)

    def _move(self, one: Operation, old: str, new: str) -> Iterator[Request]:
        """Yield what a new name, or its loss, asks for."""
        mount = self.life.mount
        self.path = new
        if one.kind is Kind.CREATE:
            self.unsaved, self.writer, self.place = True, one.process, new
            if mount.creates is When.PERHAPS:
                yield Request(one.index, new, self.number, must=False)
        elif new:
            yield from self._renamed(one, old, new)
        elif one.kind is Kind.UNLINK:
            yield from self._unlinked(one, old)

    def _renamed(self, one: Operation, old: str, new: str) -> Iterator[Request]:
        if self.life.mount.late and (self.is_late or self.unsaved):
            if self.is_late:
                self.life.called[self.number].add(new)
            return
        if self.life.mount.waits and self.unsaved:
            return
        put = Request(one.index, old, self.number) if self.unsaved else None
        copy = Request(one.index, new, self.number, needs=put)
        self.place, self.unsaved = new, False
        yield from [put] if put else []
        yield copy
        yield Request(one.index, old, GONE, needs=copy)

    def _unlinked(self, one: Operation, old: str) -> Iterator[Request]:
        mount = self.life.mount
        if mount.late and (self.is_late or self.unsaved):
            if FIRST in self._moves:
                yield Request(one.index, old, GONE, must=False)
            return
        if self.unsaved and not mount.waits:
            yield Request(one.index, old, self.number, must=False)
            self.unsaved = False
        elif self.unsaved:
            return  # the object stays, and the close writes it
        yield Request(one.index, old, GONE)


class _Older(Request):
    """An upload of what a file held just before the call."""


# ---- one state -----------------------------------------------------------------------------------


@dataclass
class _Look:
    """A state, held against a life."""

    life: Life
    state: State
    chosen: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def __post_init__(self) -> None:
        """Find the calls that had returned: another one began after them."""
        issued = self.life.calls[: self.state.point]
        newest = max(issued, key=lambda one: (one.begin, one.index), default=None)
        self.answered = {one.index for one in issued if newest and one.precedes(newest)} | {FIRST}
        self.issued = self.state.point

    def wrong_names(self) -> str:
        """Return which folder has no reason to be there."""
        folders = {n for n, kind in self.life.kinds.items() if kind == "dir"}
        numbers = [n for n in self.state.names.values() if n not in folders]
        if not self.state.apart and len(numbers) > len(set(numbers)):
            return "a file has two names"
        for path, number in self.state.names.items():
            if number not in self.life.kinds:
                return f"{path} is no object"
            above = path.rpartition("/")[0]
            if above and self.state.names.get(above) not in folders:
                return f"{path} is in no folder"
            if number in folders:
                known = {n for n, call in self.life.folders_at[path] if call < self.issued}
                filled = any(name.startswith(path + "/") for name in self.state.names)
                if number not in known:
                    return f"{path} is another folder"
                if not filled and not self.life.mount.folders:
                    return f"{path} is empty"
        return ""

    def wrong_places(self) -> str:
        """Return at which path something stands that can't be there."""
        for path in sorted(self.life.at.keys() | self.state.names.keys()):
            self.chosen[path] = self._fitting(path)
            if self._is_implied(path):
                self.chosen[path] = [*range(-1, len(self.life.at[path]))]
            if not self.chosen[path] and not self._is_late(path):
                number = self.state.names.get(path)
                what = "is gone" if number is None else f"can't hold that of object {number}"
                return f"{path} {what}"
        return ""

    def _is_implied(self, path: str) -> bool:
        """Whether a path is a folder that is there for what is in it."""
        number = self.state.names.get(path, GONE)
        is_folder = self.life.kinds.get(number) == "dir"
        return is_folder and any(name.startswith(path + "/") for name in self.state.names)

    def _is_late(self, path: str) -> bool:
        """Whether some upload that has no time explains what is at a path, or is not."""
        number = self.state.names.get(path, GONE)
        if not self.life.mount.late:
            return False
        if number == GONE:
            return self._fits_late_absence(path)
        calls = [call for call in self.life.closed[number] if call < self.issued]
        content = self.state.contents.get(number)
        return (
            content is not None
            and path in self.life.called[number]
            and any(self.life.holds(number, call, content) for call in calls)
        )

    def _fits_late_absence(self, path: str) -> bool:
        """Whether nothing had to be at a path: what was moved there may not have been there yet."""
        return any(
            one.kind in {Kind.RENAME, Kind.UNLINK} and path in {one.path, one.target}
            for one in self.life.calls[: self.issued]
        )

    def _fitting(self, path: str) -> list[int]:
        """Return positions in the requests of a path that explain what is there; -1: none came."""
        requests = [one for one in self.life.at[path] if one.call < self.issued]
        fitting = [-1, *range(len(requests))]
        return [at for at in fitting if self._stands(path, requests, at)]

    def _stands(self, path: str, requests: list[Request], at: int) -> bool:
        """Whether what is at a path may be what one request left, or none."""
        call = requests[at].call if at >= 0 else None
        for later in requests[at + 1 :]:
            is_after = call is None or call == later.call or self._before(call, later.call)
            if later.must and later.call in self.answered and is_after:
                return False
        return self._is_what_it_made(path, requests[at] if at >= 0 else None)

    def _before(self, call: int, other: int) -> bool:
        return call == FIRST or self.life.calls[call].precedes(self.life.calls[other])

    def _is_what_it_made(self, path: str, made: Request | None) -> bool:
        number = self.state.names.get(path, GONE)
        if made is None or made.object == GONE:
            return number == GONE
        if made.object != number:
            return False
        content = self.state.contents.get(number)
        if self.life.kinds[number] != "file":
            return content is None
        before = made.call - 1 if isinstance(made, _Older) else made.call
        return content is not None and self.life.holds(number, before, content)

    def wrong_order(self) -> str:
        """Return which request is there without the one that it waits for."""
        groups = defaultdict[tuple[int, int], list[Request]](list)
        for requests in self.life.at.values():
            for one in requests:
                if one.needs and one.call < self.issued and one.call not in self.answered:
                    groups[one.call, one.needs.object].append(one)
        for (call, _), waiting in groups.items():
            paths = {one.path for one in waiting} | {one.needs.path for one in waiting if one.needs}
            if not any(self._ordered(waiting, at) for at in self._choices(sorted(paths))):
                return f"operation {call} removed {waiting[-1].path} before it was elsewhere"
        return ""

    def _choices(self, paths: list[str]) -> Iterator[dict[str, int]]:
        for places in product(*(self.chosen[path] or [-1] for path in paths)):
            yield dict(zip(paths, places, strict=True))

    def _ordered(self, waiting: list[Request], at: dict[str, int]) -> bool:
        """Whether each request that was made has what it needs."""

        def is_made(one: Request) -> bool:
            place = next(n for n, other in enumerate(self.life.at[one.path]) if other is one)
            return at[one.path] >= place

        return all(is_made(one.needs) for one in waiting if one.needs and is_made(one))
