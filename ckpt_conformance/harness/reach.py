"""Which functions of a package are entered, in whatever process or thread, until it is killed.

The server of a recording imports the package through `install`: each function then begins with one
more statement, which sets a byte of a file that is mapped into memory. Children share that mapping,
so a byte stays set when the process that set it is killed in the next instruction. A child that is
a new interpreter calls `inherit`, and maps the same file.

Where it is asked for each statement does so, too, under the function's name and its line.

What is not seen: a generator function is entered when its first element is asked for, which is
later than its call; `FunctionTable.lazy` names these.
"""

from __future__ import annotations

import ast
import mmap
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Iterator, Sequence

MARKS = "__entered__"  # the mapping, in each module of the package
INHERITED = "CKC_REACH"  # what a new interpreter goes on with: file, package, statements
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class FunctionTable:
    """The functions of a package as `module:Class.method`, in the order of their marks.

    A function inside of another one belongs to it. `lazy` are those that run after their call.
    With `statements` their marks follow that of the function, as `module:Class.method#LINE`.
    """

    names: tuple[str, ...]
    lazy: frozenset[str]
    statements: bool = False

    @classmethod
    def of(cls, package: str, *, statements: bool = False) -> FunctionTable:
        """Read the texts of a package's modules; nothing of them is imported.

        Raises ModuleNotFoundError for a package that is not there.
        """
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"no package {package!r}", name=package)
        names: list[str] = []
        lazy: set[str] = set()
        for folder in spec.submodule_search_locations:
            for path in sorted(Path(folder).rglob("*.py")):
                module = _module_name(package, path.relative_to(folder))
                functions = functions_in(module, ast.parse(path.read_bytes()))
                for name, node in functions.items():
                    names += [name, *(place(name, line) for line in _lines(node) if statements)]
                lazy |= {name for name, node in functions.items() if _is_lazy(node)}
        return cls(tuple(names), frozenset(lazy), statements)


class Marks:
    """The file of marks, one byte for each function; the reader's end."""

    def __init__(self, path: Path, table: FunctionTable) -> None:
        """Make the file, with nothing marked."""
        self.path, self.table = path, table
        self.clear()

    def clear(self) -> None:
        """Forget what was entered; writes in place, since processes have the file mapped."""
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.write(bytes(len(self.table.names)))

    def entered(self) -> frozenset[str]:
        """Name the functions that were entered since the file was cleared."""
        marks = self.path.read_bytes()
        return frozenset(name for name, mark in zip(self.table.names, marks, strict=True) if mark)


def functions_in(module: str, tree: ast.Module) -> dict[str, Function]:
    """Return the functions of a module's text by name, as `FunctionTable` names them."""
    reader = _Reader(module)
    reader.visit(tree)
    return reader.functions


def place(function: str, line: int) -> str:
    """Name the statements of a function that begin in a line of its file."""
    return f"{function}#{line}"


def grouped(names: Iterable[str]) -> frozenset[str]:
    """Write the lines of each function together, `module:Class.method#3,4`: far shorter."""
    lines: dict[str, list[int]] = {}
    for name in names:
        function, _, line = name.partition("#")
        lines.setdefault(function, []).extend([int(line)] if line else [])
    return frozenset(
        f"{function}#{','.join(map(str, sorted(of_one)))}" if of_one else function
        for function, of_one in lines.items()
    )


def lines_of(groups: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each function and line of what `grouped` gave."""
    for group in groups:
        function, _, lines = group.partition("#")
        yield from ((function, int(line)) for line in lines.split(",") if line)


def install(path: Path, package: str, *, statements: bool = False) -> None:
    """Make this process and its forks mark in `path` what they enter of `package`.

    Raises RuntimeError if the package was imported before: its functions would mark nothing.
    """
    if package in sys.modules:
        raise RuntimeError(f"{package} was imported before its functions could be marked")
    table = FunctionTable.of(package, statements=statements)
    marks = _mapped(path)
    os.environ[INHERITED] = f"{path}\n{package}\n{'statements' if statements else ''}"
    sys.meta_path.insert(0, _Finder(package, table, marks))


def inherit() -> None:
    """Mark in a new interpreter what the one that started it marks, if that does.

    Where the package is imported already, all of it counts as entered.
    """
    if INHERITED not in os.environ:
        return
    path, package, statements = os.environ[INHERITED].split("\n")
    if package in sys.modules:
        marks = _mapped(Path(path))
        marks[:] = b"\1" * len(marks)
        return
    install(Path(path), package, statements=bool(statements))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _module_name(package: str, path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _is_lazy(node: Function) -> bool:
    """Return whether a call of the function runs nothing of it yet."""
    nodes = [node, *(inner for statement in node.body for inner in _same_function(statement))]
    return any(
        isinstance(inner, ast.Yield | ast.YieldFrom | ast.AsyncFunctionDef) for inner in nodes
    )


def _same_function(node: ast.AST) -> list[ast.AST]:
    """Return a node and what is below it, without the functions that are defined there."""
    if isinstance(node, Function | ast.Lambda | ast.ClassDef):
        return []
    return [
        node,
        *(below for child in ast.iter_child_nodes(node) for below in _same_function(child)),
    ]


class _Reader(ast.NodeVisitor):
    """Collects the functions of a module by name, those in classes too."""

    def __init__(self, module: str) -> None:
        self.functions: dict[str, Function] = {}
        self._prefix = f"{module}:"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._prefix = self._prefix, f"{self._prefix}{node.name}."
        self.generic_visit(node)
        self._prefix = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions[self._prefix + node.name] = node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.functions[self._prefix + node.name] = node


class _Finder:
    """Finds the modules of one package and has their functions marked."""

    def __init__(self, package: str, table: FunctionTable, marks: mmap.mmap) -> None:
        self.package, self.marks, self.statements = package, marks, table.statements
        self.numbers = {name: number for number, name in enumerate(table.names)}

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name != self.package and not name.startswith(f"{self.package}."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None:
            return spec
        folders = spec.submodule_search_locations
        loader = _Loader(name, spec.origin, self)
        return spec_from_file_location(
            name, spec.origin, loader=loader, submodule_search_locations=folders
        )


class _Loader(SourceFileLoader):
    """Compiles a module from its text, with marks; what Python has cached is passed over."""

    def __init__(self, name: str, path: str, finder: _Finder) -> None:
        super().__init__(name, path)
        self.finder = finder

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for name, node in functions_in(fullname, tree).items():
            numbers = self.finder.numbers
            if self.finder.statements:
                _mark_statements(node, {line: numbers[place(name, line)] for line in _lines(node)})
            _mark(node, numbers[name])
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        setattr(module, MARKS, self.finder.marks)
        super().exec_module(module)


def _lines(function: Function) -> list[int]:
    """Return the lines in which statements of a function begin, those inside of others, too."""
    nodes = (node for statement in _body(function) for node in ast.walk(statement))
    return sorted({node.lineno for node in nodes if isinstance(node, ast.stmt)})


def _body(function: Function) -> list[ast.stmt]:
    has_docstring = ast.get_docstring(function, clean=False) is not None
    return function.body[int(has_docstring) :]


def _mark(function: Function, number: int) -> None:
    """Put the statement that marks a function before its first one; lines stay what they are."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    function.body.insert(int(has_docstring), _marking(number, function.body[0]))


def _marking(number: int, there: ast.stmt) -> ast.stmt:
    """Make the statement that sets a mark, at the place of another one."""
    statement = ast.parse(f"{MARKS}[{number}] = 1").body[0]
    for node in ast.walk(statement):
        ast.copy_location(node, there)
    return statement


def _mark_statements(function: Function, numbers: dict[int, int]) -> None:
    """Put a statement that marks its line before each statement of a function."""
    inner = [node for statement in _body(function) for node in ast.walk(statement)]
    for node in (function, *inner):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, _marked(cast("list[ast.stmt]", block), numbers))


def _marked(block: list[ast.stmt], numbers: dict[int, int]) -> list[ast.stmt]:
    """Return a block with marks; a docstring, of which no number is known, stays the first."""
    made: list[ast.stmt] = []
    for statement in block:
        if statement.lineno in numbers:
            made.append(_marking(numbers[statement.lineno], statement))
        made.append(statement)
    return made
