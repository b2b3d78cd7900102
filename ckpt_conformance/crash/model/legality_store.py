"""Judges one content of a bucket after the crash of its client, from the rules alone.

An object is what one request wrote, all of it. A request whose answer had come before the last one
began is in force unless a later one, or one beside it, changed the same key.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.states import Extent
from ckpt_conformance.trace.operations import Kind, is_crash_point

if TYPE_CHECKING:
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Operation, Recording


def stored(recording: Recording, state: State) -> str:
    """Return which rule a state breaks; empty if it is legal."""
    if not is_crash_point(recording.operations, state.point):
        return f"a request is there in part after operation {state.point - 1}"
    issued = recording.operations[: state.point]
    changes = defaultdict[str, list["Operation"]](list)  # by key: renames to it, removals
    writes: dict[int, Operation] = {}
    folders: dict[str, int] = {}
    for operation in issued:
        if operation.kind is Kind.RENAME:
            changes[operation.target].append(operation)
        elif operation.kind is Kind.UNLINK:
            changes[operation.path].append(operation)
        elif operation.kind is Kind.WRITE:
            writes[operation.object] = operation
        elif operation.kind is Kind.MKDIR:
            folders[operation.path] = operation.object
    files = {path: n for path, n in state.names.items() if path not in folders}
    wrong = [_strange_folder(path, state, folders) for path in state.names if path in folders]
    wrong += [_torn(path, number, state, writes) for path, number in files.items()]
    moment = issued[-1].begin if issued else 0
    wrong += [_misplaced(path, files.get(path), changes[path], moment) for path in changes]
    wrong += [f"{path} was never written" for path in files.keys() - changes.keys()]
    return next((one for one in wrong if one), "")


def _strange_folder(path: str, state: State, folders: dict[str, int]) -> str:
    """A bucket has no folders: one is there for what is in it."""
    if state.names[path] != folders[path]:
        return f"{path} is another folder"
    return "" if any(name.startswith(f"{path}/") for name in state.names) else f"{path} is empty"


def _torn(path: str, number: int, state: State, writes: dict[int, Operation]) -> str:
    """An object has all the bytes of the request that wrote it, and no others."""
    content, write = state.contents.get(number), writes.get(number)
    if content is None:
        return f"{path} is no object"
    size = write.size if write else 0
    whole = (Extent(0, size, write.index),) if write else ()
    if content.size != size or content.extents != whole:
        return f"{path} is not what one request wrote: {content.size} bytes of {size}"
    return ""


def _misplaced(path: str, number: int | None, changes: list[Operation], moment: int) -> str:
    """What is at a key is what some request left there that no answered one came after."""
    answered = [one for one in changes if one.end < moment]
    if number is None:
        sources = [one for one in changes if one.kind is Kind.UNLINK]
        if not answered:
            return ""  # none of them need have taken effect
        what = f"{path} is gone"
    else:
        sources = [one for one in changes if one.kind is Kind.RENAME and one.object == number]
        what = f"{path} is another object"
    for source in sources:
        if not any(source.end < later.begin for later in answered if later is not source):
            return ""
    newest = (
        f", although request at operation {answered[-1].index} was answered" if answered else ""
    )
    return f"{what}{newest}"
