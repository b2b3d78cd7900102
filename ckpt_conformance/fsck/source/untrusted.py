"""Values from files that are not trusted: guards for their types, limits, names, and JSON.

No length, type or name is taken for granted. A value that is wrong raises `Malformed`.
"""

from __future__ import annotations

import contextlib
import gc
import json
from typing import TYPE_CHECKING, Any, TypeGuard

from ckpt_conformance.fsck.source import json_pieces
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge

if TYPE_CHECKING:
    from collections.abc import Generator

Json = dict[str, object]
"""A JSON object as it was read: nothing is known of its values."""

MOST_COUNT = 1 << 63
MOST_JSON = 256 << 20
"""Bytes of a JSON file, or of the metadata of DCP, that are read at most."""
MOST_WEIGHT = 256 << 20
"""Bytes of memory that the values of a JSON text may take, as `weight` has them."""

_WEIGHTS = {b"{": 256, b"[": 72, b",": 40, b'"': 32}
"""Bytes of an object, a list, an item with its place, and half a text, in CPython."""


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """Return whether a value is a dict."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether a value is a list."""
    return isinstance(value, list)


def is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    """Return whether a value is a tuple."""
    return isinstance(value, tuple)


def is_sequence(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return whether a value is a list or a tuple."""
    return isinstance(value, list | tuple)


def object_or_empty(value: object) -> Json:
    """Return a JSON object as it is, and an empty one for anything else."""
    return value if is_dict(value) else {}


def count(value: object, what: str) -> int:
    """Return a number of things; Malformed, which says `what`, for anything else."""
    if type(value) is not int or not 0 <= value < MOST_COUNT:
        raise Malformed(f"{what} is {clip(value)}, which is no number of things")
    return value


def clip(value: object, limit: int = 80) -> str:
    """Show a value from a file, and not all of a long one."""
    if isinstance(value, int) and value.bit_length() > limit:  # too long to be written at all
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        value = value[: limit + 1]
    known = isinstance(value, str | int | float | bool | None)
    text = repr(value) if known else type(value).__name__
    return text if len(text) <= limit else f"{text[:limit]}…"


def plain(name: object) -> str:
    """Return a name of a file inside a checkpoint; Malformed for anything that leads elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or len(name) > 255:  # noqa: PLR2004  NAME_MAX
        raise Malformed(f"{str(name)[:80]!r} is no name of a file")
    if any(sign in name for sign in "/\\\0"):
        raise Malformed(f"the file name {name[:80]!r} leaves the checkpoint")
    return name


@contextlib.contextmanager
def without_collector() -> Generator[None]:
    """Pause the collector of cycles: millions of new parts would make it look at all of them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def weight(data: bytes) -> int:
    """Return about how many bytes a JSON text and its values take once they are read.

    Signs are counted, those inside of texts, too: nothing is parsed, and nothing allocated.
    """
    text = len(data) if data.isascii() else 4 * len(data)  # one sign can make all of them wide
    return 2 * text + sum(data.count(sign) * size for sign, size in _WEIGHTS.items())


def parse_json(data: bytes) -> Json:
    """Read a JSON object in which no key occurs twice.

    Raises:
        TooLarge: its values would take more memory than `MOST_WEIGHT`.
        Malformed: anything else than such an object.

    """
    parsed = parse_any_json(data)
    if not is_dict(parsed):
        raise Malformed(f"no JSON object but a {type(parsed).__name__}")
    return parsed


def parse_any_json(data: bytes) -> object:
    """Read a JSON value of any type; raises as `parse_json` does."""
    heavy = weight(data)
    if heavy > MOST_WEIGHT:
        limit = f"its values would take some {heavy >> 20} MiB, and {MOST_WEIGHT >> 20} are given"
        raise TooLarge(f"{len(data)} bytes of JSON are more than is looked into: {limit}")
    try:
        with without_collector():
            return json_pieces.loads(data.decode("utf-8"), _no_duplicates)
    except UnicodeDecodeError as error:
        raise Malformed(f"no UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None
    except RecursionError:
        raise Malformed("JSON that is nested deeper than any save writes") from None
    except ValueError as error:
        if not isinstance(error, json.JSONDecodeError):  # Python's own limit of digits
            raise Malformed("a number of JSON with more digits than any save writes") from None
        raise Malformed(f"no JSON: {str(error)[:200]}") from None


def is_json_lines(data: bytes) -> bool:
    """Return whether bytes are several JSON objects, each in a line of its own, as logs are."""
    lines = [line for line in data.split(b"\n") if line.strip()]
    try:
        return len(lines) > 1 and all(is_dict(parse_any_json(line)) for line in lines)
    except Malformed:
        return False


def _no_duplicates(pairs: list[tuple[str, object]]) -> Json:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise Malformed("a key occurs twice")
    return values
