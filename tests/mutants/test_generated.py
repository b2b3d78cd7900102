"""Generated mutants: what is changed, what it is called, and how it comes into a process."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract import registry
from ckpt_conformance.contract.registry import AdapterError
from ckpt_conformance.mutants import generated, overrides
from ckpt_conformance.mutants.generated import operators, placing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.harness.reach import Function

AT_LEAST = 1_000  # mutants of one process
HERE = overrides.REFERENCE


def function_of(text: str) -> Function:
    (node,) = ast.parse(textwrap.dedent(text)).body
    assert isinstance(node, ast.FunctionDef)
    return node


def changes(text: str, operator: str) -> set[str]:
    """Return the bodies that an operator makes of `def f(...)`, in one line each."""
    node = function_of(text)
    return {
        "; ".join(ast.unparse(operators.edited(node, edit)).split("\n    ")[1:])
        for edit in operators.edits(node)
        if edit.operator == operator
    }


@pytest.mark.parametrize(
    ("operator", "body", "expected"),
    [
        ("drop-call", "a(); b()", {"pass; b()", "a(); pass"}),
        ("drop-call", "logger.info('x')", set()),
        ("drop-statement", "self.x = 1; x += 2", {"pass; x += 2", "self.x = 1; pass"}),
        ("drop-statement", "y = 1; x = y", {"y = 1; pass"}),  # x is an argument, y is new
        ("drop-statement", "return x", {"pass"}),
        ("swap", "a(); b(); c = x", {"b(); a(); c = x"}),
        ("swap", "y = a(); b(y)", set()),
        ("swap", "a(); return x", set()),
        ("drop-condition", "return not x and y", {"return not x", "return y", "return x and y"}),
        ("drop-condition", "return a if x else b", {"return a", "return b"}),
        ("drop-condition", "return [y for y in x if y]", {"return [y for y in x if True]"}),
        ("comparison", "return x < y", {"return x <= y"}),
        ("comparison", "return x is None", {"return x is not None"}),
        ("constant", "return 0", {"return 1"}),
        ("constant", "return 4", {"return 3", "return 5"}),
        ("constant", "f(sort=True)", {"f(sort=False)"}),
        ("constant", "return f'm_{x:06d}'", {"return f'm_~{x:06d}'"}),
        ("constant", "raise ValueError('x')", set()),
        ("constant", "return CheckpointDamaged(f'no {x}')", set()),
        ("constant", "x: 'int' = y", set()),
        ("arithmetic", "return x - 1", {"return x + 1"}),
        ("arithmetic", "return [x] + y", set()),
        ("first-bytes", "file.write(x)", {"file.write(x[:16])", "file.write(x[:4096])"}),
        ("first-bytes", "d.update(x)", set()),
        (
            "skip-element",
            "return {y for y in x}",
            {"return {y for y in list(x)[1:]}", "return {y for y in list(x)[:-1]}"},
        ),
    ],
)
def test_an_operator_makes_these_changes(operator: str, body: str, expected: set[str]) -> None:
    assert changes(f"def f(self, x, a, b): {body}", operator) == expected


def test_conditions_are_taken_always_and_never() -> None:
    text = """
    def f(x):
        if x:
            g()
    """
    assert changes(text, "drop-condition") == {"if True:;     g()", "if False:;     g()"}


def test_exception_clauses_catch_less_more_and_nothing() -> None:
    text = """
    def f(x):
        try:
            g()
        except (OSError, ValueError):
            h()
    """
    found = changes(text, "exception")
    clauses = {one.partition("except ")[2].partition(":")[0] for one in found}
    assert clauses == {"(ValueError,)", "(OSError,)", "Exception", ""}
    text = """
    def f(x):
        with suppress(OSError):
            g()
    """
    assert changes(text, "exception") == {"with suppress():;     g()", "g()"}


def test_docstrings_defaults_and_decorators_stay() -> None:
    text = '''
    @cache("x")
    def f(x=1, *, y="z"):
        """Words."""
    '''
    assert not list(operators.edits(function_of(text)))


# ---- all of them ---------------------------------------------------------------------------------


def test_there_are_enough_of_every_kind() -> None:
    every = generated.all_generated().values()
    alone = [one for one in every if not one.spans_ranks]
    assert len(alone) >= AT_LEAST
    counts = Counter(one.operator for one in alone)
    assert set(counts) == set(operators.NAMES)
    assert min(counts.values()) >= 50, counts
    assert {one.module for one in alone} >= {"saving", "loading", "retention", "mirror", "resolve"}
    assert len(set(generated.all_generated())) == len(every)


def test_a_name_outlives_an_edit_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    before = function_of("def f(x):\n    a(x)\n    b(x)\n    a(x)")
    after = function_of("def f(x):\n    new(1)\n    a(x)\n    other = 2\n    b(x)\n    a(x)")

    def names(node: Function) -> set[str]:
        monkeypatch.setattr(generated, "functions_of", lambda _: {f"{HERE}.saving:f": node})
        found = (one for one, _ in generated.mutants_of(f"{HERE}.saving:f"))
        return {one.name for one in found if one.operator == "drop-call"}

    assert len(names(before)) == 3  # the same call twice has two names
    assert names(before) < names(after)


@pytest.fixture(scope="module")
def functions() -> list[tuple[str, Function]]:
    return [
        pair for module in generated.modules() for pair in generated.functions_of(module).items()
    ]


def test_the_order_of_a_set_is_no_difference() -> None:
    """A module that was read from a file of bytecode may have another one, by the hash seed."""
    text = "from types import FunctionType as F\nf = lambda x: x in {'a', 'bc', 'def', 'g', 'hi'}"
    seeds = ("1", "2", "3", "4")
    command = f"{text}\nfrom ckpt_conformance.mutants.generated import placing\n"
    command += "print(placing.signature(f.__code__))"
    words = [sys.executable, "-c", command]
    told = {
        subprocess.run(
            words, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout
        for seed in seeds
    }
    assert len(told) == 1


def test_every_function_is_compiled_as_its_module_compiles_it(
    functions: list[tuple[str, Function]],
) -> None:
    for function, node in functions:
        there = placing.signature(placing.target(function).__code__)
        made = placing.signature(placing.compiled(function, operators.edited(node, None)))
        assert made == there, function
    assert {function for function, _ in functions} <= set(overrides.functions().names)


@pytest.fixture
def restored() -> Iterator[None]:
    """Give functions their own code back: tests of one process share them."""
    codes = {
        function: placing.target(function).__code__
        for module in generated.modules()
        for function in generated.functions_of(module)
    }
    yield
    generated.put_in_place.cache_clear()
    for function, code in codes.items():
        placing.target(function).__code__ = code


def named(place: str, before: str, after: str) -> str:
    """Return the name of the mutant of a function that changes one text into another."""
    found = [
        one.name
        for one in generated.all_generated().values()
        if one.name.startswith(f"{place}:") and (one.before, one.after) == (before, after)
    ]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.usefixtures("restored")
def test_a_change_reaches_every_name_of_a_function(tmp_path: Path) -> None:
    from ckpt_conformance.reference_impl import durable, torch_zip

    name = named("durable.read_exact", "length < 0", "length <= 0")
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    with path.open("rb") as file:
        assert torch_zip.read_exact(file, 0, 0) == b""  # imported from `durable` by name
        generated.put_in_place(name)
        assert torch_zip.read_exact(file, 0, 64) == bytes(64)
        with pytest.raises(durable.CheckpointDamaged):
            torch_zip.read_exact(file, 0, 0)


@pytest.mark.usefixtures("restored")
def test_every_change_comes_into_a_process(functions: list[tuple[str, Function]]) -> None:
    """Each has as many cells as the function has: one that no longer calls `super()`, too."""
    for function, node in functions:
        for _, edit in generated.mutants_of(function):
            placing.put(function, operators.edited(node, edit))


# ---- as adapters ---------------------------------------------------------------------------------


def test_an_adapter_declares_what_its_base_does() -> None:
    name = next(iter(generated.all_generated()))
    for base, unbroken in (
        ("reference", "mutant:unbroken-reference"),
        ("reference-dcp", "mutant:unbroken-reference-dcp"),
        ("reference-trainer", "reference-trainer"),
        ("reference+ranks", "reference"),
        ("reference-dcp+ranks", "reference-dcp"),
    ):
        made, plain = registry.get(f"generated:{name}@{base}"), registry.get(unbroken)
        assert (made.capabilities, made.shape) == (plain.capabilities, plain.shape)
        assert registry.place_of(f"generated:{name}@{base}").startswith("ckpt_conformance.mutants")


@pytest.mark.parametrize(
    "name", ["saving.Saving.publish_flat:swap:000000@reference", "x@reference", "same@x"]
)
def test_an_unknown_change_is_refused(name: str) -> None:
    with pytest.raises(AdapterError, match="cannot be made"):
        registry.get(f"generated:{name}")
