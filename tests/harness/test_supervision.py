"""Who runs below a supervisor of system calls, and what it has to see, follows from a program."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_conformance.harness.messages import (
    AnyOp,
    Call,
    Fault,
    JobSpec,
    Probe,
    Program,
    Save,
)
from ckpt_conformance.harness.server import supervision_of
from ckpt_conformance.trace.vector_clocks import Stop

INJECTOR = "ckpt_conformance.fault_injectors.system_call:SystemCall"


def program(*ops: AnyOp, **more: Any) -> Program:  # noqa: ANN401
    files = {"root": "r", "journal": "j", "result": "e", "output": "o"}
    job = JobSpec(kind="cpu", seed=0)
    return Program(adapter="reference", ops=ops, job=job, **files, **more)


def save(injector: str = INJECTOR, **args: Any) -> Save:  # noqa: ANN401
    return Save(faults=(Fault(injector=injector, args=args),))


def probe(**args: Any) -> Probe:  # noqa: ANN401
    return Probe(probe="module:function", args=args)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (program(Save()), False),
        (program(Save(), record="folder"), True),
        (program(stops=(Stop(count=1, makes=("a",)),)), True),
        (program(save(at=1)), True),
        (program(save("other:Fault")), False),
        (program(probe(injector=INJECTOR, what="save")), True),
        (program(Call(method="wait", args=(INJECTOR,))), False),
    ],
)
def test_a_supervisor_is_there_where_something_needs_it(given: Program, *, wanted: bool) -> None:
    assert (supervision_of(given) is not None) == wanted


@pytest.mark.parametrize(
    ("op", "reading"),
    [
        (save(reading=True), True),
        (save(at=1), False),
        (probe(injector=INJECTOR, reading=True), True),
        (probe(injector=INJECTOR, reading=False), False),
    ],
)
def test_reads_are_asked_about_where_a_fault_may_hit_them(op: AnyOp, *, reading: bool) -> None:
    supervision = supervision_of(program(op))
    assert supervision is not None
    assert supervision.reading == reading
