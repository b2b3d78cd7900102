"""The kill matrix: what each mutant violates, held against what it was built to break."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from msgspec import Struct, field

from ckpt_conformance import __version__
from ckpt_conformance.contract.verdicts import Cause, Verdict
from ckpt_conformance.report.certificate import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.contract.verdicts import CheckOutcome
    from ckpt_conformance.mutants import MutantInfo

SCHEMA = "ckpt-conformance/kill-matrix/v2"


class Row(Struct, frozen=True, kw_only=True):
    """A mutant or a control: ids of invariants, in order, and what was found of them."""

    expected: list[str]
    got: list[str]
    missed: list[str]
    extra: list[str]
    unknown: list[str]
    reasons: dict[str, str]  # id -> the first reason, of what is violated or UNKNOWN
    verdicts: dict[str, dict[str, Verdict]]  # id -> check -> verdict: what ran, and what applied
    # Checks that did not run: they enter nothing that the mutant changes.
    unreached: list[str] = field(default_factory=list[str])
    bug: str = ""  # these four of a mutant, empty for a control
    url: str = ""
    change: str = ""
    base: str = ""
    exact: bool


class KillMatrix(Struct, frozen=True, kw_only=True):
    """All rows; `exact` if every mutant and every control is."""

    schema: str = SCHEMA
    suite: dict[str, str] = field(default_factory=lambda: {"version": __version__})
    exact: bool
    controls: dict[str, Row]  # by adapter
    mutants: dict[str, Row]  # by the mutant's id
    interrupted: bool = False


def kill_matrix(
    mutants: Mapping[str, MutantInfo],
    outcomes: Mapping[str, Sequence[CheckOutcome]],
    unreached: Mapping[str, Sequence[str]] | None = None,
    *,
    interrupted: bool = False,
) -> KillMatrix:
    """Compare what each mutant violates with what it was built to break.

    `outcomes` are by adapter, and so are the checks that were `unreached`; outcomes that belong to
    no mutant are controls. UNKNOWN is shown and
    does not spare a mutant; in a control it is a fault, because "violates nothing" was not shown.
    """
    infos = {f"mutant:{name}": info for name, info in mutants.items()}
    others = {name: of_one for name, of_one in outcomes.items() if name not in infos}
    controls = {name: _control(of_one) for name, of_one in others.items()}
    killed = {
        info.id: _mutant(info, outcomes[name], (unreached or {}).get(name, ()))
        for name, info in infos.items()
        if name in outcomes
    }
    return KillMatrix(
        exact=all(row.exact for row in (*controls.values(), *killed.values())),
        controls=controls,
        mutants=killed,
        interrupted=interrupted,
    )


def _mutant(info: MutantInfo, outcomes: Sequence[CheckOutcome], unreached: Sequence[str]) -> Row:
    got, unknown = _reasons(outcomes, Verdict.VIOLATION), _reasons(outcomes, Verdict.UNKNOWN)
    missed, extra = sorted(info.violates - got.keys()), sorted(got.keys() - info.violates)
    return Row(
        expected=sorted(info.violates),
        got=sorted(got),
        missed=missed,
        extra=extra,
        unknown=sorted(unknown.keys() - got.keys()),
        reasons=_plain(unknown | got),
        verdicts=_verdicts(outcomes),
        unreached=sorted(unreached),
        bug=info.bug,
        url=info.url,
        change=info.change,
        base=info.base,
        exact=not missed and not extra,
    )


def _control(outcomes: Sequence[CheckOutcome]) -> Row:
    """Hold a control against nothing at all; what the machine can't do is no fault of it."""
    got, unknown = _reasons(outcomes, Verdict.VIOLATION), _reasons(outcomes, Verdict.UNKNOWN)
    undecided = sorted(unknown.keys() - got.keys())
    limits = {one.invariant for one in outcomes if one.cause is Cause.MACHINE}
    return Row(
        expected=[],
        got=sorted(got),
        missed=[],
        extra=sorted(got),
        unknown=undecided,
        reasons=_plain(unknown | got),
        verdicts=_verdicts(outcomes),
        exact=bool(outcomes) and not got and limits.issuperset(undecided),
    )


def _plain(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: plain(reason) for name, reason in sorted(reasons.items())}


def _verdicts(outcomes: Sequence[CheckOutcome]) -> dict[str, dict[str, Verdict]]:
    table = defaultdict[str, dict[str, Verdict]](dict)
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.invariant, outcome.check)):
        table[outcome.invariant][outcome.check] = outcome.verdict
    return dict(table)


def _reasons(outcomes: Sequence[CheckOutcome], verdict: Verdict) -> dict[str, str]:
    """Map each invariant with this verdict to the first reason."""
    return {one.invariant: one.reason for one in reversed(outcomes) if one.verdict == verdict}
