"""Mutants that nobody wrote: every small change of every function of the reference manager.

A mutant is named by its function, its operator, and a digest of the text that changes, so that an
edit elsewhere, even in the same function, leaves its name. As an adapter it is
`generated:NAME@BASE`: the manager of BASE, in whose process the function has the changed code from
the moment when it is opened. That is a child of the server, and never the server itself.

What is left out: see `operators`, and functions that do nothing. No function of the reference runs
in the server or when it is imported, but for two that make constants (`IMPORTING`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract.registry import GENERATED, AdapterError
from ckpt_conformance.harness import reach
from ckpt_conformance.mutants.generated import operators, placing
from ckpt_conformance.mutants.overrides import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.harness.reach import Function

SAME = "same"  # the name of a mutant that has each function compiled anew, and nothing changed
WITH_RANKS = "+ranks"  # the end of a base's name that declares several ranks, too
BASES = (
    *("reference", "reference-dcp", "reference-trainer"),
    *(f"reference{WITH_RANKS}", f"reference-dcp{WITH_RANKS}"),
)
RANKS = ("ranks", "ranks_loading", "ranks_saving", "ranks_state")  # modules of several ranks
DIGITS = 6


@dataclass(frozen=True)
class Mutant:
    """A change of one function: `before` becomes `after`, each in one line of Python."""

    name: str
    module: str  # of the reference manager, without its package
    function: str  # as `reach.FunctionTable` names it
    operator: str
    line: int
    before: str
    after: str

    @property
    def spans_ranks(self) -> bool:
        """Whether only a job of several ranks runs its module."""
        return self.module in RANKS

    def adapter(self, base: str) -> str:
        """Name the adapter of a base that has this change."""
        return f"{GENERATED}{self.name}@{base}"


@functools.cache
def modules() -> tuple[str, ...]:
    """Name the modules of the reference manager, without their package."""
    return tuple(name for name in placing.modules_in(REFERENCE) if name != "__init__")


@functools.cache
def functions_of(module: str) -> dict[str, Function]:
    """Read the functions of a module of the reference manager; nothing of it is imported."""
    name = f"{REFERENCE}.{module}"
    return reach.functions_in(name, placing.tree_of(name))


def mutants_of(function: str) -> Iterator[tuple[Mutant, operators.Edit]]:
    """Yield every change of a function with its name, those that compile to the same, too."""
    dotted, _, qualified = function.partition(":")
    module = dotted.removeprefix(f"{REFERENCE}.")
    seen: Counter[tuple[str, str, str]] = Counter()
    for edit in operators.edits(functions_of(module)[function]):
        key = edit.operator, edit.before, edit.after
        digest = hashlib.blake2b(repr((*key, seen[key])).encode()).hexdigest()[:DIGITS]
        seen[key] += 1
        name = f"{module}.{qualified}:{edit.operator}:{digest}"
        mutant = Mutant(name, module, function, edit.operator, edit.line, edit.before, edit.after)
        yield mutant, edit


@functools.cache
def all_generated() -> dict[str, Mutant]:
    """Return every mutant by name, in the order of the modules and of their texts.

    Of several that compile to the same code there is the first, and none that compiles to the code
    of the function as it is.
    """
    found: dict[str, Mutant] = {}
    for module in modules():
        for function, node in functions_of(module).items():
            codes = {placing.signature(placing.compiled(function, operators.edited(node, None)))}
            for mutant, edit in mutants_of(function):
                code = placing.signature(placing.compiled(function, operators.edited(node, edit)))
                if code not in codes:
                    codes.add(code)
                    found[mutant.name] = mutant
    return found


def find(name: str) -> tuple[Mutant, operators.Edit]:
    """Return a mutant by name; raises AdapterError for an unknown one. Reads one function only."""
    place, _, _ = name.partition(":")
    module, _, qualified = place.partition(".")
    function = f"{REFERENCE}.{module}:{qualified}"
    if module in modules() and function in functions_of(module):
        for mutant, edit in mutants_of(function):
            if mutant.name == name:
                return mutant, edit
    raise AdapterError(
        f"adapter '{GENERATED}{name}' cannot be made: there is no such change of the reference "
        "manager; `ckpt-conformance mutants --generated --list` names all"
    )


def changed_text(name: str) -> str:
    """Return the function of a mutant as Python, with its change."""
    mutant, edit = find(name)
    return ast.unparse(operators.edited(functions_of(mutant.module)[mutant.function], edit))


def read_all() -> None:
    """Import and read every module of the reference manager: children of this process have it."""
    for module in modules():
        for function in functions_of(module):
            placing.target(function)


@functools.cache  # a process opens a manager more than once
def put_in_place(name: str) -> None:
    """Give this process the changed code of a mutant; of `SAME`, each function compiled anew."""
    if name == SAME:
        for module in modules():
            for function, node in functions_of(module).items():
                placing.put(function, operators.edited(node, None))
        return
    mutant, edit = find(name)
    node = functions_of(mutant.module)[mutant.function]
    placing.put(mutant.function, operators.edited(node, edit))


def adapter(named: str) -> Any:  # noqa: ANN401  an Adapter
    """Return the adapter of `NAME@BASE`; raises AdapterError for an unknown name or base."""
    from ckpt_conformance.mutants.generated import adapters

    name, _, base = named.partition("@")
    if base not in BASES:
        raise AdapterError(f"adapter '{GENERATED}{named}' cannot be made: no base {base!r}")
    if name != SAME:
        find(name)
    return adapters.make(name, base, f"{GENERATED}{named}")


def place_of(named: str) -> str:
    """Name the place of an adapter as `module:attribute`."""
    return f"{__name__}.adapters:{named}"
