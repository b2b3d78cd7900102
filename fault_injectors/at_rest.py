"""Damage of files that nobody writes at the moment: what a disk, a copy or a hand does to them.

Models: flipped bits, zeroed and swapped blocks, files cut short, or longer by a hole, swapped,
taken from another step, missing, unexpected or duplicated, names that are no file any more,
metadata edited by hand, text in another encoding. Times, modes and inodes stay as they were,
because a failing disk does not touch them either.
Does not model: damage that moves while it is read, or directories that cannot be listed.
Proof: each function gives a `Damage` with the digest before and after, and raises `Unknown` when
nothing changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpt_conformance.contract.kept_trees import fingerprint
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.fault_injectors import payload
from ckpt_conformance.fault_injectors.injector import length_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ckpt_conformance.fault_injectors.payload import Place

ABSENT = "absent"
Cut = Literal["0", "1", "half", "len-1"]
GROWN = 1 << 40  # bytes: no hash gets through them while a child lives
CUTS: tuple[Cut, ...] = ("0", "1", "half", "len-1")
NoFile = Literal["directory", "socket", "FIFO"]
NO_FILES: dict[NoFile, Callable[[Path], None]] = {
    "directory": os.mkdir,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),  # no length limits it
    "FIFO": os.mkfifo,
}


@dataclass(frozen=True)
class Damage:
    """What was done to which file, and the proof: digests of the file before and after."""

    fault: str
    file: str
    offset: int | None
    before: str
    after: str
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain types only, for evidence."""
        return asdict(self)


def digest(path: Path) -> str:
    """Digest a file's bytes; `absent` if there is no such file."""
    if not path.is_file():
        return ABSENT
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def prove(fault: str, root: Path, file: str, before: str, **more: Any) -> Damage:  # noqa: ANN401
    """Describe damage; raises Unknown where the digest of the file is what it was before."""
    after = digest(root / file)
    if after == before:
        message = f"the fault {fault} did not fire: {file} still has digest {before}"
        raise Unknown(message)
    return Damage(fault, file, more.get("offset"), before, after, more.get("detail", ""))


def rewrite(path: Path, data: bytes) -> None:
    """Write a file in place and put its times back."""
    info = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def _patch(fault: str, root: Path, place: Place, change: Callable[[bytearray], str]) -> Damage:
    """Change the bytes of a place; `change` edits them and says what it did."""
    path = root / place.file
    before, info = digest(path), path.stat()
    with path.open("r+b") as file:
        file.seek(place.offset)
        window = bytearray(file.read(place.length))
        detail = change(window)
        file.seek(place.offset)
        file.write(window)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    detail = f"{detail} of {place.tensor or 'the middle of the largest file'}"
    return prove(fault, root, place.file, before, offset=place.offset, detail=detail)


# -- bytes inside a file ---------------------------------------------------------------------------


def flip_bits(root: Path, place: Place, rng: random.Random, bits: int = 1) -> Damage:
    """Flip one bit, or several different ones, inside a place."""

    def change(window: bytearray) -> str:
        chosen = rng.sample(range(len(window) * 8), min(bits, len(window) * 8))
        for bit in chosen:
            window[bit // 8] ^= 1 << bit % 8
        return f"bits {sorted(chosen)}"

    return _patch("bit-flip" if bits == 1 else "multi-bit", root, place, change)


def change_number(root: Path, place: Place) -> Damage:
    """Change a number by its lowest bit: an integer by one, a float by the least it can."""

    def change(window: bytearray) -> str:
        window[0] ^= 1
        return "the lowest bit"

    return _patch("changed-number", root, place, change)


def zero_block(root: Path, place: Place, size: int = 512) -> Damage:
    """Zero the first bytes of a place: what a lost block of a file reads as."""

    def change(window: bytearray) -> str:
        count = min(size, len(window))
        window[:count] = bytes(count)
        return f"{count} bytes zeroed"

    return _patch("zeroed-block", root, place, change)


def swap_blocks(root: Path, place: Place, other: Place | None = None) -> Damage:
    """Swap the bytes of two places of one file; without another, two halves of the place."""
    if other is None:

        def halves(window: bytearray) -> str:
            half = len(window) // 2
            window[:half], window[half : 2 * half] = window[half : 2 * half], window[:half]
            return f"two halves of {half} bytes swapped"

        return _patch("swapped-blocks", root, place, halves)
    path = root / place.file
    before, data = digest(path), bytearray(path.read_bytes())
    size = min(place.length, other.length, abs(place.offset - other.offset))
    first = slice(place.offset, place.offset + size)
    second = slice(other.offset, other.offset + size)
    data[first], data[second] = data[second], data[first]
    rewrite(path, bytes(data))
    detail = f"{size} bytes of {place.tensor} and {other.tensor} (at {other.offset}) swapped"
    return prove("swapped-blocks", root, place.file, before, offset=place.offset, detail=detail)


# -- whole files -----------------------------------------------------------------------------------


def truncate(root: Path, file: str, cut: Cut = "half") -> Damage:
    """Cut a file to 0 bytes, 1 byte, half of it, or all but the last byte."""
    return cut_at(root, file, length_of(cut, (root / file).stat().st_size))


def truncate_all(root: Path, file: str, cut: Cut = "half") -> Damage:
    """Cut a file and its copies: a manager that keeps two serves the other one."""
    for other in copies_of(root, file):
        truncate(root, other, cut)
    return truncate(root, file, cut)


def copies_of(root: Path, file: str) -> list[str]:
    """Name the other files that have the bytes of a file; an empty one has no copy."""
    content = (root / file).read_bytes()
    alike = [n for n in payload.names(root) if (root / n).stat().st_size == len(content)]
    same = (name for name in alike if name != file and (root / name).read_bytes() == content)
    return list(same) if content else []


def make_noise(root: Path, file: str, rng: random.Random) -> Damage:
    """Replace each byte of a file by a random one; its size stays."""
    path = root / file
    before = digest(path)
    rewrite(path, rng.randbytes(path.stat().st_size))
    return prove("noise", root, file, before)


def cut_at(root: Path, file: str, length: int) -> Damage:
    """Cut a file to its first `length` bytes."""
    path = root / file
    before, info = digest(path), path.stat()
    os.truncate(path, min(length, info.st_size))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    detail = f"{info.st_size} to {length} bytes"
    return prove("truncation", root, file, before, offset=length, detail=detail)


def swap_files(root: Path, file: str, other: str) -> Damage:
    """Swap the bytes of two files, each under the other's name."""
    left, right = root / file, root / other
    before, data = digest(left), left.read_bytes()
    rewrite(left, right.read_bytes())
    rewrite(right, data)
    return prove("swapped-files", root, file, before, detail=f"with {other}")


def replace_file(root: Path, file: str, source: Path, fault: str = "other-step") -> Damage:
    """Put the bytes of a file from elsewhere under this name: of another step, of another shard."""
    path = root / file
    before = digest(path)
    rewrite(path, source.read_bytes())
    return prove(fault, root, file, before, detail=f"bytes of {source.name}")


def copy_over(root: Path, copies: Mapping[str, str], source: Path) -> Damage:
    """Put copies of files and directories in the place of others: a step under another's name.

    `copies` maps each path below `source`, where the step is still there, to the one below the root
    that it replaces.
    """
    changed = {new: _content(root / new) for new in copies.values()}
    for old, new in copies.items():
        remove_all(root / new)
        copy = shutil.copytree if (source / old).is_dir() else shutil.copy2
        copy(source / old, root / new)
    first = next((new for new, before in changed.items() if _content(root / new) != before), "")
    if not first:
        raise Unknown(f"the fault other-step did not fire: {', '.join(changed)} are as before")
    before, after = changed[first], _content(root / first)
    return Damage("other-step", first, None, before, after, f"copies of {', '.join(copies)}")


def remove_all(path: Path) -> None:
    """Delete a file, or a directory with all that is in it; it may be absent."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _content(path: Path) -> str:
    """Digest a file, or all of a directory."""
    if not path.is_dir():
        return digest(path)
    return hashlib.sha256(repr(sorted(fingerprint(path).items())).encode()).hexdigest()[:16]


def duplicate(root: Path, file: str, source: str) -> Damage:
    """Put a copy of one file in the place of another: a shard that is there twice."""
    return replace_file(root, file, root / source, fault="duplicated-file")


def remove(root: Path, file: str) -> Damage:
    """Delete a file."""
    before = digest(root / file)
    (root / file).unlink(missing_ok=True)
    return prove("missing-file", root, file, before)


def grow(root: Path, file: str, size: int = GROWN) -> Damage:
    """Let a file grow to a size (bytes) by a hole: it takes no more of the disk than before.

    Its digest is not asked for, as whoever reads a hole of this size has to wait.
    """
    path = root / file
    before, info = digest(path), path.stat()
    try:
        os.truncate(path, size)
    except OSError as error:  # such as EFBIG: the largest file may be smaller here
        raise Unknown(f"the fault grown did not fire: {error}") from error
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    after = f"{before}, and zeros up to {path.stat().st_size} bytes"
    return Damage("grown", file, info.st_size, before, after)


def put_in_place(root: Path, file: str, kind: NoFile) -> Damage:
    """Put something of the file's name there that is no file."""
    before = digest(root / file)
    (root / file).unlink()
    NO_FILES[kind](root / file)
    return prove(f"a {kind} in the place", root, file, before)


def add(root: Path, file: str, data: bytes = b"not yours\n") -> Damage:
    """Put a file there that no save wrote."""
    path = root / file
    before = digest(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return prove("extra-file", root, file, before)


# -- metadata --------------------------------------------------------------------------------------


def json_files(root: Path, files: list[str] | None = None) -> list[str]:
    """Name the files that begin with a JSON object or list; more may stand behind it."""
    return [name for name in files or payload.names(root) if _is_json(root / name)]


def _is_json(path: Path) -> bool:
    data = path.read_bytes()
    try:
        return data[:1] in (b"{", b"[") and bool(Json.read(data))
    except ValueError:
        return False


@dataclass(frozen=True)
class Json:
    """A JSON object or list at the begin of a file: its bytes, and what stands behind them."""

    tree: Any
    own: bytes
    behind: bytes

    @classmethod
    def read(cls, data: bytes) -> Json:
        """Read it; raises ValueError where the file begins with no JSON."""
        text = data.decode("utf-8", "surrogateescape")
        tree, end = json.JSONDecoder().raw_decode(text)
        own = text[:end].encode("utf-8", "surrogateescape")
        return cls(tree, own, data[len(own) :])

    def with_tree(self, tree: Any) -> bytes:  # noqa: ANN401
        """Return other content with the separators and indentation of this."""
        separators = (",", ":") if b": " not in self.own else None
        ascii_only, indent = self.own.isascii(), _indent(self.own)
        text = json.dumps(tree, separators=separators, ensure_ascii=ascii_only, indent=indent)
        return text.encode("utf-8", "surrogateescape") + self.behind


def _fields(tree: Any, kind: type) -> list[tuple[Any, Any]]:  # noqa: ANN401  JSON
    """List (container, key) of every value of a kind, containers first to last."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    fields: list[tuple[Any, Any]] = []
    for key, value in items:
        if isinstance(value, dict | list):
            fields += _fields(value, kind)
        elif isinstance(value, kind) and not isinstance(value, bool):
            fields.append((tree, key))
    return fields


def edit_json(
    root: Path, file: str, rng: random.Random, what: str = "number", key_like: str = ""
) -> Damage:
    """Change one field of a JSON file as a hand would: a number by one, or a name by a letter.

    A field whose key contains `key_like` is chosen where there is one: `step`, for example.
    """
    path = root / file
    before, found = digest(path), Json.read(path.read_bytes())
    fields = _fields(found.tree, int if what == "number" else str)
    if not fields:
        message = f"the fault edited-metadata did not fire: {file} holds no {what}"
        raise Unknown(message)
    alike = [field for field in fields if key_like and key_like in str(field[1])]
    container, key = rng.choice(alike or fields)
    old = container[key]
    container[key] = old + 1 if what == "number" else f"{old}x"
    rewrite(path, found.with_tree(found.tree))
    detail = f"{key}: {old!r} became {container[key]!r}"
    return prove("edited-metadata", root, file, before, detail=detail)


def keys_of(path: Path) -> list[str]:
    """List the outermost keys of a JSON file; none where it holds no object."""
    tree = Json.read(path.read_bytes()).tree
    return sorted(tree) if isinstance(tree, dict) else []


def rename_key(root: Path, file: str, key: str) -> Damage:
    """Rename an outermost key of a JSON file: what looks for it finds none."""
    path = root / file
    before, found = digest(path), Json.read(path.read_bytes())
    tree = {f"{name}x" if name == key else name: one for name, one in found.tree.items()}
    rewrite(path, found.with_tree(tree))
    return prove("renamed-key", root, file, before, detail=f"{key} became {key}x")


def _indent(data: bytes) -> int | None:
    """Return the indentation of the second line; None if it has none. So only the field changes."""
    second = (data.split(b"\n")[1:2] or [b""])[0]
    return len(second) - len(second.lstrip(b" ")) or None


def break_utf8(root: Path, file: str) -> Damage:
    """Put a byte that no UTF-8 text has into a text file, in the middle of its letters."""
    path = root / file
    before, data = digest(path), path.read_bytes()
    letters = [at for at, byte in enumerate(data) if chr(byte).isalpha()]
    at = letters[len(letters) // 2] if letters else len(data) // 2
    rewrite(path, data[:at] + b"\xff" + data[at + 1 :])
    return prove("non-utf8", root, file, before, offset=at, detail="one byte became 0xff")


# -- by name ---------------------------------------------------------------------------------------


def _two(root: Path, rng: random.Random, file: str | None) -> tuple[str, str]:
    """Choose two files with different bytes, `file` first; raises Unknown if there are none."""
    names = payload.names(root)
    first = file or rng.choice(names or [""])
    others = [name for name in names if digest(root / name) != digest(root / first)]
    if not others:
        message = f"{root} holds no second file with other bytes"
        raise Unknown(message)
    return first, rng.choice(others)


def _json(root: Path, file: str | None) -> str:
    """Choose `file`, or the first JSON file; raises Unknown if there is none."""
    candidates = [file] if file else json_files(root)
    if not candidates:
        message = f"{root} holds no JSON file"
        raise Unknown(message)
    return candidates[0]


def _at(root: Path, file: str | None) -> Place:
    return payload.middle(root, [file] if file else None)


AT_REST: Mapping[str, Callable[[Path, random.Random, str | None], Damage]] = {
    "bit-flip": lambda root, rng, file: flip_bits(root, _at(root, file), rng),
    "multi-bit": lambda root, rng, file: flip_bits(root, _at(root, file), rng, bits=9),
    "zeroed-block": lambda root, _, file: zero_block(root, _at(root, file)),
    "swapped-blocks": lambda root, _, file: swap_blocks(root, _at(root, file)),
    "truncation-0": lambda root, _, file: truncate(root, _at(root, file).file, "0"),
    "truncation-1": lambda root, _, file: truncate(root, _at(root, file).file, "1"),
    "truncation-half": lambda root, _, file: truncate(root, _at(root, file).file, "half"),
    "truncation-len-1": lambda root, _, file: truncate(root, _at(root, file).file, "len-1"),
    "swapped-files": lambda root, rng, file: swap_files(root, *_two(root, rng, file)),
    "duplicated-file": lambda root, rng, file: duplicate(root, *_two(root, rng, file)),
    "missing-file": lambda root, _, file: remove(root, _at(root, file).file),
    "extra-file": lambda root, _, file: add(root, file or "extra.bin"),
    "edited-number": lambda root, rng, file: edit_json(root, _json(root, file), rng, "number"),
    "edited-name": lambda root, rng, file: edit_json(root, _json(root, file), rng, "name"),
    "non-utf8": lambda root, _, file: break_utf8(root, _json(root, file)),
}
"""Every fault of this module that needs one directory only: `AT_REST[name](root, rng, file)`."""


def copy_damaged(
    source: Path, target: Path, fault: str, rng: random.Random, file: str | None = None
) -> Damage:
    """Copy a directory and damage the copy, in `file` if one is named; the original stays."""
    shutil.copytree(source, target, symlinks=True)
    return AT_REST[fault](target, rng, file)
