"""Strata of crash states: after which sort of operation, and what is missing of which role."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from test_crash_plan import explorer, recording, save

from ckpt_conformance.crash.explore import losses
from ckpt_conformance.harness.strata import Role
from ckpt_conformance.trace.operations import ROOT, Kind, Operation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.crash.explore.exploration import BaseExplorer
    from ckpt_conformance.subject.subject import Subject

ROLES = {"#-#.pt": Role.PAYLOAD, "now": Role.POINTER}


def pointer() -> list[Operation]:
    """Return the operations of a small file that gets its name by a rename."""
    made = [
        Operation(0, Kind.CREATE, object=7, path="now.tmp", parent=ROOT),
        Operation(0, Kind.WRITE, object=7, path="now.tmp", size=9),
        Operation(0, Kind.RENAME, object=7, path="now.tmp", target="now", parent=ROOT),
        Operation(0, Kind.FSYNC, object=ROOT),
    ]
    return [replace(operation, new_parent=ROOT) for operation in made]


def few(tmp_path: Path, most: int) -> BaseExplorer:
    """Return an explorer of a save of many payloads and a pointer, which chooses few states."""
    saves = [*save(2, start=10), *save(4, start=100), *pointer()]
    made = explorer(recording(tmp_path, saves), 4)
    made.limits = replace(made.limits, strata=most)
    made.roles = ROLES
    return made


def test_operations_have_the_role_of_the_name_in_the_end(tmp_path: Path) -> None:
    made = few(tmp_path, 0)
    operations = made.recording.operations
    done = losses.as_calls(operations, made.complete(len(operations)))
    assert [one.became for one in done[-4:-1]] == ["now"] * 3
    assert [one.is_folder for one in done[-4:]] == [False, False, False, True]
    assert done[1].became == "2-0.pt"


def test_each_stratum_is_met_whatever_was_chosen(tmp_path: Path) -> None:
    left_out, met = few(tmp_path, 0), few(tmp_path, 99)
    for one in (left_out, met):
        one.recover(one.listed(["btrfs"]))
        one.tally()
    before, after = (one.result.models["btrfs"] for one in (left_out, met))
    assert before.strata.visited < before.strata.unique
    assert after.strata.visited == after.strata.unique == before.strata.unique
    names = losses.strata(met.recording.operations, met.cases["btrfs"], ROLES, met.complete).keys()
    assert {"data lost payload", "data lost pointer", "after data pointer"} <= set(map(str, names))


def test_where_no_role_is_known_nothing_is_said(tmp_path: Path) -> None:
    made = few(tmp_path, 99)
    made.roles = {}
    made.recover(made.listed(["btrfs"]))
    made.tally()
    assert made.result.models["btrfs"].strata.unique == 0


def test_of_a_manager_each_stratum_is_met_at_the_quick_budget(
    new_subject: Callable[..., Subject],
) -> None:
    from ckpt_conformance.crash.explore import verdicts

    explored = verdicts.explored(new_subject("reference"), "same")
    for report in explored.result.models.values():
        assert 0 < report.strata.visited == report.strata.unique
