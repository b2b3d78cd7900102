"""What a load of a pt2 archive of torch.export, or of Keras, evaluates or imports.

`torch.export.load` gives each expression of sizes to sympy, which evaluates it; a library in C that
AOTInductor has made runs as soon as it is opened. Keras imports the modules that its configuration
names, and unmarshals the code of a `Lambda`. So what these libraries write passes, piece by piece;
everything else is unsafe.
"""

from __future__ import annotations

import ast
import contextlib
import re
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats.written_names import ANY
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.untrusted import (
    MOST_JSON,
    clip,
    is_dict,
    is_list,
    parse_any_json,
)

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Callable, Iterator

    from ckpt_conformance.fsck.formats.zip_ends import Opened

_MARK = "archive_format"  # a member of every pt2 archive
_NATIVE = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"!<arch>\n")
_LIBRARIES = (".so", ".dll", ".dylib", ".pyd", ".o", ".a", ".cubin", ".hsaco", ".cpp", ".ptx")
_MOST_TEXT = 1 << 20  # signs of an expression
_MOST_TOLD = 20

_SIZES = (
    "Symbol|Integer|Float|Rational|Half|One|Zero|NegativeOne|Add|Mul|Pow|Abs|sign|floor|ceiling|"
    "Max|Min|Mod|And|Or|Not|Xor|Equality|Unequality|Eq|Ne|Lt|Le|Gt|Ge|GreaterThan|LessThan|"
    "StrictGreaterThan|StrictLessThan|Piecewise|ExprCondPair|ITE|BooleanTrue|BooleanFalse|"
    "Infinity|NegativeInfinity|IntInfinity|NegativeIntInfinity|FloorDiv|ModularIndexing|Where|"
    "PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural|FloatPow|"
    "FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|TruncToInt|RoundToInt|"
    "RoundDecimal|ToFloat|Identity|BitwiseFn_bitwise_(?:and|or|xor)|sqrt|log|exp|"
    "OpaqueUnaryFn_\\w+"
)
_CALLED = re.compile(_SIZES)
_VALUES = re.compile(r"true|false|oo|int_oo|nan|zoo|[a-z]{1,4}\d{1,9}")
_SYMBOL = re.compile(r"[A-Za-z_]\w{0,80}|[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")
_GUARD_CALLS = re.compile(
    r"max|min|Max|Min|Mod|FloorDiv|int|float|abs|round|size|stride|storage_offset|item|dim|numel|"
    r"floor|ceil|trunc|sqrt|pow|not_|and_|or_"
)
_GUARD_ROOTS = re.compile(r"L|math|True|False|None|" + _GUARD_CALLS.pattern)
_TARGET = re.compile(
    r"torch\.(?:ops\.\w+(?:\.\w+)*|_?sym_\w+)|math\.\w+|#[\w.:#]+|"
    r"_operator\.(?!call$|attrgetter$|itemgetter$|methodcaller$)\w+"
)
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.UnaryOp, ast.BinOp, ast.Compare, ast.BoolOp, ast.Tuple),
    *(ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context, ast.keyword),
)


class Unsafe(NamedTuple):
    """What a load may run, and the name that vouches for it (`ANY`: only `--allow-code`)."""

    what: str
    name: str


def is_export(archive: Opened) -> bool:
    """Return whether a zip says that it is a pt2 archive."""
    return any(one.filename.rpartition("/")[2] == _MARK for one in archive.infolist())


def of_export(archive: Opened) -> Iterator[Unsafe]:
    """Yield what a load of a pt2 archive may run.

    Raises:
        Malformed, and what the standard library raises: a member that cannot be read.

    """
    for member in archive.infolist():
        name = member.filename
        with archive.open(member) as opened:
            head = opened.read(8)
        if head.startswith(_NATIVE) or name.lower().endswith(_LIBRARIES):
            yield Unsafe(f"{clip(name)} is native code, which runs where it is loaded", ANY)
        elif name.endswith(".json"):
            for why in _some(_walk(_json(archive, member), _of_program)):
                yield Unsafe(f"{clip(name)} {why.what}: to load it may run code", why.name)


def of_keras(archive: Opened) -> Iterator[Unsafe]:
    """Yield what a load of a model of Keras may run; raises as `of_export` does."""
    for member in archive.infolist():
        if member.filename == "config.json":
            for why in in_config(_json(archive, member)):
                yield Unsafe(f"config.json {why.what}", why.name)


def in_config(value: object) -> list[Unsafe]:
    """Return what of the configuration of a model Keras runs, or imports."""
    return _some(_walk(value, _of_layer))


def _json(archive: Opened, member: zipfile.ZipInfo) -> object:
    if member.file_size > MOST_JSON:
        raise TooLarge(f"{clip(member.filename)} has {member.file_size} bytes: not looked into")
    return parse_any_json(archive.read(member))


def _some(found: Iterator[Unsafe]) -> list[Unsafe]:
    return sorted({one for _, one in zip(range(_MOST_TOLD), found, strict=False)})


def _walk(
    value: object, judge: Callable[[dict[str, object]], Iterator[Unsafe]]
) -> Iterator[Unsafe]:
    """Judge each object of a JSON value."""
    pending = [value]
    while pending:
        part = pending.pop()
        if is_dict(part):
            yield from judge(part)
            pending.extend(part.values())
        elif is_list(part):
            pending.extend(part)


# -- torch.export ----------------------------------------------------------------------------------


def _of_program(part: dict[str, object]) -> Iterator[Unsafe]:
    expression, target = part.get("expr_str"), part.get("target")
    if isinstance(expression, str) and not is_size(expression):
        yield Unsafe(f"has {clip(expression)} where a size belongs, which is evaluated", ANY)
    if isinstance(target, str) and ("inputs" in part) and not _TARGET.fullmatch(target):
        yield Unsafe(f"calls {clip(target)}, which is no operator", ANY)
    guards = part.get("guards_code")
    for guard in guards if is_list(guards) else []:
        if not isinstance(guard, str) or not _is_guard(guard):
            yield Unsafe(f"has {clip(guard)} where a guard belongs, which is evaluated", ANY)
    for key in ("in_spec", "out_spec"):
        yield from _of_tree(part.get(key))


def _of_tree(text: object) -> Iterator[Unsafe]:
    """Yield modules that a tree of arguments makes torch import; its contexts are JSON again."""
    pending = [text]
    while pending:
        part = pending.pop()
        if isinstance(part, str) and part[:1] in ("[", "{", '"'):
            with contextlib.suppress(Malformed):  # then torch refuses it, too
                pending.append(parse_any_json(part.encode()))
        elif is_list(part):
            pending.extend(part)
        elif is_dict(part):
            pending.extend(part.values())
            module = part.get("default_factory_module", "builtins")
            if module not in ("builtins", "collections"):
                yield Unsafe(f"imports {clip(module)} for a defaultdict", ANY)


def is_size(text: str) -> bool:
    """Return whether a text is an expression of sizes as torch writes it."""
    tree = _parsed(text)
    return tree is not None and all(map(_is_of_size, ast.walk(tree)))


def _is_of_size(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        is_called = isinstance(node.func, ast.Name) and _CALLED.fullmatch(node.func.id)
        return bool(is_called) and all(
            one.arg and not one.arg.startswith("_") for one in node.keywords
        )
    if isinstance(node, ast.Name):
        return bool(_CALLED.fullmatch(node.id) or _VALUES.fullmatch(node.id))
    if isinstance(node, ast.Constant):
        value = node.value
        return isinstance(value, int | float) or (
            isinstance(value, str) and _SYMBOL.fullmatch(value) is not None
        )
    return isinstance(node, _ARITHMETIC)


def _is_guard(text: str) -> bool:
    tree = _parsed(text)
    return tree is not None and all(map(_is_of_guard, ast.walk(tree)))


def _is_of_guard(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        func = node.func
        name = func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")
        return _GUARD_CALLS.fullmatch(name) is not None
    if isinstance(node, ast.Name):
        return _GUARD_ROOTS.fullmatch(node.id) is not None
    if isinstance(node, ast.Attribute):
        return not node.attr.startswith("_")
    return isinstance(node, (ast.Subscript, *_ARITHMETIC))


def _parsed(text: str) -> ast.Expression | None:
    if len(text) > _MOST_TEXT:
        return None
    try:
        return ast.parse(text, mode="eval")
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


# -- Keras -----------------------------------------------------------------------------------------

_KERAS = re.compile(
    r"(?:keras(?:\.src)?(?:\.(?:layers|initializers|regularizers|constraints|optimizers|losses|"
    r"metrics|models|dtype_policies|activations|quantizers|random|ops|callbacks|"
    r"backend\.\w+\.optimizers)(?:\.\w+)*)?)|builtins"
)
_RUNS = {"Lambda", "__lambda__", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer"}


def _of_layer(part: dict[str, object]) -> Iterator[Unsafe]:
    kind, module = part.get("class_name"), part.get("module")
    if not isinstance(kind, str):
        return
    if kind in _RUNS:
        yield Unsafe(f"has a {kind}, which holds code: Keras runs it with safe_mode=False", ANY)
    elif isinstance(module, str) and not _KERAS.fullmatch(module):
        name = f"{module}.{kind}"
        yield Unsafe(f"makes Keras import {clip(name)}: to load it may run code", name)
