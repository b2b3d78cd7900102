"""Mutants: managers broken in one named way, each made from a real bug. They test the suite.

One module per area. Bugs have ids such as A02; docs/incidents.md has the thread of each. A mutant
is a subclass of the reference manager or trainer with one change, registered by `@mutant`. It must
violate exactly the ids that it names, and no other.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_conformance.contract import Capability
from ckpt_conformance.contract.catalogue import load_catalogue
from ckpt_conformance.contract.registry import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

T = TypeVar("T")
TRAINER = "reference-trainer"
OF_RANKS = {Capability.RANKS, Capability.RESHARD}
# The managers as they are, but of one process; by name whether DCP writes.
UNBROKEN = {"unbroken-reference": False, "unbroken-reference-dcp": True}


@dataclass(frozen=True)
class MutantInfo:
    """One mutant: its bug, the thread that evidences it, the change, and what it must violate."""

    id: str
    bug: str
    url: str
    change: str
    base: str  # the adapter it is made from
    violates: frozenset[str]
    broken: type[Any]

    @property
    def spans_ranks(self) -> bool:
        """Whether it takes several ranks to see it; a mutant of one process declares no ranks."""
        known = load_catalogue().invariants
        return any("distributed" in known[one].profiles for one in self.violates if one in known)

    @property
    def unbroken(self) -> str:
        """The adapter that is this one without its change: it declares the same capabilities."""
        has_ranks = self.spans_ranks or self.base == TRAINER
        return self.base if has_ranks else f"mutant:unbroken-{self.base}"


_MUTANTS: dict[str, MutantInfo] = {}


def mutant(
    name: str, *, url: str, change: str, violates: Collection[str], base: str = "reference"
) -> Callable[[type[T]], type[T]]:
    """Register a broken class under a name that starts with its bug's id: `B10` or `B10-dcp`.

    `base` is the adapter whose manager (or trainer) class is replaced: reference, reference-dcp or
    reference-trainer. `url` is `owner/repository#number` of the thread.
    """
    repository, _, number = url.partition("#")

    def register(broken: type[T]) -> type[T]:
        if name in _MUTANTS:
            msg = f"mutant {name!r} is registered twice"
            raise ValueError(msg)
        thread = f"https://github.com/{repository}/issues/{number}"
        _MUTANTS[name] = MutantInfo(
            name, name.partition("-")[0], thread, change, base, frozenset(violates), broken
        )
        return broken

    return register


@lru_cache(maxsize=1)
def places() -> Mapping[str, str]:
    """Map each mutant's id to its module, read from the texts: nothing is imported for it."""
    marked = re.compile(r'^@?mutant\(\s*"([^"]+)"', re.MULTILINE)
    return {
        found: f"{__name__}.{path.stem}"
        for folder in __path__
        for path in sorted(Path(folder).glob("*.py"))
        for found in marked.findall(path.read_text(encoding="utf-8"))
    }


def place_of(name: str) -> str:
    """Name a mutant's place as `module:id`; raises AdapterError for an unknown id."""
    if name in UNBROKEN:
        return f"{__name__}:{name}"
    if name not in places():
        why = f"unknown mutant {name!r}; `ckpt-conformance list mutants` names them"
        msg = f"adapter 'mutant:{name}' cannot be made: {why}"
        raise AdapterError(msg)
    return f"{places()[name]}:{name}"


@lru_cache(maxsize=1)
def all_mutants() -> Mapping[str, MutantInfo]:
    """Import every module of this package and give the mutants by id, sorted."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_MUTANTS.items()))


def adapter(name: str) -> Any:  # noqa: ANN401  an Adapter
    """Return the adapter of a mutant; raises AdapterError for an unknown id."""
    from ckpt_conformance.adapters import reference

    if name in UNBROKEN:
        return _of_one_process(reference.make(f"mutant:{name}", use_dcp=UNBROKEN[name]))
    importlib.import_module(place_of(name).partition(":")[0])
    info = _MUTANTS[name]
    if info.base == TRAINER:
        from ckpt_conformance.adapters import reference_trainer

        return reference_trainer.make(f"mutant:{name}", trainer=info.broken)
    made = reference.make(
        f"mutant:{name}", use_dcp=info.base == "reference-dcp", manager=info.broken
    )
    return made if info.spans_ranks else _of_one_process(made)


def _of_one_process(made: Any) -> Any:  # noqa: ANN401  adapters of the reference manager
    return replace(made, capabilities=made.capabilities - OF_RANKS)
