"""What tags in YAML ask for: PyYAML's unsafe loaders import and call what `!!python/...` names.

Tags are found in the text, without a parser: one that stands in a comment counts, too.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ckpt_conformance.fsck.formats.pickles import Asked, Name

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDINGS = (".yaml", ".yml")
MOST = 64 << 20
"""Bytes of a text that are searched."""

_STANDARD = "tag:yaml.org,2002:"
_OF_PYTHON = re.compile(rf"{_STANDARD}python/(object/apply|object/new|object|name|module):(.+)")
_HANDLE = re.compile(r"^%TAG[ \t]+(!(?:[\w-]*!)?)[ \t]+(\S+)", re.MULTILINE)
_TAG = re.compile(r"(?<!\w)(?:!<([^>\s]+)>|(![\w-]*!|!)([^\s,\[\]{}]+))")
_CALLS = ("object/apply", "object/new")
_HANDS = ("name", "module")
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def asked_by(data: bytes) -> Asked:
    """Return what the tags in the bytes of a YAML file ask for."""
    asked = Asked()
    for tag in _tags(data.decode("utf-16" if data.startswith(_WIDE) else "utf-8", "replace")):
        match = _OF_PYTHON.fullmatch(tag)
        if match is None:
            continue
        module, _, last = match[2].rpartition(".")
        name = Name(module or "builtins", last)
        asked.names.add(name)
        if match[1] in _CALLS:
            asked.called.add(name)
        elif match[1] in _HANDS:
            asked.handed.add(name)
    return asked


def _tags(text: str) -> Iterator[str]:
    """Yield the tags of a text in full."""
    handles = {"!!": _STANDARD, "!": "!"} | dict(_HANDLE.findall(text))
    for whole, handle, end in _TAG.findall(text):
        yield unquote(whole or handles.get(handle, handle) + end)
