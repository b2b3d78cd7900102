"""What the source of a result is: the modules that it may run, found without running them.

The imports of a module are read from its text: those at the top, those in functions, and modules
that are named in a string, such as `"package.module:function"`. Imports for types only run nothing.
What is found is more than what runs, never less: `tests/work/test_sources.py` holds it against what
checks really import.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import re
import secrets
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.work import own_code
from ckpt_conformance.work.own_code import our_packages

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

_COMPILED = tuple(importlib.machinery.EXTENSION_SUFFIXES)
ROOT = Path("/")  # of which nobody imports all: the word is a separator


@dataclass(frozen=True)
class Source:
    """The text of one module, and what it names of a tree of modules."""

    name: str  # dotted
    path: Path

    @cached_property
    def text(self) -> bytes:
        """What is in the file."""
        return self.path.read_bytes()

    @cached_property
    def digest(self) -> str:
        """A digest of the text."""
        return hashlib.blake2b(self.text, digest_size=16).hexdigest()

    @cached_property
    def names(self) -> frozenset[str]:
        """Every dotted name that an import or a string of the module may stand for."""
        if self.path.suffix != ".py":
            return frozenset()  # compiled: what it imports is not seen
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        return _names_in(self.text, package)


@dataclass(frozen=True)
class SourceTree:
    """The modules of some packages, by dotted name.

    `linked` modules are needed where another one is, although nothing in the text says so.
    """

    sources: dict[str, Source]
    linked: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    @classmethod
    def of_packages(cls, packages: dict[str, Path]) -> SourceTree:
        """Read packages, each from its folder; `packages` maps dotted names to folders."""
        found: dict[str, Source] = {}
        for package, folder in packages.items():
            for path in sorted(_files(folder), key=_precedence):
                *inside, last = path.relative_to(folder).parts
                own = last.partition(".")[0]
                name = ".".join([package, *inside, *([] if own == "__init__" else [own])])
                found[name] = Source(name, path)  # of one name the last: what Python imports
        return cls(found)

    def closure(self, modules: Iterable[str]) -> frozenset[str]:
        """Return the modules of the tree that are imported when these are, these included.

        A package that is neither in the tree nor installed, such as a folder beside the user, is
        added to it. What is installed is passed over: its version covers it.
        """
        reached: set[str] = set()
        waiting = [name for module in modules for name in self._with_parents(module)]
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting += self.imports(name) - reached
        return frozenset(reached)

    def imports(self, module: str) -> frozenset[str]:
        """Return the modules of the tree that one names, with the packages that they lie in."""
        if module not in self._imports:
            names = self.sources[module].names | self.linked.get(module, frozenset())
            self._imports[module] = frozenset(
                parent for name in names for parent in self._with_parents(name)
            )
        return self._imports[module]

    def digest(self, modules: Iterable[str]) -> str:
        """Return one digest of the texts of modules, whatever their order."""
        lines = sorted(f"{name} {self.sources[name].digest}" for name in modules)
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    @cached_property
    def _imports(self) -> dict[str, frozenset[str]]:
        return {}

    @cached_property
    def _elsewhere(self) -> set[str]:
        """The top names that were looked for outside of the tree."""
        return set()

    def _with_parents(self, dotted: str) -> Iterator[str]:
        """Yield a name and the packages that it lies in, as far as the tree has them."""
        parts = dotted.split(".")
        if parts[0] not in self.sources and parts[0] not in self._elsewhere:
            self._elsewhere.add(parts[0])
            self.sources.update(not_installed(parts[0]))
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            if name in self.sources:
                yield name


def not_installed(top: str) -> dict[str, Source]:
    """Read a module or package of the user's own, by its top name; nothing if it is installed."""
    if top in sys.stdlib_module_names or not top.isidentifier():
        return {}
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # half imported, or a name that cannot be one
        return {}
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return {}
    path = Path(spec.origin).resolve()
    if own_code.is_installed(path) or not path.is_file():  # in an archive, which counts whole
        return {}
    if path.name == "__init__.py":
        return SourceTree.of_packages({top: path.parent}).sources
    return {top: Source(top, path)}


def code_outside() -> str:
    """Return one digest of all code that may be imported and is neither installed nor ours.

    That is what lies below the working directory, the PYTHONPATH, the folders of editable
    installations, and those that code in one of these puts on `sys.path` by a name in its text.
    What a program imports by a name that it makes up is no name in its text, so all of it counts.
    Where that is too much to read the digest is never the same twice.
    """
    return code_in(with_added(own_code.places_outside()))


def code_in(places: Iterable[Path]) -> str:
    """Return one digest of all code below some folders; never the same twice if it is too much."""
    found = hashlib.blake2b(digest_size=16)
    try:
        for relative, path in own_code.files_below(places):
            found.update(f"{relative}\0".encode(errors="surrogateescape"))
            with contextlib.suppress(OSError), path.open("rb") as file:
                found.update(hashlib.file_digest(file, "blake2b").digest())
    except own_code.TooMuchError:
        return secrets.token_hex(16)
    return found.hexdigest()


def with_added(places: Iterable[Path]) -> list[Path]:
    """Return folders, and those that code in them puts on `sys.path`, as far as its text says so.

    Of too much code only the folders themselves are returned: who reads them finds that out, too.
    """
    found, waiting = list(places), list(places)
    try:
        while waiting:
            files = [path for _, path in own_code.files_below([waiting.pop()])]
            added = {place for path in files if path.suffix == ".py" for place in _added_by(path)}
            new = sorted(place for place in added if place not in found)
            found, waiting = [*found, *new], [*waiting, *new]
    except own_code.TooMuchError:
        pass
    return found


def _added_by(path: Path) -> frozenset[Path]:
    """Return the folders and archives that a file puts on `sys.path` by a name in its text."""
    try:
        text = path.read_bytes()
    except OSError:
        return frozenset()
    if b"sys.path" not in text and b"addsitedir" not in text:
        return frozenset()
    words = (Path(word) for word in _path_words(text))
    places = (word.resolve() for word in words if word.exists())
    return frozenset(
        place for place in places if place != ROOT and not own_code.is_installed(place)
    )


def code_beside(modules: Sequence[str], first: Path | None = None) -> dict[str, str]:
    """Return a short digest of each file of code of the user's own that modules may import.

    That is all below the folders from which they, and the modules that they name, are imported; the
    path is relative to that folder, which has another place on each machine. What a program imports
    by a name that it makes up is no name in its text. Where that is too much to read, the modules
    that are named have to do. Modules are looked for in `first`, too, before all other places.
    """
    named = SourceTree({})
    with _looking_first_in(first):
        reached = named.closure(modules)
        wanted = {*modules, *(name for module in reached for name in named.sources[module].names)}
        tops = {name.partition(".")[0] for name in wanted}
        places = {place for top in tops if (place := _place_of(top)) is not None}
    return digests_below(with_added(sorted(places))) or _joined(
        (source.path.relative_to(place), source.path)
        for place in places
        for source in named.sources.values()
        if source.path.is_relative_to(place)
    )


@contextlib.contextmanager
def _looking_first_in(folder: Path | None) -> Generator[None]:
    """Let modules be found in a folder, as in the working directory of `python -m`."""
    before = list(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def digests_below(places: Iterable[Path]) -> dict[str, str]:
    """Return a short digest of each file of code below folders, by its relative path.

    Empty where that is too much to read.
    """
    try:
        return _joined(list(own_code.files_below(places)))
    except own_code.TooMuchError:
        return {}


def digest_of(path: Path) -> str:
    """Return a short digest of a file; another word where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, _short).hexdigest()
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _short() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=6)


def _joined(files: Iterable[tuple[Path, Path]]) -> dict[str, str]:
    """Return the digests of files by name; those of one name in several places stand together."""
    found: dict[str, set[str]] = {}
    for relative, path in files:
        name = str(relative).encode(errors="backslashreplace").decode()
        found.setdefault(name, set()).add(digest_of(path))
    return {name: " and ".join(sorted(digests)) for name, digests in sorted(found.items())}


def _place_of(top: str) -> Path | None:
    """Return the folder from which a module of the user's own is imported; None for all others."""
    if top in sys.stdlib_module_names or top in our_packages() or not top.isidentifier():
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # half imported, or a name that cannot be one
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())  # of a package, with __init__ or without
    file = folders[0] if folders else spec.origin
    place = Path(file).resolve().parent if file else None
    if place is None or own_code.is_installed(place):
        return None
    return place


def _precedence(path: Path) -> tuple[int, Path]:
    """Sort files so that of one name what an import takes is last: a package, compiled, a text."""
    is_package = path.name.partition(".")[0] == "__init__"
    return (2 if is_package else int(path.suffix != ".py")), path


def _files(folder: Path) -> Iterator[Path]:
    """Yield the modules below a folder; a link to a folder is another package's place."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != "__pycache__":
            yield from _files(path)
        elif path.suffix == ".py" or path.name.endswith(_COMPILED):
            yield path


@functools.lru_cache(maxsize=4096)
def _names_in(text: bytes, package: str) -> frozenset[str]:
    """Read the names of a module's text once, however many trees it is in.

    A text that does not compile imports nothing: who imports it says so.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    return frozenset(name for node in _running(tree) for name in _named(node, package))


@functools.lru_cache(maxsize=4096)
def _path_words(text: bytes) -> frozenset[str]:
    """Read the strings in calls and assignments that have to do with `sys.path`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    about = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call | ast.Assign | ast.AugAssign) and _is_about_path(node)
    )
    return frozenset(
        part.value
        for node in about
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and "\0" not in part.value
    )


def _is_about_path(node: ast.Call | ast.Assign | ast.AugAssign) -> bool:
    """Return whether a statement changes `sys.path`, by its words."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).startswith(("sys.path.", "site.addsitedir"))
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(ast.unparse(target).startswith("sys.path") for target in targets)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk over what may run: without docstrings, and without what is for types only."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for node in child.orelse:
                yield node
                yield from _running(node)
            continue
        yield child
        yield from _running(child)


_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


def _named(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names that one node may stand for."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, package)
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _MODULE.findall(node.value)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """Write out what a relative import means."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])
