"""Runs of instances: read at once, they are what instruction by instruction gives, or Malformed."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from dcp_bytes import metadata_of
from hypothesis import HealthCheck, example, given, settings
from test_fsck_parsers import edited, edits

from ckpt_conformance.fsck.formats import cover, dcp
from ckpt_conformance.fsck.pickled import pickle_runs, pickles
from ckpt_conformance.fsck.pickled.pickle_values import Made, Name, Persistent
from ckpt_conformance.fsck.source.findings import Malformed

if TYPE_CHECKING:
    from collections.abc import Iterator

CLASSES = dcp._MANY


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "LARGE", 0)


MANY = metadata_of(
    {
        "row": ((70_000, 8), 300),
        "flat": ((3,), 300),
        "cube": ((2, 3, 4), 50),
        "deep": ((1, 1, 2, 1, 3), 50),
        "none": ((), 1),
        **{f"layers.{at}.weight": ((16, 4), 3) for at in range(40)},
    },
    far=5_000_000_000,
)


def plain(value: Any, within: tuple[int, ...] = ()) -> Any:  # noqa: ANN401  what a pickle holds
    """Give something that can be compared, whichever way it was read."""
    if id(value) in within:
        return "a part of itself"  # damaged bytes may ask for it
    inner = (*within, id(value))
    if isinstance(value, Made | Persistent):
        return [type(value).__name__, *(plain(one, inner) for one in parts(value))]
    if isinstance(value, dict):
        return [(plain(key, inner), plain(one, inner)) for key, one in value.items()]
    if isinstance(value, list | tuple) and not isinstance(value, Name):
        return [plain(one, inner) for one in value]
    return value.hex() if isinstance(value, float) else value  # two NaN are no equals


def parts(value: Made | Persistent) -> list[Any]:
    if isinstance(value, Persistent):
        return [value.id]
    state = dict(zip(value.keys, value.state, strict=True)) if value.keys else value.state
    return [value.of, value.args, state, value.parts]


def instances(value: Any) -> Iterator[Made]:  # noqa: ANN401  what a pickle holds
    if isinstance(value, Made):
        yield value
        yield from instances(value.state)
    elif isinstance(value, dict):
        for pair in value.items():
            yield from instances(pair)
    elif isinstance(value, list | tuple) and not isinstance(value, Name):
        for one in value:
            yield from instances(one)


def both(data: bytes) -> tuple[Any, Any]:
    """Read a pickle in both ways; the reason where it is none."""
    found: list[Any] = []
    for classes in (CLASSES, ()):
        try:
            root, names = pickles.load(data, classes)
            found.append((plain(root), names))
        except Malformed:
            found.append("malformed")
    return found[0], found[1]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_both_ways_give_the_same(protocol: int) -> None:
    data = pickle.dumps(pickle.loads(MANY), protocol=protocol)  # noqa: S301  our own
    fast, slow = both(data)
    assert fast == slow
    assert fast != "malformed"


def test_most_of_it_is_read_at_once() -> None:
    """Else the test above compares one way with itself."""
    root, _ = pickles.load(MANY, CLASSES)
    made = [one for one in instances(root) if one.of in CLASSES]
    at_once = sum(one.keys is not None for one in made)
    assert len(made) > 2000
    assert at_once > 0.9 * len(made)
    found = dcp.read_metadata(MANY)
    assert found.problems == []
    places = [one.place for items in found.items.values() for one in items]
    assert max(one.start for one in places) == 5_000_000_000 + 299 * 100
    assert sum(bool(one.packed) for one in places) == 1


@settings(
    max_examples=300,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(changes=edits)
@example(changes=[(5918, "set", b"\x89")])  # the value of an attribute is a class
def test_both_ways_agree_on_damaged_bytes(changes: list[tuple[int, str, bytes]]) -> None:
    small = metadata_of({"row": ((70_000, 8), 20), "flat": ((3,), 20)})
    fast, slow = both(edited(small, changes))
    assert fast == slow


def test_ends_of_frames_do_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame ends every 64 KiB, in the middle of an instance; here there are more than tries."""
    monkeypatch.setattr(pickle_runs, "_MOST_TRIES", 2)
    data = metadata_of({"row": ((70_000, 8), 6000)})
    assert data.count(b"\x95") > 5
    root, _ = pickles.load(data, CLASSES)
    made = [one for one in instances(root) if one.of in CLASSES]
    assert sum(one.keys is not None for one in made) > 0.99 * len(made) > 17_000


def test_a_pickle_that_asks_for_what_was_passed_over_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last instruction asks for the dict of an instance in the middle of a run."""
    reads: list[bool] = []
    original = pickle_runs.Runs.read

    def counted(self: pickle_runs.Runs, machine: Any, start: int) -> bool:  # noqa: ANN401
        reads.append(original(self, machine, start))
        return reads[-1]

    monkeypatch.setattr(pickle_runs.Runs, "read", counted)
    found: set[str] = set()
    for index in range(150, 260):
        get = b"j" + index.to_bytes(4, "little")
        data = MANY[:-1] + b"0" + get + b"."  # forget the root, give something of the memo
        fast, slow = both(data)
        assert fast == slow, index
        found.add(str(slow)[:20])
    assert any(reads)
    assert len(found) > 3


@pytest.mark.parametrize("many", [1, 1 << 30], ids=["arrays", "numbers"])
@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], ""),
        ([((0, 0), (4, 1)), ((0, 1), (2, 2)), ((2, 1), (2, 2))], ""),
        ([((0, 0), (4, 3)), ((4, 0), (0, 3))], ""),
        ([((0, 0), (2, 3)), ((2, 0), (2, 2))], "2 of 12 elements are in no chunk: a hole"),
        ([((0, 0), (3, 3)), ((2, 0), (2, 3))], "overlap"),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], "overlap"),
        ([((0, 0), (2, 3)), ((2, 1), (2, 3))], "lies outside"),
        ([((0,), (4,))], "1 dimensions"),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "overlap"),
    ],
)
def test_coverage_is_judged_alike_in_both_ways(
    many: int, boxes: list[cover.Box], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cover, "_MANY", many)
    found = cover.why_not((4, 3), boxes)
    assert why in found
    assert bool(why) == bool(found)


def test_many_boxes_are_covered_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cover, "_MANY", 1)
    boxes = [((row, 0, part * 4), (1, 7, 4)) for row in range(300) for part in range(10)]
    assert cover.why_not((300, 7, 40), boxes) == ""
    moved = [*boxes[:-1], ((299, 0, 35), (1, 7, 4))]
    assert "overlap" in cover.why_not((300, 7, 40), moved)
    assert "hole" in cover.why_not((300, 7, 40), boxes[:-1])
