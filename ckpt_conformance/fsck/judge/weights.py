"""Weights alone beside checkpoints that a run can resume from: an export, an average, the best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.judge.placed import named
from ckpt_conformance.fsck.layouts.layouts import WITH_DATA, Format
from ckpt_conformance.fsck.source.findings import NO_FACTS, Finding, Kind, Role, State, Topic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.fsck.judge.ages import Age
    from ckpt_conformance.fsck.layouts.layouts import Candidate, Part
    from ckpt_conformance.fsck.source.findings import Report

_TO_RESUME = frozenset({Role.MODEL, Role.OPTIMIZER})
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
    held = report.facts.get(name, NO_FACTS).held
    return held.roles if held is not None and held.is_known else None


def is_passed_over(ages: Sequence[Age], place: int) -> bool:
    """Return whether one of weights alone has an older one behind it to resume from."""
    return ages[place].alone is Role.MODEL and any(map(_is_to_resume, ages[place + 1 :]))


def told(ages: Sequence[Age], report_at: Callable[[int], Report], least: float) -> set[int]:
    """Return the places of weights alone in front of the newest whole one to resume from.

    The ages are ordered, newest first. Reports are asked for up to the first that is whole, of
    which `least` is verified, and of which no other holds more.
    """
    found = set[int]()
    last = max((place for place, one in enumerate(ages) if _is_to_resume(one)), default=-1)
    for place in range(last + 1):
        if ages[place].alone is Role.MODEL:
            found.add(place)
            continue
        report = report_at(place)
        if report.state is State.WHOLE and report.coverage >= least and not report.is_poorer:
            break
    return found


def _is_to_resume(age: Age) -> bool:
    return age.resumable and age.alone is None


FINDING = Finding(
    Kind.NOTE,
    "",
    "it holds a model and no optimizer, and an older one holds both: a run that resumes from it "
    "starts its optimizer cold",
    own_topic=Topic.WEIGHTS_ALONE,
)
