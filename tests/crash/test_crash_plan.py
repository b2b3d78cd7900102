"""Which crash points get states, and which states are recovered from, where there are too many."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.crash.explore import losses
from ckpt_conformance.crash.explore.exploration import BaseExplorer, Case, Limits, shape_of, starved
from ckpt_conformance.crash.explore.judging import Recovery, Version
from ckpt_conformance.crash.model import plan
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.trace.operations import ROOT, Kind, Operation, Recording

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckpt_conformance.crash.model.states import State

FILES = 40  # of one save: each is made, written and renamed


def save(step: int, *, start: int, synced: Sequence[int] = ()) -> list[Operation]:
    """Return the operations of a save of many files, with its markers."""
    made: list[Operation] = [Operation(0, Kind.MARK, mark="begun", step=step)]
    for number in range(FILES):
        held, draft, final = start + number, f"{step}-{number}.tmp", f"{step}-{number}.pt"
        made.append(Operation(0, Kind.CREATE, object=held, path=draft, parent=ROOT))
        made.append(Operation(0, Kind.WRITE, object=held, path=draft, size=5000))
        if number in synced:
            made.append(Operation(0, Kind.FSYNC, object=held, path=draft))
        made.append(
            Operation(
                0, Kind.RENAME, object=held, path=draft, target=final, parent=ROOT, new_parent=ROOT
            )
        )
    return [*made, Operation(0, Kind.MARK, mark="acknowledged", step=step)]


def recording(tmp_path: Path, *saves: list[Operation]) -> Recording:
    operations = [operation for part in saves for operation in part]
    (tmp_path / "data").write_bytes(b"")
    numbered = [replace(operation, index=at) for at, operation in enumerate(operations)]
    return Recording(str(tmp_path / "root"), tmp_path, [], numbered)


def two_saves(tmp_path: Path, *, synced: Sequence[int] = ()) -> Recording:
    return recording(tmp_path, save(2, start=10, synced=synced), save(4, start=100, synced=synced))


def test_a_short_recording_has_states_at_every_point(tmp_path: Path) -> None:
    made = two_saves(tmp_path)
    allowed = plan.allowed(made.operations, 10_000)
    assert [*allowed] == [*range(len(made.operations) + 1)]


@pytest.mark.parametrize("budget", [1, 40, 400])
def test_acknowledgements_have_states_whatever_the_budget(budget: int, tmp_path: Path) -> None:
    made = two_saves(tmp_path)
    allowed = plan.allowed(made.operations, budget)
    promised = plan.acknowledgements(made.operations)
    assert len(promised) == 2
    before = dict(zip(allowed, (0, *allowed.values()), strict=False))
    assert all(allowed[at] - before[at] >= plan.LEAST for at in promised)


def test_of_updates_that_are_alike_the_ends_come_first(tmp_path: Path) -> None:
    """Each save has three kinds of points within, and some where it begins and ends."""
    made = two_saves(tmp_path)
    chosen = plan.allowed(made.operations, 6 * 2 * 20).keys()
    around = {at for at in chosen if 0 < at < len(made.operations)}
    kinds = {(made.operations[at - 1].kind, made.operations[at - 1].path[0:1]) for at in around}
    for kind in (Kind.CREATE, Kind.WRITE, Kind.RENAME):
        assert {(kind, "2"), (kind, "4")} <= kinds


def states(made: Recording, model: str, budget: int) -> list[Case]:
    rng = random.Random(0)  # noqa: S311
    found = MODELS[model].states(made, rng, budget)
    return [Case(model, state, f"{number}") for number, state in enumerate(found)]


@pytest.mark.parametrize("model", ["ext4", "xfs", "btrfs", "posix"])
def test_a_budget_of_few_states_has_what_loses_all_of_a_kind(model: str, tmp_path: Path) -> None:
    made = two_saves(tmp_path)
    last = len(made.operations)
    at_end = [case.state for case in states(made, model, 120) if case.state.point == last]
    assert any("only what was synced" in state.why for state in at_end)
    assert any("without the data of all" in state.why for state in at_end)
    assert all(not MODELS[model].illegal(made, state) for state in at_end)


class Explorer(BaseExplorer):
    """Recovers from some contents only."""

    def content_of(self, state: State) -> str:
        return shape_of(state)

    def recover(self, cases: Sequence[Case]) -> None:
        for case in cases:
            self.result.recoveries[case.content] = Recovery("ended", step=4, versions=(1,))


def explorer(made: Recording, recoveries: int) -> Explorer:
    marks = {(op.mark, op.step): op.index for op in made.operations if op.kind is Kind.MARK}
    versions = [
        Version(number, step, marks["begun", step], marks["acknowledged", step])
        for number, step in enumerate((2, 4))
    ]
    return Explorer("two", made, versions, Limits(candidates=200, recoveries=recoveries))


def test_what_lacks_the_most_is_chosen_at_each_acknowledgement(tmp_path: Path) -> None:
    """The same content at two points is recovered from once, and judged at both."""
    made = two_saves(tmp_path)
    exploring = explorer(made, 2)
    cases = exploring.enumerate("ext4")
    chosen = {case.content for case in exploring.choose(cases)}
    for point in plan.acknowledgements(made.operations):
        whole = exploring.complete(point)
        at_point = [case for case in cases if case.state.point == point]
        lacks = {case.content: losses.loss_of(case.state, whole).amount for case in at_point}
        assert max(lacks[content] for content in chosen & lacks.keys()) == max(lacks.values())


def test_a_model_that_was_not_asked_at_a_promise_is_unknown(tmp_path: Path) -> None:
    made = two_saves(tmp_path)
    exploring = explorer(made, 4)
    cases = exploring.enumerate("ext4")
    first, _ = plan.acknowledgements(made.operations)
    there = {case.content for case in cases if case.state.point == first}
    exploring.recover([case for case in cases if case.content not in there])
    (missed,) = starved(exploring)
    assert missed.startswith("ext4: no state that a power loss leaves was tried right after")
    assert f"operation {first - 1};" in missed
    exploring.tally()
    phases = exploring.result.models["ext4"].phases
    asked = phases["right after an acknowledgement"]
    assert 0 < asked.visited < asked.unique
    exploring.recover(cases)
    assert starved(exploring) == []
    exploring.tally()
    assert all(p.visited == p.unique for p in exploring.result.models["ext4"].phases.values())


def test_where_all_is_durable_nothing_is_asked(tmp_path: Path) -> None:
    files = range(FILES)
    end = Operation(0, Kind.FSYNC, object=ROOT)
    first = save(2, start=10, synced=files)
    made = recording(tmp_path, [*first[:-1], end, first[-1]])
    exploring = Explorer("one", made, [], Limits(candidates=200, recoveries=4))
    exploring.enumerate("xfs")
    assert starved(exploring) == []


@pytest.mark.parametrize(
    ("lost", "how_many"), [((3,), "one"), (range(5), "some"), (range(FILES - 1), "all but one")]
)
def test_losses_are_told_by_kind_and_how_many(
    lost: Sequence[int], how_many: str, tmp_path: Path
) -> None:
    made = recording(tmp_path, save(2, start=10))
    whole = Explorer("one", made, []).complete(len(made.operations))
    gone = {f"2-{number}.pt" for number in lost}
    left = {path: number for path, number in whole.names.items() if path not in gone}
    loss = losses.loss_of(replace(whole, names=left), whole)
    assert loss.amount == len(gone)
    assert loss.kinds == {("#-#.pt", "name", how_many)}
