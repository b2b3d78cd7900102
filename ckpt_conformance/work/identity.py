"""What results depend on, in plain values: the same on all machines of a cluster, in all shards."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from typing import TYPE_CHECKING

from msgspec import Struct

from ckpt_conformance import __version__
from ckpt_conformance.contract.registry import EXTRAS
from ckpt_conformance.work.own_code import PACKAGE, our_packages
from ckpt_conformance.work.sources import SourceTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# With those that adapters of this suite, and what it judges, are made of.
DISTRIBUTIONS = (
    *("torch", "numpy", "msgspec", "hypothesis", "pytest"),
    *("safetensors", "blake3", "fsspec", *sorted(EXTRAS)),
)


SHOWN = 3  # files that a message names


class Identity(Struct, frozen=True):
    """Values by name, all of which must be equal; `commit` is for people, where they are not.

    `files` has a digest of each file of the user's own code, by its path below the folder that it
    is imported from, which may be another one on each machine. None: nobody has looked.
    """

    values: dict[str, str]
    commit: str | None = None
    files: dict[str, str] | None = None

    def part(self, other: Identity) -> Identity:
        """Return what of it the other one has, too: a process may know a part of itself first."""
        values = {name: value for name, value in self.values.items() if name in other.values}
        return Identity(values, self.commit, None if other.files is None else self.files)

    def without(self, name: str) -> Identity:
        """Return it without one of the values."""
        values = {key: value for key, value in self.values.items() if key != name}
        return Identity(values, self.commit, self.files)

    def differences(self, other: Identity, here: str = "here", there: str = "there") -> list[str]:
        """Write what differs between this one, which is `here`, and another one."""
        names = dict.fromkeys([*self.values, *other.values])
        told = [
            f"{name} is {self.shown(name)} {here} and {other.shown(name)} {there}"
            for name in names
            if self.values.get(name) != other.values.get(name)
        ]
        return told + self._files_that_differ(other, here, there)

    def shown(self, name: str) -> str:
        """Write a value for people."""
        value = self.values.get(name, ABSENT)
        return f"{value} (commit {self.commit})" if name == SUITE and self.commit else value

    def _files_that_differ(self, other: Identity, here: str, there: str) -> list[str]:
        ours, theirs = self.files, other.files
        if ours is None or theirs is None:
            return []
        names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        told = [
            f"{name} is {ours.get(name, ABSENT)} {here} and {theirs.get(name, ABSENT)} {there}"
            for name in names[:SHOWN]
        ]
        more = len(names) - SHOWN
        return [*told, f"{more:,} more files differ"] if more > 0 else told


ABSENT = "absent"
SUITE = "the suite"


def identity(
    commit: str | None,
    more: Mapping[str, str],
    files: dict[str, str] | None = None,
    distributions: Sequence[str] = DISTRIBUTIONS,
) -> Identity:
    """Return the identity of this process; `more` are what a command adds, such as adapters.

    `distributions` are what the command's results depend on.
    """
    versions = {name: _version(name) for name in distributions}
    suite = f"{__version__}, sources {_sources()}"
    values = {"Python": platform.python_version(), SUITE: suite, **versions}
    return Identity(values | dict(more), commit, files)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def _sources() -> str:
    """Return a short digest of every module of the suite, and of the catalogue's files."""
    tree = SourceTree.of_packages(our_packages())
    digest = hashlib.blake2b(tree.digest(tree.sources).encode(), digest_size=6)
    for path in sorted((PACKAGE / "contract").glob("*.toml")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
