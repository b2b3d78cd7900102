"""Names of work in progress: of saves, of copies, and of what somebody set aside."""

from __future__ import annotations

import functools
import re

_UNDER_WAY = r"tmp|temp|incomplete|partial|unfinished|in[-_]?progress|writing|saving"
_ENDINGS = r"(?:pt|pth|bin|ckpt|pkl|tar|safetensors|json|distcp|metadata|npz|npy)"
_TEMPORARY = (  # of one file: its own name is the group
    re.compile(rf"\.(.+\.{_ENDINGS})\.[A-Za-z0-9]{{6}}"),  # rsync
    re.compile(
        rf"(.+\.{_ENDINGS})\.(?=\d*[a-fA-F])[0-9a-fA-F]{{8}}"
    ),  # aws s3; digits alone are a date
    re.compile(
        rf"[._]?(?:tmp[._-])?(.+\.{_ENDINGS})(?:\.[0-9a-f]{{8}})?[._-]{{1,2}}(?:{_UNDER_WAY}|part|filepart|gstmp|crdownload|download|aria2)"
    ),
)
_LEFTOVER = re.compile(
    rf"^[._]?tmp[._-]|^[._]?(?:incomplete|unfinished|in[-_]?progress|writing|saving)[._-]|"
    rf"[._-](?:{_UNDER_WAY})$|\.(?:part|old|del|bak|swp|lock)$|[._-]tmp[._-]|~$|"
    # A hidden step: who writes one gives it its name at the end.
    rf"^[._](?:global_?)?(?:step|iter(?:ation)?|epoch|checkpoint|ckpt)s?[-_=]?\d|"
    rf"^[._]?(?:trash|deleted|corrupt(?:ed)?|broken)[._-]|[._-](?:trash|corrupt(?:ed)?|broken)$|"
    r"\.orbax-checkpoint-tmp"
)


def is_one(name: str) -> bool:
    """Return whether a name is one of work in progress."""
    return _LEFTOVER.search(name) is not None or meant_by(name) is not None


def meant_by(name: str) -> str | None:
    """Return the name that a file gets when it is whole; None of what is no temporary file.

    `.optimizer.pt.AbC123` is one of rsync, `optimizer.pt.tmp` of many programs.
    """
    at, slash, last = name.rpartition("/")
    matches = (pattern.fullmatch(last) for pattern in _TEMPORARY)
    return next((f"{at}{slash}{match[1]}" for match in matches if match), None)


def is_below(name: str) -> bool:
    """Return whether any part of a name, its own or that of a folder, is of work in progress."""
    at, _, last = name.rpartition("/")
    return is_one(last) or (bool(at) and _is_any(at))


@functools.lru_cache(maxsize=1024)
def _is_any(path: str) -> bool:
    """Look once at a folder that many files are in."""
    return any(map(is_one, path.split("/")))
