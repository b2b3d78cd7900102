"""What a mutant changes of the reference manager: the functions that it overrides, if that is all.

A run that enters none of these functions is the run of the reference manager itself. That holds
only for a mutant that puts a function in the place of a function. Not so where it has a constructor
or a constant of its own, makes a plain method a property, or changes a function whose call runs
nothing yet (a generator).
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckpt_conformance import mutants
from ckpt_conformance.harness.reach import FunctionTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.mutants import MutantInfo

REFERENCE = "ckpt_conformance.reference_impl"
OF_A_CLASS = {  # what every class body leaves, whatever is in it
    "__module__",
    "__qualname__",
    "__doc__",
    "__annotations__",
    "__dict__",
    "__weakref__",
    "__parameters__",
    "__orig_bases__",
    "__abstractmethods__",
    "_abc_impl",
}
# What a module may call while it is imported.
HARMLESS = {
    *("mutant", "partial", "frozenset", "property", "staticmethod", "classmethod"),
    *("torch.no_grad", "logging.getLogger"),
}
DECORATORS = {"mutant", "torch.no_grad"}  # that are called
Attribute = Any  # what a class holds under a name


@functools.cache
def functions() -> FunctionTable:
    """Read the functions of the reference manager."""
    return FunctionTable.of(REFERENCE)


@functools.cache
def overridden(info: MutantInfo) -> frozenset[str] | None:
    """Name the functions that a mutant replaces; None if that is not all that it changes."""
    kinds = _kinds(info.broken)
    modules = {kind.__module__ for kind in kinds} | {mutants.places().get(info.id, "")} - {""}
    if not all(map(_is_plain, sorted(modules))) or not _stands_on_one(info.broken, kinds):
        return None
    names = [
        _replaced(info.broken, name, value)
        for kind in kinds
        for name, value in vars(kind).items()
        if name not in OF_A_CLASS
    ]
    known = [name for name in names if name is not None]
    return frozenset(known) if len(known) == len(names) else None


def _kinds(broken: type) -> list[type]:
    """Return a mutant's class and those of its bases that are not of the reference manager."""
    return [kind for kind in broken.__mro__ if kind is not object and not _is_of_reference(kind)]


def _is_of_reference(kind: type) -> bool:
    """Return whether a class is one of the reference manager, and does not only say so."""
    module = sys.modules.get(kind.__module__) if kind.__module__.startswith(REFERENCE) else None
    return getattr(module, kind.__name__, None) is kind


def _stands_on_one(broken: type, kinds: Sequence[type]) -> bool:
    """Return whether a mutant's classes stand above one class of the reference, as if it were it.

    Another class of the reference among its bases, or another metaclass, changes how it is made.
    """
    rest = [kind for kind in broken.__mro__ if kind not in kinds]
    return rest == list(rest[0].__mro__) and type(broken) is type(rest[0])


def _replaced(broken: type, name: str, value: Attribute) -> str | None:
    """Name the function of the reference that an attribute takes the place of; None: no such."""
    bases = filter(_is_of_reference, broken.__mro__)
    before = next((vars(kind)[name] for kind in bases if name in vars(kind)), None)
    if type(value) is not type(before) or (name.startswith("__") and name.endswith("__")):
        return None
    old, new = _function(before), _function(value)
    if old is None or new is None:
        return None
    place = f"{old.__module__}:{old.__qualname__}"
    table = functions()
    return place if place in table.names and place not in table.lazy else None


def _function(value: Attribute) -> types.FunctionType | None:
    """Return the function of a method, or of a property that can only be read."""
    inner: Attribute = value
    if isinstance(value, staticmethod | classmethod):
        inner = cast("Attribute", value).__func__
    elif isinstance(value, property):
        inner = None if value.fset or value.fdel else value.fget
    return inner if isinstance(inner, types.FunctionType) and _is_bare(inner) else None


def _is_bare(function: types.FunctionType) -> bool:
    """Return whether nothing is wrapped around a function."""
    return inspect.unwrap(function) is function


@functools.cache
def _is_plain(module: str) -> bool:
    """Return whether importing a module changes nothing elsewhere: it only defines names.

    Nor do the modules of mutants that it imports.
    """
    path = importlib.import_module(module).__file__
    body = ast.parse(Path(path or "").read_bytes()).body
    is_lazy = any(isinstance(one, ast.ImportFrom) and one.module == "__future__" for one in body)
    own = {name for statement in body for name in _bound(statement)}
    return (
        not own & HARMLESS
        and all(map(_only_defines, body))
        and (is_lazy or all(map(_is_harmless, _annotations(body))))
        and all(map(_is_plain, _mutants_in(body)))
    )


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module gives to what it makes itself."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [ast.unparse(target) for target in targets]


def _annotations(body: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    """Yield what stands as an annotation, which Python computes when it comes to it."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns


def _mutants_in(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the modules of this package that statements import; `mutant` is of none."""
    known = set(mutants.places().values()) | {
        f"{mutants.__name__}.{module.name}" for module in pkgutil.iter_modules(mutants.__path__)
    }
    for statement in body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            names = {statement.module, *(f"{statement.module}.{x.name}" for x in statement.names)}
            yield from sorted(names & known)
        elif isinstance(statement, ast.Import):
            yield from sorted({one.name for one in statement.names} & known)


def _only_defines(statement: ast.stmt) -> bool:
    """Return whether a statement of a module or of a class binds names there, and does no more."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.AnnAssign(value=None):
            return True
        case ast.Expr(value=value) | ast.AnnAssign(target=ast.Name(), value=ast.expr() as value):
            return _is_harmless(value)
        case ast.Assign(targets=targets, value=value):
            return all(map(_is_name, targets)) and _is_harmless(value)
        case ast.FunctionDef(decorator_list=decorators, args=args):
            given = [*args.defaults, *filter(None, args.kw_defaults)]
            return all(map(_is_harmless_decorator, decorators)) and all(map(_is_harmless, given))
        case ast.ClassDef(decorator_list=decorators, bases=bases, keywords=keywords, body=body):
            given = [*bases, *(one.value for one in keywords)]
            is_plain = all(map(_is_harmless_decorator, decorators)) and all(
                map(_is_harmless, given)
            )
            return is_plain and all(map(_only_defines, body))
        case _:
            return isinstance(statement, ast.If) and _is_for_types(statement)


def _is_for_types(statement: ast.If) -> bool:
    return ast.unparse(statement.test) == "TYPE_CHECKING" and not statement.orelse


def _is_name(target: ast.expr) -> bool:
    inner = target.elts if isinstance(target, ast.Tuple) else [target]
    return all(isinstance(one, ast.Name) for one in inner)


def _is_harmless_decorator(decorator: ast.expr) -> bool:
    """Return whether applying a decorator changes nothing elsewhere: one that calls is `mutant`."""
    if isinstance(decorator, ast.Call):
        is_known = ast.unparse(decorator.func) in DECORATORS
        return is_known and _is_harmless(decorator)
    return isinstance(decorator, ast.Name) and decorator.id in HARMLESS


def _is_harmless(expression: ast.expr) -> bool:
    """Return whether an expression calls nothing but what is known to change nothing elsewhere."""
    called = [node.func for node in ast.walk(expression) if isinstance(node, ast.Call)]
    return all(ast.unparse(node) in HARMLESS for node in called if not isinstance(node, ast.Call))
