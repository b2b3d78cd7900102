"""A recording of requests, as operations on a directory: what explorers and models read.

A bucket becomes the folder that one gets who copies it. An object that is written whole is a file
that is made without a name, filled and renamed to its key, with no crash point in between: the
three operations are `joined`. A folder is made with the first object in it. What changes no object
(reads, parts, refusals) is no operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.trace import requests
from ckpt_conformance.trace.operations import REQUESTS, ROOT, Kind, Operation, Recording
from ckpt_conformance.trace.requests import Action, StoreRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

UNNAMED = ".put-"  # begins the name of an object that has not got its key yet
FILE, FOLDER = 0o644, 0o755


class Mark(NamedTuple):
    """A moment of a save: after so many requests had begun, none of which was in flight."""

    requests: int
    mark: str  # as in a journal: begun, acknowledged
    step: int


@dataclass
class _Made:
    """What was made so far."""

    prefix: str
    bodies: Path
    data: bytearray = field(default_factory=bytearray)
    operations: list[Operation] = field(default_factory=list[Operation])
    objects: int = ROOT
    named: dict[str, int] = field(default_factory=dict[str, int])  # by path: objects and folders
    parts: dict[tuple[str, int, str], str] = field(default_factory=dict[tuple[str, int, str], str])

    def new_object(self) -> int:
        self.objects += 1
        return self.objects

    def add(
        self, kind: Kind, request: StoreRequest, *, joined: bool = False, **given: object
    ) -> None:
        """Add an operation of a request."""
        made = Operation(
            index=len(self.operations),
            kind=kind,
            begin=request.begin,
            end=request.end or UNENDING,
            joined=joined,
            source=f"request {request.index}: {request.action}",
            **given,  # type: ignore[arg-type]
        )
        self.operations.append(made)


UNENDING = 1 << 61  # of a request whose answer the client never had: it may have been lost for ever


def as_recording(
    asked: Sequence[StoreRequest], folder: Path, root: str, prefix: str, marks: Iterable[Mark] = ()
) -> Recording:
    """Make a recording of what requests did to the objects of one bucket below a prefix.

    Args:
        asked: in the order in which they began; their bodies are in `folder`.
        folder: gets the recording, beside `requests.jsonl` and `bodies/`.
        root: the directory that stands for the prefix.
        prefix: of the keys, with a slash at its end, or empty.
        marks: moments of saves, in order.

    Raises:
        ValueError: an object was copied, or put together of parts that were not recorded.
    """
    made, left = _Made(prefix, folder), list(marks)
    for count, request in enumerate(asked):
        _add_marks(made, left, count, request.begin)
        if request.succeeded:
            _add(made, request)
    _add_marks(made, left, len(asked), max((one.end for one in asked), default=0) + 1)
    (folder / "data").write_bytes(made.data)
    (folder / "initial").mkdir(exist_ok=True)
    recording = Recording(root, folder, [], made.operations, recorder=REQUESTS)
    recording.save()
    return recording


def _add_marks(made: _Made, left: list[Mark], count: int, moment: int) -> None:
    """Add the marks that come before the request of a number."""
    while left and left[0].requests <= count:
        one = left.pop(0)
        index = len(made.operations)
        made.operations.append(
            Operation(index, Kind.MARK, mark=one.mark, step=one.step, begin=moment, end=moment)
        )


def _add(made: _Made, request: StoreRequest) -> None:
    """Add what a request did that the store says it has done."""
    if request.action is Action.UPLOAD_PART:
        made.parts[request.upload, request.part, request.tag] = request.digest
    elif request.action is Action.PUT:
        _put(made, request, requests.body_of(made.bodies, request.digest))
    elif request.action is Action.COMPLETE:
        _put(made, request, b"".join(_bodies(made, request)))
    elif request.action is Action.COPY:
        msg = f"request {request.index} copies {request.source}: copies can't be followed"
        raise ValueError(msg)
    elif request.action is Action.DELETE:
        _remove(made, request, request.key)
    elif request.action is Action.DELETE_MANY:
        for key in request.keys:
            _remove(made, request, key)


def _bodies(made: _Made, request: StoreRequest) -> list[bytes]:
    """Return the parts of an upload, in their order."""
    found: list[bytes] = []
    for part in request.parts:
        digest = made.parts.get((request.upload, part.number, part.tag))
        if digest is None:
            msg = f"request {request.index}: part {part.number} of {request.key} was not recorded"
            raise ValueError(msg)
        found.append(requests.body_of(made.bodies, digest))
    return found


def _put(made: _Made, request: StoreRequest, body: bytes) -> None:
    """Add an object that is there as a whole."""
    if not request.key.startswith(made.prefix):
        return
    path = request.key.removeprefix(made.prefix)
    parent, joined = _folders(made, request, path)
    number = made.new_object()
    name = f"{UNNAMED}{number}"
    own = {"object": number, "path": name, "parent": ROOT}
    made.add(Kind.CREATE, request, joined=joined, mode=FILE, **own)
    if body:
        given = {"size": len(body), "data": len(made.data)}
        made.add(Kind.WRITE, request, joined=True, **own, **given)
        made.data += body
    replaced = made.named.get(path, 0)
    to = {"target": path, "new_parent": parent, "replaced": replaced}
    made.add(Kind.RENAME, request, joined=True, **own, **to)
    made.named[path] = number


def _folders(made: _Made, request: StoreRequest, path: str) -> tuple[int, bool]:
    """Make the folders of a path that are not there; return the last, and whether one was made."""
    parent, joined = ROOT, False
    names = path.split("/")[:-1]
    for depth in range(len(names)):
        folder = "/".join(names[: depth + 1])
        if folder not in made.named:
            made.named[folder] = made.new_object()
            own = {"object": made.named[folder], "path": folder, "parent": parent, "mode": FOLDER}
            made.add(Kind.MKDIR, request, joined=joined, **own)
            joined = True
        parent = made.named[folder]
    return parent, joined


def _remove(made: _Made, request: StoreRequest, key: str) -> None:
    """Add that an object is gone; a store says yes also where there was none."""
    path = key.removeprefix(made.prefix)
    number = made.named.pop(path, 0) if key.startswith(made.prefix) else 0
    if number:
        parent = made.named.get(path.rpartition("/")[0], ROOT)
        made.add(Kind.UNLINK, request, object=number, path=path, parent=parent)
