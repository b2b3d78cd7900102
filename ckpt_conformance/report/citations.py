"""Which ids a text cites, and which tests cite an id.

A bug is a letter and two digits ("A02"); a requirement is the letter of its source with three
digits ("M044"), or with an X and a number ("KX1"). A range ("M009-M012" or "A01 to A14") cites all
that are in it. In Python a word in quotes is a name or a value ("F16" is a type), not a citation.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

BUG = re.compile(r"[A-S]\d\d")
REQUIREMENT = re.compile(r"[VKPLM](?:\d{3}|X\d{1,2})")
_WORD = re.compile(
    r"""(?<![\w"'./-])(?P<kind>[A-Z]X?)(?P<first>\d{1,3})(?![\w"'])"""
    r"""(?:(?:-|\ to\ )(?P=kind)(?P<last>\d{1,3})(?!\w))?"""
)

_CHECK = re.compile(r'@check\("([\w-]+)"\)')


@dataclass(frozen=True)
class Span:
    """The lines of a test in its file, from 1, decorators included."""

    name: str
    first: int
    last: int


def ids_in(text: str) -> set[str]:
    """The ids of bugs and of requirements that a text cites."""
    words = {word for match in _WORD.finditer(text) for word in _range(match)}
    return {word for word in words if BUG.fullmatch(word) or REQUIREMENT.fullmatch(word)}


def _range(match: re.Match[str]) -> Iterator[str]:
    kind, first = match["kind"], match["first"]
    for number in range(int(first), int(match["last"] or first) + 1):
        yield f"{kind}{number:0{len(first)}}"


def cited_by(root: Path, folders: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Map each id to where Python files below some folders of a checkout cite it, sorted.

    A place is `path::test` inside of a test function, and `path` anywhere else.
    """
    return _places_of(root, folders, ids_in)


def checked_by(root: Path) -> Mapping[str, Sequence[str]]:
    """Map each invariant to the checks of the suites that bear its mark, as `path::test`."""
    return _places_of(root, ("suites",), lambda line: set(_CHECK.findall(line)))


def _places_of(
    root: Path, folders: Iterable[str], ids_of: Callable[[str], set[str]]
) -> Mapping[str, Sequence[str]]:
    places: dict[str, set[str]] = defaultdict(set)
    for folder in folders:
        for path in (root / folder).rglob("*.py"):
            for name, test in _in_tests(path.read_text("utf-8"), ids_of):
                places[name].add("::".join([path.relative_to(root).as_posix(), *test]))
    return {name: sorted(places[name]) for name in sorted(places)}


def _in_tests(
    source: str, ids_of: Callable[[str], set[str]]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Each id with the test around it, if it is in one."""
    lines = [(number, ids_of(line)) for number, line in enumerate(source.splitlines(), 1)]
    cited = [(number, names) for number, names in lines if names]
    tests = _tests(source) if cited else []
    for number, names in cited:
        around = [test.name for test in tests if test.first <= number <= test.last]
        for name in names:
            yield name, around[:1]


def _tests(source: str) -> list[Span]:
    return [
        Span(node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)]), last)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if (last := node.end_lineno or node.lineno)
    ]
