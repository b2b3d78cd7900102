"""The gate that background uploads pass."""

from __future__ import annotations

import threading

import pytest

from ckpt_conformance.harness.gate import Gate


def test_a_failing_gate_lets_some_files_pass() -> None:
    gate = Gate()
    gate.set("fail", after=1)
    gate.pass_through("first")
    with pytest.raises(OSError, match="injected upload failure"):
        gate.pass_through("second")
    assert gate.wait_for_upload()


def test_a_shut_gate_holds_until_it_opens() -> None:
    gate, passed = Gate(), threading.Event()
    gate.set("shut")
    upload = threading.Thread(target=lambda: (gate.pass_through("file"), passed.set()))
    upload.start()
    assert gate.wait_for_upload()
    assert not passed.is_set()
    gate.set("open")
    upload.join()
    assert passed.is_set()


def test_a_gate_counts_what_came_since_it_was_set() -> None:
    gate = Gate()
    gate.set("open", after=1)
    gate.pass_through("free")
    gate.pass_through("open")
    assert gate.set("open") == 2
    assert gate.set("open") == 0
