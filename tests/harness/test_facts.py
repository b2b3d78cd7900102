"""The facts of adapters come from the fork server; what can't be made is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract import registry
from ckpt_conformance.harness import facts

if TYPE_CHECKING:
    from pathlib import Path

SILENT = """
class Made:
    name, version, shape, isolation = "silent", "1", "manager", "fork"
    capabilities, holds = frozenset(), frozenset()
    open = None
    @property
    def library(self):
        raise LookupError("no such distribution")
"""
MISTAKEN = """
from ckpt_conformance.contract import AdapterBase
def make():
    return AdapterBase(name="mistaken", version="1", capabilities=frozenset({"STEPS"}))
"""
MODULES = {
    "exploding": ("raise RuntimeError('at import')", "cannot be made: RuntimeError: at import"),
    "leaving": ("import os; os._exit(3)", "its import ends the process (exit status 3)"),
    "silent": (SILENT, "does not say what it is: no such distribution"),
    "mistaken": (MISTAKEN, "capabilities has 'STEPS'; it may be 'async', 'cold_start'"),
    "lacking": ("make = dict", "dict lacks 'name'"),
}


def test_facts_are_read_in_a_life() -> None:
    with facts.serve(("torch-save-inplace",), ("torch-save-inplace",)) as (socket, infos):
        assert socket
    assert infos == {"torch-save-inplace": registry.describe("torch-save-inplace")}


@pytest.mark.parametrize("name", MODULES)
def test_an_adapter_that_cannot_be_made_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, told = MODULES[name]
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = f"{name}:{'Made' if name == 'silent' else 'make'}"
    with pytest.raises(registry.AdapterError) as refused, facts.serve((made,), (made,)):
        pass
    assert told in str(refused.value)
    assert name in str(refused.value)


def test_an_unknown_name_is_refused_before_anything_starts() -> None:
    with (
        pytest.raises(registry.AdapterError, match="did you mean reference"),
        facts.serve(("refrence",), ()),
    ):
        pass
