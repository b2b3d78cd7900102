"""Weights alone beside checkpoints that a run can resume from: an export, an average, the best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.judge.placed import named
from ckpt_conformance.fsck.layouts.layouts import WITH_DATA, Format
from ckpt_conformance.fsck.source.findings import NO_FACTS, Finding, Kind, Role, Topic

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def told(ages: Iterable[Age]) -> dict[int, Finding]:
    """Return what checkpoints of weights alone are told, by their places."""
    ages = list(ages)
    if not any(one.resumable and one.alone is None for one in ages):
        return {}
    what = (
        "it holds a model and no optimizer, and others here hold one: a run that resumes from it "
        "starts its optimizer cold"
    )
    finding = Finding(Kind.NOTE, "", what, own_topic=Topic.WEIGHTS_ALONE)
    return {place: finding for place, one in enumerate(ages) if one.alone is Role.MODEL}
