"""Faults that advance over the system calls of a save and a load, and what is said of them."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract.verdicts import Cause, Outcome, Unknown
from ckpt_conformance.fault_injectors import injected_calls
from ckpt_conformance.fault_injectors.advancing import (
    KINDS,
    OF_AN_OUTAGE,
    Advancer,
    CallFault,
    Task,
    TrialResult,
    is_renewed,
    passes,
    reads_of,
)
from ckpt_conformance.fault_injectors.injected_calls import OPERATIONS, Trial
from ckpt_conformance.harness.client import ProcessResult
from ckpt_conformance.harness.messages import ExitKind, SeenCall, UnsupportedCall
from ckpt_conformance.harness.strata import of_calls
from ckpt_conformance.subject import roles
from ckpt_conformance.trace.faults import READING
from ckpt_conformance.trace.notify import NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.subject.subject import Subject

NAME = "torch-save-atomic-per-step"


@pytest.fixture(scope="module")
def full(new_subject: Callable[..., Subject]) -> Subject:
    return new_subject(NAME, budget="full")


@pytest.fixture
def quick(new_subject: Callable[..., Subject]) -> Subject:
    return new_subject(NAME)


@pytest.mark.parametrize("what", ["save", "load"])
def test_every_call_fails_once_and_from_there_on_until_the_operation_is_clean(
    what: str, full: Subject
) -> None:
    trials = injected_calls.trials(full, what)
    log = injected_calls.trials_of(full, what).control.log
    for lasting in (False, True):
        faults = [trial.fault for trial in trials if trial.kind == "EIO"]
        injected = {fault.at for fault in faults if fault.persistent is lasting}
        assert injected == set(range(1, len(log) + 1))
    every = {*OPERATIONS[what].kinds, *(OF_AN_OUTAGE if what == "save" else ())}
    assert {trial.kind for trial in trials} <= every
    assert full.remarks.io_points[what].startswith(f"all {len(log)} failed once and from")


def test_reads_of_a_rotation_are_grouped_by_what_follows_the_last_pass_first() -> None:
    what = [("a-2", 2), ("b-2", 2), ("a-2", 1), ("a-4", 3), ("b-4", 1)]
    paths = [path for path, reads in what for _ in range(reads)]
    firsts = [not number for _, reads in what for number in range(reads)]
    log = [
        SeenCall(call=at, what="openat" if first else "read", path=path, reads=True)
        for at, (path, first) in enumerate(zip(paths, firsts, strict=True), 1)
    ]
    task = Task(what="", base="", step=6, keep="", out="", holds=())
    groups = [[call.call for call in group] for group in reads_of(log, task)]
    assert groups == [[9], [6, 7, 8], [5], [3, 4], [1, 2]]


def test_each_kind_strikes_only_calls_that_can_fail_so(full: Subject) -> None:
    trials = injected_calls.trials(full, "save")
    injected = {kind: {trial.call.what for trial in trials if trial.kind == kind} for kind in KINDS}
    assert injected["short"] == {"write", "writev"}
    assert "rename" in injected["ENOSPC"]
    assert "rename" not in injected["EINTR"]
    assert injected["sync"] == set()  # this recipe syncs nothing


def test_a_short_write_is_finished_and_an_error_is_raised(full: Subject) -> None:
    trials = injected_calls.trials(full, "save")
    assert all(trial.error for trial in trials if trial.kind in {"ENOSPC", "EIO", "EDQUOT"})
    good = [trial for trial in trials if trial.kind in {"short", "EINTR"} and not trial.error]
    assert good
    assert {injected_calls.outcome(full, "save", trial) for trial in good} == {Outcome.NEW}


def test_a_sample_says_that_it_is_one_and_how_large(quick: Subject) -> None:
    trials = injected_calls.trials(quick, "save")
    usual = {"EDQUOT", "EINTR", "EIO", "ENOSPC", "short"}
    assert {trial.kind for trial in trials} == usual | set(OF_AN_OUTAGE)
    count = len(injected_calls.trials_of(quick, "save").control.log)
    remark = quick.remarks.io_points["save"]
    assert remark.startswith(f"a sample of {count}: {len(trials)} trials, ")


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("save", {"data payload", "sync manifest", "name pointer", "sync directory"}),
        ("rotation", {"name manifest", "set aside manifest", "remove payload", "sync pointer"}),
    ],
)
def test_a_sample_meets_every_stratum_with_an_error_that_does_not_last(
    what: str, wanted: set[str], new_subject: Callable[..., Subject]
) -> None:
    subject = new_subject("reference")
    made = injected_calls.trials_of(subject, what)
    hit = {trial.call.call for trial in made.tried if not trial.fault.persistent}
    once = [call for call in made.control.log if call.call in hit]
    assert wanted <= set(map(str, of_calls(once, roles.of_manager(subject))))
    assert re.search(r", (\d+) of \1 strata$", made.remark)


def test_a_trial_that_is_made_again_gives_the_same(quick: Subject) -> None:
    trial = next(trial for trial in injected_calls.trials(quick, "save") if trial.error)
    alone = injected_calls.again(quick, "save", trial)
    assert alone.error
    assert trial.error
    assert (alone.call.what, alone.error.type) == (trial.call.what, trial.error.type)
    both = [injected_calls.outcome(quick, "save", tried) for tried in (trial, alone)]
    assert both == [Outcome.PREVIOUS] * 2


def trial_result(kind: str = "EIO", **more: Any) -> TrialResult:  # noqa: ANN401  fields of a result
    fault, call = CallFault(at=3, error="EIO"), SeenCall(call=3, what="write", path="a")
    fields: dict[str, Any] = {"fired": 1, "calls": 9, "call": call, **more}
    return TrialResult(key="", kind=kind, what="save", fault=fault, **fields)


def test_a_point_that_never_fired_is_unknown() -> None:
    control = trial_result("control", log=(SeenCall(call=1, what="write"),) * 9)
    with pytest.raises(Unknown, match="did not fire: EIO at write of a"):
        injected_calls.remark(OPERATIONS["save"], control, [trial_result(fired=0)])
    with pytest.raises(Unknown, match="no system call of the save"):
        injected_calls.remark(OPERATIONS["save"], trial_result("control", log=()), [])


def test_writes_that_nobody_sees_are_unknown(quick: Subject) -> None:
    foreign = UnsupportedCall(call="mmap", path="a.bin", why="not seen")
    control = trial_result("control", unsupported=(foreign,))
    with pytest.raises(Unknown, match=r"can't be made to fail: mmap of a\.bin"):
        injected_calls.require_control(quick, OPERATIONS["save"], control)


def test_a_process_that_dies_of_its_error_is_an_error_that_says_so() -> None:
    trial = Trial(trial_result(exit_kind=ExitKind.CRASHED))
    assert trial.died
    assert trial.error
    assert trial.error.type == "crashed"


def test_what_a_process_that_died_was_hit_at_is_told_by_the_control() -> None:
    log = [
        SeenCall(call=number, what=what, path=path)
        for number, (what, path) in enumerate(
            [("openat", "a"), ("sync", ""), ("write", "a"), ("write", "b"), ("fsync", "b")], 1
        )
    ]
    control = trial_result("control", log=tuple(log))
    died = trial_result(exit_kind=ExitKind.HANG, call=None)
    assert injected_calls.with_call(died, control).call == log[3], "sync(2) returns no error"
    lived = trial_result(call=None)
    assert injected_calls.with_call(lived, control) is lived
    assert "at write of b" in Trial(injected_calls.with_call(died, control)).name


def test_a_directory_has_only_to_be_synced_again() -> None:
    def synced(number: int, path: str, *, injected: bool = False) -> SeenCall:
        is_folder = path == ""
        return SeenCall(
            call=number, what="fsync", path=path, injected=injected, is_folder=is_folder
        )

    log = [synced(1, "", injected=True), synced(2, "a"), synced(3, "")]
    assert is_renewed(log, log[0])
    assert not is_renewed(log[:2], log[0])
    lasting = [synced(1, "", injected=True), synced(3, "", injected=True)]
    assert not is_renewed(lasting, lasting[0])
    mapped = [synced(1, "a", injected=True), synced(2, "a")]
    assert not is_renewed(mapped, mapped[0]), "a file without a write: it was mapped"


def test_where_nothing_can_be_hit_the_machine_is_named(quick: Subject) -> None:
    output = "ckpt_conformance.trace.notify.NotAvailableError: not allowed here"
    status = NotAvailableError.EXIT_STATUS
    refused = ProcessResult(ExitKind.CRASHED, (), [], output, quick.program(), code=status)
    why = injected_calls.why_not(quick, refused)
    assert why.cause is Cause.MACHINE
    assert str(why).startswith("this machine can't make system calls fail")
    printed = ProcessResult(ExitKind.CRASHED, (), [], output, quick.program(), code=70)
    assert injected_calls.why_not(quick, printed).cause is Cause.CONTROL


def test_a_sync_that_failed_is_renewed_by_a_new_file_only() -> None:
    def call(number: int, what: str, *, injected: bool = False) -> SeenCall:
        return SeenCall(call=number, what=what, path=f"model_{number}.tmp", injected=injected)

    failed = call(2, "fsync", injected=True)
    again = [call(1, "write"), failed, call(3, "fsync")]
    anew = [call(1, "write"), failed, call(3, "write"), call(4, "fsync")]
    assert not is_renewed(again, failed)
    assert is_renewed(anew, failed)


def test_what_a_process_left_that_its_error_ended_is_resumed_from(tmp_path: Path) -> None:
    """A writer that dies of an error is no failure of the harness; its directory is judged."""

    class Aborts(Advancer):
        def once(self, begun: TrialResult) -> TrialResult:
            (self.child.root / "half").write_bytes(b"h")
            os._exit(3)  # as a library does that can raise nothing
            raise AssertionError(begun)

    root = tmp_path / "root"
    root.mkdir()
    child = SimpleNamespace(root=root, adapter=SimpleNamespace(shape="manager"))
    task = Task(
        what="save",
        step=4,
        holds=(),
        base=str(tmp_path),
        keep=str(tmp_path / "left"),
        out=str(tmp_path / "out"),
    )
    result = Aborts(child, task, "", lambda _: None).trial("EIO", CallFault(at=1))
    assert result.exit_kind is ExitKind.CRASHED
    assert (tmp_path / "left" / result.left / "half").read_bytes() == b"h"


def test_a_load_meets_an_error_in_each_pass_over_the_newest_step(
    new_subject: Callable[..., Subject],
) -> None:
    subject = new_subject("reference")
    made = injected_calls.trials_of(subject, "load")
    assert re.search(r", (\d+) of \1 strata$", made.remark)
    newest = set(injected_calls.newest_files(subject))
    once = [trial.call for trial in made.tried if not trial.fault.persistent]
    met = {call.path for call in once if call.what in READING} & newest
    assert any(path.startswith("meta_") for path in met)
    assert any(path.endswith(".pt") for path in met)


def test_a_load_that_opens_a_file_again_makes_another_pass() -> None:
    names = ("openat", "read", "openat", "read")
    log = [SeenCall(call=at, what=what, path="a") for at, what in enumerate(names, 1)]
    assert passes(log) == {1: 1, 2: 1, 3: 2, 4: 2}
