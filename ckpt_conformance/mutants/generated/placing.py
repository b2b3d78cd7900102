"""How the changed code of one function comes into a process: in the place of the function's own.

The function stays the object that it is, with another code. So every name that leads to it, in
whatever module, class or closure, leads to the changed one.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.harness.reach import Function

Attribute: TypeAlias = Any  # what a class or a module holds under a name


def modules_in(package: str) -> list[str]:
    """Name the modules of a package by their files; the package itself is not imported.

    Raises ModuleNotFoundError for a package that is not there.
    """
    return sorted(path.stem for path in _folder(package).glob("*.py"))


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no package {package!r}", name=package)
    return Path(spec.origin).parent


@functools.cache
def tree_of(module: str) -> ast.Module:
    """Read the text of a module of a package, by its dotted name; it is not imported."""
    package, _, name = module.rpartition(".")
    path = _folder(package) / f"{name}.py"
    return ast.parse(path.read_bytes(), str(path))


@functools.cache
def _imports_of(module: str) -> list[ast.stmt]:
    """Return the imports at the top of a module: the compiler treats what they name in its way."""
    below = (one for one in tree_of(module).body if isinstance(one, ast.If))
    inner = (one for statement in below for one in statement.body)
    imports = (ast.Import, ast.ImportFrom)
    return [one for one in (*tree_of(module).body, *inner) if isinstance(one, imports)]


def compiled(function: str, node: Function) -> types.CodeType:
    """Compile the text of `module:Class.method`, as its module would; raises SyntaxError.

    Decorators and defaults are left out: the function has them.
    """
    module, _, qualified = function.partition(":")
    *classes, name = qualified.split(".")
    body: list[ast.stmt] = [_bare(node)]
    for outer in reversed(classes):
        body = [ast.copy_location(ast.ClassDef(outer, [], [], body, []), node)]
    tree = ast.Module([*_imports_of(module), *body], [])
    code = compile(tree, f"{module.replace('.', '/')}.py", "exec", dont_inherit=True)
    for inner in (*classes, name):
        code = next(one for one in _codes_in(code) if one.co_name == inner)
    return code


def _bare(node: Function) -> Function:
    """Return a function without what runs when it is defined."""
    arguments = node.args
    made = type(node)(**dict(ast.iter_fields(node)))
    made.decorator_list, made.returns = [], None
    made.args = ast.arguments(
        arguments.posonlyargs,
        arguments.args,
        arguments.vararg,
        arguments.kwonlyargs,
        [None] * len(arguments.kwonlyargs),
        arguments.kwarg,
        [],
    )
    return ast.copy_location(made, node)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    return (one for one in code.co_consts if isinstance(one, types.CodeType))


def signature(code: types.CodeType) -> tuple[object, ...]:
    """Return what a code does, apart from where its text stands: equal for equal behaviour."""
    constants = tuple(
        signature(one) if isinstance(one, types.CodeType) else _constant(one)
        for one in code.co_consts
    )
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return (code.co_name, code.co_code, constants, names, code.co_exceptiontable, code.co_flags)


def _constant(value: object) -> tuple[str, object]:
    """Return a type and a text; a set that was read from a file may have another order."""
    if isinstance(value, frozenset):
        return "frozenset", tuple(sorted(map(repr, cast("frozenset[object]", value))))
    return type(value).__name__, repr(value)


def _unbound(value: Attribute) -> Attribute:
    """Return the function of what a class holds: of a method, or of a property."""
    if isinstance(value, staticmethod | classmethod):
        return cast("Attribute", value).__func__
    return value.fget if isinstance(value, property) else value


@functools.cache
def target(function: str) -> types.FunctionType:
    """Return the function that a name stands for, below what is wrapped around it.

    Raises TypeError for what is no function of Python's.
    """
    module, _, qualified = function.partition(":")
    value: Attribute = importlib.import_module(module)
    for part in qualified.split("."):
        value = cast("Attribute", vars(value)[part])
    found = inspect.unwrap(_unbound(value))
    if not isinstance(found, types.FunctionType):
        raise TypeError(f"{function} is a {type(found).__name__}")
    return found


def put(function: str, node: Function) -> None:
    """Give a function the code of a changed text, in this process."""
    there = target(function)
    code = compiled(function, node)
    if missing := [name for name in there.__code__.co_freevars if name not in code.co_freevars]:
        code = compiled(function, _naming(node, missing))
    there.__code__ = code


def _naming(node: Function, names: list[str]) -> Function:
    """Return a function that names what it no longer uses: a code has as many cells as before."""
    made = type(node)(**dict(ast.iter_fields(node)))
    after = ast.parse("\n".join(f"lambda: {name}" for name in names)).body
    for one in after:
        for below in ast.walk(one):
            ast.copy_location(below, node.body[-1])
    made.body = [*node.body, *after]
    return ast.copy_location(made, node)
