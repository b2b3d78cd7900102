"""Which check is asked next about a generated mutant, until one of them kills it.

MUSTs come before SHOULDs, so that who is killed by a SHOULD is killed by no MUST. Within these the
likeliest comes first: chance by cost. The chance of a check is how often it has killed mutants of
the same module, and of all; its cost is what it has taken here, and before that what it took when
it was recorded which statements each check runs.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from ckpt_conformance.contract.catalogue import level_of, load_catalogue
from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.harness.reach import lines_of
from ckpt_conformance.mutants import TRAINER
from ckpt_conformance.plugin.trials import Trial
from ckpt_conformance.report.generated import Fate, Judged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping

    from ckpt_conformance.cli.unreached import Recorded
    from ckpt_conformance.contract.verdicts import CheckOutcome
    from ckpt_conformance.mutants.generated import Mutant
    from ckpt_conformance.plugin.plan import CheckItem
    from ckpt_conformance.plugin.trials import Trials

KILLS = {Verdict.VIOLATION: Fate.MUST, Verdict.NOT_MET: Fate.SHOULD}
LEAST = 0.02  # seconds: a child
DOUBT, WEIGHT = 8, 4  # kills and tries that are supposed before any was seen
OF_TRAINER = "trainer"  # the module about which the trainer is asked, and no other
LEVELS = ("MUST", "SHOULD")
REASON = 300  # characters that are kept of one


class Pair(NamedTuple):
    """A check on a base, which runs statements of the reference manager."""

    base: str
    unbroken: str  # the adapter that is the base without any change
    check: str
    invariant: str
    level: str
    cost: float  # seconds that it took when it was recorded


@dataclass
class Order:
    """What has killed so far, and how long checks took."""

    tries: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    kills: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # by check, of all

    def note(self, module: str, check: str, seconds: float, *, killed: bool) -> None:
        """Take into account what a check did to a mutant of a module."""
        for where in (module, ""):  # of that module, and of all
            self.tries[where, check] += 1
            self.kills[where, check] += killed
        self.seconds[check] = self.seconds.get(check, 0.0) + max(LEAST, seconds)

    def cost(self, pair: Pair) -> float:
        """Estimate the seconds that a check takes."""
        return (pair.cost + self.seconds.get(pair.check, 0.0)) / (1 + self.tries["", pair.check])

    def chance(self, module: str, check: str) -> float:
        """Estimate how likely a check kills a mutant of a module that it enters."""
        overall = (self.kills["", check] + 1) / (self.tries["", check] + DOUBT)
        known = self.kills[module, check] + WEIGHT * overall
        return known / (self.tries[module, check] + WEIGHT)

    def likeliest(self, module: str, pairs: Collection[Pair], hint: str = "") -> Pair:
        """Choose the check that is asked next; `hint` is one that has killed the mutant before."""
        return max(
            pairs,
            key=lambda one: (
                one.check == hint,
                self.chance(module, one.check) / self.cost(one),
                one,
            ),
        )


class Reach:
    """Which checks run which statement of the reference manager."""

    def __init__(self, recorded: Mapping[CheckItem, Recorded], bases: Mapping[str, str]) -> None:
        """Read what was recorded; `bases` has the unbroken adapter of each base.

        What is no PASS of the unbroken manager says nothing of a changed one.
        """
        self._pairs: dict[tuple[str, int], list[Pair]] = {}
        named = {adapter: base for base, adapter in bases.items()}
        for item, found in recorded.items():
            if found.outcome["verdict"] == Verdict.PASS:
                pair = _pair(item, found, named[item.adapter])
                for place in lines_of(found.entered):
                    self._pairs.setdefault(place, []).append(pair)

    def of(self, mutant: Mutant, *, whole: bool = False) -> list[list[Pair]]:
        """Return what runs the statement of a mutant; the trainer is asked about itself only.

        A check that runs it on several bases is asked on the first of them, and on the others when
        all were asked so, for a branch may be entered on one base and matter on another; on the
        `whole` at once.
        """
        pairs = self._pairs.get((mutant.function, mutant.line), [])
        is_of_trainer = mutant.module == OF_TRAINER
        asked = [pair for pair in pairs if is_of_trainer or pair.base != TRAINER]
        first = {pair.check: pair for pair in reversed(asked)}
        others = [pair for pair in asked if pair is not first[pair.check]]
        return [asked] if whole else [list(first.values()), others]


def _pair(item: CheckItem, found: Recorded, base: str) -> Pair:
    invariant = load_catalogue().invariants[item.check.invariant]
    level = level_of(invariant, None)
    cost = max(LEAST, float(found.outcome["seconds"]))
    return Pair(base, item.adapter, item.check.key, invariant.id, level, cost)


@dataclass
class Search:
    """Asks about mutants, one by one, until each is killed or nothing is left to ask."""

    reach: Reach
    keep: Callable[[Judged], None]
    cpu: Callable[[], float]  # core-seconds so far; raises ServerError where the server has ended
    whole: bool = False  # ask on all bases at once
    hints: Mapping[str, str] = field(default_factory=dict[str, str])  # mutant -> check
    order: Order = field(default_factory=Order)

    def trials(self, mutants: Iterable[Mutant]) -> Trials:
        """Yield one trial after the other; each is answered with its outcome."""
        for mutant in mutants:
            begun, cpu = time.monotonic(), self.cpu()
            judged = yield from self._judge(mutant)
            seconds, cpu = time.monotonic() - begun, self.cpu() - cpu
            self.keep(structs.replace(judged, seconds=round(seconds, 2), cpu=round(cpu, 2)))

    def _judge(self, mutant: Mutant) -> Generator[Trial, CheckOutcome, Judged]:
        tried, unknown = 0, list[str]()
        groups = self.reach.of(mutant, whole=self.whole)
        for level, pairs in itertools.product(LEVELS, groups):
            waiting = {pair for pair in pairs if pair.level == level}
            while waiting:
                hint = self.hints.get(mutant.name, "")
                pair = self.order.likeliest(mutant.module, waiting, hint)
                waiting.remove(pair)
                adapter = mutant.adapter(pair.base)
                outcome = yield Trial(mutant.name, adapter, pair.unbroken, pair.check)
                tried += 1
                fate = KILLS.get(outcome.verdict)
                killed = fate is not None
                self.order.note(mutant.module, pair.check, outcome.seconds, killed=killed)
                if fate is not None:
                    return _killed(mutant, fate, pair, outcome, tried)
                if outcome.verdict is Verdict.UNKNOWN:
                    self.cpu()  # that of a server which has ended says nothing
                    unknown.append(f"{pair.base} {pair.check}")
        return Judged(
            mutant=mutant.name, fate=_left(tried, unknown), tried=tried, unknown=sorted(unknown)
        )


def _killed(mutant: Mutant, fate: Fate, pair: Pair, outcome: CheckOutcome, tried: int) -> Judged:
    return Judged(
        mutant=mutant.name,
        fate=fate,
        check=pair.check,
        invariant=pair.invariant,
        base=pair.base,
        reason=outcome.reason[:REASON],
        tried=tried,
    )


def _left(tried: int, unknown: Collection[str]) -> Fate:
    if not tried:
        return Fate.UNENTERED
    return Fate.UNKNOWN if unknown else Fate.SURVIVED
