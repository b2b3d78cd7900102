"""The directory as the supervisor knows it: a number for each object, and the names that it has."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ckpt_conformance.trace.operations import ROOT, Entry

Identity = tuple[int, int]  # device, inode


class Tree:
    """Numbers of objects below a root, found by device and inode."""

    def __init__(self, root: Path) -> None:
        """Number what is there."""
        self.root = os.path.realpath(root)
        info = Path(self.root).stat()
        self.device = info.st_dev
        self.numbers: dict[Identity, int] = {(info.st_dev, info.st_ino): ROOT}
        self.children: dict[int, dict[str, int]] = {ROOT: {}}  # of directories
        self.names: dict[int, list[tuple[int, str]]] = {ROOT: []}  # (parent, name), oldest first
        self.last: dict[int, str] = {ROOT: ""}  # the path that a nameless object had
        self.next = ROOT + 1
        # What was made elsewhere on the same disk, a directory with all that is in it: it may be
        # moved or linked in yet.
        self.outside: set[int] = set()
        self.elsewhere: dict[int, str] = {}  # where they were made: an absolute path; also later
        self.mapped: set[int] = set()  # files that may be stored into without a call, unfollowed
        self.unclear: dict[int, str] = {}  # of those: why their bytes are not known
        self.initial: list[Entry] = []
        self._scan("", ROOT)

    def _scan(self, folder: str, number: int) -> None:
        entries = sorted(os.scandir(f"{self.root}/{folder}"), key=lambda e: e.name)
        for entry in entries:
            info = entry.stat(follow_symlinks=False)
            path = f"{folder}/{entry.name}" if folder else entry.name
            known = self.numbers.get((info.st_dev, info.st_ino))
            kind, target = "file", ""
            if entry.is_symlink():
                kind, target = "link", os.readlink(entry.path)  # noqa: PTH115  a string is wanted
            elif entry.is_dir():
                kind = "dir"
            object_number = known or self.add(info, number, entry.name)
            if known:
                self.name(known, number, entry.name)
            mode, size = stat.S_IMODE(info.st_mode), info.st_size if kind == "file" else 0
            self.initial.append(
                Entry(object_number, path, kind, size, mode, info.st_mtime_ns, target)
            )
            if kind == "dir":
                self._scan(path, object_number)

    def find(self, info: os.stat_result, link: str = "") -> int | None:
        """Return the number of an object, None if it is not known.

        The inode of one that lost its names may be in use again: then `link`, where its descriptor
        is said to lead, decides.
        """
        number = self.numbers.get((info.st_dev, info.st_ino))
        if number is None or number == ROOT or self.names[number] or not link:
            return number
        if number in self.outside:
            return number
        leads = os.readlink(link)  # noqa: PTH115  a string is wanted
        return number if leads.startswith(self.root + "/") else None

    def add(self, info: os.stat_result, parent: int, name: str) -> int:
        """Number a new object; `name` is empty for one that has none yet."""
        number, self.next = self.next, self.next + 1
        self.numbers[info.st_dev, info.st_ino] = number
        self.names[number], self.last[number] = [], ""
        if stat.S_ISDIR(info.st_mode):
            self.children[number] = {}
        if name:
            self.name(number, parent, name)
        if parent in self.outside:
            self.outside.add(number)
            self.elsewhere[number] = self.last[number]
        return number

    def add_outside(self, info: os.stat_result, path: str) -> int:
        """Number what was made elsewhere, at an absolute path; it has no name here.

        What is made in such a directory has an absolute path until the directory comes in.
        """
        number = self.add(info, 0, "")
        self.outside.add(number)
        self.elsewhere[number] = path
        if number in self.children:
            self.last[number] = path
        return number

    def take_in(self, number: int) -> list[str]:
        """Have what was made elsewhere come in, with all that is in it; say what is not known."""
        self.outside.discard(number)
        unclear = [self.unclear.pop(number)] if number in self.unclear else []
        for below in self.children.get(number, {}).values():
            unclear += self.take_in(below)
        return unclear

    def where_outside(self, number: int) -> str:
        """Return where something was made elsewhere that has not come in; "" for all else."""
        return self.elsewhere[number] if number in self.outside else ""

    def leave(self, info: os.stat_result | None) -> None:
        """Forget what is elsewhere and about to lose its last name: its inode may be used again.

        A directory goes only if it is empty.
        """
        number = self.numbers.get((info.st_dev, info.st_ino)) if info is not None else None
        if info is None or number not in self.outside:
            return
        if info.st_nlink <= 1 or self.children.get(number) == {}:
            del self.numbers[info.st_dev, info.st_ino]

    def name(self, number: int, parent: int, name: str) -> None:
        """Add a name to an object."""
        self.names[number].append((parent, name))
        self.children[parent][name] = number
        self.last[number] = self.join(parent, name)

    def unname(self, parent: int, name: str) -> int:
        """Remove a name; return the number of the object that had it, 0 if none did."""
        number = self.children[parent].pop(name, 0)
        if number:
            self.last[number] = self.join(parent, name)
            self.names[number].remove((parent, name))
        return number

    def at(self, parent: int, name: str) -> int:
        """Return the number of the object that has a name, 0 if none does."""
        return self.children[parent].get(name, 0)

    def join(self, parent: int, name: str) -> str:
        """Return the path of a name in a directory, relative to the root."""
        above = self.path(parent)
        return f"{above}/{name}" if above else name

    def path(self, number: int) -> str:
        """Return the first path of an object; without a name the last path that it had."""
        if number == ROOT or not self.names.get(number):
            return self.last.get(number, "")
        return self.join(*self.names[number][0])

    def parent(self, number: int) -> int:
        """Return the number of the directory of an object's first name, 0 if it has none."""
        names = self.names.get(number)
        return names[0][0] if names else 0
