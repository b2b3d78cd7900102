"""The catalogue of invariants: the one place is `catalogue.toml`; this module reads it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

FAMILIES: Mapping[str, str] = {
    "SMOK": "smoke",
    "RTRP": "round trip",
    "COMP": "completeness of state",
    "RSUM": "resumed trajectory",
    "ATOM": "atomicity under kill",
    "DURA": "durability under power loss",
    "CORR": "damage detection",
    "IOER": "I/O errors and full disk",
    "DISC": "discovery and latest",
    "RETN": "retention",
    "MIRR": "mirror and upload",
    "INTN": "explicit intent",
    "SHRD": "shards and resharding",
    "RANK": "rank faults and coordination",
    "VERS": "versions and formats",
    "SECU": "untrusted input",
    "SIDE": "save has no side effects",
}

PROFILES: Mapping[str, str] = {
    "smoke": "the adapter works and its claims hold",
    "resume": "a resumed run is the run that never stopped, bit for bit",
    "crash": "a killed process costs at most the step that was being saved",
    "power-loss": "what was acknowledged is there when the power comes back",
    "damage": "damaged bytes are never served as a checkpoint",
    "io-error": "a failed save reaches the caller and destroys nothing",
    "retention": "rotation deletes what it should and nothing else",
    "mirror": "no only copy is deleted while its upload is on the way",
    "intent": "an explicit request is honoured or refused, never replaced",
    "distributed": "several ranks save and load one checkpoint, also in another layout",
    "security": "a checkpoint is data: it runs no code and leads nowhere else",
    "versions": "what one release of torch wrote another one loads, or refuses in words",
}

# Profiles that cost more than all others together: run where they are named, or at the full budget.
ON_REQUEST = frozenset({"distributed"})

BASES = ("contract", "promise", "practice")


@dataclass(frozen=True)
class Invariant:
    """One promise that a manager is held to."""

    id: str
    statement: str
    why: str
    basis: str
    profiles: tuple[str, ...]
    incidents: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ("manager", "trainer")
    since: int = 1

    @property
    def family(self) -> str:
        """The four letters."""
        return self.id.split("-")[1]

    @property
    def level(self) -> str:
        """MUST for contract and promise, SHOULD for practice."""
        return "SHOULD" if self.basis == "practice" else "MUST"


def is_chosen(
    invariant: Invariant,
    profiles: Collection[str],
    only: Collection[str],
    claims: Collection[str],
    budget: str,
) -> bool:
    """Return whether a run judges an invariant: by id, by profile, or where nothing was named."""
    if only and invariant.id not in only:
        return False
    if profiles:
        return bool(set(profiles) & set(invariant.profiles))
    left_out = ON_REQUEST - set(claims) if budget != "full" and not only else set[str]()
    return not set(invariant.profiles) <= left_out


@dataclass(frozen=True)
class Catalogue:
    """Every invariant of a version, by id."""

    version: int
    invariants: Mapping[str, Invariant]


class CatalogueError(ValueError):
    """The catalogue does not read, or a version was asked for that does not exist."""


@lru_cache(maxsize=8)
def load_catalogue(version: int | None = None) -> Catalogue:
    """Read the catalogue; with a version, only what that version had. Raises CatalogueError."""
    raw = tomllib.loads((Path(__file__).parent / "catalogue.toml").read_text("utf-8"))
    newest = int(raw["version"])
    if version is not None and not 1 <= version <= newest:
        msg = f"catalogue {version} does not exist; versions 1 to {newest} do"
        raise CatalogueError(msg)
    every = [_invariant(name, entry) for name, entry in raw["invariant"].items()]
    chosen = {entry.id: entry for entry in every if entry.since <= (version or newest)}
    return Catalogue(version or newest, chosen)


def _invariant(name: str, entry: Mapping[str, object]) -> Invariant:
    strange = entry.keys() - {field.name for field in fields(Invariant)}
    if strange:
        raise CatalogueError(f"{name}: an invariant has no {', '.join(sorted(strange))}")
    try:
        invariant = msgspec.convert({"id": name, **entry}, Invariant)
    except msgspec.ValidationError as error:
        raise CatalogueError(f"{name}: {error}") from error
    unknown = set(invariant.profiles) - PROFILES.keys()
    if unknown or invariant.basis not in BASES or invariant.family not in FAMILIES:
        what = f"profile {sorted(unknown)}, basis {invariant.basis!r}, family {invariant.family!r}"
        msg = f"{name}: one of these is not known: {what}"
        raise CatalogueError(msg)
    return invariant
