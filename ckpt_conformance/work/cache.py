"""Results that need not be found out again: kept under a digest of all that they depend on.

A cache is a folder, as a CI service keeps one between runs: one file for each result, named by the
digest, written whole or not at all. Several processes and machines may share it. A file that does
not read, or whose content is not what was written, counts as absent.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.work import openings, own_code

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KeyParts = dict[str, Any]
"""What a result depends on, by name: plain values, hashed as JSON."""

SCHEMA = "ckpt-conformance/cache/v2"


class Entry(Struct, frozen=True):
    """One result: what it depends on, for a reader who asks why it was found; and its content."""

    schema: str
    inputs: KeyParts
    digest: str  # of the content and of what was opened: a file that was damaged is not believed
    content: msgspec.Raw
    opened: dict[str, str] = {}  # what was seen to be opened when it was found out (`openings`)


def key_of(inputs: Mapping[str, Any]) -> str:
    """Return the digest of what a result depends on: plain values, by name, in any order."""
    text = msgspec.json.encode(inputs, order="sorted")
    return hashlib.blake2b(text, digest_size=20).hexdigest()


@dataclass(frozen=True)
class Cache:
    """A folder of results; `is_read_only` where none can be added.

    `unused` counts results that were found and not taken, by what is another one now; `unwritten`
    those that could not be added, by the error.
    """

    folder: Path
    is_read_only: bool = False
    unused: Counter[str] = field(default_factory=Counter[str], compare=False)
    unwritten: Counter[str] = field(default_factory=Counter[str], compare=False)

    @classmethod
    def open(cls, folder: Path) -> Cache:
        """Make the folder, or take one that a cache was made in.

        A cache that cannot be written, as a CI job mounts one of another job, is read.
        Raises RequestError for a folder that holds something else, or where none can be made.
        """
        if folder.is_file():
            raise RequestError(f"--cache {folder} is a file; name a folder")
        try:
            if (folder / own_code.OF_A_CACHE).is_file():
                return cls(folder, is_read_only=not _can_be_written(folder))
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise RequestError(
                    f"--cache {folder}: the folder holds other files; name an "
                    "empty one, or one that is not there yet"
                )
            if not _can_be_written(folder):  # as a CI job mounts one that nobody has filled yet
                return cls(folder, is_read_only=True)
            what = f"{SCHEMA}: results of checks; may be removed\n"
            (folder / own_code.OF_A_CACHE).write_text(what)
        except OSError as error:
            reason = f"--cache {folder} cannot be written: {error.strerror}"
            raise RequestError(f"{reason}; name another folder") from error
        return cls(folder)

    def get(self, key: str) -> bytes | None:
        """Return the content that is kept under a key; None if there is none that can be read.

        Nor is there any where a file or a variable that its run has opened is another one now.
        """
        path = self._path(key)
        try:
            if not path.is_file():  # a pipe would be waited for
                return None
            entry = msgspec.json.decode(path.read_bytes(), type=Entry)
        except (OSError, msgspec.DecodeError):
            return None
        content = bytes(entry.content)
        is_whole = entry.schema == SCHEMA and entry.digest == _digest(content, entry.opened)
        if not is_whole or key_of(entry.inputs) != key:
            return None
        if why := openings.changed(entry.opened):
            self.unused[why] += 1
            return None
        return content

    def put(
        self, inputs: Mapping[str, Any], content: bytes, opened: Mapping[str, str] | None = None
    ) -> None:
        """Keep a content, which is JSON, under the digest of its inputs, with what it has opened.

        A disk that is full loses the entry, and nothing else: the result itself is already known.
        """
        if self.is_read_only:
            return
        path = self._path(key_of(inputs))
        entry = Entry(
            *(SCHEMA, dict(inputs), _digest(content, opened or {}), msgspec.Raw(content)),
            opened=dict(opened or {}),
        )
        try:
            path.parent.mkdir(exist_ok=True)
            trees.write_whole(path, msgspec.json.encode(entry))
        except OSError as error:
            self.unwritten[error.strerror or str(error)] += 1

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


def _can_be_written(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _digest(content: bytes, opened: Mapping[str, str]) -> str:
    found = hashlib.blake2b(content, digest_size=16)
    found.update(msgspec.json.encode(opened, order="sorted"))
    return found.hexdigest()
