"""What the cited ids stand for: real bugs (`A02`) and requirements of checkpoint formats (`M044`).

The texts are data, in `incidents.toml` and `requirements.toml`; this module reads them.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


class Incident(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A real bug: `thread` is `owner/repository#number`, `what` is what happened, in our words."""

    thread: str
    title: str
    what: str

    @property
    def url(self) -> str:
        """The page of the thread; GitHub leads from an issue's address to a pull request's."""
        return thread_url(self.thread)


class Incidents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every bug by its id, and what the first letter of an id says."""

    area: dict[str, str]
    incident: dict[str, Incident]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document that requirements come from; `url` is empty where it has no lasting address."""

    name: str
    document: str
    url: str = ""


class Requirements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each requirement's sentence by its id, and the source by the id's first letter."""

    source: dict[str, Source]
    requirement: dict[str, str]


def thread_url(thread: str) -> str:
    """The address of a thread that is written as `owner/repository#number`."""
    repository, _, number = thread.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


@lru_cache(maxsize=1)
def load_incidents() -> Incidents:
    """Every bug. Raises msgspec.ValidationError for a field that is missing or not known."""
    return _read("incidents.toml", Incidents)


@lru_cache(maxsize=1)
def load_requirements() -> Requirements:
    """Every requirement. Raises msgspec.ValidationError for a field that is missing or unknown."""
    return _read("requirements.toml", Requirements)


def _read(name: str, kind: type[T]) -> T:
    return msgspec.toml.decode((Path(__file__).parent / name).read_bytes(), type=kind)
