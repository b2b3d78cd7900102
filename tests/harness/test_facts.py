"""The facts of adapters come from the fork server; what can't be made is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract import registry
from ckpt_conformance.harness import client, facts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("facts")  # they share the server below

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


@dataclass(frozen=True)
class Served:
    """A server as `facts.describe` sees it, with the refusals of some adapters only."""

    socket: str
    folder: Path
    refused: dict[str, registry.Refusal]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[client.Server]:
    """Serve all that cannot be made: each was tried in a process of its own."""
    folder = tmp_path_factory.mktemp("modules")
    for name, (source, _) in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with client.Server(tuple(map(made_of, MODULES))) as server:
            yield server


def made_of(name: str) -> str:
    return f"{name}:{'Made' if name == 'silent' else 'make'}"


@pytest.mark.parametrize("name", MODULES)
def test_an_adapter_that_cannot_be_made_is_refused(name: str, served: client.Server) -> None:
    made = (made_of(name),)
    refusals = {one: said for one, said in served.refused.items() if one in made}
    mine: Any = Served(served.socket, served.folder, refusals)
    with pytest.raises(registry.AdapterError) as refused:
        facts.describe(mine, made, made)
    assert MODULES[name][1] in str(refused.value)
    assert name in str(refused.value)


def test_an_unknown_name_is_refused_before_anything_starts() -> None:
    with (
        pytest.raises(registry.AdapterError, match="did you mean reference"),
        facts.serve(("refrence",), ()),
    ):
        pass
