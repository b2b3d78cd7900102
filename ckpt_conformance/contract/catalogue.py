"""The catalogue of invariants: the one place is `catalogue.toml`; this module reads it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
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
    "ASYN": "saves in the background",
    "EMRG": "emergency dumps",
    "STAG": "staging from a mirror",
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
    "async": "a save in the background saves what the job had when it began, and is told as it is",
    "emergency": "a job that is told to end leaves a whole dump of that step, or costs nothing",
    "staging": "what comes from a mirror is whole, was asked for, and costs no copy that is here",
    "versions": "what one release of torch wrote another one loads, or refuses in words",
}

# Profiles that cost more than all others together: run where they are named, or at the full budget.
ON_REQUEST = frozenset({"distributed"})

BASIC = "CKC-SMOK-001"
"""Without it no other promise can be judged, so a run of any profile asks for it, too."""

BASES = ("contract", "promise", "practice")


@dataclass(frozen=True)
class Invariant:
    """One promise that a manager is held to; `remedy` says what a manager does that keeps it."""

    id: str
    statement: str
    why: str
    remedy: str
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


def basis_of(invariant: Invariant, origin: Origin | None) -> str:
    """Return the basis of a violation: what the library at its origin documents is practice."""
    return "practice" if origin and origin.basis == "practice" else invariant.basis


def level_of(invariant: Invariant, origin: Origin | None) -> str:
    """Return the level of a violation that has an origin outside of the manager, or none."""
    return "SHOULD" if basis_of(invariant, origin) == "practice" else "MUST"


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
        return invariant.id == BASIC or bool(set(profiles) & set(invariant.profiles))
    left_out = ON_REQUEST - set(claims) if budget != "full" and not only else set[str]()
    return not set(invariant.profiles) <= left_out


@dataclass(frozen=True)
class Origin:
    """A cause outside of a manager: what a library that it calls does to what it is handed.

    `told_by` is the invariant that tells it; all others that it breaks refer to that one. With
    basis practice it is a SHOULD also where the invariant is a MUST: the library documents it.
    """

    id: str
    owner: str
    statement: str
    documentation: str
    decision: str
    basis: str
    told_by: str


@dataclass(frozen=True)
class Catalogue:
    """Every invariant of a version, by id, and the origins of violations that are known."""

    version: int
    invariants: Mapping[str, Invariant]
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])


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
    every = {name: _invariant(name, entry) for name, entry in raw["invariant"].items()}
    chosen = {name: one for name, one in every.items() if one.since <= (version or newest)}
    known = {name: _origin(name, entry, every) for name, entry in raw["origin"].items()}
    origins = {name: origin for name, origin in known.items() if origin.told_by in chosen}
    return Catalogue(version or newest, chosen, origins)


def _origin(name: str, entry: Mapping[str, object], known: Mapping[str, Invariant]) -> Origin:
    try:
        origin = msgspec.convert({"id": name, **entry}, Origin)
    except msgspec.ValidationError as error:
        raise CatalogueError(f"origin {name}: {error}") from error
    if origin.basis not in BASES or origin.told_by not in known:
        what = f"basis {origin.basis!r}, told_by {origin.told_by!r}"
        raise CatalogueError(f"origin {name}: one of these is not known: {what}")
    return origin


def _invariant(name: str, entry: Mapping[str, object]) -> Invariant:
    strange = entry.keys() - {one.name for one in fields(Invariant)}
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
