"""What was found and what came of it, as JSON: to be kept, sent elsewhere, and put together.

A name of a file may hold bytes that are no UTF-8, which JSON text cannot: such a value is kept as a
string of ASCII JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from ckpt_conformance.fsck.judge.ages import Age
from ckpt_conformance.fsck.judge.judging import Job, Judgement, SharedFile, Slice, Unjudged
from ckpt_conformance.fsck.judge.siblings import kin_from
from ckpt_conformance.fsck.layouts.listing import Found, Sort, Weight
from ckpt_conformance.fsck.source.findings import (
    Finding,
    Kind,
    NotFinite,
    Report,
    Role,
    Topic,
    ordered,
)
from ckpt_conformance.fsck.source.places import named
from ckpt_conformance.fsck.source.sums import Sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.fsck.judge.judge import Options
    from ckpt_conformance.fsck.judge.siblings import KinJson
    from ckpt_conformance.fsck.source.findings import FindingJson, ReportJson

SLICE = 16 << 30
"""Bytes from which on a checkpoint is cut into slices of about as many."""
_PER_FILE = 1 << 20  # bytes that are read while one waits for a file to be opened
_STRUCTURE_SHARE = 10  # a slice reads at least so many times what each reads of the structure


def encode(value: object) -> bytes:
    """Write a plain value as JSON in one line, whatever its strings hold."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(json.dumps(value)).encode()


def decode(content: bytes) -> Any:  # noqa: ANN401  JSON
    """Read what `encode` wrote."""
    value = json.loads(content)
    return json.loads(value) if isinstance(value, str) else value


# -- what was found --------------------------------------------------------------------------------


class FoundJson(TypedDict):
    """A `Found`."""

    sort: str
    base: str
    names: list[str]
    step: int | None
    depth: int
    links: list[list[str]]
    is_sure: bool
    changed: float | None
    weight: list[int]


def found_json(found: Found) -> FoundJson:
    """Return plain types."""
    weight = found.weight
    return {
        "sort": str(found.sort),
        "base": found.base,
        "names": list(found.names),
        "step": found.step,
        "depth": found.depth,
        "links": [list(link) for link in found.links],
        "is_sure": found.is_sure,
        "changed": found.changed,
        "weight": [weight.files, weight.size, weight.summed, weight.structure],
    }


def found_of(plain: FoundJson) -> Found:
    """Read what `found_json` wrote; KeyError, ValueError and TypeError for anything else."""
    return Found(
        Sort(plain["sort"]),
        plain["base"],
        tuple(plain["names"]),
        plain["step"],
        plain["depth"],
        tuple((name, why) for name, why in plain["links"]),
        plain["is_sure"],
        plain["changed"],
        Weight(*plain["weight"]),
    )


def identity(found: Found) -> bytes:
    """Return all that two listings must agree about; not the time of a change."""
    return encode(found_json(replace(found, changed=None)))


def slices(found: Found, options: Options) -> int:
    """Return into how many slices it is cut: no slice reads more structure than a tenth."""
    if options.nan:  # which are counted where all else is known
        return 1
    least = max(SLICE, _STRUCTURE_SHARE * _structure(found))
    return max(int(_payload(found, options) // least), 1)


def cost(found: Found, options: Options, count: int = 1) -> float:
    """Estimate how many bytes are read to judge it, or one of so many slices of it.

    The time that one waits for each file counts as bytes that are read meanwhile.
    """
    return _structure(found) + _payload(found, options) / count


def _structure(found: Found) -> float:
    return found.weight.files * _PER_FILE + found.weight.structure


def _payload(found: Found, options: Options) -> float:
    if options.metadata_only:
        return 0.0
    counted = found.weight.size * options.sample if options.nan else 0.0
    return found.weight.summed * options.sample + counted


# -- what came of it -------------------------------------------------------------------------------


class SumsJson(TypedDict):
    """The sums of a slice."""

    findings: list[FindingJson]
    digest: int
    crc: int
    structure: int


class ResultJson(TypedDict):
    """A `Result`; `report` is null where there is no checkpoint after all."""

    number: int
    slice: list[int]
    age: list[Any]
    report: ReportJson | None
    shared: list[list[Any]]
    sums: SumsJson | None
    division: str
    unjudged: NotRequired[str]
    kin: NotRequired[KinJson]


@dataclass(frozen=True)
class Result:
    """What came of a job; `number` is its place in the listing."""

    number: int
    slice: Slice
    judgement: Judgement | None


def result_json(job: Job, judgement: Judgement | None) -> ResultJson:
    """Return plain types."""
    is_slice = judgement is not None and job.slice.count > 1
    sums = judgement.sums if judgement and is_slice else None
    plain: ResultJson = {
        "number": job.number,
        "slice": [job.slice.number, job.slice.count],
        "age": list(judgement.age) if judgement else [],
        "report": judgement.report.to_json() if judgement else None,
        "shared": [list(one) for one in judgement.shared] if judgement else [],
        "sums": _sums_json(sums) if sums else None,
        "division": judgement.division if judgement else "",
    }
    if judgement and judgement.unjudged:
        plain["unjudged"] = str(judgement.unjudged)
    if judgement and judgement.kin:
        plain["kin"] = judgement.kin.to_json()
    return plain


def _sums_json(sums: Sums) -> SumsJson:
    findings = [one.to_json() for one in sums.findings]
    return {
        "findings": findings,
        "digest": sums.digest,
        "crc": sums.crc,
        "structure": sums.structure,
    }


def result_of(plain: ResultJson) -> Result:
    """Read what `result_json` wrote; KeyError, ValueError and TypeError for anything else."""
    part = Slice(*plain["slice"])
    if plain["report"] is None:
        return Result(plain["number"], part, None)
    sums = plain["sums"]
    judgement = Judgement(
        _age_of(*plain["age"]),
        report_of(plain["report"]),
        [SharedFile(*one) for one in plain["shared"]],
        Sums() if sums is None else _sums_of(sums),
        plain["division"],
        Unjudged(plain["unjudged"]) if "unjudged" in plain else None,
        kin_from(plain["kin"]) if "kin" in plain else None,
    )
    return Result(plain["number"], part, judgement)


def _age_of(first: int | bool | None, step: int | None, time: float, *more: Any) -> Age:  # noqa: ANN401, FBT001  plain values
    """Return what orders a checkpoint; older results say first whether a step is known."""
    if isinstance(first, bool):
        return Age(None, int(step or 0) if first else None, float(time))
    known: list[Any] = [*more, *_NO_MORE[len(more) :]]
    resumable, counted, slot, inside, alone = known
    return Age(
        _whole(first),
        _whole(step),
        float(time),
        bool(resumable),
        *(_whole(counted), _whole(slot), _whole(inside)),
        Role(alone) if alone else None,
    )


_NO_MORE = (False, None, None, None, None)
"""What older results do not have."""


def _whole(number: int | None) -> int | None:
    return None if number is None else int(number)


def _sums_of(plain: SumsJson) -> Sums:
    findings = list(map(_finding_of, plain["findings"]))
    return Sums(findings, plain["digest"], plain["crc"], plain["structure"])


def report_of(plain: ReportJson) -> Report:
    """Read a report; what it says of the insides of files is not in its JSON."""
    size, not_finite = plain["bytes"], plain["not_finite"]
    return Report(
        named(plain["path"]),
        plain["layout"],
        plain["step"],
        list(map(_finding_of, plain["findings"])),
        plain["tensors"],
        size["total"],
        size["digest"],
        size["crc"],
        size["structure"],
        size["unread"],
        plain["world_size"],
        plain["ties"],
        None if not_finite is None else [NotFinite(**one) for one in not_finite],
        passed_over=plain.get("passed_over", []),  # results of the first release have none
        changed=plain.get("changed"),
    )


def _finding_of(plain: FindingJson) -> Finding:
    return Finding(
        Kind(plain["kind"]),
        plain["file"],
        plain["what"],
        tuple(plain["tensors"]),
        plain["start"],
        plain["end"],
        plain.get("name", ""),  # results of the first release have none
        Topic(plain["topic"]) if "topic" in plain else None,
    )


def joined(results: Sequence[Result]) -> Judgement | None:
    """Put the slices of one checkpoint together; None where there is no checkpoint.

    Where slices are missing, or where it changed while they were judged, it is unknown.
    """
    first = results[0].judgement
    if first is None or results[0].slice.count == 1:
        return first
    judged = [one for one in results if not _is_lost(one)]
    known = [one.judgement for one in judged if one.judgement is not None]
    first = known[0] if known else first
    report = first.report
    differs = len(known) < len(judged) or any(not _is_same(first, one) for one in known)
    for one in known:
        report.add(one.sums)
    for result in results:
        if result.judgement is not None and result.judgement is not first and _is_lost(result):
            report.findings += result.judgement.report.findings
    if differs:
        what = "it changed while its slices were judged: judge it again"
        report.say(Kind.UNKNOWN, "", what)
    there = {one.slice.number for one in results}
    absent = [number for number in range(1, results[0].slice.count + 1) if number not in there]
    if absent:
        some = ", ".join(map(str, absent[:20]))
        what = f"{len(absent)} of its {results[0].slice.count} slices were not judged: {some}"
        report.say(Kind.UNKNOWN, "", what)
    report.findings = ordered(report.findings)
    return first


def _is_lost(result: Result) -> bool:
    return result.judgement is not None and result.judgement.unjudged is Unjudged.LOST


def _is_same(first: Judgement, other: Judgement) -> bool:
    """Return whether two slices saw the same structure, and cut the payload in the same way."""
    return (first.division, first.age) == (other.division, other.age) and (
        first is other or first.report.to_json() == other.report.to_json()
    )
