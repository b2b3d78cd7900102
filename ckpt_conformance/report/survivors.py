"""What readers found out about generated mutants that survived: a file, and a page made of it."""

from __future__ import annotations

import tomllib
from collections import Counter
from enum import StrEnum
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field

from ckpt_conformance.mutants import generated

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt_conformance.mutants.generated import Mutant

PLACE = "ckpt_conformance.mutants.generated"
FILE = "survivors.toml"
PAGE = "generated-mutants.md"
MOST_BY_READING = 0.1  # of all that were judged: called equivalent, and only a reader says so

HEAD = """# Generated mutants that survive

Made from `ckpt_conformance/mutants/generated/survivors.toml` by `make docs`. Do not edit.

`ckpt-conformance mutants --generated` changes the reference manager in one place at a time and asks
the checks that run this place, until one of them sees it. Here is what no check has seen, and why:
*equivalent* (no job can tell it from the reference), *outside* of the contract, or *missing*: a
check that would see it is not there yet. A mutant that is *equivalent* by *reading* stands on the
sentence beside it alone; by *running*, something was tried, too.
"""


class Class(StrEnum):
    """Why a mutant may survive."""

    EQUIVALENT = "equivalent"  # no job can tell it from the reference
    OUTSIDE = "outside"  # of the contract: a sentence of the documentation says so
    MISSING = "missing"  # a check is missing


class Basis(StrEnum):
    """What the word of a reader stands on."""

    READING = "reading"
    RUNNING = "running"


class Survivor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a reader found out about a mutant that survived, or that no check runs."""

    mutant: str
    kind: Class
    why: str  # the proof, the sentence, or what a check would have to do
    by: Basis = Basis.READING
    confirmed: bool = False  # by a second reader


class Sample(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of the command, and what came of it."""

    request: str  # its arguments
    judged: int
    fates: dict[str, int]
    checks: int
    cpu: float  # core-seconds, without those of the recording
    note: str = ""


class Known(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    sample: list[Sample] = field(default_factory=list[Sample])
    survivor: list[Survivor] = field(default_factory=list[Survivor])


def known() -> Known:
    """Read the file; raises msgspec.ValidationError if it is wrong.

    Raises ValueError for a mutant that is there twice.
    """
    text = (resources.files(PLACE) / FILE).read_text(encoding="utf-8")
    found = msgspec.convert(tomllib.loads(text), Known)
    twice = [name for name, number in _numbers(found.survivor).items() if number > 1]
    if twice:
        raise ValueError(f"{FILE} names {', '.join(twice)} twice")
    return found


def _numbers(survivors: Iterable[Survivor]) -> Counter[str]:
    return Counter(one.mutant for one in survivors)


def by_name() -> dict[str, Survivor]:
    """Return what is known of each mutant."""
    return {one.mutant: one for one in known().survivor}


def page(found: Known) -> str:
    """Write the page; raises AdapterError for a mutant that is not made any more."""
    lines = [HEAD, "## What was run", ""]
    lines += [
        "| request | judged | what came of them | checks | core-seconds |",
        "|---|---|---|---|---|",
    ]
    lines += [_sample(one) for one in found.sample]
    lines += ["", *(one.note for one in found.sample if one.note), ""]
    for kind in Class:
        of_kind = [one for one in found.survivor if one.kind is kind]
        lines += [f"## {kind.capitalize()}: {len(of_kind)}", ""]
        for one in sorted(of_kind, key=lambda one: one.mutant):
            lines += _entry(one, generated.find(one.mutant)[0])
    return "\n".join(lines).rstrip() + "\n"


def _sample(one: Sample) -> str:
    fates = ", ".join(f"{number} {fate}" for fate, number in one.fates.items())
    return f"| `{one.request}` | {one.judged} | {fates} | {one.checks:,} | {one.cpu:,.0f} |"


def _entry(one: Survivor, mutant: Mutant) -> list[str]:
    confirmed = "confirmed by a second reader" if one.confirmed else "not confirmed yet"
    return [
        f"### {one.mutant}",
        "",
        "```diff",
        f"- {mutant.before}",
        f"+ {mutant.after}",
        "```",
        "",
        f"{one.why} (by {one.by}; {confirmed})",
        "",
    ]
