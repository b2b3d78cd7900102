"""Which mutants only put a function in the place of a function of the reference manager."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import broken_managers
import pytest

from ckpt_conformance.contract import registry
from ckpt_conformance.contract.registry import AdapterError
from ckpt_conformance.mutants import MutantInfo, all_mutants, overrides
from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.loading import OpenCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

HERE = "ckpt_conformance.reference_impl"


BEGIN = """
from functools import partial
from typing import TYPE_CHECKING
from broken_managers import Method
class Manager: steps = None  # the module is imported: it stands for the reference
def register(*_): return lambda kind: kind
patch = register
class Kind: pass
def same(kind): return kind
"""


def info(broken: type[Any]) -> MutantInfo:
    return MutantInfo("X", "X", "https://x.test/1", "", "reference", frozenset(), broken)


@pytest.mark.parametrize("broken", [broken_managers.Method, broken_managers.Below])
def test_functions_in_the_place_of_functions_are_named(broken: type[Any]) -> None:
    changed = overrides.overridden(info(broken))
    assert changed is not None
    names = {name.rpartition(".")[2] for name in changed}
    assert names == {"restore_rng"} | ({"steps"} if broken is broken_managers.Below else set())
    assert changed <= set(overrides.functions().names)


@pytest.mark.parametrize(
    "name",
    ["NewMethod", "Constant", "Constructor", "AttributeHook", "AsProperty", "Partial", "Generator"],
)
def test_a_mutant_that_changes_anything_else_runs_whole(name: str) -> None:
    assert overrides.overridden(info(getattr(broken_managers, name))) is None


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("import os\nNAMES = {'a'}\ndef function(): os.x = 1\nclass Kind:\n    y = 1", True),
        ("LIMIT = partial(int)", True),
        ("from ckpt_conformance.mutants import unchanged", True),
        ("from ckpt_conformance.mutants import damage", False),  # not plain itself
        ("def mutant(*_, **__): return lambda kind: kind\nmutant('A', url='')(Kind)", False),
        ("if TYPE_CHECKING:\n    import os\nelse:\n    Manager.steps = list", False),
        ("if not TYPE_CHECKING:\n    Manager.steps = list", False),
        ("Manager.steps, LIMIT = list, 3", False),
        ("class Kind:\n    @partial(register, 'steps')\n    def steps(self): return []", False),
        ("def function(x=setattr(Manager, 'steps', list)): return x", False),
        ("class Other(same(Manager)): pass", False),
        ("class Other(metaclass=same(type)): pass", False),
        ("def function(x: register()): return x", False),
        ("import os\nos.x = 1", False),
        ("import os\nos.environ['x'] = 'y'", False),
        ("register()", False),
        ("for name in (): pass", False),
        ("if True:\n    x = 1", False),
        ("import os\nclass Kind:\n    os.x = 1", False),
        ("import os\n@patch(os)\nclass Kind: pass", False),
    ],
)
def test_a_module_that_does_more_than_to_define_runs_whole(
    text: str, *, is_plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"module_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(f"{BEGIN}\n{text}")
    monkeypatch.syspath_prepend(tmp_path)
    broken = type("Broken", (broken_managers.Method,), {})
    broken.__module__ = name
    assert (overrides.overridden(info(broken)) is not None) is is_plain
    sys.modules.pop(name, None)


def test_a_mutant_is_made_as_the_reference_is() -> None:
    """Found by somebody who had only the documentation: each changes more than it overrides."""

    class Meta(type(CheckpointManager)):  # type: ignore[misc]
        def __call__(cls, *given: Any, **named: Any) -> Any:  # noqa: ANN401
            made = super().__call__(*given, **named)
            made.keep_last = 1
            return made

    body = {"restore_rng": broken_managers.Method.restore_rng, "__module__": "broken_managers"}
    of_another_kind = Meta("OfAnotherKind", (CheckpointManager,), body)
    beside = type("Beside", (OpenCheckpoint, CheckpointManager), body)
    in_disguise = type("InDisguise", (CheckpointManager,), body | {"__module__": HERE + ".manager"})
    plain = type("Plain", (CheckpointManager,), body)
    assert overrides.overridden(info(plain))
    assert overrides.overridden(info(in_disguise)) == overrides.overridden(info(plain))
    assert overrides.overridden(info(of_another_kind)) is None
    assert overrides.overridden(info(beside)) is None


def test_a_third_of_the_mutants_only_override_functions() -> None:
    """Of these alone the checks that enter none of the functions need not run."""
    known = [overrides.overridden(each) for each in all_mutants().values()]
    assert sum(one is not None for one in known) > len(known) / 3
    assert all(one for one in known if one is not None), "a mutant that changes nothing"


def test_an_unbroken_manager_declares_what_its_mutants_do() -> None:
    for each in all_mutants().values():
        assert each.broken is not None
        unbroken, broken = registry.get(each.unbroken), registry.get(f"mutant:{each.id}")
        assert unbroken.capabilities == broken.capabilities, each.id
        assert (unbroken.shape, unbroken.holds) == (broken.shape, broken.holds), each.id


def test_an_unknown_unbroken_manager_is_refused() -> None:
    with pytest.raises(AdapterError, match="unknown mutant 'unbroken-other'"):
        registry.get("mutant:unbroken-other")
