"""Pairs of a mutant and a check that need not run: the check enters nothing that was changed.

Such a pair has the outcome that the manager has without the change. What a check enters is recorded
once for each unbroken manager, when enough mutants are made from it for that to pay.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ckpt_conformance.contract.registry import MUTANT
from ckpt_conformance.contract.verdicts import CheckOutcome, Verdict
from ckpt_conformance.harness.reach import grouped
from ckpt_conformance.mutants import all_mutants, overrides
from ckpt_conformance.plugin.plan import CheckItem, selection
from ckpt_conformance.plugin.session import record_reach
from ckpt_conformance.report.certificate import plain
from ckpt_conformance.work.cache import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckpt_conformance.plugin.depends import Inputs
    from ckpt_conformance.plugin.options import SessionOptions
    from ckpt_conformance.work.cache import Cache

# To record a check takes 2.4 times its time, and 13 % of the pairs turn out to be unreached.
ENOUGH = 20
SURE = {Verdict.PASS, Verdict.NOT_APPLICABLE}  # of the unbroken manager: nothing else is taken over


class Recorded(Struct, frozen=True):
    """What a check found out about an unbroken manager, and which functions it entered.

    With statements: these by their lines, as `reach.grouped` writes them.
    """

    outcome: dict[str, Any]
    entered: frozenset[str]


@dataclass(frozen=True)
class Candidate:
    """A planned pair whose mutant only overrides functions."""

    item: CheckItem
    unbroken: str
    overridden: frozenset[str]


@dataclass(frozen=True)
class Recorder:
    """Records what checks enter, or takes it from the cache."""

    options: SessionOptions
    cache: Cache | None
    inputs: Inputs | None  # with a cache
    on_progress: Callable[[int, int, CheckOutcome | None], None]
    statements: bool = False  # whether it is recorded which of them are run, too

    def outcomes(self, items: Sequence[CheckItem]) -> dict[str, CheckOutcome]:
        """Return by item the outcome of each pair that need not run."""
        pairs = defaultdict[CheckItem, list[Candidate]](list)  # by the item of the unbroken manager
        for one in map(candidate, items):
            if one is not None:
                pairs[CheckItem.of(one.unbroken, one.item.check)].append(one)
        known = self._known(pairs)
        missing = [base for base in pairs if base not in known and len(pairs[base]) >= ENOUGH]
        recorded = known | (self._record(missing) if missing else {})
        return {
            one.item.id: replace(CheckOutcome.from_message(known.outcome), adapter=one.item.adapter)
            for base, known in recorded.items()
            for one in pairs[base]
            if known.outcome["verdict"] in SURE
            and known.entered  # else it may be that nothing could be recorded
            and not one.overridden & known.entered
        }

    def recorded(self, bases: Sequence[CheckItem]) -> dict[CheckItem, Recorded]:
        """Return what checks find out about unbroken managers, and what they enter of these."""
        known = self._known(bases)
        missing = [base for base in bases if base not in known]
        return known | (self._record(missing) if missing else {})

    def _known(self, bases: Iterable[CheckItem]) -> dict[CheckItem, Recorded]:
        return {base: kept for base in bases if (kept := self._kept(base)) is not None}

    def _record(self, bases: Sequence[CheckItem]) -> dict[CheckItem, Recorded]:
        asked = replace(
            self.options,
            adapters=tuple(dict.fromkeys(base.adapter for base in bases)),
            selection=selection(bases),
            reach=overrides.REFERENCE,
            statements=self.statements,
            on_progress=self.on_progress,
        )
        by_id = {base.id: base for base in bases}
        found: dict[CheckItem, Recorded] = {}
        for reached in record_reach(asked):
            outcome = reached.outcome
            message = outcome.to_message() | {"evidence": plain(outcome.evidence)}
            base = by_id[f"{outcome.adapter} {outcome.check}"]
            found[base] = Recorded(message, grouped(reached.entered))
            self._keep(base, found[base])
        return found

    def _kept(self, base: CheckItem) -> Recorded | None:
        if self.cache is None or self.inputs is None:
            return None
        content = self.cache.get(key_of(self._inputs(base, self.inputs)))
        return None if content is None else msgspec.json.decode(content, type=Recorded)

    def _keep(self, base: CheckItem, recorded: Recorded) -> None:
        if self.cache and self.inputs and recorded.outcome["verdict"] != Verdict.UNKNOWN:
            self.cache.put(self._inputs(base, self.inputs), msgspec.json.encode(recorded))

    def _inputs(self, base: CheckItem, inputs: Inputs) -> dict[str, Any]:
        more = {"statements": True} if self.statements else {}
        return inputs.of(base) | {"reach": overrides.REFERENCE} | more


def candidate(item: CheckItem) -> Candidate | None:
    """Return what a pair stands on; None if its mutant changes more than functions."""
    info = all_mutants().get(item.adapter.removeprefix(MUTANT))
    if info is None or not item.adapter.startswith(MUTANT):
        return None
    overridden = overrides.overridden(info)
    return None if overridden is None else Candidate(item, info.unbroken, overridden)
