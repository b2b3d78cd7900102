"""The gate that background uploads pass."""

from __future__ import annotations

import threading

import pytest

from ckpt_conformance.harness.gate import AWAITED, Gate


class Upload(threading.Thread):
    """An upload of one file, which waits at a shut gate."""

    def __init__(self, gate: Gate) -> None:
        """Begin it, and wait until it is at the gate."""
        super().__init__(daemon=True)
        self.gate, self.failed = gate, False
        self.start()
        assert gate.wait_for_upload()

    def run(self) -> None:
        try:
            self.gate.pass_through("file")
        except OSError:
            self.failed = True


def test_a_failing_gate_lets_some_files_pass() -> None:
    gate = Gate()
    gate.set("fail", after=1)
    gate.pass_through("first")
    with pytest.raises(OSError, match="injected upload failure"):
        gate.pass_through("second")
    assert gate.wait_for_upload()


def test_a_gate_may_fail_for_the_files_of_one_step_alone() -> None:
    gate = Gate()
    gate.set("fail", only=4)
    for other in ("meta_000014.json", "latest", "0badcafe4d4e5f60.bin"):
        gate.pass_through(other)
    with pytest.raises(OSError, match="injected upload failure"):
        gate.pass_through("meta_000004.json")
    assert gate.failed == 1
    assert gate.wait_for_upload(only=14)
    assert gate.set("open") == 4
    gate.pass_through("meta_000004.json")
    assert gate.failed == 0


def test_a_shut_gate_holds_until_it_opens() -> None:
    gate = Gate()
    gate.set("shut")
    upload = Upload(gate)
    assert upload.is_alive()
    gate.set("open")
    upload.join()
    assert not upload.failed


# Who holds the condition keeps those that wait from seeing what lies between two of its calls. That
# is what happens by chance where a thread that was woken is late.


@pytest.mark.parametrize(
    ("then", "fails"), [(("open", "shut"), False), (("fail", "open"), True), (("fail",), True)]
)
def test_a_file_that_waits_meets_what_the_gate_is_set_to_next(
    then: tuple[str, ...], *, fails: bool
) -> None:
    gate = Gate()
    gate.set("shut")
    upload = Upload(gate)
    with gate._condition:
        for state in then:
            gate.set(state)
    upload.join(AWAITED)
    assert not upload.is_alive()
    assert upload.failed == fails
    assert gate.standing == 0


def test_a_file_that_comes_as_another_is_let_pass_does_not_hold_it() -> None:
    gate = Gate()
    gate.set("shut")
    first = Upload(gate)

    def let_pass_and_come() -> None:
        with gate._condition:  # until the second one waits
            gate.let_pass()
            gate.pass_through("second")

    second = threading.Thread(target=let_pass_and_come, daemon=True)
    second.start()
    first.join(AWAITED)
    assert not first.is_alive()
    assert gate.standing == 1
    gate.set("open")
    second.join()
    assert gate.standing == 0


def test_a_gate_counts_what_came_since_it_was_set() -> None:
    gate = Gate()
    gate.set("open", after=1)
    gate.pass_through("free")
    gate.pass_through("open")
    assert gate.set("open") == 2
    assert gate.set("open") == 0
