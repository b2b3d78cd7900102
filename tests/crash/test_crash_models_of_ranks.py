"""Models of several ranks: what they yield, what their predicates refuse, what orders the ranks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operation_lists import Disk, operation_lists, shown

from ckpt_conformance.crash.explore.exploration import complete
from ckpt_conformance.crash.model import replay
from ckpt_conformance.crash.model.models import MODELS, OF_RANKS
from ckpt_conformance.crash.model.states import State
from ckpt_conformance.trace import vector_clocks
from ckpt_conformance.trace.events import Entered, Left, Looked, Published, Received
from ckpt_conformance.trace.operations import is_crash_point

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.trace.operations import Recording

SLOW = settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def share(
    disk: Disk, whose: list[int], notes: list[vector_clocks.Note], size: int = 2
) -> Recording:
    """Give each operation to a rank, and order them; what was seen at one look is of one rank."""
    ones = disk.recording.operations
    for at, one in enumerate(ones):
        whose[at] = whose[at - 1] if one.joined else whose[at]
    ones[:] = [replace(one, process=whose[at]) for at, one in enumerate(ones)]
    ones[:] = vector_clocks.order(ones, notes, {rank: rank for rank in range(size)}, size)
    return disk.done()


def meet(
    at: int, call: str, size: int = 2, after: list[int] | None = None
) -> list[vector_clocks.Note]:
    """A collective before the operation `at`; a rank leaves it after all, or after some."""
    waited_for = tuple(range(size) if after is None else after)
    notes: list[vector_clocks.Note] = [(at, Entered(rank, call)) for rank in range(size)]
    return notes + [(at, Left(rank, call, waited_for)) for rank in range(size)]


@st.composite
def worlds(draw: st.DrawFn, most: int = 12) -> Recording:
    """Draw operations of two or three ranks with some collectives between them."""
    disk, size = draw(operation_lists(most=most)), draw(st.integers(2, 3))
    count = len(disk.recording.operations)
    whose = draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count))
    places = sorted(draw(st.sets(st.integers(0, count), max_size=3)))
    places = [at for at in places if is_crash_point(disk.recording.operations, at)]
    notes = [note for at in places for note in meet(at, f"world {at}", size)]
    return share(disk, whose, notes, size)


def states(model: str, recording: Recording, budget: int = 300) -> list[State]:
    return list(MODELS[model].states(recording, random.Random(0), budget))  # noqa: S311


def told(recording: Recording, state: State) -> str:
    lines = [
        f"{o.index} rank {o.rank} {o.kind} {o.object} {o.path} {o.target} {o.offset}+{o.size} "
        f"after {o.after}{' sync' * o.sync}{' failed' * bool(o.error)}"
        for o in recording.operations
    ]
    what = f"point {state.point} cut {state.cut} {state.why}: {dict(state.names)}"
    return "\n".join([f"{what} {dict(state.contents)}", *lines])


@pytest.mark.parametrize("model", OF_RANKS)
@SLOW
@given(recording=worlds())
def test_what_a_model_yields_is_legal_by_its_predicate(model: str, recording: Recording) -> None:
    for state in states(model, recording):
        wrong = MODELS[model].illegal(recording, state)
        assert not wrong, f"{wrong}\n{told(recording, state)}"


@SLOW
@given(recording=worlds())
def test_what_a_kill_leaves_is_legal_when_a_node_is_lost(recording: Recording) -> None:
    for state in states("ranks", recording):
        for model in ("nfs", "node-loss"):
            wrong = MODELS[model].illegal(recording, state)
            assert not wrong, f"{model}: {wrong}\n{told(recording, state)}"


@SLOW
@given(recording=worlds())
def test_an_nfs_loses_nothing_that_another_file_system_keeps(recording: Recording) -> None:
    for state in states("nfs", recording):
        wrong = MODELS["node-loss"].illegal(recording, state)
        assert not wrong, f"{wrong}\n{told(recording, state)}"


@SLOW
@given(recording=worlds())
def test_ranks_that_stop_at_one_moment_are_a_consistent_cut(recording: Recording) -> None:
    operations = recording.operations
    points = (at for at in range(len(operations) + 1) if is_crash_point(operations, at))
    for state in (complete(recording, point) for point in points):
        for model in OF_RANKS:
            wrong = MODELS[model].illegal(recording, state)
            assert not wrong, f"{model}: {wrong}\n{told(recording, state)}"


# ---- all that is legal is found ------------------------------------------------------------------


def every_legal(recording: Recording) -> set[tuple[tuple[str, bytes], ...]]:
    """What may be seen after any cut: every choice of where each rank stops, held to the rules."""
    size, count = recording.ranks, len(recording.operations)
    found: set[tuple[tuple[str, bytes], ...]] = set()
    for cut in itertools.product(range(count + 1), repeat=size):
        bare = State(max(cut), {}, {}, cut=cut)
        issued = [one for one in recording.operations if bare.has(one)]
        last = {one.rank: one for one in issued}
        if any(last.get(rank) is None and at for rank, at in enumerate(cut)):
            continue
        if any(at and last[rank].index != at - 1 for rank, at in enumerate(cut)):
            continue
        writes = [one for one in last.values() if one.kind == "write"]
        pages = [[None, *range(4096, one.stop, 4096)] for one in writes]
        for chosen in itertools.product(*pages):
            tears = {one.index: at for one, at in zip(writes, chosen, strict=True) if at}
            state = laid(recording, bare, tears)
            if not MODELS["ranks"].illegal(recording, state):
                found.add(tuple(sorted(shown(recording, state).items())))
    return found


def laid(recording: Recording, bare: State, tears: dict[int, int]) -> State:
    slots = replay.initial_slots(recording)
    contents = replay.initial_contents(recording)
    for one in recording.operations:
        if not bare.has(one):
            continue
        if one.kind == "create":
            contents[one.object] = replay.EMPTY
        if one.kind == "write" and one.object in contents:
            at = tears.get(one.index, one.stop)
            contents[one.object] = replay.written(contents[one.object], one, at)
        elif one.kind in {"truncate", "allocate"} and one.object in contents:
            contents[one.object] = replay.changed(contents[one.object], one)
        replay.put(slots, replay.slot_events(one))
    names = replay.paths(slots, replay.directories(recording))
    held = {each: contents[each] for each in names.values() if each in contents}
    return replace(bare, names=names, contents=held)


@settings(SLOW, max_examples=60)
@given(recording=worlds(most=7))
def test_every_consistent_cut_is_found(recording: Recording) -> None:
    mine = states("ranks", recording, budget=10**6)
    seen = {tuple(sorted(shown(recording, state).items())) for state in mine}
    assert seen == every_legal(recording)


# ---- what orders the ranks -----------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path, real=False)


def save(disk: Disk) -> None:
    """Two ranks write a shard each; the first then writes what names them."""
    for name in ("one", "two", "index"):
        disk.create(name)
        disk.write(name, 100)


WHOSE = [0, 0, 1, 1, 0, 0]


def cuts(recording: Recording, model: str = "ranks") -> set[frozenset[str]]:
    return {frozenset(state.names) for state in states(model, recording, budget=10**6)}


def test_without_a_collective_the_index_may_be_there_alone(disk: Disk) -> None:
    save(disk)
    assert frozenset({"one", "index"}) in cuts(share(disk, WHOSE, []))


def test_nobody_leaves_a_barrier_before_all_came(disk: Disk) -> None:
    save(disk)
    found = cuts(share(disk, WHOSE, meet(4, "barrier")))
    assert frozenset({"one", "index"}) not in found
    assert {frozenset(), frozenset({"two"}), frozenset({"one"})} <= found


@pytest.mark.parametrize(("after", "ordered"), [([0, 1], True), ([0], False), ([], False)])
def test_a_collective_orders_only_what_its_kind_orders(
    disk: Disk, after: list[int], *, ordered: bool
) -> None:
    """A gather holds its root until all came; who only sends goes on at once."""
    save(disk)
    found = cuts(share(disk, WHOSE, meet(4, "gather", after=after)))
    assert (frozenset({"one", "index"}) not in found) is ordered


@pytest.mark.parametrize(
    "notes",
    [
        [(4, Published(1)), (4, Received(0))],
        [(4, Looked(0, "two"))],
        [(4, Looked(0, ""))],
    ],
    ids=["a store", "a look at the file", "a listing"],
)
def test_what_one_may_have_waited_for_orders(disk: Disk, notes: list[vector_clocks.Note]) -> None:
    save(disk)
    assert frozenset({"one", "index"}) not in cuts(share(disk, WHOSE, notes))


def test_who_uses_what_another_made_comes_after(disk: Disk) -> None:
    disk.mkdir("folder")
    disk.create("folder/file")
    disk.rename("folder/file", "folder/name")
    found = cuts(share(disk, [0, 1, 0], []))
    assert found == {
        frozenset(),
        frozenset({"folder"}),
        frozenset({"folder", "folder/file"}),
        frozenset({"folder", "folder/name"}),
    }


def test_a_write_that_somebody_waited_for_is_whole(disk: Disk) -> None:
    disk.create("shard")
    disk.write("shard", 9000)
    disk.create("index")
    recording = share(disk, [0, 0, 1], meet(2, "barrier"))
    sizes = {
        ("index" in one.names, len(shown(recording, one).get("shard", b"")))
        for one in states("ranks", recording, budget=10**6)
    }
    assert sizes == {(False, 0), (False, 4096), (False, 8192), (False, 9000), (True, 9000)}


# ---- a node that is lost -------------------------------------------------------------------------


def test_a_lost_node_takes_what_it_had_not_synced(disk: Disk) -> None:
    save(disk)
    recording = share(disk, WHOSE, meet(4, "barrier"))
    whole = [one for one in states("node-loss", recording, budget=10**6) if len(one.names) > 2]
    sizes = {tuple(len(body) for body in shown(recording, one).values()) for one in whole}
    assert (100, 100, 0) in sizes  # by name: index, one, two
    assert (0, 0, 100) in sizes
    assert (0, 0, 0) not in sizes  # both nodes


def test_what_a_node_synced_is_kept_and_a_sync_of_another_does_not_help(disk: Disk) -> None:
    save(disk)
    disk.fsync("one")
    disk.fsync("two")
    disk.mark("acknowledged", 1)
    recording = share(disk, [*WHOSE, 0, 0, 0], meet(4, "barrier") + meet(8, "end"))
    last = [one for one in states("node-loss", recording, budget=10**6) if one.point == 9]
    sizes = {tuple(len(body) for body in shown(recording, one).values()) for one in last}
    assert sizes == {(100, 100, 100), (0, 100, 100), (100, 100, 0)}


@pytest.mark.parametrize("how", ["close", "exit"])
def test_a_close_sends_what_a_client_of_an_nfs_holds(disk: Disk, how: str) -> None:
    save(disk)
    {"close": lambda: disk.close("one"), "exit": disk.exit}[how]()
    disk.mark("acknowledged", 1)
    recording = share(disk, [*WHOSE, 0, 0], meet(4, "barrier") + meet(7, "end"))

    def left(model: str) -> set[tuple[int, ...]]:
        last = [one for one in states(model, recording, budget=10**6) if one.point == 8]
        return {tuple(len(body) for body in shown(recording, one).values()) for one in last}

    assert (100, 0, 100) in left("node-loss")  # by name: index, one, two
    assert (100, 0, 100) not in left("nfs")
    assert (100, 100, 0) in left("nfs"), "nobody closed it"


def test_what_was_closed_is_not_lost_by_an_nfs_and_the_predicate_says_so(disk: Disk) -> None:
    save(disk)
    disk.close("one")
    recording = share(disk, [*WHOSE, 0], meet(4, "barrier"))
    whole = complete(recording, 7)
    lost = replace(whole, contents={**whole.contents, whole.names["one"]: replay.EMPTY})
    assert not MODELS["node-loss"].illegal(recording, lost)
    assert MODELS["nfs"].illegal(recording, lost)
    early = replace(complete(recording, 6), contents=lost.contents)
    assert not MODELS["nfs"].illegal(recording, early), "it had not been closed yet"


def test_broken_cuts_are_caught(disk: Disk) -> None:
    """Why: the predicate is what the enumerator is held to; it has to refuse."""
    save(disk)
    recording = share(disk, WHOSE, meet(4, "barrier"))
    bare = State(6, {}, {}, cut=(6, 2))
    state = laid(recording, bare, {})
    assert "another went on" in MODELS["ranks"].illegal(recording, state)
    assert "another went on" in MODELS["node-loss"].illegal(recording, state)
    whole = complete(recording, 6)
    lost = replace(whole, contents={**whole.contents, whole.names["two"]: replay.EMPTY})
    assert MODELS["ranks"].illegal(recording, lost)
    assert not MODELS["node-loss"].illegal(recording, lost)
    both = replace(lost, contents={**lost.contents, whole.names["one"]: replay.EMPTY})
    assert MODELS["node-loss"].illegal(recording, both)
