"""The sources in a TorchScript archive: what of them a load runs, and whether that is harmless.

`torch.jit.load`, to which `torch.load(weights_only=False)` hands such a file, runs every
`__setstate__`, and evaluates the constants of classes and the defaults of arguments. The operators
of TorchScript write files (`torch.save`, `torch.from_file`), so these parts are read: constants
and defaults must be literals, and a `__setstate__` may do what is listed here, with what it calls.
All else waits for a call of `forward`, and is not read.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source import clock
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ckpt_conformance.fsck.pickled.asked import Asked

SCRIPT = "__torch__"
"""The package of all classes of TorchScript."""
_CLASS = re.compile(rb"^class (\w+)", re.MULTILINE)
BYTECODE, CONSTANTS = "bytecode.pkl", "constants.pkl"

MOST = 16 << 20
"""Bytes of all sources of an archive that are parsed, where a load runs none of them."""
_MOST_KEPT = 4 << 20  # the same where a load runs some of them, and all trees are needed
_PIECE = 64 << 10  # bytes that are parsed at once, at least
_MOST_PIECE = 2 << 20  # of one class: some 400 MiB of tree
_BEGINS = re.compile(r"^(?:class|def) ", re.MULTILINE)
_MOST_VISITED = 10_000  # functions that a load may run
_SETS = "__setstate__"
_SETS_TEXT = re.compile(r"\bdef\s+__setstate__\b")
_MAGIC = re.compile(r"__\w+__")
_NOT_AT_LOAD = {"__init__", "__getstate__"}
_CLASSES = ("quantized", "rnn", "xnnpack", "mkldnn", "sparse")
"""Classes of torch, written in C++, that only pack parameters when they are read."""

_OPERATORS = (
    "eq ne lt le gt ge add sub mul div floordiv remainder neg len append __is__ __isnot__ __not__ "
    "__and__ __or__ __contains__ __getitem__ __range_length __derive_index zeros ones empty full "
    "tensor to cat stack detach clone contiguous view reshape squeeze unsqueeze transpose permute "
    "t size dim dequantize quantize_per_tensor quantize_per_channel q_scale q_zero_point int_repr "
    "slice select list format zeros_like ones_like int float bool str"
)
_PACKS = (
    r"(?:conv(?:_transpose)?[123]d|linear|embedding_bag(?:_byte|_4bit|_2bit)?)"
    r"_(?:pre|un)pack(?:_fp16|_fp16_legacy|_legacy)?"
)
_CALLED = "annotate unchecked_cast uninitialized int float bool str range isinstance len getattr"
_KNOWN: Mapping[tuple[str, ...], re.Pattern[str]] = {
    ("torch",): re.compile(_OPERATORS.replace(" ", "|")),
    ("ops", "quantized"): re.compile(_PACKS),
    ("ops", "prim"): re.compile("NumToTensor|unchecked_cast|min|max|dtype|device"),
    (): re.compile(_CALLED.replace(" ", "|")),
}
"""Operators that only make a value, by where they stand."""
_ERROR = re.compile(r"builtins\.\w+")
_OF_PACKED = {"unpack"}  # methods of the classes in C++
_ROOTS = {"torch", "ops", SCRIPT, "CONSTANTS"}
_NUMBERS = {"inf", "nan", "infj", "nanj", "NoneType"}
_ODD = re.compile(r"[\\\r\0]|\"\"\"|'''")  # where a parser of Python may read another text
_PLAIN = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp, ast.USub, ast.Load)

TOO_MUCH = f"its sources have more than {_MOST_KEPT} bytes: nobody knows what of them a load runs"


@dataclass
class _Function:
    """A function of a source, with its class and the text it stands in."""

    node: ast.FunctionDef
    owner: str
    text: str


def is_source(name: str) -> bool:
    """Return whether a record, without the archive's own folder, is a source of TorchScript."""
    return name.lower().startswith("code/") and name.lower().endswith(".py")


def classes(asked: Asked) -> Iterator[str]:
    """Yield why names of classes in C++ that a pickle asks for are unsafe."""
    start = f"{SCRIPT}.torch.classes."
    for name in sorted(asked.names):
        rest = str(name).removeprefix(start)
        if rest != str(name) and rest.partition(".")[0] not in _CLASSES:
            yield f"asks for {clip(str(name))}, a class in C++ that fsck does not know"


def problems(sources: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what of the sources runs at a load, and may do more than fill in a state.

    `sources` are texts by the name of their record, as `code/__torch__/m.py`.
    """
    runs = any(_SETS.encode() in data for data in sources.values())
    if sum(map(len, sources.values())) > (_MOST_KEPT if runs else MOST):
        yield TOO_MUCH
        return
    functions: dict[str, _Function] = {}
    for name, data in sources.items():
        try:
            for text in _pieces(data.decode()):
                yield from _top(name, ast.parse(text), text, functions)
                if not runs:
                    functions.clear()  # their trees are a hundred times as large as their texts
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            yield f"{clip(name)} cannot be read: nobody knows what of it a load runs"
    yield from _visited(functions)


def defined(sources: Mapping[str, bytes]) -> frozenset[str] | None:
    """Return the names of the classes in sources; None of more than are read."""
    if sum(map(len, sources.values())) > MOST:
        return None
    places = {name: ".".join(re.split(r"[./]", name)[1:-1]) for name in sources}
    return frozenset(
        f"{places[name]}.{match[1].decode()}"
        for name, data in sources.items()
        for match in _CLASS.finditer(data)
    )


def undefined(asked: Asked, known: Collection[str]) -> Iterator[str]:
    """Yield which classes of TorchScript a pickle asks for that no source defines."""
    for name in sorted(asked.names):
        is_own = name.module.partition(".")[0] == SCRIPT
        is_of_torch = str(name).startswith(f"{SCRIPT}.torch.classes.")
        if is_own and not is_of_torch and str(name) not in known:
            yield f"asks for {clip(str(name))}, and no source below code/ defines it"


def _pieces(text: str) -> Iterator[str]:
    """Divide a source before classes and functions: the parser lets no other thread go on.

    What stands across such a place, as a text of several lines, is no Python then.
    """
    at, starts = 0, [match.start() for match in _BEGINS.finditer(text)]
    for start in [*starts, len(text)]:
        clock.check_latest()
        if start - at > _MOST_PIECE:
            raise ValueError("a class is larger than is parsed")
        if start - at >= _PIECE or start == len(text):
            yield text[at:start]
            at = start


def _top(name: str, tree: ast.Module, text: str, functions: dict[str, _Function]) -> Iterator[str]:
    """Check what is evaluated as soon as a source is read; note its functions."""
    base = ".".join(re.split(r"[./]", name)[1:-1])
    told = len(_SETS_TEXT.findall(text))
    for part in tree.body:
        if isinstance(part, ast.FunctionDef):
            functions[f"{base}.{part.name}"] = _Function(part, "", text)
            yield from _defaults(name, part)
        elif isinstance(part, ast.ClassDef):
            yield from _class(name, base, part, text, functions)
        elif not isinstance(part, ast.Import | ast.ImportFrom) and not _is_version(part):
            yield f"{clip(name)} line {part.lineno} is no class and no function"
    found = sum(isinstance(one, ast.FunctionDef) and one.name == _SETS for one in ast.walk(tree))
    if found != told:
        yield f"{clip(name)} has a {_SETS} that a parser of Python does not see as one"


def _is_version(part: ast.stmt) -> bool:
    return isinstance(part, ast.Assign) and _is_plain(part.value)


def _class(
    name: str, base: str, part: ast.ClassDef, text: str, functions: dict[str, _Function]
) -> Iterator[str]:
    owner = f"{base}.{part.name}"
    for one in part.body:
        if isinstance(one, ast.FunctionDef):
            functions[f"{owner}.{one.name}"] = _Function(one, owner, text)
            yield from _defaults(name, one)
        elif isinstance(one, ast.AnnAssign | ast.Assign):
            if one.value is not None and not (_is_plain(one.value) or _is_type(one)):
                yield f"{clip(name)} line {one.lineno} computes a constant of {clip(part.name)}"
        elif not isinstance(one, ast.Pass):
            yield f"{clip(name)} line {one.lineno} is no attribute and no method"
    if part.decorator_list or part.keywords:
        yield f"{clip(name)} line {part.lineno} decorates {clip(part.name)}"


def _is_type(part: ast.AnnAssign | ast.Assign) -> bool:
    """Return whether a line says what type an attribute has whose name is no word."""
    if not isinstance(part, ast.Assign) or len(part.targets) != 1:
        return False
    target, types = part.targets[0], (ast.Name, ast.Attribute, ast.Subscript, *_PLAIN)
    is_said = isinstance(target, ast.Subscript) and _chain(target.value) == ["__annotations__"]
    return is_said and all(isinstance(one, types) for one in ast.walk(part.value))


def _defaults(name: str, part: ast.FunctionDef) -> Iterator[str]:
    values = [*part.args.defaults, *filter(None, part.args.kw_defaults)]
    if part.decorator_list or not all(map(_is_plain, values)):
        yield f"{clip(name)} line {part.lineno} computes a default of {clip(part.name)}"


def _is_plain(value: ast.expr) -> bool:
    """Return whether a value is a literal."""
    return all(
        isinstance(one, _PLAIN)
        or (isinstance(one, ast.Name) and one.id in _NUMBERS)
        or (isinstance(one, ast.Attribute) and _chain(one)[:1] == ["CONSTANTS"])
        or (isinstance(one, ast.Name) and one.id == "CONSTANTS")
        for one in ast.walk(value)
    )


def _visited(functions: dict[str, _Function]) -> Iterator[str]:
    """Follow what a load calls: each `__setstate__`, and methods that an operator may stand for."""
    names = [name for name in functions if name.endswith(f".{_SETS}")]
    if not names:
        return
    for name in functions:
        last = name.rpartition(".")[2]
        if last in _OF_PACKED or (_MAGIC.fullmatch(last) and last not in _NOT_AT_LOAD):
            names.append(name)
    seen = set[str]()
    while names and len(seen) < _MOST_VISITED:
        name = names.pop()
        if name not in seen:
            seen.add(name)
            for called, why in _judged(functions[name], functions):
                if why:
                    yield f"{clip(name.removeprefix(f'{SCRIPT}.'))} runs at a load and {why}"
                    return
                names.append(called)
    if names:
        yield f"a load runs more than {_MOST_VISITED} functions"


def _judged(one: _Function, functions: dict[str, _Function]) -> Iterator[tuple[str, str]]:
    """Yield what a function calls of the archive's own, or why it is not harmless."""
    if _ODD.search(ast.get_source_segment(one.text, one.node) or "\\"):
        yield "", "holds text that is not read"
        return
    names = [arg.arg for arg in ast.walk(one.node) if isinstance(arg, ast.arg)]
    bound = {*_ROOTS, *_CALLED.split(), *_NUMBERS}
    if bound.intersection(names):
        yield "", "has an argument with the name of an operator"
    known = {id(part) for part in _annotations(one.node)}
    for part in _parts(one.node, known):
        if isinstance(part, ast.Call):
            yield from _call(part, one, functions, known)
        elif isinstance(part, ast.Attribute) and _chain(part)[:1] == ["CONSTANTS"]:
            known |= {id(inner) for inner in ast.walk(part)}
        elif isinstance(part, ast.Name):
            if part.id in _ROOTS and id(part) not in known:
                yield "", f"uses {part.id} otherwise than to call what is in it"
            if isinstance(part.ctx, ast.Store) and part.id in {*bound, *names[:1]}:
                yield "", f"gives {clip(part.id)} another meaning"
        elif isinstance(part, _REFUSED) and part is not one.node:
            yield "", f"has a {type(part).__name__}"


_REFUSED = (
    *(ast.With, ast.AsyncWith, ast.AsyncFor, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ClassDef, ast.Import, ast.ImportFrom, ast.Await, ast.Yield, ast.YieldFrom, ast.JoinedStr),
    *(ast.Global, ast.Nonlocal, ast.NamedExpr, ast.Delete),
)


def _annotations(node: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield what stands for a type."""
    for part in ast.walk(node):
        if isinstance(part, ast.arg) and part.annotation:
            yield part.annotation
        elif isinstance(part, ast.FunctionDef) and part.returns:
            yield part.returns
        elif isinstance(part, ast.AnnAssign):
            yield part.annotation
        elif isinstance(part, ast.Call) and _is_typed(part):
            yield part.args[0]


def _is_typed(call: ast.Call) -> bool:
    is_cast = isinstance(call.func, ast.Name) and call.func.id in (
        "annotate",
        "unchecked_cast",
        "uninitialized",
    )
    return is_cast and bool(call.args)


def _parts(node: ast.AST, skipped: set[int]) -> Iterator[ast.AST]:
    """Walk a function, parents first, but for its types."""
    pending = [node]
    while pending:
        part = pending.pop()
        if id(part) in skipped and not isinstance(part, ast.Name):
            continue
        yield part
        pending.extend(ast.iter_child_nodes(part))


def _call(
    call: ast.Call, one: _Function, functions: dict[str, _Function], known: set[int]
) -> Iterator[tuple[str, str]]:
    """Judge one call; the root of its name is `known` then."""
    chain = _chain(call.func)
    known |= {id(part) for part in ast.walk(call.func) if isinstance(part, ast.Name) and chain}
    shown = clip(".".join(chain) or "what it computes")
    if chain[:1] == [SCRIPT] and ".".join(chain) in functions:
        yield ".".join(chain), ""
    elif one.owner and len(chain) == 2 and chain[:1] == _first(one):  # noqa: PLR2004  self.method
        called = f"{one.owner}.{chain[1]}"
        yield (called, "") if called in functions else ("", f"calls {shown}")
    elif not _is_harmless(chain, call):
        yield "", f"calls {shown}"


def _first(one: _Function) -> list[str]:
    """Return the name of the first argument, which is the object in a method."""
    return [arg.arg for arg in one.node.args.args[:1]]


def _is_harmless(chain: list[str], call: ast.Call) -> bool:
    *before, name = chain or [""]
    last = call.args[-1] if call.args else None
    text = last.value if isinstance(last, ast.Constant) else None
    if before[:1] == ["ops"] and name == "RaiseException":  # it may look the class up
        return isinstance(text, str) and _ERROR.fullmatch(text) is not None
    if tuple(before) in _KNOWN:
        is_named = name != "getattr" or isinstance(text, str)
        return is_named and _KNOWN[tuple(before)].fullmatch(name) is not None
    return before[0] not in _ROOTS and name in _OF_PACKED


def _chain(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`; nothing where it begins with anything else than a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def bytecode(data: bytes) -> Iterator[str]:
    """Yield that the bytecode of the lite interpreter, which is not read, runs at a load."""
    if _SETS.encode() in data:
        yield f"its bytecode, which is not read, has a {_SETS}, which a load runs"


def unsafe(why: str) -> str:
    """Write what `problems` gave as it is told."""
    return f"TorchScript: {why}: to load it may run code"
