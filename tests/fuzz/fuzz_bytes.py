"""Changes of bytes, by format: blind ones, as a disk makes them, and ones that know the structure.

Each takes the bytes and a generator, and gives other bytes. What cannot be followed is changed
blindly. It shares no code with the readers of fsck: zips are read by the standard library.
"""

from __future__ import annotations

import io
import json
import lzma
import pickletools
import struct
import tarfile
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    Change = Callable[[bytes, random.Random], bytes]

NUMBERS = (
    *(0, 1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 1000, 4095, 4096, 65535, 65536),
    *((1 << 24), (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, 10**15),
)
_FORMS = ("B", "<H", "<I", "<Q", ">H", ">I", ">Q")
_MOST = 1 << 19

# -- blind -----------------------------------------------------------------------------------------


def flip(data: bytes, rng: random.Random) -> bytes:
    """Flip some bits of one place."""
    changed = bytearray(data)
    at = rng.randrange(len(data))
    for _ in range(rng.choice((1, 1, 1, 2, 9))):
        where = min(at + rng.randrange(8), len(data) - 1)
        changed[where] ^= 1 << rng.randrange(8)
    return bytes(changed)


def number(data: bytes, rng: random.Random) -> bytes:
    """Write a number that is likely to be a limit of something."""
    form = rng.choice(_FORMS)
    size = struct.calcsize(form)
    at = rng.randrange(max(len(data) - size, 0) + 1)
    value = rng.choice((*NUMBERS, len(data), len(data) - at, at, rng.randrange(1 << 16)))
    return data[:at] + struct.pack(form, value % (1 << 8 * size)) + data[at + size :]


def step(data: bytes, rng: random.Random) -> bytes:
    """Count a number up or down by a little."""
    form = rng.choice(_FORMS)
    size = struct.calcsize(form)
    if len(data) < size:
        return flip(data, rng)
    at = rng.randrange(len(data) - size + 1)
    (value,) = struct.unpack_from(form, data, at)
    value = (value + rng.choice((-8, -1, 1, 8))) % (1 << 8 * size)
    return data[:at] + struct.pack(form, value) + data[at + size :]


def cut(data: bytes, rng: random.Random) -> bytes:
    """Lose the end, or the begin."""
    at = rng.randrange(len(data))
    return data[at:] if rng.random() < 0.1 else data[:at]


def insert(data: bytes, rng: random.Random) -> bytes:
    """Put some bytes in."""
    at = rng.randrange(len(data) + 1)
    new = rng.randbytes(rng.randrange(1, 9)) if rng.random() < 0.5 else bytes(rng.randrange(1, 600))
    return data[:at] + new + data[at:]


def remove(data: bytes, rng: random.Random) -> bytes:
    """Take some bytes out."""
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice((1, 1, 2, 4, 8, 64)) :]


def zero(data: bytes, rng: random.Random) -> bytes:
    """Zero a block."""
    size = rng.choice((1, 4, 16, 64, 512))
    at = rng.randrange(len(data))
    return data[:at] + bytes(len(data[at : at + size])) + data[at + size :]


def swap(data: bytes, rng: random.Random) -> bytes:
    """Swap two blocks, or put one over the other."""
    size = min(rng.choice((4, 16, 64, 512)), max(len(data) // 2, 1))
    one, two = sorted(rng.randrange(len(data) - size + 1) for _ in range(2))
    if two < one + size:
        return flip(data, rng)
    first, second = data[one : one + size], data[two : two + size]
    first = second if rng.random() < 0.5 else first
    return data[:one] + second + data[one + size : two] + first + data[two + size :]


BLIND: tuple[Change, ...] = (flip, flip, number, step, cut, insert, remove, zero, swap)


def blind(data: bytes, rng: random.Random) -> bytes:
    """Change bytes as a disk, a copy or a hand does."""
    if not data:
        return rng.randbytes(rng.randrange(1, 20))
    return rng.choice(BLIND)(data, rng)


# -- JSON ------------------------------------------------------------------------------------------

_JSON_VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *(
        -1,
        1.5,
        float("nan"),
        float("inf"),
        -0.0,
        1e400,
        10**40,
        None,
        True,
        False,
        "",
        "\0",
        "..",
        "/",
    ),
    *(
        "\ud800",
        "x" * 300,
        "../x",
        [],
        {},
        [[]],
        [1, 2],
        {"a": 1},
        "0",
        "F32",
        "float32",
        "BF16",
        "I4",
    ),
)


def _places(tree: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401  JSON
    found: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending and len(found) < 5000:
        part = pending.pop()
        keys = part if isinstance(part, dict) else range(len(part))
        for key in keys:
            found.append((part, key))
            if isinstance(part[key], dict | list):
                pending.append(part[key])
    return found


def of_json(tree: Any, rng: random.Random) -> None:  # noqa: ANN401, C901  JSON; a case each
    """Change a value of a JSON tree, in place."""
    places = _places(tree)
    if not places:
        if isinstance(tree, dict):
            tree[rng.choice(("a", "weight_map", "manifest"))] = rng.choice(_JSON_VALUES)
        return
    part, key = rng.choice(places)
    other, name = rng.choice(places)
    match rng.randrange(9):
        case 0 | 1:
            part[key] = rng.choice(_JSON_VALUES)
        case 2:
            part[key] = other[name]
        case 3:
            del part[key]
        case 4 if isinstance(part, dict):
            part[rng.choice((str(name), f"{key}x", "", key.upper()))] = part[key]
        case 5 if isinstance(part[key], int) and not isinstance(part[key], bool):
            part[key] += rng.choice((-1, 1, 8, -8))
        case 6 if isinstance(part[key], str) and part[key]:
            text = part[key]
            at = rng.randrange(len(text))
            part[key] = text[:at] + rng.choice(("", "0", "/", "\ud800", "é", text)) + text[at + 1 :]
        case 7:
            part[key], other[name] = other[name], part[key]
        case 8 if isinstance(part, list):
            part.insert(rng.randrange(len(part) + 1), part[key])
        case _:
            part[key] = [part[key]]


def json_text(data: bytes, rng: random.Random) -> bytes:
    """Change a JSON text by its values; sometimes a key is there twice."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return blind(data, rng)
    if not isinstance(tree, dict | list):
        return blind(data, rng)
    for _ in range(rng.choice((1, 1, 2))):
        of_json(tree, rng)
    return _dumped(tree, rng)


def _dumped(tree: Any, rng: random.Random) -> bytes:  # noqa: ANN401  JSON
    try:
        text = json.dumps(tree, ensure_ascii=rng.random() < 0.7)
    except (ValueError, RecursionError):  # a part was put into itself
        text = "[" * 5000
    if rng.random() < 0.05 and text[1:2] == '"':
        text = "{" + text[1:].partition(",")[0].rstrip("}") + ", " + text[1:]
    return text.encode("utf-8", "surrogatepass")[:_MOST]


# -- pickles ---------------------------------------------------------------------------------------


def _words(data: bytes) -> list[tuple[int, int]]:
    """Return where each instruction of a pickle begins and ends, as far as they can be followed."""
    starts: list[int] = []
    try:
        starts.extend(at for _, _, at in pickletools.genops(data) if at is not None)
    except Exception:  # noqa: BLE001  pickletools raises many sorts for what is no pickle
        if not starts:
            return []
    ends = [*starts[1:], starts[-1] + 1]
    return list(zip(starts, ends, strict=True))


_SNIPPETS = (
    *(
        b"0",
        b"1",
        b"2",
        b"(",
        b"N",
        b"K\x01",
        b")",
        b"}",
        b"]",
        b"t",
        b"l",
        b"R",
        b"b",
        b"\x81",
        b"\x94",
    ),
    *(
        b"Q",
        b"s",
        b"u",
        b"a",
        b"e",
        b"o",
        b"\x85",
        b"\x86",
        b"\x93",
        b"h\x00",
        b"q\x00",
        b"j\x05\0\0\0",
    ),
    *(b"\x95" + struct.pack("<Q", n) for n in (0, 3, 8, 100)),
    *(
        b"I0x10\n",
        b"I1\n",
        b"L5L\n",
        b"S'a'\n",
        b"V\\u0041\n",
        b"F1.5\n",
        b"g0\n",
        b"p0\n",
        b"P1\n",
    ),
    *(
        b"X\x05\0\0\0fuzzy",
        b"U\x01w",
        b"C\x01a",
        b"\x8f",
        b"\x90",
        b"\x91",
        b"\x96" + bytes(8),
        b"\x97",
        b"\x98",
    ),
    *(
        b"\x82\x01",
        b"\x8a\x01\xff",
        b"\x8a\x09\0\0\0\0\0\0\0\x80\0",
        b"M\xff\xff",
        b"J\xff\xff\xff\xff",
    ),
    b"ccollections\nOrderedDict\n)R0",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch\nSize\n",
    b"cposix\nsystem\nX\x0b\0\0\0fuzz-canary\x85R",
    b"cos\ngetcwd\n)R0",
    b"cbuiltins\ngetattr\n",
    b"cbuiltins\neval\nX\x05\0\0\x001 + 1\x85R0",
    b"(X\x0b\0\0\0fuzz-canaryios\nsystem\n0",
    b"(cos\nsystem\nX\x0b\0\0\0fuzz-canaryo0",
    b"cargparse\nNamespace\n)\x81}X\x01\0\0\0ws b",
)


def pickled(data: bytes, rng: random.Random) -> bytes:
    """Change a pickle by its instructions."""
    words = _words(data)
    if not words:
        return blind(data, rng)
    start, end = rng.choice(words)
    word = data[start:end]
    other = rng.choice(words)
    match rng.randrange(9):
        case 0:
            new = b""
        case 1:
            new = word + word
        case 2:
            new = data[slice(*other)]
        case 3 | 4:
            new = word + rng.choice(_SNIPPETS)
        case 5:
            new = rng.choice(_SNIPPETS)
        case 6 if len(word) > 1:
            new = word[:1] + blind(word[1:], rng)
        case 7 if len(word) > 1 and word[:1] in b"X\x8c\x8d":
            new = _text(_other_text(word, data, words, rng))
        case 8 if word[:1] in b"KMJ":
            new = _whole(rng)
        case _:
            new = word[:1] + (number(word[1:], rng) if len(word) > 1 else b"")
    return data[:start] + new + data[end:]


def _text(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


def _other_text(
    word: bytes, data: bytes, words: list[tuple[int, int]], rng: random.Random
) -> bytes:
    """Return a text that stands in the pickle already, or the own one changed."""
    texts = [data[start:end] for start, end in words if data[start : start + 1] in (b"X", b"\x8c")]
    chosen = rng.choice(texts) if texts and rng.random() < 0.6 else word
    text = chosen[5:] if chosen[:1] == b"X" else chosen[2:]
    return text if chosen is not word else blind(text, rng)


def _whole(rng: random.Random) -> bytes:
    value = rng.choice((*NUMBERS, -1, -5, rng.randrange(300)))
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


# -- zips ------------------------------------------------------------------------------------------

_END, _CENTRAL, _LOCAL = b"PK\x05\x06", b"PK\x01\x02", b"PK\x03\x04"


def zipped(data: bytes, rng: random.Random) -> bytes:
    """Change a zip: a member, with its CRC made to fit; or a field of the directory."""
    if rng.random() < 0.35:
        return _zip_field(data, rng)
    try:
        members = _members(data)
    except (
        zipfile.BadZipFile,
        OSError,
        lzma.LZMAError,
        OverflowError,
        zlib.error,
        ValueError,
        NotImplementedError,
        RuntimeError,
        EOFError,
    ):
        return blind(data, rng)
    if not members:
        return blind(data, rng)
    at = rng.randrange(len(members))
    name, held = members[at]
    match rng.randrange(10):
        case 0:
            del members[at]
        case 1:
            members.append(
                (rng.choice((name.upper(), name, f"{name}x", "data.pkl", "x/data.pkl")), held)
            )
        case 2:
            members[at] = (
                rng.choice((name.swapcase(), f"a/{name}", name.rpartition("/")[2])),
                held,
            )
        case 3:
            to = rng.randrange(len(members))
            members[at], members[to] = (name, members[to][1]), (members[to][0], held)
        case 4:
            members.append(
                (rng.choice(("a.pkl", "x/y.pkl", "code/a.py", "a.npy")), rng.choice(_RUN))
            )
        case _:
            members[at] = (name, any_bytes(name, held, rng))
    return _in_place(data, members) or _zip_of(members, deflate=rng.random() < 0.1)


_RUN = (
    b"\x80\x02cposix\nsystem\nX\x0b\0\0\0fuzz-canary\x85R.",
    b"cos\nsystem\n(S'fuzz-canary'\ntR.",
)


def _members(data: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = archive.infolist()[:200]
        return [(one.filename, _member(archive, one)) for one in found]


def _member(archive: zipfile.ZipFile, one: zipfile.ZipInfo) -> bytes:
    if one.file_size > _MOST:
        raise ValueError(one.file_size)
    with archive.open(one) as opened:
        try:
            return opened.read(_MOST)
        except zipfile.BadZipFile:  # its CRC is wrong already: what is there all the same
            return b""


def _in_place(data: bytes, members: list[tuple[str, bytes]]) -> bytes:
    """Put members of the same names and lengths where the old ones are; nothing where none fits.

    That keeps what only the writer of the format leaves: padding, descriptors, 64-bit fields.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        old = archive.infolist()
    if [(one.filename, one.file_size) for one in old] != [(n, len(held)) for n, held in members]:
        return b""
    changed = bytearray(data)
    for info, (_, held) in zip(old, members, strict=True):
        if info.compress_type or len(data) < info.header_offset + 30:
            return b""
        sizes = struct.unpack_from("<HH", data, info.header_offset + 26)
        start = info.header_offset + 30 + sum(sizes)
        if data[start : start + len(held)] == held:
            continue
        was, now = struct.pack("<I", info.CRC), struct.pack("<I", zlib.crc32(held))
        changed[start : start + len(held)] = held
        for at in _everywhere(data, was):
            changed[at : at + 4] = now
    return bytes(changed)


def _everywhere(data: bytes, what: bytes) -> list[int]:
    found: list[int] = []
    at = data.find(what)
    while at >= 0 and len(found) < 16:
        found.append(at)
        at = data.find(what, at + 1)
    return found


def _zip_of(members: list[tuple[str, bytes]], *, deflate: bool) -> bytes:
    out = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, held in members:
            info = zipfile.ZipInfo(name or "x")
            info.compress_type = how
            archive.writestr(info, held)
    return out.getvalue()


def _zip_gap(data: bytes, rng: random.Random) -> bytes:
    """Insert bytes before the end record, or behind it: readers differ in where they look."""
    end = data.rfind(_END)
    if end < 0:
        return blind(data, rng)
    at = rng.choice((end, max(end - 20, 0), len(data)))
    return data[:at] + rng.choice((bytes(rng.randrange(1, 60)), _END, _CENTRAL)) + data[at:]


def _zip_field(data: bytes, rng: random.Random) -> bytes:
    """Change a few bytes of a header of the archive."""
    if rng.random() < 0.1:
        return _zip_gap(data, rng)
    signs = [
        at
        for sign in (_END, _CENTRAL, _LOCAL, b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08")
        for at in _everywhere(data, sign)
    ]
    if not signs:
        return blind(data, rng)
    at = rng.choice(signs)
    head = data[at : at + rng.choice((22, 46, 80))]
    if not head:
        return blind(data, rng)
    return data[:at] + blind(head, rng) + data[at + len(head) :]


# -- other formats ---------------------------------------------------------------------------------


def safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change the header of a safetensors file, and mostly the length that it says."""
    if len(data) < 8:
        return blind(data, rng)
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8 or rng.random() < 0.2:
        return blind(data, rng)
    header, body = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.2:
        header = blind(header, rng)
    else:
        header = json_text(header, rng)
        header += b" " * (-len(header) % 8)
    said = len(header) if rng.random() < 0.9 else size
    return said.to_bytes(8, "little") + header + body


def database(data: bytes, rng: random.Random) -> bytes:
    """Change a manifest or a node of OCDBT; its length and its CRC-32C are made to fit."""
    import google_crc32c
    from backports import zstd

    is_one = data[:4] in (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde") and len(data) > 18
    if not is_one or rng.random() < 0.2:
        return blind(data, rng)
    body, is_packed = data[14:-4], data[13] == 1
    try:
        body = zstd.decompress(body) if is_packed else body
    except zstd.ZstdError:
        return blind(data, rng)
    body = blind(body, rng)
    body = zstd.compress(body) if is_packed else body
    head = data[:4] + (len(body) + 18).to_bytes(8, "little") + data[12:14]
    return head + body + google_crc32c.value(head + body).to_bytes(4, "little")


def tar(data: bytes, rng: random.Random) -> bytes:
    """Change a member of a tar archive; its headers are made anew."""
    out = io.BytesIO()
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as old:
            members = [
                (one.name, (old.extractfile(one) or io.BytesIO()).read(_MOST)) for one in old
            ]
    except (tarfile.TarError, ValueError, EOFError, OSError):
        return blind(data, rng)
    if not members:
        return blind(data, rng)
    at = rng.randrange(len(members))
    members[at] = (members[at][0], pickled(members[at][1], rng))
    with tarfile.open(fileobj=out, mode="w") as new:
        for name, held in members:
            info = tarfile.TarInfo(name)
            info.size = len(held)
            new.addfile(info, io.BytesIO(held))
    return out.getvalue()


def shard(data: bytes, rng: random.Random) -> bytes:
    """Change one of the archives that stand one behind the other in a shard of DCP."""
    ends = [at + 22 for at in _everywhere(data, _END)]
    starts = [0, *ends[:-1]]
    if not ends:
        return blind(data, rng)
    start, end = rng.choice(list(zip(starts, ends, strict=True)))
    return data[:start] + zipped(data[start:end], rng) + data[end:]


def any_bytes(name: str, data: bytes, rng: random.Random) -> bytes:
    """Change bytes by the format that they have."""
    return (known(name, data) or blind)(data, rng)


def known(name: str, data: bytes) -> Change | None:
    """Return what changes a format by its structure; None for bytes of none."""
    by_name: dict[str, Change] = {".safetensors": safetensors, ".distcp": shard, ".ocdbt": database}
    for ending, change in by_name.items():
        if name.endswith(ending) and (ending != ".distcp" or data.startswith(_LOCAL)):
            return change
    if data.startswith(_LOCAL):
        return zipped
    if data[:2] == b"\x0c\xdb":
        return database
    if data[:1] in b"{[" and data:
        return json_text
    if data[257:262] == b"ustar":
        return tar
    is_pickle = data[:1] == b"\x80" or name.endswith(("pkl", "pickle", ".metadata", "data"))
    return pickled if is_pickle else None
