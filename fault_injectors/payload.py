"""Where a checkpoint keeps its payload, searched without knowing the manager.

Models: nothing; it aims. The bytes of live tensors (`Golden.payload_samples`) are searched in the
files, so a fault can hit a weight and not a comment. Files that belong to one step are those that
its save made or changed.
Does not model: compressed, encrypted or re-encoded payloads; there the middle of the largest file
stands in, and the place says so (`found` is False).
A number has no bytes of its own to search for: `numbers` finds it behind its key in a pickle.
Proof: a place is the position where a tensor's first bytes were read from the file.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_conformance.contract import trees

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.messages import PayloadSample

LOCAL_HEADER = struct.Struct("<4s4xH16xHH")  # of a zip: magic, method; lengths of name and extra
STORED = 0
NUMBERS = {"BININT": 1, "BININT1": 1, "BININT2": 1, "LONG1": 2, "BINFLOAT": 8}
"""Where the lowest byte of a number stands in a pickle, counted from its opcode."""
NOTES = ("PROTO", "FRAME", "BINPUT", "LONG_BINPUT", "MEMOIZE", "PUT")  # between key and value
GUESS = 256  # bytes around the middle of a file that stand in for a payload that was not found


@dataclass(frozen=True)
class Place:
    """One tensor's bytes in a file: name relative to the root, first byte, length."""

    file: str
    offset: int
    length: int
    tensor: str
    found: bool = True

    @property
    def component(self) -> str:
        """The component that the tensor belongs to."""
        return self.tensor.partition("/")[0]


def names(root: Path) -> list[str]:
    """Name every regular file below a directory, sorted."""
    return [path.relative_to(root).as_posix() for path in trees.files(root)]


def changed(before: Path | None, after: Path) -> list[str]:
    """Name the files that are in `after` and are absent from `before`, or differ there."""
    if before is None:
        return names(after)
    return [name for name in names(after) if not _same(before / name, after / name)]


def _same(left: Path, right: Path) -> bool:
    return left.is_file() and left.read_bytes() == right.read_bytes()


def of_step(golden: Any, step: int) -> list[str]:  # noqa: ANN401  a Golden: snapshots by step
    """Name the files that the save of a step of a golden run made or changed."""
    earlier = [saved for saved in golden.saves if saved < step]
    before = golden.snapshot(max(earlier)) if earlier else None
    return changed(before, golden.snapshot(step))


def find(
    root: Path, payload_samples: Iterable[PayloadSample], files: Sequence[str] | None = None
) -> list[Place]:
    """Find every place of the tensors in the files (all by default), in the order of the files."""
    samples = [
        (bytes.fromhex(sample.bytes), sample.size, sample.name) for sample in payload_samples
    ]
    by_offset: dict[tuple[str, int], Place] = {}
    for file in names(root) if files is None else files:
        data = (root / file).read_bytes()
        for start, size, tensor in samples:
            for offset in _occurrences(data, start):
                length = min(size, len(data) - offset)
                by_offset.setdefault((file, offset), Place(file, offset, length, tensor))
    return [by_offset[key] for key in sorted(by_offset)]


def _occurrences(data: bytes, part: bytes) -> Iterable[int]:
    at = data.find(part)
    while at >= 0:
        yield at
        at = data.find(part, at + 1)


def places(
    root: Path, payload_samples: Iterable[PayloadSample], files: Sequence[str] | None = None
) -> list[Place]:
    """Find payload as `find` does, or fall back to the middle of the largest file."""
    return find(root, payload_samples, files) or [middle(root, files)]


def middle(root: Path, files: Sequence[str] | None = None) -> Place:
    """Return the middle of the largest file; raises ValueError if there is no file with a byte."""
    sizes = {name: (root / name).stat().st_size for name in (files or names(root))}
    largest = max(sizes, key=lambda name: (sizes[name], name), default=None)
    if largest is None or not sizes[largest]:
        msg = f"{root} holds no file with a byte in it"
        raise ValueError(msg)
    length = min(GUESS, sizes[largest])
    return Place(largest, (sizes[largest] - length) // 2, length, "", found=False)


def in_turn(places: Iterable[Place]) -> list[Place]:
    """Order places: the first of each component, then the second of each, and so on."""
    by_component: dict[str, list[Place]] = {}
    for place in places:
        by_component.setdefault(place.component, []).append(place)
    turns = zip_longest(*by_component.values())
    return [place for turn in turns for place in turn if place is not None]


def numbers(root: Path, keys: Collection[str], files: Iterable[str]) -> list[Place]:
    """Find the lowest byte of each number that stands behind one of the keys in a pickle.

    Pickles are looked for at the start of a file and in records of zip archives that are not
    compressed, as `torch.save` makes them, wherever in a file the archive begins.
    """
    found: list[Place] = []
    for file in files:
        data = (root / file).read_bytes()
        for start in _pickles(data):
            for key, offset in _numbers(data[start:], keys):
                found.append(Place(file, start + offset, 1, f"number/{key or start}"))
    return found


def steps_beside(
    old: Path, new: Path, steps: tuple[int, int], earlier: Iterable[Place], places: Iterable[Place]
) -> list[Place]:
    """Find a step's own number before and behind its payload: the lowest byte of it.

    That is where a format of one's own has a header or a trailer, as 4 bytes of an integer of
    either order, or as text behind the word step. What counts stands as the number of an older step
    stands to its payload. `old` and `new` are the directory after each of the two `steps`, and
    their payload in it is `earlier` and `places`.
    """
    before = [Region(file, *span(own)) for file, own in by_file(earlier).items()]
    found: list[Place] = []
    for file, own in by_file(places).items():
        numbers = _numbers_around(new, steps[1], Region(file, *span(own)), before)
        found += [
            number.place
            for number in numbers
            if any(_stands_at(old, steps[0], one, number) for one in before)
        ]
    return found


class Region(NamedTuple):
    """Where the payload of a step lies in a file: from the first byte to behind the last."""

    file: str
    begin: int
    end: int


class Number(NamedTuple):
    """Where a number stands, and how far from the payload's begin, or from its end if behind it."""

    place: Place
    distance: int
    is_behind: bool


def _numbers_around(root: Path, step: int, new: Region, old: Sequence[Region]) -> Iterator[Number]:
    """Yield the numbers before and behind a payload; before it another one may end."""
    data = (root / new.file).read_bytes()
    before = [one.end for one in old if one.file == new.file and one.end <= new.begin]
    for match in _number(step).finditer(data, max(before, default=0), new.begin):
        place = Place(new.file, _lowest(match), 1, "number/step")
        yield Number(place, match.start() - new.begin, is_behind=False)
    for match in _number(step).finditer(data, new.end):
        place = Place(new.file, _lowest(match), 1, "number/step")
        yield Number(place, match.start() - new.end, is_behind=True)


def _stands_at(root: Path, step: int, old: Region, like: Number) -> bool:
    """Return whether a step's number stands to its payload as another one does."""
    at = (old.end if like.is_behind else old.begin) + like.distance
    return at >= 0 and bool(_number(step).match((root / old.file).read_bytes(), at))


def _number(step: int) -> re.Pattern[bytes]:
    """Return what a step's number looks like in a file."""
    words = (step.to_bytes(4, "little"), step.to_bytes(4, "big"))
    binary = b"|".join(re.escape(word) for word in words)
    return re.compile(rb"%b|[Ss]tep\W{0,6}0*%d(?!\d)" % (binary, step))


def span(places: Iterable[Place]) -> tuple[int, int]:
    """Return where the first of some places begins, and the last one ends."""
    pairs = [(place.offset, place.offset + place.length) for place in places]
    return min(begin for begin, _ in pairs), max(end for _, end in pairs)


def by_file(places: Iterable[Place]) -> dict[str, list[Place]]:
    """Group places by their file."""
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(place.file, []).append(place)
    return groups


def _lowest(match: re.Match[bytes]) -> int:
    """Return where the lowest byte of a number stands: the first one of a little-endian integer."""
    return match.start() if match[0].endswith(b"\0") else match.end() - 1


def _pickles(data: bytes) -> Iterator[int]:
    """Yield where pickles begin."""
    if data[:1] == pickle.PROTO:
        yield 0
    for at in _occurrences(data, b"PK\3\4"):
        header = data[at : at + LOCAL_HEADER.size]
        if len(header) < LOCAL_HEADER.size:
            return
        _, method, name, extra = LOCAL_HEADER.unpack(header)
        begin = at + LOCAL_HEADER.size + name + extra
        if method == STORED and data[begin - extra - name : begin - extra].endswith(b"data.pkl"):
            yield begin


def _numbers(data: bytes, keys: Collection[str]) -> list[tuple[str, int]]:
    """List keys, and where the lowest byte of the number behind them stands.

    A pickle may be a number alone, as DCP writes those of a state; its key is empty.
    """
    found: list[tuple[str, int]] = []
    key: str | None = ""
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name in NOTES:
                continue
            if key is not None and position is not None and opcode.name in NUMBERS:
                found.append((key, position + NUMBERS[opcode.name]))
            key = argument if isinstance(argument, str) and argument in keys else None
    except (ValueError, IndexError, struct.error):
        return found  # no pickle, or one that another program reads
    return found
