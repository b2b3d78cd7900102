"""Code that is packed, or stands behind what a reader may lose its way in, is found."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from typing import TYPE_CHECKING

import pytest
import torch
from unsafe_corpus import Evil

from ckpt_conformance.fsck.code import any_file, packed
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from pathlib import Path


PICKLE = pickle.dumps(Evil())


def _torch() -> bytes:
    file = io.BytesIO()
    torch.save(Evil(), file)
    return file.getvalue()


def _zip(data: bytes, name: str = "a/inner") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, data)
    return file.getvalue()


def _tar(data: bytes, mode: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        member = tarfile.TarInfo("model_weights.ckpt")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def _json() -> bytes:
    value = {"policy_class": {":serialized:": base64.b64encode(PICKLE).decode()}}
    return json.dumps(value).encode()


FILES = {
    "gzip": gzip.compress(PICKLE),
    "gzip twice": gzip.compress(gzip.compress(PICKLE)),
    "zlib": zlib.compress(PICKLE),
    "bzip2": bz2.compress(PICKLE),
    "xz": lzma.compress(PICKLE),
    "lzma": lzma.compress(PICKLE, lzma.FORMAT_ALONE),
    "a cut gzip": gzip.compress(PICKLE + os.urandom(200_000))[:-1000],
    "a second member": gzip.compress(PICKLE[:5]) + gzip.compress(PICKLE[5:]),
    "torch in gzip": gzip.compress(_torch()),
    "torch in tar": _tar(_torch(), "w"),
    "torch in tar.gz": _tar(_torch(), "w:gz"),
    "zip in zip": _zip(_zip(_torch())),
    "stable-baselines3": _zip(_json(), "data"),
    "next buffer": b"\x80\x05\x97\x980" + PICKLE[2:],
    "inst, cut": b"(iposix\ngetcwd\n",
    "obj, cut": b"(cposix\ngetcwd\no",
    "obj, junk": b"J\xff\xff\xff\xff(cposix\ngetcwd\no\xff",
}


def _state(tmp_path: Path, data: bytes) -> State:
    step = tmp_path / "step_2"
    step.mkdir()
    torch.save({"w": torch.zeros(3)}, step / "model.pt")
    (step / "extra").write_bytes(data)
    (report,) = judge(step).reports
    return report.state


@pytest.mark.parametrize("kind", FILES)
def test_what_runs_is_unsafe_however_it_is_packed(kind: str, tmp_path: Path) -> None:
    """Neither layer nor place hides it."""
    assert _state(tmp_path, FILES[kind]) is State.UNSAFE


@pytest.mark.parametrize(
    "data",
    [b"\x04\x22\x4d\x18" + bytes(64), _zip(_zip(_zip(_zip(_zip(_zip(_zip(PICKLE)))))))],
    ids=["lz4", "too many layers"],
)
def test_what_is_not_looked_into_is_unknown(data: bytes, tmp_path: Path) -> None:
    """Nobody says that nothing is in it."""
    assert _state(tmp_path, data) is State.UNKNOWN


def test_of_more_members_of_a_tar_than_are_looked_into_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one may run code."""
    monkeypatch.setattr(any_file, "_MOST_MEMBERS", 1)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in (("a.txt", b"text"), ("b.pkl", PICKLE)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    assert _state(tmp_path, file.getvalue()) is State.UNKNOWN


@pytest.mark.parametrize(
    "data",
    [gzip.compress(b"a,b\n1,2\n"), zlib.compress(bytes(100)), b"x^2 + 1", b"\x1f\x8b\x08 junk"],
    ids=["gzip", "zlib", "text", "no gzip"],  # gzip writes the time
)
def test_packed_data_stay_whole(data: bytes, tmp_path: Path) -> None:
    """A table in gzip is no code."""
    assert _state(tmp_path, data) is State.WHOLE


def test_a_bomb_costs_no_more_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes stand for many."""
    monkeypatch.setattr(any_file, "Budget", lambda: packed.Budget(1 << 20))
    data = _tar(bytes(8 << 20), "w:gz")
    stream = any_file.read(io.BytesIO(data), len(data), "a")
    assert stream is not None
    assert stream.is_limit


@pytest.mark.parametrize("before", [b"#!/bin/sh\nexit 0\n", b"\0" * 64, b"\x7fELF"])
@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_code_in_a_zip_that_begins_further_on_is_unsafe(
    before: bytes, how: int, tmp_path: Path
) -> None:
    """Readers of zips begin at the end, as that of pandas does: what is in front is no matter."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", how) as archive:
        archive.writestr("state.pkl", pickle.dumps(Evil()))
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "state.pkl.zip").write_bytes(before + packed.getvalue())
    (report,) = judge(tmp_path).reports
    assert report.state is State.UNSAFE


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_that_cannot_be_unpacked_hides_no_other(how: int, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.bin", os.urandom(300), how)
        archive.writestr("state.pkl", pickle.dumps(Evil()), zipfile.ZIP_STORED)
    data = bytearray(packed.getvalue())
    data[40:200] = b"\xff" * 160
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "more.zip").write_bytes(data)
    (report,) = judge(tmp_path).reports
    assert report.state is State.UNSAFE


def test_an_archive_of_several_disks_is_read_by_nobody(tmp_path: Path) -> None:
    """Its end says a second disk: zipfile refuses it in words of its own."""
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    locator = b"PK\x06\x07" + struct.pack("<LQL", 0, 0, 2)
    end = b"PK\x05\x06" + b"\0" * 18
    (tmp_path / "more").write_bytes(b"text" * 20 + locator + end)
    (report,) = judge(tmp_path).reports
    assert report.state is State.WHOLE
