"""The step that a name says, and what of a name is none: ranks, dates, metrics."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_ENDING = re.compile(
    r"(?:\.(?:pt|pth|ckpt|bin|safetensors|json|distcp|pkl|pickle|th|chkpt|ckp|pyth|t7|torch|"
    r"checkpoint|model|weights|state|params|keras|h5|hdf5|npz|msgpack|onnx|gguf|pt2|tar|zip))+$"
)
_OF_A_PART = "rank|shard|part|mp|tp|pp|dp|exp|world_size"
_SHARD = re.compile(
    r"(?:^|[._-])(?:[tpdec]p_)?rank_world_size=\d+_\d+|"
    rf"(?:^|[._-])(?:{_OF_A_PART})[_-]?\d+(?:[_-]of[_-]\d+)?|\d+[_-]of[_-]\d+|"
    r"(?<=^consolidated)\.\d{2}(?=\.|$)"
)
# Of experts and of contexts; where no other part is named, an epoch and a checkpoint.
_MAYBE_PART = re.compile(r"(?:^|[._-])[ec]p[_-]?\d+(?:[_-]of[_-]\d+)?")
_WORDS = r"global_?steps?|steps?|iter(?:ation)?s?|batch|(?<![a-z])(?:itr?|gs)"
_OF_THE_RUN = re.compile(
    rf"((?:{_WORDS}|epochs?|(?<![a-zA-Z])ep|updates?|rounds?)[-_=]?\d+)[_-]of[_-]\d+", re.IGNORECASE
)
# What may stand around a number; `model (1).pt` is a copy that a browser or a file manager made.
_BEFORE, _AFTER = r"(?:[-_=+:#@~, [{]|\((?=\d\d))", r"[-_.)\]} ]"
_STEP = (
    re.compile(rf"(?:{_WORDS}){_BEFORE}{{0,2}}(\d{{1,18}})(?:([km])(?![a-z0-9]))?", re.IGNORECASE),
    re.compile(rf"(?:checkpoint|ckpt){_BEFORE}(\d{{1,18}})(?:([kKmM])(?![a-zA-Z0-9]))?"),
    re.compile(r"^(?:checkpoint|ckpt|ck|chk|snapshot|snap|save)(\d{1,18})()$"),
    re.compile(r"(?:^|[-_.])slot[-_]?(\d{1,18})()$"),
    re.compile(r"^s(\d{1,18})()$"),
    re.compile(r"(?:dcp|dist_ckpt|meta|model|optim|extra)[-_=](\d{1,18})()"),
    re.compile(r"(?<![a-zA-Z])ba[-_=]?(\d{1,18})()"),
    re.compile(r"tokens?[-_=]?(\d{1,18})(?:([kmbt])(?![a-z0-9]))?", re.IGNORECASE),
    re.compile(
        r"(?<!\d)(?<!\d\.)(\d{1,18})()[-_. ]?(?:global_?)?"
        r"(?:steps?|iter(?:ation)?s?|updates)(?![a-z\d])",
        re.IGNORECASE,
    ),
)
_ROUND = re.compile(
    rf"(?:(?:{_WORDS}|tokens?)[-_=]?|(?:checkpoint|ckpt)[-_=])"
    r"(\d{1,9}\.\d{1,9})([kmbt])(?![a-z0-9])",
    re.IGNORECASE,
)
_EPOCH = (
    re.compile(
        rf"(?:epoch|(?<![a-zA-Z])ep|^e(?=\d+(?:$|[-_ ]))){_BEFORE}{{0,2}}(\d{{1,18}})()",
        re.IGNORECASE,
    ),
    re.compile(r"(?<!\d)(\d{1,18})()[-_ ]?(?:epochs?|ep)(?![a-z\d])", re.IGNORECASE),
    re.compile(r"^(\d{1,18})()_net_"),
)
_PAIR = re.compile(
    r"(?:^|[-_.])e(\d{1,18})[-_.]?[sb](\d{1,18})(?=$|[-_.])|^checkpoint_(\d{1,18})_(\d{1,18})$"
)
_AT_END = re.compile(rf"(?:(?:^|{_BEFORE}|\.)|(?<=[a-zA-Z])(?=\d{{4}}))(\d{{1,18}})(){_AFTER}*$")
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NO_STEP = re.compile(
    r"(?<!\d)\d{4}([-_.])\d\d\1\d\d(?:[-_T ]\d\d[-_.:h]?\d\d(?:[-_.:]?\d\d)?)?(?!\d)"  # a date
    r"|(?<![\d.])\d+\.\d+(?![\d.])"  # a metric
    r"|(?<![a-zA-Z])avg[-_]?\d+"  # of so many checkpoints
)
_WORD = re.compile(r"[^\W_]+")
_OF_A_SAVE = frozenset(
    [
        "best",
        "last",
        "latest",
        "newest",
        "prev",
        "previous",
        "current",
        "cur",
        "final",
        "interrupted",
        "backup",
    ]
)
_OF_ALL = frozenset(
    ["checkpoint", "ckpt", "model", "weights", "state", "net", "network", "snapshot"]
)
"""Words that a file which holds all of a job may have, and that tell no save from another."""
_SLOT = re.compile(
    r"(?:checkpoint|ckpt|ck|chk|snapshot|snap|save|state|model)?(?:[-_.]?slot)?[-_.]?(\d{1,3})",
    re.IGNORECASE,
)
_SLOTS = frozenset(["a", "b"])  # written by turns; of parts these are names, too
_OF_A_SLOT = frozenset(["checkpoint", "ckpt", "snapshot", "slot", "save"])
_FIRST = frozenset(["model", "g", "gen", "generator", "netg"])
_SECOND = frozenset(
    [
        *("d", "do", "disc", "discriminator", "netd", "critic", "ema"),
        *("opt", "optim", "optimizer", "scheduler", "scaler", "rng"),
    ]
)
_LETTERS = re.compile(r"[^\W\d_]+")
_OF_RESULTS = frozenset(["eval", "evals", "evaluation"])
_VERSION = re.compile(r"-v\d+$")  # Lightning's, of a name that was taken
_OF_LIGHTNING = re.compile(r".*=.*|last|.*-v\d+")


def is_of_so_many(name: str) -> bool:
    """Return whether a name says a step of so many in the run: `iter-1000-of-5000.pt`."""
    return _OF_THE_RUN.search(name) is not None


def without_parts(name: str) -> str:
    """Return a name without what tells the parts of one save apart: ranks, numbers of shards.

    Of a step it may say of how many in the run it is: that is no part.
    """
    name = _OF_THE_RUN.sub(r"\1", name)
    rest = _SHARD.sub("", name)
    return _MAYBE_PART.sub("", rest) if rest != name else rest


def moment_of(name: str) -> tuple[int | None, int | None]:
    """Return the epoch and the step that a name says; None for what it does not say."""
    stem = without_parts(_VERSION.sub("", _ENDING.sub("", name)))
    plain = _NO_STEP.sub("", stem)
    if pair := _PAIR.search(plain):
        return int(pair[1] or pair[3]), int(pair[2] or pair[4])
    epoch = _first(_last_of(pattern, plain) for pattern in _EPOCH)
    step = _first((_last_of(_ROUND, stem), *(_last_of(pattern, plain) for pattern in _STEP)))
    return epoch, _last_of(_AT_END, plain) if (epoch, step) == (None, None) else step


def slot_of(name: str) -> int | None:
    """Return the number of a name that has no word of what is counted: `ckpt.1.pt`, `slot_0`."""
    found = _SLOT.fullmatch(_ENDING.sub("", name))
    return int(found[1]) if found else None


def step_of_folder(name: str) -> int | None:
    """Return the step that the name of a folder says beyond doubt; None for a number of a run."""
    steps = [_last_of(pattern, without_parts(name)) for pattern in _STEP]
    return int(name) if re.fullmatch(r"\d{3,18}", name) else _first(steps)


def is_of_results(base: str) -> bool:
    """Return whether a folder of a run holds what an evaluation found: nothing to resume from."""
    return not _OF_RESULTS.isdisjoint(base.split("/"))


def step_of(name: str) -> int | None:
    """Return the step that a name says, or else the epoch; None where it says none."""
    epoch, step = moment_of(name)
    return epoch if step is None else step


def _first(numbers: Iterable[int | None]) -> int | None:
    return next((one for one in numbers if one is not None), None)


def _last_of(pattern: re.Pattern[str], stem: str) -> int | None:
    found = pattern.findall(stem)
    return _number(*found[-1]) if found else None


def _number(digits: str, size: str) -> int:
    """Return a number without a rounding: 1.5 and M are 1,500,000."""
    whole, _, part = digits.partition(".")
    return int(Decimal(f"{whole}.{part or 0}") * _THOUSANDS[size.lower()])


def is_whole(name: str) -> bool:
    """Return whether a file is a checkpoint by itself: Lightning's, which are one file each."""
    stem, dot, ending = name.rpartition(".")
    is_one = bool(dot) and ending == "ckpt" and _OF_LIGHTNING.fullmatch(stem) is not None
    return is_one and without_parts(name) == name


class _Moment(NamedTuple):
    """What files of one save have in common; the best of a run is saved apart from its step."""

    epoch: int | None
    step: int | None
    is_best: bool


def _is_best(name: str) -> bool:
    return "best" in _LETTERS.findall(_ENDING.sub("", name).lower())


def together(names: Collection[str]) -> tuple[list[list[str]], list[str]]:
    """Return which files are of one save, by their names; and those whose names tell nothing."""
    groups: dict[str | _Moment, list[str]] = defaultdict(list)
    for name in names:
        groups[name if is_whole(name) else _Moment(*moment_of(name), _is_best(name))].append(name)
    nothing = (groups.pop(_Moment(None, None, is_best), []) for is_best in (False, True))
    marked = by_marks([name for group in nothing for name in group])
    rest = marked.pop("", [])
    of_steps = sorted(groups.values(), key=lambda group: step_of(group[0]) or 0)
    of_words = by_words(rest)
    found = [*of_steps, *marked.values(), *of_words]
    return [first_one_first(group) for group in found], [] if of_words else rest


def first_one_first(names: Iterable[str]) -> list[str]:
    """Order files of one save: the one that stands for all comes first, as `G_100` of a GAN."""
    return sorted(names, key=_place_in_a_save)


def _place_in_a_save(name: str) -> int:
    words = set(_LETTERS.findall(_ENDING.sub("", name).lower()))
    if words & _SECOND:
        return 2
    return 0 if words & _FIRST else 1


def by_words(names: Collection[str]) -> list[list[str]]:
    """Group names without a step by words that tell saves apart, such as best and last.

    Only where each group has the same files but for that: `best.pt` and `last.pt`, or model and
    optimizer of both; none where the words are of different files, as in `model.pt` and
    `optimizer_latest.pt`.
    """
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    parts: dict[frozenset[str], set[str]] = defaultdict(set)
    for name in names:
        words = _WORD.findall(_ENDING.sub("", name).lower())
        key = frozenset(words) & _OF_A_SAVE
        if len(words) > 1 and set(words) <= _OF_A_SLOT | _SLOTS:
            key |= frozenset(words) & _SLOTS
        groups[key].append(name)
        parts[key].add(" ".join(word for word in words if word not in key | _OF_ALL | _OF_A_SLOT))
    are_alike = len(groups) > 1 and len(set(map(frozenset, parts.values()))) == 1
    return list(groups.values()) if are_alike else []


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
