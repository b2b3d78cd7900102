"""Which of sixteen saves do more than the others, and that a save without a call is no pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.harness.messages import ExitKind, Options, SaveResult, SeenCall
from ckpt_conformance.harness.strata import Role
from ckpt_conformance.suites import test_rare_saves as rare_saves

if TYPE_CHECKING:
    from pathlib import Path

ROLES = {"step-#.pt": Role.PAYLOAD, "index": Role.METADATA}


def usual(step: int, drawn: str = "") -> list[SeenCall]:
    """Make the calls of a save: a file under a drawn name, renamed; a line for the index."""
    draft, final = f"draft{drawn}", f"step-{step}.pt"
    return [
        SeenCall(call=1, what="openat", path=draft, became=final),
        SeenCall(call=2, what="write", path=draft, became=final),
        SeenCall(call=3, what="rename", path=draft, became=final),
        SeenCall(call=4, what="openat", path="index"),
        SeenCall(call=5, what="write", path="index"),
    ]


def compacting(step: int) -> list[SeenCall]:
    """Make those of a save that also writes the index anew, and notes it in a file of its own."""
    more = (("openat", "index"), ("write", "index"), ("openat", "note"))
    added = [SeenCall(call=6 + at, what=what, path=path) for at, (what, path) in enumerate(more)]
    return [*usual(step), *added]


def rare_steps(logs: list[list[SeenCall]]) -> list[int]:
    return [save.step for save in rare_saves.compare(logs, ROLES).rare]


def test_saves_that_are_all_alike_do_no_more_than_others() -> None:
    drawn = "abcdefghijklmnop"
    assert rare_steps([usual(step, drawn[step]) for step in range(16)]) == []


def test_each_eighth_save_is_found_with_its_calls() -> None:
    logs = [compacting(at) if at % 8 == 0 else usual(at) for at in range(1, 17)]
    first, second = rare_saves.compare(logs, ROLES).rare
    assert (first.step, second.step) == (10, 18)
    names = {(call.what, call.path) for call in first.calls}
    assert names == {("openat", "index"), ("write", "index"), ("openat", "note")}
    assert first.names == second.names


def test_what_each_second_save_does_is_found_and_what_most_do_is_not() -> None:
    assert len(rare_steps([compacting(at) if at % 2 else usual(at) for at in range(16)])) == 8
    assert rare_steps([usual(at) if at % 3 == 0 else compacting(at) for at in range(16)]) == []


def test_saves_of_which_no_call_is_seen_are_unknown(tmp_path: Path) -> None:
    def all_of(_: object) -> list[SaveResult]:
        return [SaveResult()] * 16

    def execute(*_: object, **__: object) -> SimpleNamespace:
        return result

    def keeping(_: int) -> Options:
        return Options()

    result = SimpleNamespace(went_well=True, exit_kind=ExitKind.ENDED, code=0, all_of=all_of)
    subject = SimpleNamespace(root=tmp_path / "root", execute=execute, keeping=keeping)
    with pytest.raises(Unknown, match="no system call of 16 saves"):
        rare_saves.watch(cast("Any", subject))
