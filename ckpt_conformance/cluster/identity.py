"""What results depend on and must be the same on all machines of a cluster, in a few values."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from typing import TYPE_CHECKING

from msgspec import Struct

from ckpt_conformance import __version__
from ckpt_conformance.work.sources import PACKAGE, SourceTree, our_packages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# With those that adapters of this suite, and what it judges, are made of.
DISTRIBUTIONS = (
    *("torch", "numpy", "msgspec", "hypothesis", "pytest"),
    *("safetensors", "blake3", "fsspec", "accelerate", "lightning"),
)


class Identity(Struct, frozen=True):
    """Values by name, all of which must be equal; `commit` is for people, where they are not."""

    values: dict[str, str]
    commit: str | None = None

    def differences(self, other: Identity) -> list[str]:
        """Write what differs of the other's values: this one is the client's, that a worker's."""
        return [
            f"{name} is {self.shown(name)} here and {other.shown(name)} there"
            for name, value in other.values.items()
            if self.values.get(name) != value
        ]

    def shown(self, name: str) -> str:
        """Write a value for people."""
        value = self.values.get(name, "absent")
        return f"{value} (commit {self.commit})" if name == SUITE and self.commit else value


SUITE = "the suite"


def identity(
    commit: str | None, more: Mapping[str, str], distributions: Sequence[str] = DISTRIBUTIONS
) -> Identity:
    """Return the identity of this process; `more` are what a command adds, such as adapters.

    `distributions` are what the command's results depend on.
    """
    versions = {name: _version(name) for name in distributions}
    suite = f"{__version__}, sources {_sources()}"
    values = {"Python": platform.python_version(), SUITE: suite, **versions}
    return Identity(values | dict(more), commit)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _sources() -> str:
    """Return a short digest of every module of the suite, and of the catalogue's files."""
    tree = SourceTree.of_packages(our_packages())
    digest = hashlib.blake2b(tree.digest(tree.sources).encode(), digest_size=6)
    for path in sorted((PACKAGE / "contract").glob("*.toml")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
