"""What came of generated mutants: the table, and what is known of those that survived."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct, field

from ckpt_conformance import __version__
from ckpt_conformance.report import survivors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt_conformance.mutants.generated import Mutant
    from ckpt_conformance.report.survivors import Survivor

SCHEMA = "ckpt-conformance/generated-mutants/v1"
MOST_CHECKS = 10  # that a table names, of those that kill


class Fate(StrEnum):
    """What came of one mutant, as a table says it."""

    MUST = "killed by a MUST"
    SHOULD = "killed by a SHOULD alone"
    SURVIVED = "survived"
    UNKNOWN = "UNKNOWN only"
    UNENTERED = "run by no check"
    EQUIVALENT = "known as equivalent"  # two readers have said so: it is not asked about again
    SENSELESS = "made no sense"  # it does not compile, or has no place


LEFT = (Fate.SURVIVED, Fate.UNKNOWN, Fate.UNENTERED)  # somebody has to say why


class Judged(Struct, frozen=True, kw_only=True):
    """What came of one mutant: the check that killed it, or how many could not."""

    mutant: str
    fate: Fate
    check: str = ""  # the one that killed it, with its invariant, on which base, and its words
    invariant: str = ""
    base: str = ""
    reason: str = ""
    tried: int = 0  # checks that ran
    unknown: list[str] = field(default_factory=list[str])  # checks
    seconds: float = 0.0  # that passed
    cpu: float = 0.0  # core-seconds, those of the children with them


class Row(Struct, frozen=True, kw_only=True):
    """A mutant that is left, and what is known of it; empty fields where nobody has said."""

    mutant: str
    fate: Fate
    line: int
    before: str
    after: str
    kind: str = ""
    why: str = ""
    unknown: list[str] = field(default_factory=list[str])


class Table(Struct, frozen=True, kw_only=True):
    """All that the command prints."""

    schema: str = SCHEMA
    suite: dict[str, str] = field(default_factory=lambda: {"version": __version__})
    generated: int  # of all modules
    ranks: bool  # whether those of the modules of several ranks were asked for, or the others
    apart: int  # those of the other modules
    judged: int
    seconds: float
    cpu: float  # core-seconds
    checks: int
    fates: dict[str, int]
    operators: dict[str, dict[str, int]]  # operator -> fate -> number
    modules: dict[str, dict[str, int]]
    killers: dict[str, int]  # check -> number
    left: list[Row]
    undone: int = 0
    interrupted: bool = False

    @property
    def unread(self) -> list[Row]:
        """What is left, and nobody has said why."""
        return [row for row in self.left if not row.kind]


def table_of(
    judged: Iterable[Judged],
    mutants: Mapping[str, Mutant],
    *,
    ranks: bool = False,
    undone: int = 0,
    interrupted: bool = False,
) -> Table:
    """Count what came of mutants, and name those that are left."""
    every = sorted(judged, key=lambda one: one.mutant)
    known = survivors.by_name()
    killers = Counter(one.check for one in every if one.check)
    return Table(
        generated=len(mutants),
        ranks=ranks,
        apart=sum(one.spans_ranks is not ranks for one in mutants.values()),
        judged=len(every),
        seconds=sum(one.seconds for one in every),
        cpu=sum(one.cpu for one in every),
        checks=sum(one.tried for one in every),
        fates=_counts(one.fate for one in every),
        operators=_by((mutants[one.mutant].operator, one.fate) for one in every),
        modules=_by((mutants[one.mutant].module, one.fate) for one in every),
        killers=dict(killers.most_common(MOST_CHECKS)),
        left=[_row(one, mutants[one.mutant], known) for one in every if one.fate in LEFT],
        undone=undone,
        interrupted=interrupted,
    )


def _counts(fates: Iterable[Fate]) -> dict[str, int]:
    counts = Counter(fates)
    return {str(fate): counts[fate] for fate in Fate if counts[fate]}


def _by(pairs: Iterable[tuple[str, Fate]]) -> dict[str, dict[str, int]]:
    groups: dict[str, list[Fate]] = {}
    for name, fate in pairs:
        groups.setdefault(name, []).append(fate)
    return {name: _counts(groups[name]) for name in sorted(groups)}


def _row(judged: Judged, mutant: Mutant, known: Mapping[str, Survivor]) -> Row:
    said = known.get(judged.mutant)
    return Row(
        mutant=mutant.name,
        fate=judged.fate,
        line=mutant.line,
        before=mutant.before,
        after=mutant.after,
        kind=str(said.kind) if said else "",
        why=said.why if said else "",
        unknown=judged.unknown,
    )
