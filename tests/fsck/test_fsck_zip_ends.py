"""Zip archives that torch's own reader finds, and Python's does not, or not the same ones.

Each is under a name of no format beside a step that is whole, and torch runs what is in it.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import struct
import warnings
import zipfile
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from ckpt_conformance.fsck.formats import zip_ends
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Malformed, State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class _Makes:
    """Makes a folder where it is unpickled, which is how it is seen to have run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


class Parts(NamedTuple):
    """An archive of torch, cut where a change of its end may come in between."""

    members: bytes
    directory: bytes
    count: int


def parts(value: object) -> Parts:
    stream = io.BytesIO()
    torch.save(value, stream)
    data = stream.getvalue()
    _, _, _, count, _, size, at, _ = struct.unpack("<IHHHHIIH", data[-22:])
    return Parts(data[:at], data[at : at + size], count)


def end(size: int, at: int, count: int, **others: int) -> bytes:
    """Write an end record."""
    disk, comment = others.get("disk", 0), others.get("comment", 0)
    return struct.pack("<IHHHHIIH", 0x06054B50, disk, disk, count, count, size, at, comment)


def plain(one: Parts, gap: bytes = b"", **others: int) -> bytes:
    """Write an archive with something between its directory and its end."""
    own = end(len(one.directory), len(one.members), one.count, **others)
    return one.members + one.directory + gap + own


def large(
    one: Parts, gap: bytes = b"", *, behind: bytes = b"", disk: int = 0, more: bytes = b""
) -> bytes:
    """Write an archive with a 64-bit end, and something before and behind that."""
    start = len(one.members) + len(one.directory) + len(gap)
    sizes = (one.count, one.count, len(one.directory), len(one.members))
    own = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44 + len(more), 45, 45, 0, 0, *sizes) + more
    locator = struct.pack("<IIQI", 0x07064B50, disk, start, 1)
    last = end(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFF)
    return one.members + one.directory + gap + own + behind + locator + last


def two(one: Parts) -> bytes:
    """Write a directory of harmless records where Python looks for it, beside that of torch's."""
    harmless = parts({"a": 1})
    own = harmless.directory.ljust(len(one.directory), b"\0")[: len(one.directory)]
    return plain(one, own)


def with_field(one: Parts, place: int, value: int) -> Parts:
    """Set two bytes of each entry of the directory."""
    data, at = bytearray(one.directory), 0
    while at < len(data):
        struct.pack_into("<H", data, at + place, value)
        at += 46 + sum(struct.unpack_from("<HHH", data, at + 28))
    return one._replace(directory=bytes(data))


WAYS: dict[str, Callable[[Parts], bytes]] = {
    "a gap before the end": lambda one: plain(one, b"\0" * 7),
    "a large gap": lambda one: plain(one, b"\1" * 200_000),
    "a gap before a 64-bit end": lambda one: large(one, b"\0" * 7),
    "a gap behind a 64-bit end": lambda one: large(one, behind=b"\0" * 7),
    "a 64-bit end with more in it": lambda one: large(one, more=b"\0" * 8),
    "a 64-bit end of another disk": lambda one: large(one, disk=3),
    "a second disk": lambda one: plain(with_field(one, 34, 1), disk=1),
    "half a sign behind the end": lambda one: plain(one) + b"PK\x05\x06",
    "half a record behind the end": lambda one: plain(one) + end(0, 0, 0)[:21],
    "much behind the end": lambda one: plain(one) + b"\0" * 69_000,
    "no comment of the length it says": lambda one: plain(one, comment=9),
    "two directories": two,
    "a directory that says more": lambda one: plain(
        one._replace(directory=one.directory + b"\0" * 9)
    ),
    "a record for a later program": lambda one: plain(with_field(one, 6, 99)),
    "bytes before and behind": lambda one: plain(one, b"\0" * 90_000) + b"\0" * 30_000,
}


def judged(tmp_path: Path, data: bytes, name: str = "notes") -> State:
    step = tmp_path / "step_2"
    step.mkdir()
    torch.save({"w": torch.ones(3)}, step / "model.pt")
    (step / name).write_bytes(data)
    return judge(tmp_path).state


@pytest.mark.parametrize("name", ["notes", "notes.bin"])
@pytest.mark.parametrize("way", WAYS)
def test_an_archive_that_torch_finds_is_looked_into(way: str, name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    data = WAYS[way](parts(_Makes(marker)))
    (tmp_path / "alone").write_bytes(data)
    with contextlib.suppress(Exception):
        torch.load(tmp_path / "alone", weights_only=False)
    assert marker.is_dir(), "torch did not load it"
    (tmp_path / "alone").unlink()
    marker.rmdir()
    assert judged(tmp_path, data, name) is State.UNSAFE


@pytest.mark.parametrize("way", WAYS)
def test_such_an_archive_without_code_is_passed_over(way: str, tmp_path: Path) -> None:
    assert judged(tmp_path, WAYS[way](parts({"a": 1}))) is State.WHOLE


@pytest.mark.parametrize("way", WAYS)
def test_such_a_file_of_torch_is_damaged(way: str, tmp_path: Path) -> None:
    """No save writes it, though torch loads it."""
    assert judged(tmp_path, WAYS[way](parts({"a": 1})), "optimizer.pt") is State.DAMAGED


def _records(data: bytes) -> list[str] | None:
    """Return what torch's reader finds in an archive; None where it refuses it."""
    try:
        return [*torch._C.PyTorchFileReader(io.BytesIO(data)).get_all_records()]
    except (RuntimeError, ValueError):
        return None


def test_the_same_records_are_found_as_by_torch() -> None:
    """Bytes of the directory and of the ends are changed at random: what torch finds is found."""
    rng, found = random.Random(7), 0  # noqa: S311  no secret
    wholes = [way(parts({"a": torch.ones(1)})) for way in (plain, large)]
    for _ in range(3000):
        whole = wholes[rng.random() < 0.5]
        start = whole.index(b"PK\x01\x02")
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 3])):
            data[rng.randrange(start, len(data))] = rng.choice([0, 1, 2, 255, rng.randrange(256)])
        if rng.random() < 0.3:
            data[rng.randrange(start, len(data)) :] += b"\0" * rng.randrange(40)
        expected = _records(bytes(data))
        if expected is None:
            continue
        found += 1
        archive = zip_ends.TorchZip(io.BytesIO(data), len(data))
        names = [one.filename.partition("/")[2] for one in archive.infolist()]
        assert [one for one in expected if one not in names and one.isascii()] == []
    assert found > 500


def test_of_more_members_than_are_looked_into_nobody_says_that_they_are_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zip_ends, "_MOST_MEMBERS", 3)
    assert judged(tmp_path, plain(parts({"a": 1}))) is State.UNKNOWN


def test_a_file_whose_end_cannot_be_read_raises_what_parsers_raise() -> None:
    with pytest.raises(Malformed):
        zip_ends.find(io.BytesIO(b"PK"), 100)
    assert zip_ends.find(io.BytesIO(b"PK"), 2) is None
    with pytest.raises(zipfile.BadZipFile):
        zip_ends.TorchZip(io.BytesIO(b""), 0)


def _script(marker: Path) -> dict[str, bytes]:
    """Return what is in TorchScript of which a load makes a file."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is old, and in many files
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), stream)
    with zipfile.ZipFile(stream) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (one for one in members if one.endswith("activation.py"))
    evil = f'  foo : Final[Tensor] = torch.from_file("{marker}", True, 3)\n  training : bool\n'
    members[name] = members[name].replace(b"  training : bool\n", evil.encode())
    return members


def _runs(path: Path, marker: Path) -> bool:
    """Load TorchScript, and look whether it ran."""
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")
        torch.jit.load(path)  # type: ignore[no-untyped-call]
    is_run = marker.exists()
    marker.unlink(missing_ok=True)
    path.unlink()
    return is_run


def test_sources_of_torchscript_that_occur_twice_are_unsafe(tmp_path: Path) -> None:
    """Which of them torch finds depends on how it sorts names."""
    marker, ran = tmp_path / "ran", list[bool]()
    for is_first in (True, False):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as new:
            for name, data in _script(marker).items():
                pair = [(name, data)]
                if name.endswith("activation.py"):
                    good = b"".join(
                        one for one in data.splitlines(keepends=True) if b"from_file" not in one
                    )
                    pair.append((name[:-3] + ".PY", good))
                for own, content in pair if is_first else reversed(pair):
                    new.writestr(own, content)
        path = tmp_path / f"step_{is_first:d}" / "extra"
        path.parent.mkdir()
        torch.save({"w": torch.ones(3)}, path.parent / "model.pt")
        path.write_bytes(stream.getvalue())
        assert judge(path.parent).state is State.UNSAFE
        ran.append(_runs(path, marker))
    assert any(ran)


def test_torchscript_behind_other_bytes_is_unsafe(tmp_path: Path) -> None:
    """torch.jit.load does not look at the first bytes."""
    marker, path, stream = tmp_path / "ran", tmp_path / "alone", io.BytesIO()
    stream.write(b"#!/bin/sh\n")
    with zipfile.ZipFile(stream, "a") as new:
        for name, data in _script(marker).items():
            new.writestr(name, data)
    path.write_bytes(stream.getvalue())
    assert _runs(path, marker)
    assert judged(tmp_path, stream.getvalue()) is State.UNSAFE
