"""The packages of an interpreter: versions, and of what was built from a folder all its files."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OURS = "ckpt-conformance"  # of this suite the modules that run count, one by one
ORIGIN = "direct_url.json"  # PEP 610: there where it came from no index


class Folder(Struct, frozen=True):
    """Of what was installed from a folder: whether it runs there."""

    editable: bool = False


class Origin(Struct, frozen=True):
    """Where a distribution came from, as PEP 610 has it; empty for an index."""

    url: str = ""
    dir_info: Folder = Folder()

    @property
    def is_editable(self) -> bool:
        """Whether its code lies elsewhere, and runs there."""
        return self.dir_info.editable


def described(places: Sequence[str] | None = None) -> list[str]:
    """Return name and version of each distribution, in order; None for those of this interpreter.

    Of one that was installed from a folder, an archive or a repository, whose version may stay
    while its files change, a digest of what its RECORD says of them, too.
    """
    return sorted({_described(one) for one in _distributions(places)})


def _distributions(places: Sequence[str] | None) -> Iterable[importlib.metadata.Distribution]:
    if places is None:
        return importlib.metadata.distributions()
    return importlib.metadata.distributions(path=list(places))


def edited_in_place(places: Sequence[str] | None = None) -> list[Path]:
    """Return the folders of projects that are installed as editable, in order."""
    origins = map(_origin, _distributions(places))
    urls = {one.url for one in origins if one.is_editable and one.url.startswith("file://")}
    return sorted(Path(unquote(urlsplit(url).path)) for url in urls)


def _described(one: importlib.metadata.Distribution) -> str:
    origin, text = _origin(one), f"{one.name} {one.version}"
    is_local = one.name != OURS and bool(origin.url) and not origin.is_editable
    return f"{text} {_digest_of(one)}" if is_local else text


def _origin(one: importlib.metadata.Distribution) -> Origin:
    try:
        return msgspec.json.decode(one.read_text(ORIGIN) or "{}", type=Origin)
    except msgspec.DecodeError:
        return Origin()


def _digest_of(one: importlib.metadata.Distribution) -> str:
    """Digest the files by their digests, without what has the place of the environment in it."""
    lines = (one.read_text("RECORD") or "").splitlines()
    own = sorted(line for line in lines if ".dist-info/" not in line and not line.startswith("../"))
    return hashlib.blake2b("\n".join(own).encode(), digest_size=8).hexdigest()
