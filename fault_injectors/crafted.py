"""Crafted files: what somebody who wants to do harm could leave in a checkpoint's directory.

Models: pickles that run code, names that lead elsewhere, sizes that no file has, records that
inflate without end. Digests of a manager's own are renewed behind it where the adapter can
(`reseal`); where it cannot, a digest that refuses is a pass. Proves that it fired: `fire` runs the
canary's pickle for real, and leaves its marker; who follows a name serves what `lead_inside` made.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Order = Literal["little", "big"]
ORDERS: tuple[Order, ...] = ("little", "big")
NEAR = 256  # bytes at the beginning of what a save wrote in which a length may stand
CLAIM = 10**15  # bytes, elements or entries that a header claims
BOMB = 1 << 31  # bytes of zeros that a record inflates to
BOMB_CRC = 0x4DBDF21C  # CRC-32 of them
LOCAL = b"PK\x03\x04"
CENTRAL = b"PK\x01\x02"


# -- pickles ---------------------------------------------------------------------------------------


def canary(marker: Path) -> bytes:
    """Return opcodes that create `marker` where a pickle is run, and leave the stack as it was."""
    name = str(marker).encode()
    call = b"cos\nopen\n(X" + struct.pack("<I", len(name)) + name
    return call + b"K\x41tR0"  # os.open(marker, O_CREAT | O_WRONLY), then drop the result


def whole_pickle(marker: Path) -> bytes:
    """Return a pickle of None that creates `marker` where it is run."""
    return b"\x80\x02" + canary(marker) + b"N."


def fire(_child: Any, marker: str) -> bool:  # noqa: ANN401  a Child
    """Prove that the canary works: run it as a careless reader would."""
    pickle.loads(whole_pickle(Path(marker)))  # noqa: S301  our own bytes
    return Path(marker).exists()


def is_pickle(data: bytes) -> bool:
    """Return whether bytes begin with a whole pickle of protocol 2 or newer."""
    if data[:1] != b"\x80":
        return False
    try:
        return any(opcode.name == "STOP" for opcode, _, _ in pickletools.genops(data))
    except (ValueError, UnicodeDecodeError):
        return False


class Spot(NamedTuple):
    """A place in a checkpoint where a reader might unpickle."""

    file: str  # relative to the root
    how: str  # prefix, record, item, whole
    at: int = 0  # first byte of an item


def spots(root: Path, files: list[str]) -> list[Spot]:
    """Find every pickled position: pickles, records of archives, items of shards; every file."""
    places: list[Spot] = []
    for name in files:
        data = (root / name).read_bytes()
        if is_pickle(data):
            places.append(Spot(name, "prefix"))
        elif zipfile.is_zipfile(io.BytesIO(data)) and data.startswith(LOCAL):
            places.append(Spot(name, "record"))
        places += [Spot(name, "item", at) for at in _some_items(data)]
        places.append(Spot(name, "whole"))
    return places


def _some_items(data: bytes) -> list[int]:
    """Return the first byte of some archives in a shard: one of a tensor, two of others."""
    starts = [at for at, name in archives(data) if name.endswith("/data.pkl")]
    if len(starts) < 2:  # noqa: PLR2004  one archive is the whole file
        return []
    spans = list(zip(starts, [*starts[1:], len(data)], strict=True))
    tensors = [at for at, end in spans if b"/data/0" in data[at:end]]
    return sorted([*tensors[:1], *sorted(set(starts) - set(tensors))[:2]])


def archives(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield offset and name of each record of archives that stand one after the other."""
    at = data.find(LOCAL)
    while at >= 0:
        length = struct.unpack_from("<H", data, at + 26)[0] if at + 30 <= len(data) else 0
        yield at, data[at + 30 : at + 30 + length].decode("utf-8", "replace")
        at = data.find(LOCAL, at + 4)


def plant(root: Path, spot: Spot, marker: Path) -> None:
    """Put the canary into a spot of a copy of the checkpoint."""
    path = root / spot.file
    data = path.read_bytes()
    if spot.how == "prefix":
        path.write_bytes(data[:2] + canary(marker) + data[2:])
    elif spot.how == "record":
        rewrite_records(path, lambda name, old: _infect(name, old, marker))
    elif spot.how == "item":
        new = whole_pickle(marker)
        path.write_bytes(data[: spot.at] + new + data[spot.at + len(new) :])
    else:
        path.write_bytes(whole_pickle(marker))


def _infect(name: str, data: bytes, marker: Path) -> bytes:
    return data[:2] + canary(marker) + data[2:] if name.endswith(".pkl") else data


def rewrite_records(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Write a zip archive anew, uncompressed, with each record's content changed."""
    with zipfile.ZipFile(path) as old:
        records = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w") as new:
        for name, data in records:
            new.writestr(zipfile.ZipInfo(name), change(name, data))


def rewrite_pickle(data: bytes, change: Callable[[str, Any], bytes | None]) -> bytes:
    """Replace instructions of a pickle: `change` gives new bytes or None; framing is dropped."""
    out = bytearray()
    steps = [(at, opcode.name, argument) for opcode, argument, at in pickletools.genops(data)]
    ends = [at for at, _, _ in steps[1:]] + [len(data)]
    for (at, name, argument), end in zip(steps, ends, strict=True):
        if name != "FRAME":
            new = change(name, argument)
            out += data[at:end] if new is None else new
    return bytes(out)


def inflate_integers(data: bytes, least: int) -> bytes:
    """Make every integer of a pickle from `least` on claim 10**15."""

    def change(name: str, argument: Any) -> bytes | None:  # noqa: ANN401  what pickletools gives
        large = name in {"BININT", "BININT1", "BININT2"} and argument >= least
        return pickle.dumps(CLAIM, 2)[2:-1] if large else None

    return rewrite_pickle(data, change)


def rename_text(data: bytes, old: str, new: str) -> bytes:
    """Replace a text of a pickle by another one of any length."""
    raw = new.encode()
    return rewrite_pickle(
        data,
        lambda name, argument: (
            b"X" + struct.pack("<I", len(raw)) + raw
            if "UNICODE" in name and argument == old
            else None
        ),
    )


# -- names that lead elsewhere ---------------------------------------------------------------------


def names_in(root: Path, files: list[str]) -> list[tuple[str, str]]:
    """Find (file, named file) where a file holds the plain name of another one."""
    contents = {name: (root / name).read_bytes() for name in files}
    return [
        (name, other)
        for name, data in contents.items()
        for other in files
        if other != name and Path(other).name.encode() in data and len(Path(other).name) > 4  # noqa: PLR2004
    ]


def lead_outside(root: Path, files: Sequence[str], named: str) -> Path:
    """Make each of `files` name `../<name>` in place of `<name>`; return the path where that leads.

    Where one of them is neither text nor a pickle the name keeps its length, and loses its head.
    """
    keeps = any(_has_fixed_places((root / file).read_bytes()) for file in files)
    name = Path(named).name
    new = f"../{name[3:]}" if keeps else f"../{name}"
    _rename(root, files, name, new)
    return (root / named).parent.parent / new[3:]


def lead_inside(root: Path, files: Sequence[str], named: str) -> None:
    """Give a file another name of the same length beside it, and change it in `files`."""
    name = Path(named).name
    new = f"x{name[1:]}" if name[0] != "x" else f"y{name[1:]}"
    (root / named).rename((root / named).with_name(new))
    _rename(root, files, name, new)


def lead_here(root: Path, files: Sequence[str], named: str) -> None:
    """Make each of `files` name `./<name>`, which is the same file, where that has room."""
    name = Path(named).name
    if not any(_has_fixed_places((root / file).read_bytes()) for file in files):
        _rename(root, files, name, f"./{name}")


def _has_fixed_places(data: bytes) -> bool:
    return not is_pickle(data) and not data.isascii()


def _rename(root: Path, files: Iterable[str], old: str, new: str) -> None:
    for file in files:
        data = (root / file).read_bytes()
        if is_pickle(data):
            (root / file).write_bytes(rename_text(data, old, new))
        else:
            (root / file).write_bytes(data.replace(old.encode(), new.encode()))


# -- sizes -----------------------------------------------------------------------------------------


class Header(NamedTuple):
    """A place in a file where sizes stand, and which."""

    file: str  # relative to the root
    how: str  # header length, header offsets, record sizes, storage sizes, ..., length
    at: int = 0  # first byte of a length
    width: int = 8  # bytes of it
    order: Order = "little"

    def __str__(self) -> str:
        """Say it in a sentence."""
        return (
            f"{self.how} at byte {self.at} of {self.file}"
            if self.at
            else f"{self.how} of {self.file}"
        )


def claims(root: Path, files: list[str], before: Path | None = None) -> list[Header]:
    """Find each header whose sizes can be made to claim more than there is.

    `before` is the directory before the save: of a file that it only appended to, what it appended.
    """
    headers: list[Header] = []
    for name in files:
        data = (root / name).read_bytes()
        known = [Header(name, how) for how, fits in _HEADERS.items() if fits(data)]
        headers += known or _lengths(name, data, _begin(data, before / name if before else None))
    return headers


def _begin(data: bytes, old: Path | None) -> int:
    """Return where what was appended begins; 0 for a file that is new or was written anew."""
    head = old.read_bytes() if old is not None and old.is_file() else b""
    return len(head) if len(head) < len(data) and data.startswith(head) else 0


def _lengths(name: str, data: bytes, begin: int) -> list[Header]:
    """Find the first number near the beginning that may be the length of most of what follows."""
    for width, order in product((8, 4), ORDERS):
        for at in range(begin, min(begin + NEAR, len(data) - width)):
            rest = len(data) - at - width
            if rest // 2 < int.from_bytes(data[at : at + width], order) <= rest:
                return [Header(name, "length", at, width, order)]
    return []


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data.decode()), dict)
    except ValueError:
        return False


def _is_zip(data: bytes) -> bool:
    return data.startswith(LOCAL) and zipfile.is_zipfile(io.BytesIO(data))


_HEADERS: dict[str, Callable[[bytes], bool]] = {
    "header length": lambda data: data[8:10] == b'{"',
    "header offsets": lambda data: data[8:10] == b'{"',
    "record sizes": _is_zip,
    "storage sizes": _is_zip,
    "all integers": _is_zip,
    "json": _is_json,
    "pickle": is_pickle,
}


def claim(root: Path, header: Header) -> None:
    """Make a header claim 10**15, or as much as its field holds."""
    path, how = root / header.file, header.how
    data = path.read_bytes()
    if how == "length":
        most = min(CLAIM, (1 << 8 * header.width) - 16).to_bytes(header.width, header.order)
        path.write_bytes(data[: header.at] + most + data[header.at + header.width :])
    elif how == "header length":
        path.write_bytes(struct.pack("<Q", CLAIM) + data[8:])
    elif how == "header offsets":
        path.write_bytes(_long_header(data))
    elif how == "record sizes":
        path.write_bytes(_long_records(data))
    elif how == "json":
        path.write_bytes(re.sub(rb"(?<=[:,\[ ])\d{2,12}(?=[,}\]\s])", str(CLAIM).encode(), data))
    elif how == "pickle":
        path.write_bytes(inflate_integers(data, 16))
    else:
        least = 64 if how == "storage sizes" else 8
        rewrite_records(path, lambda name, old: _long_pickle(name, old, least))


def _long_pickle(name: str, data: bytes, least: int) -> bytes:
    return inflate_integers(data, least) if name.endswith(".pkl") else data


def _long_header(data: bytes) -> bytes:
    """Make the entries of a safetensors header claim what the file does not have."""
    length = struct.unpack_from("<Q", data)[0]
    header = re.sub(rb"(?<=[,\[])\d{2,12}(?=[,\]])", str(CLAIM).encode(), data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _long_records(data: bytes) -> bytes:
    """Make each data record of a zip directory claim almost 4 GiB, stored as it is."""
    out, at = bytearray(data), data.find(CENTRAL)
    while at >= 0:
        name = data[at + 46 : at + 46 + struct.unpack_from("<H", data, at + 28)[0]]
        if b"/data/" in name:
            struct.pack_into("<II", out, at + 20, 0xFFFFFFF0, 0xFFFFFFF0)
        at = data.find(CENTRAL, at + 4)
    return bytes(out)


# -- bombs -----------------------------------------------------------------------------------------


def has_record(archive: Path, record: str) -> bool:
    """Return whether an archive has a record whose name ends with `record`.

    One without tensors has no record of data.
    """
    with zipfile.ZipFile(archive) as opened:
        return any(name.endswith(record) for name in opened.namelist())


def bomb(root: Path, file: str, record: str) -> None:
    """Replace the first record whose name ends with `record`: it inflates to 2 GiB of zeros."""
    path = root / file
    with zipfile.ZipFile(path) as old:
        names = old.namelist()
        records = {name: old.read(name) for name in names}
    target = next(name for name in names if name.endswith(record))
    with zipfile.ZipFile(path, "w") as new:
        for name in names:
            if name != target:
                new.writestr(zipfile.ZipInfo(name), records[name])
    _append(path, target, _zeros())


def _zeros() -> bytes:
    """Return a raw deflate stream of 2 GiB of zeros, made of equal blocks of 1 MiB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * (BOMB >> 20) + b"\x03\x00"


def _append(path: Path, name: str, packed: bytes) -> None:
    """Add a deflated record to an archive by hand: zipfile would inflate it first."""
    data = path.read_bytes()
    end = data.rfind(b"PK\x05\x06")
    count, size, start = struct.unpack_from("<HII", data, end + 10)
    raw = name.encode()
    sizes = struct.pack("<IIIHH", BOMB_CRC, len(packed), BOMB, len(raw), 0)
    local = LOCAL + struct.pack("<HHHHH", 20, 0, 8, 0, 33) + sizes + raw + packed
    entry = CENTRAL + struct.pack("<HHHHHH", 20, 20, 0, 8, 0, 33) + sizes
    entry += struct.pack("<HHHII", 0, 0, 0, 0, start) + raw
    directory = data[start : start + size] + entry
    tail = struct.pack(
        "<HHHHIIH", 0, 0, count + 1, count + 1, len(directory), start + len(local), 0
    )
    path.write_bytes(data[:start] + local + directory + b"PK\x05\x06" + tail)


# -- what a checkpoint asks for --------------------------------------------------------------------


def globals_of(data: bytes) -> set[str]:
    """Name what the pickles of a file import: plain, in archives, or one after the other."""
    imports: set[str] = set()
    starts = [0] if data[:1] == b"\x80" else []
    starts += [
        at + 30 + sum(struct.unpack_from("<HH", data, at + 26))
        for at, name in archives(data)
        if name.endswith(".pkl")
    ]
    for start in starts:
        try:
            imports |= _imports(data[start:])
        except (ValueError, UnicodeDecodeError):
            continue
    return imports


def _imports(data: bytes) -> set[str]:
    """Name the imports of one pickle; protocol 4 takes them from the stack."""
    imports: set[str] = set()
    texts: list[str] = []
    memo: dict[int, Any] = {}
    last: Any = None
    for opcode, argument, _ in pickletools.genops(data):
        if "GET" in opcode.name:
            last = memo.get(int(argument or 0))
        elif "PUT" in opcode.name or opcode.name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = last
            continue
        else:
            last = argument
        if opcode.name in {"GLOBAL", "INST"}:
            imports.add(str(argument).replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            imports.add(".".join(texts[-2:]))
        if isinstance(last, str):
            texts.append(last)
    return imports
