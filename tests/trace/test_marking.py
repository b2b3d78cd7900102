"""What a marked rank notes of its talk with others; see `marked_ranks`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "marked_ranks.py"
Notes = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> list[Notes]:
    """For each rank the notes of each way."""
    folder = tmp_path_factory.mktemp("marked")
    (folder / "root" / "a").mkdir(parents=True)
    (folder / "root" / "a" / "there").write_bytes(b"it")
    command = [sys.executable, str(SCRIPT), str(folder)]
    subprocess.run(command, check=True)
    found: list[Notes] = []
    for rank in (0, 1):
        by_way: Notes = {}
        now: list[dict[str, Any]] = []
        for line in (folder / f"journal-{rank}").read_text().splitlines():
            event: dict[str, Any] = json.loads(line)
            assert event.pop("rank") == rank
            if event["event"] == "way":
                now = by_way.setdefault(event["name"], [])
            else:
                now.append(event)
        found.append(by_way)
    return found


def events(notes: list[dict[str, Any]]) -> list[str]:
    return [note["event"] for note in notes]


@pytest.mark.slow
def test_a_collective_is_entered_and_left_by_both_under_one_name(ways: list[Notes]) -> None:
    for way in ("barrier", "objects", "waited later"):
        mine, others = ways[0][way], ways[1][way]
        assert events(mine)[:2] == ["enter", "leave"]
        assert [note["call"] for note in mine] == [note["call"] for note in others]
        left = [note["after"] for note in (*mine, *others) if note["event"] == "leave"]
        assert all(after == [0, 1] for after in left)


@pytest.mark.parametrize(
    ("way", "rank", "after"),
    [
        ("from a root", 0, [1]),
        ("from a root", 1, [1]),
        ("to a root", 0, []),
        ("to a root", 1, [0, 1]),
    ],
)
def test_a_root_orders_in_one_direction(
    ways: list[Notes], way: str, rank: int, after: list[int]
) -> None:
    assert [note.get("after") for note in ways[rank][way]] == [None, after]


def test_a_tensor_that_is_gathered_orders_as_if_all_had_told_all(ways: list[Notes]) -> None:
    for rank in (0, 1):
        assert events(ways[rank]["functional"])[:2] == ["tell", "ask"]


@pytest.mark.parametrize("way", ["message", "store"])
def test_who_hears_comes_after_who_told(ways: list[Notes], way: str) -> None:
    assert "tell" in events(ways[0][way])
    assert events(ways[1][way])[-1] == "ask"


@pytest.mark.parametrize(
    ("way", "path"), [("look", "a/file"), ("listing", "a"), ("read", "a/there")]
)
def test_what_is_seen_below_the_directory_is_noted(ways: list[Notes], way: str, path: str) -> None:
    assert {"event": "look", "path": path} in ways[0][way]
    assert not ways[0]["elsewhere"]
