"""What the fuzz feeds to fsck: what a library wrote, and the files that differ from it."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MOST_FILES = 40  # that one input changes
MOST_BYTES = 1 << 19  # of one file
NEW_BYTES = 1 << 20  # of all files of an input


class Input(msgspec.Struct, forbid_unknown_fields=True):
    """One input.

    Attributes:
        seed: the checkpoint that it began as.
        files: the files that differ from the seed's, by their path; None for one that is gone.
        options: chooses how fsck is asked.
        is_blind: whether bytes were changed as a disk changes them: no CRC and no length was
            made to fit afterwards.

    """

    seed: str
    files: dict[str, bytes | None] = {}
    options: int = 0
    is_blind: bool = True


class Seed(msgspec.Struct, frozen=True):
    """A checkpoint that a library wrote: files by their path, the first part of which is a folder.

    `target` is the path that fsck is given, relative to that folder.
    """

    name: str
    files: dict[str, bytes]
    target: str = "."


class Seeds:
    """All seeds by name, in a fixed order."""

    def __init__(self, seeds: Iterable[Seed]) -> None:
        """Take them."""
        self.by_name = {one.name: one for one in seeds}

    @cached_property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self.by_name)

    def file(self, one: Input, path: str) -> bytes | None:
        """Return what an input has at a path; None for nothing."""
        return one.files[path] if path in one.files else self.by_name[one.seed].files.get(path)

    def paths(self, one: Input) -> list[str]:
        """Return the paths of all files that an input has."""
        gone = {path for path, data in one.files.items() if data is None}
        return sorted({*self.by_name[one.seed].files, *one.files} - gone)

    def changed(self, one: Input) -> dict[str, bytes | None]:
        """Return the files that really differ from those of the seed."""
        own = self.by_name[one.seed].files
        return {path: data for path, data in one.files.items() if data != own.get(path)}


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Input)


def encode(one: Input) -> bytes:
    """Return an input as bytes."""
    return _ENCODER.encode(one)


def decode(data: bytes, seeds: Seeds) -> Input | None:
    """Return an input from bytes; None where they are none that can be written to a disk."""
    try:
        one = _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    is_known = one.seed in seeds.by_name and len(one.files) <= MOST_FILES
    sizes = [len(held) for held in one.files.values() if held is not None]
    if not is_known or sum(sizes) > NEW_BYTES or not all(map(is_path, one.files)):
        return None
    return one


def is_path(path: str) -> bool:
    """Return whether a path lies inside of the folder of an input, and can be written."""
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return False
    parts = path.split("/")
    is_short = len(raw) < 400 and all(0 < len(part.encode()) < 200 for part in parts)
    return is_short and "\0" not in path and not {".", ".."} & set(parts) and len(parts) < 12


def name_of(data: bytes) -> str:
    """Name an input by its bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


def load_seeds(folder: Path) -> Seeds:
    """Read the seeds that `fuzz_seeds.write_all` wrote."""
    decoder = msgspec.msgpack.Decoder(Seed)
    return Seeds(decoder.decode(path.read_bytes()) for path in sorted(folder.glob("*.seed")))


def save_seeds(seeds: Iterable[Seed], folder: Path) -> None:
    """Write seeds, each into a file."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = msgspec.msgpack.Encoder()
    for one in seeds:
        (folder / f"{one.name}.seed").write_bytes(encoder.encode(one))


class Disk:
    """A folder that holds an input; from one to the next only what differs is written."""

    def __init__(self, base: Path, seeds: Seeds) -> None:
        """Take an empty folder on a fast disk."""
        self._base, self._seeds = base, seeds
        self._written: dict[str, dict[str, bytes]] = {}

    def put(self, one: Input) -> Path:
        """Write an input; return the path that fsck is given. OSError where a disk refuses it."""
        seed = self._seeds.by_name[one.seed]
        wanted = dict(seed.files)
        for path, data in one.files.items():
            wanted.pop(path, None) if data is None else wanted.update({path: data})
        root = self._base / one.seed / "run"
        there = self._written.setdefault(one.seed, {})
        root.mkdir(parents=True, exist_ok=True)
        for path in [path for path in there if wanted.get(path) != there[path]]:
            (root / path).unlink(missing_ok=True)
            del there[path]
            self._prune(root, (root / path).parent)
        for path in [path for path in wanted if path not in there]:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(wanted[path])
            there[path] = wanted[path]
        return root if seed.target == "." else root / seed.target

    def _prune(self, root: Path, folder: Path) -> None:
        """Remove folders that are empty now."""
        while folder != root:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent
