"""A child that is recorded, and a child that is hit at its system calls, through the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from recording import replay, tree

from ckpt_conformance.contract import registry
from ckpt_conformance.contract.journal import Fired
from ckpt_conformance.harness.client import Client, Server
from ckpt_conformance.harness.messages import (
    ExitKind,
    Fault,
    JobSpec,
    Load,
    LoadResult,
    Program,
    Run,
    RunResult,
)
from ckpt_conformance.trace.operations import Kind, Recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp

INJECTOR = "ckpt_conformance.fault_injectors.system_call:SystemCall"
RECIPES = tuple(name for name in registry.BUNDLED if name not in registry.EXTRAS)
SAVE = Run(until=4, save_at=(2, 4))


def live(
    client: Client,
    tmp_path: Path,
    *ops: AnyOp,
    adapter: str = "torch-save-atomic-per-step",
    **more: Any,  # noqa: ANN401  fields of a program
) -> ProcessResult:
    (tmp_path / "root").mkdir(parents=True, exist_ok=True)
    program = Program(
        adapter=adapter,
        root=str(tmp_path / "root"),
        journal=str(tmp_path / "journal"),
        result=str(tmp_path / "result"),
        output=str(tmp_path / "output"),
        job=JobSpec(kind="plain", seed=1),
        ops=ops,
        **more,
    )
    return client.run(program)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    running = Client(server.socket)
    yield running
    running.close()


def test_a_recorded_life_has_its_marks_in_order(client: Client, tmp_path: Path) -> None:
    result = live(client, tmp_path, SAVE, record=str(tmp_path / "record"))
    assert result.went_well, result.output
    recording = Recording.read(tmp_path / "record")
    assert recording.unsupported == []
    shown = [(op.mark, op.step) for op in recording.operations if op.kind is Kind.MARK]
    assert shown == [("begun", 2), ("acknowledged", 2), ("begun", 4), ("acknowledged", 4)]
    inside = [op.kind is Kind.RENAME for op in recording.operations]
    assert inside.count(True) == 2
    assert not recording.operations[-1].source
    assert all("torch_save.py" in op.source for op in recording.operations if op.path)
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_recorded_byte_for_byte(name: str, client: Client, tmp_path: Path) -> None:
    result = live(client, tmp_path, SAVE, record=str(tmp_path / "record"), adapter=name)
    assert result.went_well, result.output
    recording = Recording.read(tmp_path / "record")
    assert recording.unsupported == []
    assert all(op.source for op in recording.operations if op.kind is not Kind.MARK)
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")


def test_a_life_of_its_own_interpreter_is_recorded(client: Client, tmp_path: Path) -> None:
    record = str(tmp_path / "record")
    result = live(client, tmp_path, SAVE, record=record, isolation="exec")
    assert result.went_well, result.output
    recording = Recording.read(tmp_path / "record")
    marks = [op.mark for op in recording.operations if op.kind is Kind.MARK]
    assert marks == ["begun", "acknowledged"] * 2
    assert all(op.source for op in recording.operations if op.kind is not Kind.MARK)
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")


def injected(client: Client, tmp_path: Path, **args: object) -> ProcessResult:
    fault = Fault(injector=INJECTOR, args=args)
    return live(client, tmp_path, replace(SAVE, faults=(fault,), fault_step=4))


def fired_calls(result: ProcessResult) -> list[int]:
    return [event.call for event in result.events if isinstance(event, Fired)]


def test_each_call_of_a_save_is_counted_and_can_fail(client: Client, tmp_path: Path) -> None:
    counted = injected(client, tmp_path).of(RunResult).faults[0]
    assert counted.calls == len(counted.log) > 2
    assert counted.fired == 0
    for at in range(1, counted.calls + 1):
        result = injected(client, tmp_path / str(at), at=at, error="EIO")
        report = result.of(RunResult).faults[0]
        assert (report.fired, len(report.log) >= at) == (1, True)
        assert result.error is not None, (counted.log[at - 1], result.output)
        assert result.steps_of("acknowledged") == [2]
        assert fired_calls(result) == [at]


def test_a_kill_ends_the_life_as_a_real_one(client: Client, tmp_path: Path) -> None:
    result = injected(client, tmp_path, at=2, error="kill", moment="half")
    assert result.exit_kind is ExitKind.KILLED
    assert fired_calls(result) == [2]
    assert result.steps_of("acknowledged") == [2]


def test_reads_of_a_load_can_fail(client: Client, tmp_path: Path) -> None:
    assert live(client, tmp_path, SAVE).error is None
    fault = Fault(injector=INJECTOR, args={"at": 1, "reading": True, "only": ["read"]})
    result = live(client, tmp_path, Load(faults=(fault,)))
    assert result.of(LoadResult).faults[0].fired == 1
    assert result.error is not None


def test_without_a_supervisor_the_injector_says_so(tmp_path: Path) -> None:
    from ckpt_conformance.contract.journal import ChildJournal
    from ckpt_conformance.fault_injectors.system_call import SystemCall

    injector = SystemCall(tmp_path, ChildJournal(tmp_path / "journal"), at=1)
    with pytest.raises(RuntimeError, match="has no supervisor"):
        injector.install()
