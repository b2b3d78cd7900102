"""Recordings made by hand: what a plain manager's save would have issued, from two real trees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.trace.operations import ROOT, Entry, Kind, Operation, Recording

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BLOCK = 4096


@dataclass
class Trace:
    """Writes a recording operation by operation; `folder` becomes the recording's."""

    folder: Path
    root: Path
    before: Path | None = None
    operations: list[Operation] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    made: int = 100

    def __post_init__(self) -> None:
        """Copy what was there before."""
        self.folder.mkdir(parents=True)
        initial = self.folder / "initial"
        if self.before:
            trees.copy(self.before, initial)
        else:
            initial.mkdir()
        self.initial: list[Entry] = []
        for path in sorted(initial.rglob("*")):
            name = path.relative_to(initial).as_posix()
            self.objects[name] = len(self.objects) + 2
            size = path.stat().st_size if path.is_file() else 0
            kind = "dir" if path.is_dir() else "file"
            mode = path.stat().st_mode & 0o777
            self.initial.append(
                Entry(self.objects[name], name, kind, size, mode, path.stat().st_mtime_ns)
            )

    def say(self, kind: Kind, path: str = "", **given: Any) -> None:  # noqa: ANN401
        folder = path.rpartition("/")[0]
        parent = self.objects.get(folder, ROOT) if folder else ROOT
        index = len(self.operations)
        one = self.objects.get(path, ROOT)
        fields: dict[str, Any] = {"object": one, "path": path, "parent": parent}
        fields |= {"source": f"saving.py:{index} {kind}", **given}
        self.operations.append(Operation(index, kind, **fields))

    def mark(self, mark: str, step: int) -> None:
        self.say(Kind.MARK, mark=mark, step=step, object=0, source="")

    def create(self, path: str) -> None:
        self.made += 1
        self.objects[path] = self.made
        self.say(Kind.CREATE, path, mode=0o644)

    def write(self, path: str, data: bytes, pieces: int = 3) -> None:
        size = max(1, len(data) // pieces // BLOCK * BLOCK)
        for at in range(0, len(data), size):
            piece = data[at : at + size]
            self.say(Kind.WRITE, path, offset=at, size=len(piece), data=len(self.data))
            self.data += piece

    def rename(self, path: str, target: str) -> None:
        replaced = self.objects.get(target, 0)
        self.say(Kind.RENAME, path, target=target, new_parent=ROOT, replaced=replaced)
        self.objects[target] = self.objects.pop(path)

    def finish(self) -> Recording:
        (self.folder / "data").write_bytes(self.data)
        found = Recording(str(self.root), self.folder, self.initial, self.operations)
        found.save()
        return found


def atomic(trace: Trace, name: str, data: bytes, step: int, skip: Sequence[str] = ()) -> None:
    """Save as a careful manager does, through a temporary name; `skip` leaves calls out."""
    trace.mark("begun", step)
    trace.create(f"{name}.tmp")
    trace.write(f"{name}.tmp", data)
    if "fsync" not in skip:
        trace.say(Kind.FSYNC, f"{name}.tmp")
    trace.rename(f"{name}.tmp", name)
    if "directory" not in skip:
        trace.say(Kind.FSYNC, "")
    trace.mark("acknowledged", step)


def in_place(trace: Trace, name: str, data: bytes, step: int) -> None:
    """Save over the old file."""
    trace.mark("begun", step)
    if name in trace.objects:
        trace.say(Kind.TRUNCATE, name)
    else:
        trace.create(name)
    trace.write(name, data)
    trace.mark("acknowledged", step)
