"""The house rules that a program can check: sizes, no assert statements, no traces of a machine."""

from __future__ import annotations

import ast
import json
import re
import statistics
import tomllib
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import long_tests
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODULE_LINES = 800
ROOM_MODULES = 25
FUNCTION_LINES = 70
MOST_LINES = 30  # of 90 % of the functions
MEDIAN_LINES = 10
LOOSE_DICTS = 60  # `dict[str, Any]` in the package
ADAPTER_LINES = 120  # of code: what a maintainer has to write, less imports and docstrings

MACHINE_PATH = re.compile(r"(?<![\w.~*-])/(?:work|farm)/")
REGISTRY = re.compile(r"(?:extra-)?index[-_]" + r"url\b|\bfind[-_]" + "links\\b", re.IGNORECASE)


class Function(NamedTuple):
    where: str
    lines: int


def is_test_of_the_project(path: Path) -> bool:
    return path.parts[0] == "tests" and path.name.startswith("test_")


@cache
def parse(repository: Path, path: Path) -> ast.Module:
    return ast.parse((repository / path).read_text(encoding="utf-8"), filename=str(path))


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count from `def` to the end, less the docstring: every check must have a long one."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is None:
        return total
    return total - ((first.end_lineno or first.lineno) - first.lineno + 1)


def adapter_lines(repository: Path, path: Path) -> int:
    """Count the lines of code: neither blank, nor a comment, nor in a docstring or an import."""
    left = (repository / path).read_text(encoding="utf-8").splitlines()
    for node in ast.walk(parse(repository, path)):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string or isinstance(node, ast.Import | ast.ImportFrom):
            span = slice(node.lineno - 1, node.end_lineno)
            left[span] = [""] * len(left[span])
    return sum(1 for line in left if line.strip() and not line.strip().startswith("#"))


def functions_of(repository: Path, path: Path) -> Iterator[Function]:
    for node in ast.walk(parse(repository, path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(f"{path}:{node.lineno} {node.name}", body_lines(node))


@pytest.fixture(scope="module")
def functions(repository: Path, python_files: list[Path]) -> list[Function]:
    return [each for path in python_files for each in functions_of(repository, path)]


def test_violations_are_raised_never_asserted(repository: Path, python_files: list[Path]) -> None:
    """`python -O` drops assert statements, so only the project's own tests may use them."""
    asserts = [
        f"{path}:{node.lineno}"
        for path in python_files
        if not is_test_of_the_project(path)
        for node in ast.walk(parse(repository, path))
        if isinstance(node, ast.Assert)
    ]
    assert not asserts, f"raise instead of assert: {asserts}"


def test_modules_are_short(repository: Path, python_files: list[Path]) -> None:
    sizes = {
        str(path): len((repository / path).read_text(encoding="utf-8").splitlines())
        for path in python_files
    }
    long = {path: lines for path, lines in sizes.items() if lines > MODULE_LINES}
    assert not long, f"over {MODULE_LINES} lines: {long}"


def test_no_room_is_a_hall(python_files: list[Path]) -> None:
    """A newcomer looks through a room in a minute; mutants and adapters are lists."""
    rooms = Counter(
        path.parent
        for path in python_files
        if path.parts[0] == "ckpt_conformance" and path.name != "__init__.py"
    )
    full = {str(room): count for room, count in rooms.items() if count > ROOM_MODULES}
    assert not {name for name in full if not name.endswith(("mutants", "adapters"))}, full
    at_root = [path.name for path in python_files if path.parent.as_posix() == "ckpt_conformance"]
    assert sorted(at_root) == ["__init__.py", "__main__.py"], "every module stands in a room"


def test_bundled_adapters_are_short(repository: Path, python_files: list[Path]) -> None:
    """An adapter is an example, and what it repairs nobody certifies."""
    adapters = [path for path in python_files if path.parts[:2] == ("ckpt_conformance", "adapters")]
    assert len(adapters) > 5
    long = {str(path): adapter_lines(repository, path) for path in adapters}
    long = {path: lines for path, lines in long.items() if lines >= ADAPTER_LINES}
    assert not long, f"{ADAPTER_LINES} lines of code or more: {long}"


def test_no_function_is_long(functions: list[Function]) -> None:
    long = [each for each in functions if each.lines > FUNCTION_LINES]
    assert not long, f"over {FUNCTION_LINES} lines: {long}"


def test_most_functions_are_short(functions: list[Function]) -> None:
    longer = sorted((each for each in functions if each.lines > MOST_LINES), key=lambda f: -f.lines)
    assert len(longer) <= len(functions) / 10, (
        f"{len(longer)} of {len(functions)} functions have more than {MOST_LINES} lines: {longer}"
    )


def test_the_median_function_is_short(functions: list[Function]) -> None:
    assert statistics.median(each.lines for each in functions) <= MEDIAN_LINES


@pytest.mark.parametrize("trace", [MACHINE_PATH, REGISTRY], ids=["path", "registry"])
def test_no_file_names_a_machine(
    repository: Path, committed: list[Path], trace: re.Pattern[str]
) -> None:
    found = []
    for path in committed:
        if (repository / path).is_symlink():
            continue
        text = (repository / path).read_bytes().decode("utf-8", errors="replace")
        found += [
            f"{path}:{number}"
            for number, line in enumerate(text.splitlines(), 1)
            if trace.search(line)
        ]
    assert not found, f"{trace.pattern} in {found}"


def test_the_trace_of_a_machine_is_recognized() -> None:
    """The control of the test above."""
    root = "{}work{}main".format("/", "/")
    assert MACHINE_PATH.search(f"cd {root}")
    assert not MACHINE_PATH.search(f"cd /home/me{root}")
    assert REGISTRY.search("--extra-index" + "-url=file:///somewhere")


def test_every_lint_exception_has_a_reason(repository: Path) -> None:
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    lint = tomllib.loads(text)["tool"]["ruff"]["lint"]
    ignored = [lint["ignore"], *lint["per-file-ignores"].values()]
    for code in sorted({code for codes in ignored for code in codes}):
        lines = [line for line in text.splitlines() if f'"{code}"' in line]
        assert all(re.search(r"#\s*\S", line) for line in lines), f"{code} has no reason beside it"


def test_few_dicts_hold_anything(repository: Path, python_files: list[Path]) -> None:
    """What parts tell each other has a type; `dict[str, Any]` is left for what is plain JSON."""
    ours = [path for path in python_files if path.parts[0] == "ckpt_conformance"]
    texts = ((repository / path).read_text(encoding="utf-8") for path in ours)
    assert sum(text.count("dict[str, Any]") for text in texts) <= LOOSE_DICTS


def test_long_tests_are_there(repository: Path) -> None:
    """A list of tests outlives their names: who renames one moves its line, too."""
    recorded = [f"{name}[" for name in json.loads(long_tests.PLACE.read_text(encoding="utf-8"))]
    for name in (*recorded, *long_tests.ALWAYS):
        path, _, test = name.partition("[")[0].partition("::")
        assert f"def {test}" in (repository / path).read_text(encoding="utf-8"), name
