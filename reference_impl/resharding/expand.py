"""One statement that stands for many: `$LAYER_ID`, `name[0:4]`, `*` (P048, P052).

A macro takes a statement and gives those it stands for. They are applied in the order of their
priority, each to all that the one before gave.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ckpt_conformance.reference_impl.resharding.nearest import near

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from ckpt_conformance.reference_impl.resharding.syntax import Name, Statement

PLACEHOLDER = re.compile(r"\$[A-Z][A-Z_]*")
OFFSET = "_OFFSET"
"""A placeholder that ends so is one less on the right: layers counted from 1 become from 0."""


@dataclass(frozen=True)
class Known:
    """The names that a statement may mean.

    Attributes:
        left: source tensors, and what statements before it made.
        right: destination tensors.
    """

    left: Collection[str]
    right: Collection[str]


class Macro(Protocol):
    """What stands behind a macro."""

    def __call__(self, statement: Statement, known: Known, /) -> list[Statement]:
        """Give the statements that this one stands for; itself alone if it is none of its own."""


@dataclass(frozen=True)
class Registered:
    """A macro by its name; lower priorities come first."""

    name: str
    priority: int
    expand: Macro


class Macros:
    """Macros in their order."""

    def __init__(self) -> None:
        """Begin with none."""
        self._all: list[Registered] = []

    def __iter__(self) -> Iterator[Registered]:
        """Give them in the order in which they are applied."""
        return iter(self._all)

    def register(self, name: str, priority: int) -> Callable[[Macro], Macro]:
        """Add a macro; for use as a decorator.

        Raises:
            ValueError: the name is taken (P052).
        """
        if any(one.name == name for one in self._all):
            raise ValueError(f"Macro '{name}' is already registered.")

        def keep(macro: Macro) -> Macro:
            self._all.append(Registered(name, priority, macro))
            self._all.sort(key=lambda one: one.priority)
            return macro

        return keep

    def expand(self, statement: Statement, known: Known) -> list[Statement]:
        """Give the plain statements that one stands for.

        Raises:
            StatementError: a placeholder or a star that matches nothing, or names that do not fit.
        """
        statements = [statement]
        for macro in self._all:
            statements = [one for before in statements for one in macro.expand(before, known)]
        return statements


MACROS = Macros()
"""Those of P052 that make many statements of one; the others act on tensors (`compiling.py`)."""


@MACROS.register("id_macro", 1)
def _ids(statement: Statement, known: Known) -> list[Statement]:
    """`$LAYER_ID`, `$EXPERT_ID`: a statement for each number that a name has among those known.

    A namespace has its own depth: which numbers there are is asked of the statement's own names.
    """
    names = [name for name in (*statement.left, *statement.right) if not name.is_nothing]
    holders = [name for name in names if PLACEHOLDER.search(name.text)]
    if not holders:
        return [statement]
    first = holders[0]
    wanted = _placeholders(first)
    for name in names:
        if _placeholders(name) != wanted:
            raise statement.error(
                name, f"every name here must have {' and '.join(sorted(wanted))}, as the first has"
            )
    pool = known.left if first in statement.left else known.right
    found = _numbers(first.text, pool)
    if not found:
        side = "source" if pool is known.left else "destination"
        raise statement.error(first, f"no name of the {side} matches{near(first.text, pool)}")
    return [_with_numbers(statement, numbers) for numbers in found]


def _placeholders(name: Name) -> set[str]:
    return set(PLACEHOLDER.findall(name.text))


def _numbers(pattern: str, pool: Iterable[str]) -> list[dict[str, int]]:
    """Give the numbers that stand for the placeholders in names that match, in order."""
    groups: dict[str, str] = {}

    def group(match: re.Match[str]) -> str:
        name = match[0].removeprefix("$")
        if name in groups:  # a second time in one name: the same number
            return f"(?P={name})"
        groups[name] = match[0]
        return f"(?P<{name}>\\d+)"

    parts = PLACEHOLDER.split(pattern)
    marks = [group(match) for match in PLACEHOLDER.finditer(pattern)]
    texts = [re.escape(part) for part in parts]
    written = texts[0] + "".join(mark + text for mark, text in zip(marks, texts[1:], strict=True))
    matches = [match for name in pool if (match := re.fullmatch(written, name))]
    found = {tuple(int(match[name]) for name in groups) for match in matches}
    return [dict(zip(groups.values(), numbers, strict=True)) for numbers in sorted(found)]


def _with_numbers(statement: Statement, numbers: dict[str, int]) -> Statement:
    left = tuple(_numbered(name, numbers) for name in statement.left)
    lower = {one: at - one.endswith(OFFSET) for one, at in numbers.items()}
    if min(lower.values()) < 0:
        raise statement.error(
            statement.right[0], f"number {min(numbers.values())} has none before it"
        )
    right = tuple(_numbered(name, lower) for name in statement.right)
    return replace(statement, left=left, right=right)


def _numbered(name: Name, numbers: dict[str, int]) -> Name:
    text = PLACEHOLDER.sub(lambda match: str(numbers[match[0]]), name.text)
    return replace(name, text=text)


@MACROS.register("array_macro", 2)
def _arrays(statement: Statement, known: Known) -> list[Statement]:
    """`name[0:3]` is name_0, name_1, name_2."""
    return [_each_name(statement, known, _array)]


ARRAY = re.compile(r"(.+)\[(\d+):(\d+)\]")


def _array(statement: Statement, name: Name, pool: Collection[str]) -> list[str]:  # noqa: ARG001
    match = ARRAY.fullmatch(name.text)
    if match is None:
        return [name.text]
    begin, end = int(match[2]), int(match[3])
    if begin >= end:
        raise statement.error(name, f"from {begin} to {end} there is no name")
    return [f"{match[1]}_{at}" for at in range(begin, end)]


@MACROS.register("star_macro", 3)
def _stars(statement: Statement, known: Known) -> list[Statement]:
    """`experts.*.w`: all names that have a number there, in the order of the numbers."""
    return [_each_name(statement, known, _star)]


def _star(statement: Statement, name: Name, pool: Collection[str]) -> list[str]:
    if "*" not in name.text:
        return [name.text]
    found = _numbers(name.text.replace("*", "$STAR", 1), pool)
    if not found:
        raise statement.error(name, f"no name matches{near(name.text, pool)}")
    return [name.text.replace("*", str(one["$STAR"]), 1) for one in found]


def _each_name(
    statement: Statement,
    known: Known,
    names_for: Callable[[Statement, Name, Collection[str]], list[str]],
) -> Statement:
    """Replace each name by those it stands for."""

    def each(names: Iterable[Name], pool: Collection[str]) -> tuple[Name, ...]:
        return tuple(
            replace(name, text=text) for name in names for text in names_for(statement, name, pool)
        )

    return replace(
        statement, left=each(statement.left, known.left), right=each(statement.right, known.right)
    )
