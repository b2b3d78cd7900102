"""Messages between the harness and its children: checked on both sides, and nothing is lost."""

from __future__ import annotations

import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_conformance.harness import messages
from ckpt_conformance.harness.child import RESULTS, Child
from ckpt_conformance.harness.messages import (
    AnyOp,
    AnyResult,
    Arrived,
    Error,
    Fault,
    JobSpec,
    Load,
    MessageError,
    Program,
    Report,
    Run,
    RunResult,
    Save,
    Steps,
    StepsResult,
)

if typing.TYPE_CHECKING:
    import msgspec

OPS: tuple[type[messages.Op], ...] = typing.get_args(AnyOp)
KINDS: tuple[type[messages.Result], ...] = typing.get_args(AnyResult)


def program(*ops: AnyOp) -> Program:
    files = {"journal": "j", "result": "r", "output": "o"}
    return Program(
        adapter="reference", root="/run", job=JobSpec(kind="plain", seed=1), ops=ops, **files
    )


def tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def test_a_program_comes_back_as_it_was_sent() -> None:
    fault = Fault(injector="a:B", args={"at": 2, "only": ["write"]}, ranks=(1,))
    sent = program(Run(until=2, save_at=(2,), resume="/x", faults=(fault,)), Load(step=4), Steps())
    assert messages.decode(messages.encode(sent), Program) == sent


def test_step_0_is_no_default() -> None:
    sent = program(Run(resume=0), Load(step=0), Save(step=0))
    came = messages.decode(messages.encode(sent), Program).ops
    assert isinstance(came[0], Run)
    assert came[0].resume is not False
    assert came == sent.ops


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"adapter": None}, r"Expected `str`, got `null` - at `\$.adapter`"),
        ({"deadlin": 1}, "unknown field `deadlin`"),
        ({"ops": [{"op": "trian"}]}, "Invalid value 'trian'"),
        ({"ops": [{"op": "train", "n": "4"}]}, r"Expected `int`, got `str` - at `\$.ops\[0\].n`"),
        ({"ops": [{"op": "run", "save_atr": [2]}]}, "unknown field `save_atr`"),
    ],
)
def test_what_is_no_program_is_refused_with_its_place(change: dict[str, object], said: str) -> None:
    plain = json.loads(messages.encode(program())) | change
    with pytest.raises(MessageError, match=said):
        messages.decode(json.dumps(plain), Program)


@pytest.mark.parametrize("cut", [0, 1, -1])
def test_what_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(MessageError, match="no Program"):
        messages.decode(messages.encode(program())[:cut], Program)


def test_every_operation_has_a_result_and_a_method() -> None:
    """An operation of another name would be an AttributeError in a child."""
    names = {tag(kind) for kind in OPS}
    assert names == {tag(kind) for kind in KINDS} == set(RESULTS)
    assert all(hasattr(Child, f"op_{name}") for name in names)


@pytest.mark.parametrize("kind", KINDS, ids=tag)
def test_a_result_that_was_not_reached_is_empty(kind: type[messages.Result]) -> None:
    """So a check that asks for it needs no case of its own."""
    assert kind().error is None
    plain = json.loads(messages.encode(kind()))
    assert plain.pop("op") == tag(kind)
    assert not any(plain.values())


def test_steps_are_numbers_on_both_sides() -> None:
    leaves: messages.Leaves = {"model": {"weight": "abc"}}
    sent = Report(results=(RunResult(arrived=Arrived(step=2), states={2: leaves}, step=2),))
    came = messages.decode(messages.encode(sent), Report)
    assert came == sent


@given(st.text(alphabet=st.characters()), st.floats())
def test_any_text_and_any_number_arrive(text: str, number: float) -> None:
    """File names may be no UTF-8, a manager may give NaN: neither may cost a verdict."""
    sent = Report(
        results=(
            StepsResult(error=Error(type="E", message=text)),
            messages.CallResult(value={text: number}),
        )
    )
    first, second = messages.decode(messages.encode(sent), Report).results
    assert first.error is not None
    assert first.error.message == text
    assert isinstance(second, messages.CallResult)
    assert repr(second.value) == repr({text: number})


def test_what_has_no_plain_form_is_told_as_text() -> None:
    sent = Report(results=(messages.ProbeResult(value=[object]),))
    (came,) = messages.decode(messages.encode(sent), Report).results
    assert isinstance(came, messages.ProbeResult)
    assert came.value == ["<class 'object'>"]


def test_what_an_operation_names_is_known_before_it_runs() -> None:
    """The server imports it, so that no child pays for it."""
    fault = Fault(injector="ckpt_conformance.fault_injectors.patched_calls:FSYNC")
    assert messages.named(Save(faults=(fault,))) == [fault.injector]
    assert messages.named(messages.Probe(probe="a:b")) == ["a:b"]
    assert messages.named(Steps()) == []
