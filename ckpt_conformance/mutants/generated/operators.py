"""What may be changed in a function: one small edit of its syntax tree at a time.

An operator yields the changes that it can make. None of them touches what no check may judge: what
is logged, the texts of errors, annotations and docstrings. Nor does any touch what runs when a
module is imported: decorators, defaults of parameters, constants of modules and classes.

Kept tools were looked at for this. cosmic-ray 8.7 has operators that run in process on a text
(`mutating.mutate_code`), and mutmut 3.8 has functions on nodes of libcst; both change constants,
comparisons and arithmetic, cosmic-ray exception clauses and whole loops, too. Neither drops a call,
a statement or a condition, swaps statements, skips one element or cuts bytes, which are the bugs
that checkpoint managers have; and they bring 13 and 6 packages (SQLAlchemy, aiohttp, textual).
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ckpt_conformance.harness.reach import Function

    Operator: TypeAlias = Callable[[ast.AST], Iterator["Edit"]]

NodeT = TypeVar("NodeT", bound=ast.AST)
Block = list[ast.stmt]
Loop: TypeAlias = ast.For | ast.comprehension

ERRORS = {  # what makes an error: its texts are for people
    *("CheckpointDamaged", "CheckpointMismatch", "CheckpointNotFound", "SaveRefused"),
    *("MirrorError", "Refusal", "_damaged", "refuse"),
}
SIZES = (16, 4096)  # bytes that are left: of a header, and of a block
# Calls with bytes, and where these stand among the arguments.
TAKES_BYTES = {
    "digest_bytes": 0,
    "pipe_file": 1,
    "read_into": 2,
    "replace_small_file": 1,
    "write": 0,
    "write_bytes": 1,
}
GIVES_BYTES = {"canonical", "read", "read_exact", "to_bytes", "tobytes"}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}
PLACED = (ast.stmt, ast.expr, ast.excepthandler, ast.arg, ast.keyword, ast.alias, ast.pattern)
NOTHING: Mapping[int, tuple[ast.AST, ...]] = {}
NO_NUMBERS = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict)


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of a function: what stands in the place of some of its nodes.

    `before` and `after` are Python, for people and for the name of the mutant.
    """

    operator: str
    line: int  # of the module's file, in which the statement begins that it changes
    before: str
    after: str
    replaced: Mapping[int, tuple[ast.AST, ...]]  # by the identity of a node


def edits(function: Function) -> Iterator[Edit]:
    """Yield every change of a function, in the order of its text."""
    lines = _statements_of(function)
    for node in seen(function):
        for operator in OPERATORS:
            for edit in operator(node):
                yield replace(edit, line=lines[next(iter(edit.replaced))])


def _statements_of(function: Function) -> dict[int, int]:
    """Map what stands in a function to the line of the statement that it belongs to."""
    lines: dict[int, int] = {}

    def note(node: ast.AST, line: int) -> None:
        here = node.lineno if isinstance(node, ast.stmt) else line
        lines[id(node)] = here
        for child in ast.iter_child_nodes(node):
            note(child, here)

    note(function, function.lineno)
    return lines


def edited(function: Function, edit: Edit | None) -> Function:
    """Return a function with a change, or without any; it shares what the change leaves alone."""
    replaced = edit.replaced if edit else NOTHING
    return _copy(function, replaced, _above(function, replaced))


def _above(function: Function, replaced: Mapping[int, tuple[ast.AST, ...]]) -> frozenset[int]:
    """Name the nodes that stand above what is replaced, by their identity."""
    parents = _parents(function)
    above: set[int] = set()
    for changed in replaced:
        here = parents.get(changed)
        while here is not None and here not in above:
            above.add(here)
            here = parents.get(here)
    return frozenset(above)


@functools.cache
def _parents(function: Function) -> dict[int, int]:
    """Map each node of a function to the one above it, by their identity."""
    return {
        id(child): id(node) for node in ast.walk(function) for child in ast.iter_child_nodes(node)
    }


def _copy(
    node: NodeT,
    replaced: Mapping[int, tuple[ast.AST, ...]] = NOTHING,
    above: frozenset[int] = frozenset(),
) -> NodeT:
    def changed(value: object) -> tuple[object, ...]:
        """Return what comes into the place of a value."""
        if id(value) in replaced:
            return tuple(
                _located(_copied(one, replaced, above), node) for one in replaced[id(value)]
            )
        return (_copied(value, replaced, above),)

    fields: dict[str, object] = {}
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            items = cast("list[object]", value)
            fields[name] = [one for item in items for one in changed(item)]
        else:
            (fields[name],) = changed(value)
    return ast.copy_location(type(node)(**fields), node)


def _copied(
    value: object, replaced: Mapping[int, tuple[ast.AST, ...]], above: frozenset[int]
) -> object:
    if isinstance(value, ast.AST) and id(value) in above:
        return _copy(value, replaced, above)
    return value


def _located(value: object, place: ast.AST) -> object:
    """Say of what is new where it stands: the compiler asks; it is where the node above it is."""
    if isinstance(value, ast.AST):
        if isinstance(value, PLACED):
            if not hasattr(value, "lineno"):
                ast.copy_location(value, place)
            place = value
        for child in ast.iter_child_nodes(value):
            _located(child, place)
    return value


# ---- what is looked at ---------------------------------------------------------------------------


def seen(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function that may be changed, in order; itself first, as a block."""
    yield function
    for statement in body_of(function):
        yield from _seen(statement, frozenset())


def body_of(function: Function) -> Block:
    """Return what a function does, without its docstring."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    return function.body[int(has_docstring) :]


def _seen(node: ast.AST, passed_over: frozenset[int]) -> Iterator[ast.AST]:
    if is_logging(node) or id(node) in passed_over:
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from seen(node)
        return
    yield node
    if _makes_an_error(node):
        passed_over |= set(_texts_in(node))
    for child in _children(node):
        yield from _seen(child, passed_over)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is below a node, but for annotations, types, and how texts are formatted."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "format_spec", "args"} and not isinstance(node, ast.Call):
            continue  # the arguments of a lambda have defaults, which are made once
        for child in cast("list[object]", value) if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_type(node, child):
                yield child


def _is_type(node: ast.AST, child: ast.AST) -> bool:
    """Return whether a node is the type that `cast` is told."""
    return isinstance(node, ast.Call) and name_of(node) == "cast" and child is node.args[0]


def is_logging(node: ast.AST) -> bool:
    """Return whether a node is a statement that logs."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return True
        case _:
            return False


def _makes_an_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and name_of(node) in ERRORS)


def _texts_in(node: ast.AST) -> Iterator[int]:
    """Name the texts of an error, however deep they stand in it."""
    for below in ast.walk(node):
        is_text = isinstance(below, ast.Constant) and isinstance(below.value, str)
        if is_text or isinstance(below, ast.JoinedStr):
            yield id(below)


def name_of(call: ast.Call) -> str:
    """Return the last part of what a call names; empty where it names nothing."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def blocks(node: ast.AST) -> Iterator[Block]:
    """Yield the lists of statements of a node."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield body_of(node)
        return
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block:
            yield block


# ---- how a change is made ------------------------------------------------------------------------


def _instead(operator: str, node: ast.AST, *others: ast.AST) -> Edit:
    """Put others in the place of a node."""
    for one in others:
        if not hasattr(one, "lineno"):  # a new one: what was there stays as it is
            ast.copy_location(one, node)
    after = "; ".join(map(_text, others))
    return Edit(operator, getattr(node, "lineno", 0), _text(node), after, {id(node): others})


def _text(node: ast.AST) -> str:
    """Write a node as Python, in one line."""
    if isinstance(node, ast.comprehension):
        return ast.unparse(node).strip()
    return " ".join(ast.unparse(node).split())


def _with(node: NodeT, **fields: object) -> NodeT:
    """Return a node with other fields; what is below is the same."""
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _without(items: list[NodeT], at: int) -> list[NodeT]:
    return [*items[:at], *items[at + 1 :]]


# ---- statements ----------------------------------------------------------------------------------


def drop_call(node: ast.AST) -> Iterator[Edit]:
    """Leave out a call that stands alone."""
    match node:
        case ast.Expr(value=ast.Call()):
            yield _instead("drop-call", node, ast.Pass())
        case _:
            return


def drop_statement(node: ast.AST) -> Iterator[Edit]:
    """Leave out what is stored, deleted or raised, and an early end.

    Not a first binding of a name, whose absence is a NameError, and not what stands alone below a
    condition: to drop the condition is the same.
    """
    for block in blocks(node):
        for statement in block:
            is_alone = len(block) == 1 and isinstance(node, ast.If) and not node.orelse
            is_last = statement is block[-1] and isinstance(node, ast.FunctionDef)
            if not is_alone and _is_dropped(statement, is_last=is_last):
                yield _instead("drop-statement", statement, ast.Pass())
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _drop_second_bindings(node)


def _is_dropped(statement: ast.stmt, *, is_last: bool) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.AnnAssign(target=ast.Attribute() | ast.Subscript(), value=ast.expr()):
            return True
        case ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            return True
        case ast.Return(value=value):
            return not (is_last and value is None)
        case _:
            return False


def _drop_second_bindings(function: Function) -> Iterator[Edit]:
    """Leave out what gives a new value to a name that has one."""
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    bound = {argument.arg for argument in every}
    for node in seen(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                if name in bound:
                    yield _instead("drop-statement", node, ast.Pass())
                bound.add(name)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                bound.add(name)
            case _:
                pass


def swap(node: ast.AST) -> Iterator[Edit]:
    """Exchange two statements that follow each other, where the order may matter.

    Not in a constructor that sets one attribute after the other.
    """
    if isinstance(node, ast.FunctionDef) and node.name == "__init__":
        return
    for block in blocks(node):
        for first, second in itertools.pairwise(block):
            if _may_be_swapped(first, second):
                text = f"{_text(first)}; {_text(second)}"
                other = f"{_text(second)}; {_text(first)}"
                replaced: dict[int, tuple[ast.AST, ...]] = {
                    id(first): (_copy(second),),
                    id(second): (_copy(first),),
                }
                yield Edit("swap", first.lineno, text, other, replaced)


ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
NEVER_SWAPPED = (*ENDS, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Pass)


def _may_be_swapped(first: ast.stmt, second: ast.stmt) -> bool:
    if any(isinstance(one, NEVER_SWAPPED) or is_logging(one) for one in (first, second)):
        return False
    if _ends_early(second) and _binds(first):
        return _has_effect(first) and not _binds(first) & _reads(second)
    return _has_effect(first) and _has_effect(second) and not _binds(first) & _reads(second)


def _ends_early(statement: ast.stmt) -> bool:
    return any(isinstance(node, ENDS) for node in ast.walk(statement))


def _has_effect(statement: ast.stmt) -> bool:
    """Return whether a statement does more than to name a value."""
    nodes = list(ast.walk(statement))
    stores = (ast.Attribute, ast.Subscript)
    is_stored = any(
        isinstance(node, stores) and isinstance(node.ctx, ast.Store | ast.Del) for node in nodes
    )
    return is_stored or _ends_early(statement) or any(isinstance(n, ast.Call) for n in nodes)


def _binds(statement: ast.stmt) -> set[str]:
    return _names(statement, ast.Store)


def _reads(statement: ast.stmt) -> set[str]:
    return _names(statement, ast.Load)


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, context)}


# ---- conditions ----------------------------------------------------------------------------------


def drop_condition(node: ast.AST) -> Iterator[Edit]:
    """Take one side of a condition always, or leave out a part of it."""
    what = "drop-condition"
    match node:
        case ast.If(test=test):
            yield from (_instead(what, test, ast.Constant(value)) for value in (True, False))
        case ast.While(test=test) if not isinstance(test, ast.Constant):
            yield _instead(what, test, ast.Constant(value=False))
        case ast.IfExp(body=body, orelse=orelse):
            yield from (_instead(what, node, side) for side in (_copy(body), _copy(orelse)))
        case ast.comprehension(ifs=ifs) if ifs:
            yield from (_instead(what, test, ast.Constant(value=True)) for test in ifs)
        case ast.BoolOp(op=op, values=values):
            for at in range(len(values)):
                left = [_copy(one) for one in _without(values, at)]
                yield _instead(what, node, left[0] if len(left) == 1 else ast.BoolOp(op, left))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _instead(what, node, _copy(operand))
        case _:
            return


def comparison(node: ast.AST) -> Iterator[Edit]:
    """Move a limit by one, or ask for the opposite."""
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            ops = [*node.ops[:at], COMPARISONS[type(op)](), *node.ops[at + 1 :]]
            yield _instead("comparison", node, _with(node, ops=ops))


# ---- values --------------------------------------------------------------------------------------


def constant(node: ast.AST) -> Iterator[Edit]:
    """Change a number, a truth value, a text or bytes."""
    if isinstance(node, ast.Constant):
        for value in _other_values(node.value):
            yield _instead("constant", node, ast.Constant(value))


def _other_values(value: object) -> list[bool | int | str | bytes]:
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value - 1] if value > 0 else [value + 1]
        case str():
            return [f"{value}~"]
        case bytes():
            return [value + b"~"]
        case _:
            return []


def arithmetic(node: ast.AST) -> Iterator[Edit]:
    """Add instead of to subtract, and so on; only where it may be of numbers."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        operands = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
        if all(map(_may_be_a_number, operands)):
            yield _instead("arithmetic", node, _with(node, op=ARITHMETIC[type(node.op)]()))


def _may_be_a_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    return not isinstance(node, NO_NUMBERS)


def first_bytes(node: ast.AST) -> Iterator[Edit]:
    """Hand over the first bytes only."""
    if not isinstance(node, ast.Call):
        return
    name = name_of(node)
    at = 0 if name == "update" and "hasher" in ast.unparse(node.func) else TAKES_BYTES.get(name)
    if at is not None and len(node.args) > at and not isinstance(node.args[at], ast.Starred):
        yield from _cut(node.args[at])
    if name in GIVES_BYTES:
        yield from _cut(node)


def _cut(node: ast.expr) -> Iterator[Edit]:
    for size in SIZES:
        part = ast.Subscript(_copy(node), ast.Slice(upper=ast.Constant(size)), ast.Load())
        yield _instead("first-bytes", node, part)


# ---- loops and exceptions ------------------------------------------------------------------------


def skip_element(node: ast.AST) -> Iterator[Edit]:
    """Leave out the first, or the last element of a loop."""
    if isinstance(node, ast.For | ast.comprehension):
        for text in ("list(x)[1:]", "list(x)[:-1]"):
            other = ast.parse(text, mode="eval").body
            call = next(one for one in ast.walk(other) if isinstance(one, ast.Call))
            call.args = [_copy(node.iter, {})]
            for one in ast.walk(other):
                ast.copy_location(one, node.iter)
            yield _instead("skip-element", node.iter, other)


def exception(node: ast.AST) -> Iterator[Edit]:
    """Catch less, catch more, or nothing; let pass what is suppressed."""
    if isinstance(node, ast.Try):
        for at, handler in enumerate(node.handlers):
            yield from _of_handler(node, at, handler)
        if node.finalbody and node.handlers:
            yield _instead("exception", node, _with(node, finalbody=[]))
    elif isinstance(node, ast.With):
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and name_of(call) == "suppress":
                yield _instead("exception", call, _with(call, args=[]))
        if len(node.items) == 1 and node.items[0].optional_vars is None:
            yield _instead("exception", node, *node.body)


def _of_handler(node: ast.Try, at: int, handler: ast.ExceptHandler) -> Iterator[Edit]:
    kind = handler.type
    if isinstance(kind, ast.Tuple):
        for number in range(len(kind.elts)):
            fewer = ast.Tuple(_without(kind.elts, number), ast.Load())
            yield _instead("exception", kind, fewer)
    left = _without(node.handlers, at)
    if left or node.finalbody:
        body, orelse = (node.body, node.orelse) if left else ([*node.body, *node.orelse], [])
        yield _instead("exception", node, _with(node, body=body, handlers=left, orelse=orelse))
    else:
        yield _instead("exception", node, *node.body, *node.orelse)
    if kind is not None and ast.unparse(kind) not in {"Exception", "BaseException"}:
        yield _instead("exception", kind, ast.Name("Exception", ast.Load()))


OPERATORS: tuple[Operator, ...] = (
    drop_call,
    drop_statement,
    swap,
    drop_condition,
    comparison,
    constant,
    arithmetic,
    first_bytes,
    skip_element,
    exception,
)
NAMES = tuple(operator.__name__.replace("_", "-") for operator in OPERATORS)
