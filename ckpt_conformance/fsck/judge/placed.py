"""Whether each file of a checkpoint holds what its name says, and what the others agree on.

A file under a wrong name is damage only where two files tell it: one holds another role's state,
and the file that is named for that role holds none. A scheduler may keep what looks like an
optimizer's state, so one file alone is a remark.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.judge.ages import COUNTERS
from ckpt_conformance.fsck.judge.roles import is_count
from ckpt_conformance.fsck.layouts.layouts import WITH_DATA, Format
from ckpt_conformance.fsck.source.findings import (
    NO_FACTS,
    Kind,
    Role,
    Topic,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt_conformance.fsck.layouts.layouts import Candidate, Part
    from ckpt_conformance.fsck.source.findings import Facts, Held, Report

LIBRARIES = ("accelerate", "transformers-trainer", "deepspeed", "verl-fsdp")
"""Layouts whose writers give each name one role."""

_ENDING = re.compile(r"\.(?:pt|pth|bin|pkl|ckpt|safetensors)$")
_NAMED = (
    (re.compile(r"(?:^|[._-])(?:training_)?args(?=$|[._-])"), {Role.ARGUMENTS}),
    (re.compile(r"(?:^|[._-])optim(?:izers?)?(?=$|[._-]|\d)"), {Role.OPTIMIZER}),
    (re.compile(r"(?:^|[._-])sched(?:ulers?)?(?=$|[._-]|\d)"), {Role.SCHEDULER}),
    (re.compile(r"(?:^|[._-])scaler(?=$|[._-]|\d)"), {Role.SCALER}),
    (re.compile(r"(?:^|[._-])(?:rng|random_states?)(?=$|[._-]|\d)"), {Role.GENERATORS}),
    (re.compile(r"(?:^|[._-])(?:sampler|data_?loader|dl_state_dict)(?=$|[._-]|\d)"), {Role.LOADER}),
    (re.compile(r"(?:^|[._-])model(?=$|[._-]|\d)"), {Role.MODEL}),
)
_EXTRA = re.compile(r"extra_state_world_size_\d+_rank_\d+\.pt")  # verl's
_OF_RANK = re.compile(r"(?<=rank_)\d+|(?<=random_states_)\d+")
_WORLDS = ("dp_world_size", "mp_world_size")
_OF_ZERO = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_TOGETHER = ("transformers-trainer", "deepspeed")  # they step the optimizer each time, once
_STEPS = ("optimizer", "global_step", "global_steps")


def named(file: str) -> frozenset[Role]:
    """Return the roles that a name tells, without its folder; none for a name that tells none."""
    name = _last(file)
    if _EXTRA.fullmatch(name):
        return frozenset({Role.SCHEDULER, Role.GENERATORS, Role.LOADER})
    if not _ENDING.search(name):
        return frozenset()
    stem = _ENDING.sub("", name)
    return frozenset(role for pattern, roles in _NAMED for role in roles if pattern.search(stem))


def judge_places(candidate: Candidate, report: Report) -> None:
    """Report which files hold another role's state, and which disagree about step and world."""
    if candidate.is_alone:
        return
    folders: dict[str, dict[str, Facts]] = defaultdict(dict)
    for name, facts in report.facts.items():
        folders[name.rpartition("/")[0]][name] = facts
    for files in folders.values():
        _misplaced(report, {name: one.held for name, one in files.items() if one.held})
        _ranks(report, files)
        _worlds(report, files)
        _counters(report, files)


# -- roles -----------------------------------------------------------------------------------------


def _misplaced(report: Report, files: Mapping[str, Held]) -> None:
    """Report files whose content has another role than their names."""
    robbed = {name for name, one in files.items() if _is_robbed(named(name), one)}
    wrong = {
        name: one
        for name, one in sorted(files.items())
        if one.roles and one.is_known and not one.roles & named(name)
    }
    lost: dict[str, str] = {}  # whose state is elsewhere, and where
    for name, one in wrong.items():
        sought = one.roles if named(name) else one.roles - {Role.MODEL}  # an average is one, too
        takers = {other for other in robbed - {name} if named(other) & sought}
        twin = _twin(name, one, files)
        if twin and named(name):
            what = f"{_holds(one)}: byte for byte the records of {twin}"
            report.say(Kind.DAMAGED, name, what, topic=Topic.ROLE)
        elif takers and (named(name) or report.layout in LIBRARIES):
            lost |= dict.fromkeys(takers, name) | {name: min(takers)}
    for name, other in sorted(lost.items()):
        what = _holds(files[name]) if name in wrong else "its content is not that of its name"
        why = f"{what}, and {_last(other)} is not what its name says: swapped?"
        report.say(Kind.DAMAGED, name, why, topic=Topic.ROLE)
    known = {one.file for one in report.findings if one.kind is Kind.DAMAGED}
    for name in sorted(name for name in wrong.keys() - known if named(name)):
        report.say(Kind.NOTE, name, f"{_holds(wrong[name])}: is that meant?", topic=Topic.ROLE)


def _is_robbed(own: frozenset[Role], one: Held) -> bool:
    """Return whether a file holds nothing that its name says; models may have any structure."""
    return bool(own) and not own & one.roles and (Role.MODEL not in own or bool(one.roles))


def _twin(name: str, one: Held, files: Mapping[str, Held]) -> str:
    """Return the file that a misplaced one is a copy of."""
    like = (
        other
        for other, two in sorted(files.items())
        if other != name and one.mark and two.mark == one.mark and named(other) & one.roles
    )
    return _last(next(like, ""))


def _holds(one: Held) -> str:
    return f"it holds the state of {' and '.join(sorted(map(str, one.roles)))}"


def _last(name: str) -> str:
    return name.rpartition("/")[2]


# -- steps and worlds ------------------------------------------------------------------------------


def _ranks(report: Report, files: Mapping[str, Facts]) -> None:
    """Report files of ranks that have counted differently: all ranks take a step together."""
    sets: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    for name, facts in files.items():
        if facts.held and (alike := _OF_RANK.sub("*", name)) != name:
            sets[alike][name] = counts_of(facts)
    for group in sets.values():
        for counter in sorted({key for counts in group.values() for key in counts}):
            said = {name: counts[counter] for name, counts in group.items() if counter in counts}
            if len(set(said.values())) > 1:
                _say_unlike(report, counter, said)


def _say_unlike(report: Report, counter: str, said: Mapping[str, int]) -> None:
    """Report who is not of the majority; of two equal parties both."""
    numbers = list(said.values())
    most = max(numbers, key=numbers.count)
    is_clear = 2 * numbers.count(most) > len(numbers)
    kind = Kind.NOTE if counter == "step" else Kind.DAMAGED  # accelerate's may differ by rank
    for name, number in sorted(said.items()):
        if not (is_clear and number == most):
            others = sorted({other for other in numbers if other != number})[:4]
            what = f"its {counter} count is {number}, and of other ranks {others}"
            report.say(kind, name, f"{what}: of another save?", topic=Topic.ANOTHER_SAVE)


def _worlds(report: Report, files: Mapping[str, Facts]) -> None:
    """Report files of one save that say different world sizes."""
    for key in _WORLDS:
        said = {name: size for name, one in files.items() if is_count(size := one.number(key))}
        if len(set(said.values())) > 1:
            sizes = sorted(set(said.values()))[:4]
            for name, size in sorted(said.items()):
                what = f"its {key} is {size}, and the files beside it say {sizes}"
                report.say(
                    Kind.DAMAGED, name, f"{what}: of another save?", topic=Topic.ANOTHER_SAVE
                )
        elif key == "dp_world_size" and said:
            _say_beyond(report, files, min(said.values()))


def _say_beyond(report: Report, files: Mapping[str, Facts], size: int) -> None:
    """Remark optimizers of ranks that the world does not have: a load passes over them."""
    for name in sorted(files):
        match = _OF_ZERO.fullmatch(_last(name))
        if match and int(match[1]) >= size:
            what = f"the world has {size} ranks: a save of a larger one left it?"
            report.say(Kind.NOTE, name, what)


def _counters(report: Report, files: Mapping[str, Facts]) -> None:
    """Remark files whose step is not that of the name, where another file's is."""
    if report.layout == "accelerate":  # which numbers its folders by saves
        return
    for key in COUNTERS:
        said = {name: number for name, one in _torch(files) if is_count(number := one.number(key))}
        _say_others(report, key, said)
    if report.layout in _TOGETHER:
        counts = {name: counts_of(one) for name, one in files.items()}
        steps = {name: one[key] for name, one in counts.items() for key in _STEPS if key in one}
        _say_others(report, "step", steps)


def _say_others(report: Report, key: str, said: Mapping[str, int]) -> None:
    if report.step in said.values():
        for name, number in sorted(said.items()):
            if number != report.step:
                what = f"its {key} count is {number}, and the name and others say {report.step}"
                report.say(Kind.NOTE, name, what, topic=Topic.ANOTHER_SAVE)


def _torch(files: Mapping[str, Facts]) -> Iterator[tuple[str, Facts]]:
    return ((name, one) for name, one in files.items() if one.held)


def counts_of(facts: Facts) -> dict[str, int]:
    """Return what a file counts: steps of an optimizer, of a scheduler, a step of its own."""
    held = facts.held
    counts = {role.name.lower(): number for role, number in held.counts.items()} if held else {}
    for key in COUNTERS:
        number = facts.number(key)
        if is_count(number):
            counts[key] = number
    return counts


# -- a model, or an optimizer, alone ---------------------------------------------------------------

_TO_RESUME = frozenset({Role.MODEL, Role.OPTIMIZER})
LIGHTNING = "pytorch-lightning_version"  # a key of each of its files
_OPTIMIZERS = "optimizer_states"
_OF_NAMES = frozenset({Format.SAFETENSORS, Format.INDEX})
"""Formats without roles inside: a name has to say that it is an optimizer's."""


def alone(candidate: Candidate, report: Report) -> Role | None:
    """Return which of a model and an optimizer a checkpoint holds, and not the other.

    None where it holds both or neither, and where not all that it holds is known.
    """
    if candidate.is_part_of_set:
        return None
    roles = set[Role]()
    for part in candidate.parts:
        if part.form in WITH_DATA:
            known = _roles_of(part, report)
            if known is None:
                return None
            roles |= known
    there = roles & _TO_RESUME
    return there.pop() if len(there) == 1 else None


def _roles_of(part: Part, report: Report) -> frozenset[Role] | None:
    """Return the roles of a file; None where it may hold anything."""
    name = part.base + part.name
    if part.form in _OF_NAMES:
        return named(name) or frozenset({Role.MODEL})
    facts = report.facts.get(name, NO_FACTS)
    if LIGHTNING in facts.values:  # whatever else callbacks put there
        return _TO_RESUME if _OPTIMIZERS in facts.values else frozenset({Role.MODEL})
    held = facts.held
    return held.roles if held is not None and held.is_known else None
