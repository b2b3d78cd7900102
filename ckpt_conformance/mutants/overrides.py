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
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckpt_conformance.harness.reach import FunctionTable

if TYPE_CHECKING:
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
Attribute = Any  # what a class holds under a name


@functools.cache
def functions() -> FunctionTable:
    """Read the functions of the reference manager."""
    return FunctionTable.of(REFERENCE)


@functools.cache
def overridden(info: MutantInfo) -> frozenset[str] | None:
    """Name the functions that a mutant replaces; None if that is not all that it changes."""
    if not all(_is_plain(kind.__module__) for kind in _kinds(info.broken)):
        return None
    names = [
        _replaced(info.broken, name, value)
        for kind in _kinds(info.broken)
        for name, value in vars(kind).items()
        if name not in OF_A_CLASS
    ]
    known = [name for name in names if name is not None]
    return frozenset(known) if len(known) == len(names) else None


def _kinds(broken: type) -> list[type]:
    """Return a mutant's class and those of its bases that are not of the reference manager."""
    mro = broken.__mro__
    return [
        kind for kind in mro if kind is not object and not kind.__module__.startswith(REFERENCE)
    ]


def _replaced(broken: type, name: str, value: Attribute) -> str | None:
    """Name the function of the reference that an attribute takes the place of; None: no such."""
    bases = (kind for kind in broken.__mro__ if kind.__module__.startswith(REFERENCE))
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
    """Return whether importing a module changes nothing elsewhere: it only defines names."""
    path = importlib.import_module(module).__file__
    body = ast.parse(Path(path or "").read_bytes()).body
    return all(map(_only_defines, body))


def _only_defines(statement: ast.stmt) -> bool:
    """Return whether a statement of a module or of a class binds names there, and does no more."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.AnnAssign(value=None):
            return True
        case ast.If(test=test):
            return "TYPE_CHECKING" in ast.unparse(test)
        case ast.Expr(value=value) | ast.AnnAssign(target=ast.Name(), value=ast.expr() as value):
            return _is_harmless(value)
        case ast.Assign(targets=targets, value=value):
            names = (isinstance(target, ast.Name | ast.Tuple) for target in targets)
            return all(names) and _is_harmless(value)
        case ast.FunctionDef(decorator_list=decorators) | ast.ClassDef(decorator_list=decorators):
            body = statement.body if isinstance(statement, ast.ClassDef) else []
            return all(map(_is_harmless_decorator, decorators)) and all(map(_only_defines, body))
        case _:
            return False


def _is_harmless_decorator(decorator: ast.expr) -> bool:
    """Return whether applying a decorator changes nothing elsewhere."""
    is_named = isinstance(decorator, ast.Name) and decorator.id in HARMLESS
    return is_named or (isinstance(decorator, ast.Call) and _is_harmless(decorator))


def _is_harmless(expression: ast.expr) -> bool:
    """Return whether an expression calls nothing but what is known to change nothing elsewhere."""
    called = [node.func for node in ast.walk(expression) if isinstance(node, ast.Call)]
    return all(ast.unparse(node) in HARMLESS for node in called if not isinstance(node, ast.Call))
