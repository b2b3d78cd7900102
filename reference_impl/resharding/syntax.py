"""How a statement is written (P046, P047): `src -> dst, attribute, k=v`.

The grammar is read by lark. What it gives is a `Statement`: names as they stand, with the place of
each, so that whatever goes wrong later can be shown in the text.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ckpt_conformance.reference_impl.resharding.errors import StatementError, UnexpectedCharacter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lark import Lark, Token

GRAMMAR = r"""
statement: names "->" items
names: name ("," name)*
items: name ("," item)*
?item: name | flag | attribute
name: (WORD | QUOTED) array? TRANSPOSED?
array: "[" INT ":" INT "]"
flag: FLAG
attribute: KEY "=" value
value: INT | QUOTED | WORD | list
list: "[" [INT ("," INT)*] "]"

KEY.3: /(axis|dtype|permute|num_heads|num_key_value_groups)(?=\s*=)/
FLAG.3: /(fused_qkv_old|fused_qkv|fused_ffn|not_fused)(?=\s*(,|$))/
TRANSPOSED: "^T"
INT.2: /\d+(?![\w.$*])/
WORD: /(\\?\$[A-Z_]+|[A-Za-z0-9_.*\/-](?<!->)(?!>))+/
QUOTED: /"[^"]+"|'[^']+'/
%ignore /[ \t\r\n]+/
"""
"""The grammar, as lark takes it; docs/key-mapping.md explains it."""

FLAGS = ("fused_qkv", "fused_qkv_old", "fused_ffn", "not_fused")
NOTHING = "_"
"""The name that stands for no tensor: `a -> _` leaves a out, `_ -> b` lets b as it is."""

EXPECTED = {
    "RARROW": "`->`",
    "__ANON_0": "`->`",
    "WORD": "a name",
    "QUOTED": "a name in quotes",
    "COMMA": "`,`",
    "EQUAL": "`=`",
    "KEY": "axis=, dtype=, permute=, num_heads= or num_key_value_groups=",
    "FLAG": "fused_qkv, fused_qkv_old, fused_ffn or not_fused",
    "INT": "a number",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "COLON": "`:`",
    "TRANSPOSED": "`^T`",
    "$END": "the end",
}


@dataclass(frozen=True)
class Name:
    """A name in a statement.

    Attributes:
        text: as it stands, without quotes and without `^T`.
        column: where it begins, from 1.
        width: of all of it in the text, in characters.
        transposed: whether `^T` follows: its dimensions in reverse order.
    """

    text: str
    column: int
    width: int
    transposed: bool = False

    @property
    def is_nothing(self) -> bool:
        """Whether it stands for no tensor."""
        return self.text == NOTHING


@dataclass(frozen=True)
class Attributes:
    """What stands behind the names; None and empty where it does not.

    Attributes:
        axis: the dimension along which names of one side are put together.
        dtype: to convert to, as torch names it.
        permute: the order of dimensions; () reverses it.
        fused: `fused_qkv`, `fused_qkv_old`, `fused_ffn`, `not_fused`, or nothing.
        num_heads: of queries.
        num_key_value_groups: of keys, and of values.
    """

    axis: int | None = None
    dtype: str = ""
    permute: tuple[int, ...] | None = None
    fused: str = ""
    num_heads: int = 0
    num_key_value_groups: int = 0

    @property
    def is_given(self) -> bool:
        """Whether there is any."""
        return self != Attributes()


@dataclass(frozen=True)
class Statement:
    """One line of a mapping.

    Attributes:
        text: as it was written.
        number: which one, from 1.
        left: what is taken.
        right: what is made of it.
        attributes: how.
    """

    text: str
    number: int
    left: tuple[Name, ...]
    right: tuple[Name, ...]
    attributes: Attributes

    def error(self, at: Name | int, reason: str) -> StatementError:
        """Say what is wrong with it, at a name or a column."""
        column, width = (at.column, at.width) if isinstance(at, Name) else (at, 1)
        return StatementError(self.text, self.number, column, reason, width)


def parse(texts: Iterable[str]) -> tuple[Statement, ...]:
    """Read statements; those that are empty, or begin with `#`, say nothing.

    Args:
        texts: each may hold several lines, a statement each.

    Raises:
        StatementError: a line that is no statement.
        ModuleNotFoundError: lark is not installed.
    """
    lines = [line.strip() for text in texts for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith("#")]
    return tuple(_parse_one(line, at) for at, line in enumerate(said, 1))


@cache
def _parser() -> Lark:
    from lark import Lark

    return Lark(GRAMMAR, start="statement", parser="lalr", propagate_positions=True)


def _parse_one(text: str, number: int) -> Statement:
    from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedToken

    try:
        tree: Any = _parser().parse(text)
    except UnexpectedCharacters as error:
        allowed = _names_of(error.allowed or ())
        reason = f"unexpected character {text[error.column - 1]!r}; {allowed} may stand here"
        raise UnexpectedCharacter(text, number, error.column, reason) from None
    except (UnexpectedToken, UnexpectedEOF) as error:
        raise _of_token(error, text, number) from None
    left, right = tree.children
    names = tuple(_name(one) for one in left.children)
    return _ordered(Statement(text, number, names, (), Attributes()), right.children)


def _of_token(error: Any, text: str, number: int) -> StatementError:  # noqa: ANN401  two of lark
    names = _names_of(getattr(error, "accepts", None) or error.expected)
    token = getattr(error, "token", None)
    if token is None or token.type == "$END":
        return StatementError(text, number, len(text) + 1, f"it ends here; {names} is missing")
    reason = f"unexpected {str(token)!r}; {names} may stand here"
    return StatementError(text, number, token.column, reason, len(token))


def _names_of(terminals: Iterable[str]) -> str:
    return " or ".join(sorted({EXPECTED.get(name, name) for name in terminals}))


def _name(tree: Any) -> Name:  # noqa: ANN401  a tree of lark
    word, *more = tree.children
    text = _unquoted(word)
    for part in more:
        if getattr(part, "data", "") == "array":
            text += f"[{part.children[0]}:{part.children[1]}]"
    transposed = getattr(more[-1], "type", "") == "TRANSPOSED" if more else False
    width = tree.meta.end_column - tree.meta.column
    return Name(text, tree.meta.column, width, transposed)


def _unquoted(token: Token) -> str:
    """Give a name as it is meant; a `$` behind a backslash is how a shell is told of one (P048)."""
    return token[1:-1] if token.type == "QUOTED" else token.replace("\\$", "$")


def _ordered(statement: Statement, items: Sequence[Any]) -> Statement:
    """Tell names on the right from the attributes behind them.

    Raises:
        StatementError: a name behind an attribute, an attribute twice, or one that is no number.
    """
    right: list[Name] = []
    given: dict[str, Any] = {}
    for tree in items:
        if tree.data == "name":
            if given:
                raise statement.error(_name(tree), "a name behind an attribute: names come first")
            right.append(_name(tree))
            continue
        key, value = _attribute(statement, tree)
        if key in given:
            raise statement.error(tree.meta.column, f"{key} is said twice")
        given[key] = value
    return Statement(
        statement.text, statement.number, statement.left, tuple(right), Attributes(**given)
    )


def _attribute(statement: Statement, tree: Any) -> tuple[str, Any]:  # noqa: ANN401
    """Give the field of `Attributes` and its value."""
    first = tree.children[0]
    if tree.data == "flag":
        return "fused", str(first)
    value = tree.children[1].children[0]
    if first == "dtype":
        if getattr(value, "type", "") in {"WORD", "QUOTED"}:
            return "dtype", _unquoted(value)
        raise statement.error(tree.meta.column, "dtype takes a name, such as dtype=float32")
    if first == "permute":
        return "permute", _permutation(statement, tree.meta.column, value)
    if getattr(value, "type", "") != "INT":
        raise statement.error(tree.meta.column, f"{first} takes a number, such as {first}=0")
    return str(first), int(value)


def _permutation(statement: Statement, column: int, value: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Read `[1, 0]`, also in quotes as the document has it."""
    numbers: object = None
    if getattr(value, "data", "") == "list":
        numbers = [int(one) for one in value.children if one is not None]
    elif getattr(value, "type", "") == "QUOTED":
        try:
            numbers = ast.literal_eval(value[1:-1])
        except (ValueError, SyntaxError):
            numbers = None
    if not isinstance(numbers, list) or sorted(numbers) != list(range(len(numbers))):
        raise statement.error(column, "permute takes each dimension once, such as permute=[1, 0]")
    return tuple(numbers)
