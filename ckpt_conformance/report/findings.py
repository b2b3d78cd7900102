"""What a reader looks at first: violations, what is not known, and the worst unmet SHOULDs.

Findings with one blame are one finding: the first tells it, the others refer to it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract.verdicts import Cause, Outcome, Verdict
from ckpt_conformance.crash.explore.judging import RANK

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ckpt_conformance.report.result import InvariantResult, Result

WORST = 3  # unmet SHOULDs whose evidence is shown
LINES = 6  # of evidence of one finding
ALIKE = 2  # UNKNOWN that one other invariant explains, and that are told one by one
ELSEWHERE = frozenset({"owner", "grade", "bundle"})  # shown on lines of their own
WHOLE = frozenset({"script"})  # operations in their order: the last one decides, none is cut
# What says the most comes first; what is not named keeps its place behind these.
LEADING = ("blame", "script", "operation", "source", "outcome", "where", "child")


@dataclass(frozen=True)
class Finding:
    """An invariant that asks for a look; `like` is another one that has told its blame."""

    name: str
    invariant: InvariantResult
    like: str = ""

    @property
    def evidence(self) -> dict[str, object]:
        """The evidence without what is shown on a line of its own; what says the most is first."""
        known = self.invariant.evidence
        leading = [name for name in LEADING if known.get(name) not in (None, "", [], {})]
        rest = [name for name in known if name not in {*LEADING, *ELSEWHERE}]
        return {name: known[name] for name in (*leading, *rest)}

    @property
    def blame(self) -> str:
        """The operations of a save that a crash state goes back to; empty for other findings."""
        return str(self.invariant.evidence.get("blame", ""))

    @property
    def rank(self) -> int:
        """How bad the outcome is that the evidence tells of; -1 where it tells none."""
        evidence: Any = self.invariant.evidence
        told: Any = evidence.get("first", evidence)
        outcome = str(told.get("outcome", "")) if hasattr(told, "get") else ""
        return RANK[Outcome(outcome)] if outcome in set(Outcome) else -1


def attention(result: Result) -> list[tuple[str, InvariantResult]]:
    """List violations, then UNKNOWN that is no mere Ctrl-C."""
    unknown = result.having(Verdict.UNKNOWN)
    undecided = [pair for pair in unknown if pair[1].cause is not Cause.INTERRUPTED]
    return [*result.having(Verdict.VIOLATION), *undecided]


def findings(result: Result, known: Collection[str] = ()) -> list[Finding]:
    """List violations that are not `known`, what is UNKNOWN, and the worst unmet SHOULDs.

    Of many UNKNOWN that one other invariant explains the first ones: `explained` names the rest.
    """
    named = {name for names in explained(result).values() for name in names}
    return [one for one in _findings(result, known) if one.name not in named]


def explained(result: Result) -> dict[str, list[str]]:
    """Return what else is UNKNOWN since a control failed, by the invariant that says why."""
    by_owner: dict[str, list[str]] = defaultdict(list)
    for name, one in result.having(Verdict.UNKNOWN):
        if one.cause is Cause.CONTROL and one.see is not None:
            by_owner[one.see].append(name)
    rest = {owner: names[ALIKE:] for owner, names in by_owner.items()}
    return {owner: names for owner, names in rest.items() if len(names) > 1}


def _findings(result: Result, known: Collection[str]) -> list[Finding]:
    told = [
        Finding(name, one)
        for name, one in attention(result)
        if one.verdict is not Verdict.VIOLATION or name not in known
    ]
    return list(_with_blames([*told, *_worst(result, {one.blame for one in told})]))


def briefly(result: Result, known: Collection[str] = ()) -> list[Finding]:
    """List the same, the worst outcome first, without SHOULDs and what goes back to a blame."""
    musts = [
        one for one in _findings(result, known) if one.invariant.verdict is not Verdict.NOT_MET
    ]
    order = {Verdict.VIOLATION: 0, Verdict.UNKNOWN: 1}
    return sorted(musts, key=lambda one: (order[one.invariant.verdict], bool(one.like), -one.rank))


def _worst(result: Result, told: Collection[str]) -> list[Finding]:
    """List the worst unmet SHOULDs: those of a new blame first, then by what a load came to."""
    unmet = [Finding(name, one) for name, one in result.having(Verdict.NOT_MET)]
    seen, new, old = set(told) - {""}, list[Finding](), list[Finding]()
    for one in sorted(unmet, key=lambda one: (-one.rank, one.name)):
        (old if one.blame in seen else new).append(one)
        seen |= {one.blame} - {""}
    return [*new, *old][:WORST]


def _with_blames(found: Iterable[Finding]) -> Iterator[Finding]:
    told: dict[str, str] = {}  # blame -> the invariant that tells it
    for one in found:
        yield replace(one, like=told.get(one.blame, ""))
        if one.blame:
            told.setdefault(one.blame, one.name)
