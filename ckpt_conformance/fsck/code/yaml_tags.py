"""What tags in YAML ask for: PyYAML's unsafe loaders import and call what `!!python/...` names.

Tags are found in the text, without a parser: one that stands in a comment counts, too.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ckpt_conformance.fsck.pickled.asked import Asked
from ckpt_conformance.fsck.pickled.pickle_values import Name
from ckpt_conformance.fsck.source import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = re.compile(r"\.ya?ml(?:$|\W)", re.IGNORECASE)  # and what copies of such files are called
_OF_ANY_TEXT = re.compile(r"\.(?:txt|conf|cfg|config|ini)$|(?:^|/)[^./]+$", re.IGNORECASE)
_SIGN = b"python"
MOST = 64 << 20
"""Bytes of a text that are searched."""
MOST_OF_ANY = 1 << 20
"""The same of a text whose name does not say YAML."""
_PIECE = 1 << 20
_PER_LOOK = 10_000  # tags between two looks at the clock

_STANDARD = "tag:yaml.org,2002:"
_OF_PYTHON = re.compile(rf"{_STANDARD}python/(object/apply|object/new|object|name|module):(.+)")
_HANDLE = re.compile(r"^%TAG[ \t]+(!(?:[\w-]*!)?)[ \t]+(\S+)", re.MULTILINE)
_TAG = re.compile(r"(?<!\w)(?:!<([^>\s]+)>|(![\w-]*!|!)([^\s,\[\]{}]+))")
_CALLS = ("object/apply", "object/new")
_HANDS = ("name", "module")
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def is_named(name: str) -> bool:
    """Return whether a name is one of YAML, or of its copy."""
    return _NAME.search(name) is not None


def may_be_named(name: str) -> bool:
    """Return whether a name is one of a text that may be written as YAML, and mostly is not."""
    return _OF_ANY_TEXT.search(name) is not None


def asked_by_text(data: bytes) -> Asked:
    """Return what tags at the beginning of a text ask for; nothing of what is no text."""
    return asked_by(data) if _SIGN in data and b"\0" not in data else Asked()


def asked_by(data: bytes) -> Asked:
    """Return what the tags in the bytes of a YAML file ask for."""
    asked, handles = Asked(), {"!!": _STANDARD, "!": "!"}
    for piece in _pieces(data):
        for tag in _tags(piece, handles):
            _take(tag, asked)
    return asked


def _pieces(data: bytes) -> Iterator[str]:
    """Yield the text in pieces of whole lines: a tag has no end of a line in it."""
    if data.startswith(_WIDE):
        yield data.decode("utf-16", "replace")
        return
    at = 0
    while at < len(data):
        end = data.find(b"\n", at + _PIECE) + 1 or len(data)
        yield data[at:end].decode("utf-8", "replace")
        at = end


def _tags(text: str, handles: dict[str, str]) -> Iterator[str]:
    """Yield the tags of a piece in full; `handles` are those that stood before it, too."""
    handles |= dict(_HANDLE.findall(text))
    for number, match in enumerate(_TAG.finditer(text)):
        if number % _PER_LOOK == 0:
            clock.check_latest()
        whole, handle, end = match.groups()
        yield unquote(whole or handles.get(handle, handle) + end)


def _take(tag: str, asked: Asked) -> None:
    """Note what a tag asks for."""
    match = _OF_PYTHON.fullmatch(tag)
    if match is None:
        return
    module, _, last = match[2].rpartition(".")
    name = Name(module or "builtins", last)
    asked.names.add(name)
    if match[1] in _CALLS:
        asked.called.add(name)
    elif match[1] in _HANDS:
        asked.handed.add(name)
