"""What a real SIGKILL leaves is one of the states that the model `kill` gives for that save."""

from __future__ import annotations

import os
import random
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from recording import tree

from ckpt_conformance.crash.explore.materializer import Materializer, digest
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.harness.client import Client, Server
from ckpt_conformance.harness.messages import ExitKind, Fault, JobSpec, Program, Run, RunResult
from ckpt_conformance.trace.operations import Kind, Recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.harness.client import ProcessResult

INJECTOR = "ckpt_conformance.fault_injectors.system_call:SystemCall"
# Those whose files have the same names and bytes in every run.
RECIPES = ("torch-save-inplace", "torch-save-atomic-per-step", "torch-save-atomic-fixed-name")
KILLS = 8  # of each recipe


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with closing(Client(server.socket)) as running:
        yield running


def live(
    client: Client,
    place: Path,
    adapter: str,
    fault: dict[str, object],
    record: str = "",
) -> ProcessResult:
    (place / "root").mkdir(parents=True)
    op = Run(until=4, save_at=(2, 4), faults=(Fault(injector=INJECTOR, args=fault),))
    program = Program(
        adapter=adapter,
        root=str(place / "root"),
        journal=str(place / "journal"),
        result=str(place / "result"),
        output=str(place / "output"),
        job=JobSpec(kind="plain", seed=1),
        ops=(op,),
        record=record,
    )
    return client.run(program)


def materialized(recording: Recording, states: list[State], place: Path) -> list[Any]:
    """Give the trees of distinct states."""
    place.mkdir()
    materializer, trees = Materializer(recording, place), []
    for state in {digest(recording, state): state for state in states}.values():
        materializer.apply(state)
        trees.append(tree(place))
    return trees


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_real_kill_leaves_is_a_state_of_the_model(
    recipe: str, client: Client, tmp_path: Path
) -> None:
    record = str(tmp_path / "record")
    result = live(client, tmp_path / "whole", recipe, {"at": 0}, record=record)
    assert result.went_well, result.output
    calls = result.of(RunResult).faults[0].log
    recording = Recording.read(tmp_path / "record")
    states = list(MODELS["kill"].states(recording, random.Random(0), 100_000))  # noqa: S311
    legal = materialized(recording, states, tmp_path / "laid-out")
    assert tree(tmp_path / "whole" / "root") in legal
    seen: list[Any] = []
    for at in random.Random(1).sample(range(1, len(calls) + 1), KILLS):  # noqa: S311
        for moment in ("before", "half", "after"):
            place = tmp_path / f"{at}-{moment}"
            result = live(client, place, recipe, {"at": at, "error": "kill", "moment": moment})
            assert result.exit_kind is ExitKind.KILLED
            found = tree(place / "root")
            assert found in legal, f"{moment} call {calls[at - 1]}"
            seen += [found] if found not in seen else []
    assert len(seen) > KILLS // 2


def test_a_state_that_no_kill_leaves_is_told_apart(client: Client, tmp_path: Path) -> None:
    recipe = "torch-save-inplace"
    live(client, tmp_path / "whole", recipe, {"at": 0}, record=str(tmp_path / "record"))
    recording = Recording.read(tmp_path / "record")
    states = list(MODELS["kill"].states(recording, random.Random(0), 100_000))  # noqa: S311
    legal = materialized(recording, states, tmp_path / "laid-out")
    first = next(op for op in recording.operations if op.kind is Kind.WRITE)
    file = tmp_path / "whole" / "root" / first.path
    os.truncate(file, first.size // 2 + 1)  # inside a page
    assert tree(tmp_path / "whole" / "root") not in legal


def test_a_kill_from_outside_cuts_a_write_at_a_page(tmp_path: Path) -> None:
    """Nobody watches this writer: the kernel itself decides where its write ends."""
    size, cuts = 128 << 20, []
    data = memoryview(os.urandom(1 << 20) * (size >> 20))
    for number in range(10):
        path = tmp_path / str(number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, b"x" * 1000)
        pid = os.fork()
        if pid == 0:
            os.write(descriptor, data)
            os._exit(0)
        while os.fstat(descriptor).st_size < (number + 1) << 20 and not os.waitid(
            os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        cuts.append(os.fstat(descriptor).st_size)
        os.close(descriptor)
        path.unlink()
    inside = [cut for cut in cuts if cut < size + 1000]
    if not inside:
        pytest.skip(f"no kill came before its write had ended: {cuts}")
    assert [cut % 4096 for cut in inside] == [0] * len(inside)
