"""Visit the crash states of a recording of several ranks: every recovery is a world of as many."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract.verdicts import control_failed
from ckpt_conformance.crash.explore import visiting_ranks
from ckpt_conformance.crash.explore.engine import Explorer, Limits
from ckpt_conformance.crash.explore.exploring import nothing
from ckpt_conformance.crash.explore.visit import AGAIN, Item, Task
from ckpt_conformance.crash.explore.visiting import told_of, what_it_serves
from ckpt_conformance.crash.model import replay

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.crash.explore.engine import Recorded
    from ckpt_conformance.crash.explore.exploration import Case
    from ckpt_conformance.crash.explore.exploring import OnProgress
    from ckpt_conformance.crash.explore.judging import Visit
    from ckpt_conformance.crash.model.states import Content, State
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import WorldResult

QUICK = Limits(candidates=500, visits=18, alone=2, rounds=1, onward=0)
FULL = Limits(candidates=4000, visits=300, alone=24, rounds=2, onward=0)
CHUNK = 50  # items of one world


class RanksExplorer(Explorer):
    """Explores one recording of several ranks with one adapter."""

    def __init__(
        self,
        subject: Subject,
        recorded: Recorded,
        limits: Limits = FULL,
        on_progress: OnProgress = nothing,
    ) -> None:
        """Read the journal's markers; nothing runs yet."""
        super().__init__(subject, recorded, limits, on_progress)
        self.layout = recorded.layout
        self.known: list[dict[int, tuple[int, Any]]] = []  # by rank: what whole steps give
        self.left = limits.alone

    # -- states ------------------------------------------------------------------------------

    def choose(self, cases: Sequence[Case]) -> list[Case]:
        """Choose distinct contents: half of them without a torn file, whoever's files are new.

        A torn file is mostly refused; whole files of two saves side by side are what loads. A
        quarter lack something of a save that was acknowledged: there a step can be lost.
        """
        usual, limit = super().choose(cases), self.limits.visits
        if len(usual) < limit:
            return usual
        rng = random.Random(self.seed)  # noqa: S311
        before = replay.initial_contents(self.recording)
        after = self.complete(len(self.recording.operations)).contents
        mixed = [case for case in cases if _is_whole(case.state, before, after)]
        lacking = [case for case in cases if self._lacks_what_was_told(case.state)]
        found: dict[str, Case] = {}
        for some, most in ((mixed, limit // 2), (lacking, limit // 4), (usual, limit)):
            new = list({c.content: c for c in some if c.content not in found}.values())
            chosen = rng.sample(new, min(len(new), most, limit - len(found)))
            found |= {case.content: case for case in chosen}
        return sorted(found.values(), key=lambda case: case.state.point)

    def _lacks_what_was_told(self, state: State) -> bool:
        """Tell whether a recorded save was acknowledged, and not all that was written is there."""
        floor = self.result.facts(state).floor
        if floor is None or self.versions[floor].begun < 0:
            return False
        return state.contents != self.complete(state.point).contents

    # -- visits ------------------------------------------------------------------------------

    def visit(self, cases: Sequence[Case]) -> None:
        """Recover from the contents that were not visited yet; suspects again, in new worlds."""
        new = {case.content: case for case in cases if case.content not in self.result.visits}
        chosen = [(case, self._item(case)) for case in new.values()]
        found = self._recover_in_batch([item for _, item in chosen])
        self.result.visited += len(found)
        for number, visit in found.items():
            self.result.visits[chosen[number][0].content] = visit
        for number in self._again([item for _, item in chosen], found):
            self.confirm(chosen[number][0])

    def _task(self, items: list[Item]) -> Task:
        return Task(
            recording=str(self.recording.folder),
            root=self.recording.root,
            out=str(self.subject.folder / "visits"),
            legal=self.legal(),
            items=items,
            holds=self.subject.holds,
            seed=self.subject.seed,
            explicit="explicit_step" in self.subject.info.capabilities,
            known=self.known,
        )

    def _recover_in_batch(self, items: list[Item]) -> dict[int, Visit]:
        """Recover from all, in one world after the other where a load leaves ranks out of step."""
        found: dict[int, Visit] = {}
        left = list(range(len(items)))
        while left:
            part = left[:CHUNK]
            task = self._task([items[number] for number in part])
            lines, result = visiting_ranks.live(
                self.subject, self.layout, task, self.recorded.options
            )
            self._seconds(result)
            if not self.known and not self._learn(visiting_ranks.known(lines), lines):
                self.unknown(control_failed(f"no world learns its steps: {_tell(self, result)}"))
                return found
            visits = visiting_ranks.visits(lines, result)
            found |= {part[at]: visit for at, visit in visits.items()}
            if not visits:
                self.unknown(f"a world that visits begins nothing: {_tell(self, result)}")
                return found
            left = left[max(visits) + 1 :]
            self.on_progress(len(found), len(items), self.result.batch_seconds)
        return found

    def _learn(
        self, known: list[dict[int, tuple[int, Any]]], lines: Sequence[list[dict[str, Any]]]
    ) -> bool:
        """Keep what the whole steps give; False if a rank did not come to all of them."""
        wanted = {number: step for number, step, _ in self.legal()}
        for line in (line for one in lines for line in one if "legal" in line):
            if line["step"] != line["wanted"]:
                self.unknown(control_failed(f"a whole step {line['wanted']} gives {told_of(line)}"))
        if any(one.keys() != wanted.keys() for one in known):
            return False
        self.known = [{n: held for n, held in one.items() if held[0] == wanted[n]} for one in known]
        return True

    def _seconds(self, result: WorldResult) -> None:
        seconds = max(rank.seconds for rank in result.ranks)
        self.result.seconds += seconds
        self.result.batch_seconds += seconds

    # -- alone -------------------------------------------------------------------------------

    def _again(self, items: Sequence[Item], found: dict[int, Visit]) -> list[int]:
        """Choose what gets a world of its own: a sample of the fine, suspects of each kind."""
        rng = random.Random(self.seed)  # noqa: S311
        bad = [number for number, visit in found.items() if _is_suspect(items[number], visit)]
        good = [number for number in found if number not in set(bad)]
        again = [number for number in good if rng.random() < AGAIN]
        first: dict[tuple[Any, ...], int] = {}
        for number in bad:
            visit = found[number]
            kind: Any = visit.error["type"] if visit.error else ""
            first.setdefault((visit.exit_kind, visit.step, visit.versions, kind), number)
        order = list(dict.fromkeys([*first.values(), *bad]))[: self.left]
        self.left -= len(order)
        return [*again, *order]

    def confirm(self, case: Case) -> Visit:
        """Judge a content in a world of its own; that overrules a batch."""
        known = self.result.visits.get(case.content)
        task = self._task([self._item(case)])
        visit = visiting_ranks.alone(self.subject, self.layout, task, self.recorded.options)
        served = known is not None and known.error is None and visit.error is None
        if known and served and what_it_serves(known) != what_it_serves(visit):
            self.unknown(
                f"order dependence: {case.state.why or 'a state'} after operation "
                f"{case.state.point} gives {known.told} in a batch, and alone {visit.told}"
            )
        self.result.visits[case.content] = visit
        return visit

    def confirm_worst(self) -> None:
        """Judge alone what stands for a class of violations, until all that is left was."""
        for _ in range(self.limits.rounds + 1):
            cases = [
                violation.case
                for report in self.result.models.values()
                for violation in report.worst.values()
                if not self.result.visits[violation.case.content].alone
            ]
            if not cases:
                return
            for case in cases:
                self.confirm(case)
            self.tally()
        self._drop_unconfirmed()

    def _drop_unconfirmed(self) -> None:
        """Count no violation that no world of its own has shown."""
        for report in self.result.models.values():
            for outcome, violation in list(report.worst.items()):
                if not self.result.visits[violation.case.content].alone:
                    self.unknown(f"{outcome} of a batch of states could not be judged alone")
                    del report.worst[outcome]
                else:
                    visit = self.result.visits[violation.case.content]
                    report.worst[outcome] = replace(violation, visit=visit)


def _is_whole(state: State, before: Mapping[int, Content], after: Mapping[int, Content]) -> bool:
    """Tell whether every file is as it was before the recording, or as it is after it."""
    return all(
        content in (before.get(each), after.get(each)) for each, content in state.contents.items()
    )


def _is_suspect(item: Item, visit: Visit) -> bool:
    if item.empty and visit.exit_kind == "ended" and not visit.error and not visit.step:
        return False
    return visit.exit_kind != "ended" or not set(visit.versions) & item.fine


def _tell(explorer: RanksExplorer, result: WorldResult) -> str:
    return explorer.subject.tell(result)
