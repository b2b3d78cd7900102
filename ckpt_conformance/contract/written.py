"""Checkpoints that another release of torch wrote: a folder, and a record of what is in it.

`ckpt-conformance write` makes such a folder under one release, `certify --written-by` reads it
under another one. The record, `written.json`, has the digests of what was saved, and of every file:
what was cut or changed on its way between two machines must not look like a fault of a manager.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

SCHEMA = "ckpt-conformance/written/v1"
RECORD = "written.json"
AGAIN = "write it again with `ckpt-conformance write`"

Leaves = dict[str, dict[str, str]]  # component -> leaf -> digest


class WrittenError(ValueError):
    """A folder that cannot be read as one of ours; the message says why, and what to do."""


class WrittenRun(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The manager's directory after the save of a step, and what was saved.

    `folder` is below that of the record; `layout` are the fields of a layout of ranks, None for a
    run of one process.
    """

    folder: str
    kind: str
    step: int
    layout: dict[str, int] | None = None
    saved: Leaves


class Written(Struct, frozen=True, kw_only=True):
    """The record: who wrote, under which versions, and what."""

    schema: str = SCHEMA
    created: str  # date and time, ISO 8601
    suite: str  # the version of this suite
    adapter: str
    library: str
    version: str  # of the adapter's manager
    torch: str
    python: str
    seed: int
    without: tuple[str, ...] = ()  # each Feature that the adapter declared it cannot hold
    runs: list[WrittenRun]
    left_out: dict[str, str]  # a run that was not written -> why
    files: dict[str, str]  # name below the folder -> digest; of a link, where it leads

    @property
    def release(self) -> str:
        """The release of torch, without the name of a build: 2.13.0 of 2.13.0+cpu."""
        return release_of(self.torch)


@dataclass(frozen=True)
class WrittenFolder:
    """A record, and the folder that it is in."""

    path: Path
    record: Written

    def tree(self, run: WrittenRun) -> Path:
        """Return the directory of a run."""
        return self.path / run.folder


def release_of(version: str) -> str:
    """Return a release without the name of a build."""
    return version.partition("+")[0]


def installed() -> str:
    """Return the version of torch that is installed here, "none" without one."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def read(folder: Path) -> WrittenFolder:
    """Read the record of a folder; the files are not looked at.

    Raises:
        WrittenError: there is none, or it is of another version.
    """
    path = folder / RECORD
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Written)
    except OSError as error:
        raise WrittenError(f"{path}: {error.strerror}; {AGAIN}") from error
    except msgspec.MsgspecError as error:
        raise WrittenError(f"{path}: {error}; it was cut or edited: {AGAIN}") from error
    if record.schema != SCHEMA:
        raise WrittenError(
            f"{path}: schema is {record.schema!r}, this version reads {SCHEMA!r}: {AGAIN}"
        )
    for run in record.runs:
        if Path(run.folder).name != run.folder or run.folder in ("", ".", ".."):
            raise WrittenError(
                f"{path}: a run lies in {run.folder!r}, which is no folder beside it"
            )
    return WrittenFolder(folder, record)


def find(folder: Path) -> list[WrittenFolder]:
    """Read every record in a folder and below, such as that of each writer of a CI matrix.

    Raises:
        WrittenError: the folder is not there, has no record, or one that does not read.
    """
    if not folder.is_dir():
        raise WrittenError(f"--written-by {folder}: there is no such folder; {AGAIN}")
    found: list[WrittenFolder] = []
    for base, folders, names in os.walk(folder):
        if RECORD in names:
            found.append(read(Path(base)))
            folders.clear()  # what is below are checkpoints
        folders.sort()
    if not found:
        raise WrittenError(
            f"--written-by {folder}: no {RECORD} is in it or below; name a folder that "
            "`ckpt-conformance write ADAPTER --out DIR` made, and wait for its end"
        )
    return found


def check_files(folder: WrittenFolder) -> None:
    """Compare every file with the record.

    Raises:
        WrittenError: a file is missing, new, or another one than was written.
    """
    there, known = digests(folder.path), folder.record.files
    for name in sorted(there.keys() | known.keys()):
        if there.get(name) != known.get(name):
            what = "is missing" if name not in there else "was added"
            what = "is not what was written" if name in there and name in known else what
            raise WrittenError(
                f"{folder.path / name} {what}: the folder did not arrive whole; copy it again"
            )


def digests(folder: Path) -> dict[str, str]:
    """Digest every file below a folder but the record; of a link, say where it leads."""
    found: dict[str, str] = {}
    for base, folders, names in os.walk(folder):
        for path in (Path(base, name) for name in (*folders, *names)):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink():
                found[name] = f"-> {path.readlink()}"
            elif path.is_file() and name != RECORD:
                found[name] = digest_of(path)
    return dict(sorted(found.items()))


def digest_of(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
