"""The step that a name says, and what of a name is none: ranks, dates, metrics."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_ENDING = re.compile(r"\.(?:pt|pth|ckpt|bin|safetensors|json|distcp|pkl)$")
SHARD = re.compile(
    r"(?:^|[._-])(?:rank|shard|part|mp|tp|pp|dp|ep|cp|world_size)[_-]?\d+|\d+[_-]of[_-]\d+"
)
_STEP = (
    re.compile(r"(?:global_?steps?|steps?|iter(?:ation)?s?|batch)[-_=]?(\d{1,18})", re.IGNORECASE),
    re.compile(r"(?:checkpoint|ckpt|dcp|dist_ckpt|meta|model|optim|extra)[-_=](\d{1,18})"),
    re.compile(r"(?:epoch|ep)[-_=]?(\d{1,18})", re.IGNORECASE),
    re.compile(r"(?:^|[-_.=])(\d{1,18})$"),
)
_NO_STEP = re.compile(
    r"(?<!\d)\d{4}([-_.])\d\d\1\d\d(?:[-_T ]\d\d[-_.:h]?\d\d(?:[-_.:]?\d\d)?)?(?!\d)"  # a date
    r"|(?<![\d.])\d+\.\d+(?![\d.])"  # a metric
)


def step_of(name: str) -> int | None:
    """Return the step that a name says; None where it says none."""
    stem = _NO_STEP.sub("", SHARD.sub("", _ENDING.sub("", name)))
    for pattern in _STEP:
        digits = pattern.findall(stem)
        if digits:
            return int(digits[-1])
    return None


def by_marks(names: Collection[str]) -> dict[str, list[str]]:
    """Group names without a step by what tells them apart: a date, or a metric.

    Only where names are the same but for that; others are under an empty text.
    """
    stems = {name: _ENDING.sub("", name) for name in names}
    marks = {name: found[0] for name, stem in stems.items() if (found := _NO_STEP.search(stem))}
    series = Counter(_NO_STEP.sub("*", stems[name]) for name in marks)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        is_one_of_some = name in marks and series[_NO_STEP.sub("*", stems[name])] > 1
        groups[marks[name] if is_one_of_some else ""].append(name)
    return groups
