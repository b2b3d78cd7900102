"""The catalogue, the checks and the mutants belong together: none without the others."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from ckpt_conformance.contract import catalogue
from ckpt_conformance.contract.catalogue import CatalogueError, load_catalogue
from ckpt_conformance.contract.references import load_incidents, load_requirements
from ckpt_conformance.mutants import all_mutants
from ckpt_conformance.report import docs

ROOT = Path(__file__).parents[2]
INVARIANTS = load_catalogue().invariants
ENTRY: dict[str, object] = {
    "statement": "It holds.",
    "why": "So.",
    "remedy": "Hold it.",
    "basis": "contract",
    "profiles": ["smoke"],
}


def checks() -> dict[str, list[ast.FunctionDef]]:
    """Map each invariant id to the checks that name it, from the suites' source."""
    found: dict[str, list[ast.FunctionDef]] = defaultdict(list)
    for path in sorted((ROOT / "suites").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "check":
                        argument = mark.args[0]
                        assert isinstance(argument, ast.Constant)
                        found[str(argument.value)].append(node)
    return found


CHECKS = checks()


def test_there_are_at_least_sixty_invariants() -> None:
    assert len(INVARIANTS) >= 60


def test_each_invariant_has_a_check_and_each_check_an_invariant() -> None:
    assert sorted(INVARIANTS) == sorted(CHECKS)


@pytest.mark.parametrize("name", sorted(INVARIANTS))
def test_each_invariant_says_what_and_why(name: str) -> None:
    entry = INVARIANTS[name]
    assert re.fullmatch(r"CKC-[A-Z]{4}-\d{3}", name)
    assert len(entry.statement) > 20
    assert len(entry.why) > 20
    assert 20 < len(entry.remedy) <= 160
    assert entry.remedy.endswith(".")
    assert ". " not in entry.remedy, "one sentence"
    assert entry.profiles
    assert set(entry.incidents) <= load_incidents().incident.keys()
    assert set(entry.requirements) <= load_requirements().requirement.keys()


@pytest.mark.parametrize("name", sorted(INVARIANTS))
def test_each_invariant_has_a_mutant_of_its_own(name: str) -> None:
    """A mutant violates it and no other invariant of its family: each check bites."""
    family = INVARIANTS[name].family
    alone = [
        info.id
        for info in all_mutants().values()
        if [v for v in info.violates if v.split("-")[1] == family] == [name]
    ]
    assert alone, f"{name}: no mutant violates it and nothing else of {family}"


def test_no_remedy_is_given_twice() -> None:
    remedies = [entry.remedy for entry in INVARIANTS.values()]
    assert sorted(set(remedies)) == sorted(remedies)


def test_there_are_at_least_sixty_mutants() -> None:
    assert len(all_mutants()) >= 60


@pytest.mark.parametrize("name", sorted(all_mutants()))
def test_each_mutant_names_its_bug_and_known_ids(name: str) -> None:
    info = all_mutants()[name]
    assert info.bug in load_incidents().incident
    assert re.fullmatch(r"https://github.com/[\w.-]+/[\w.-]+/issues/\d+", info.url)
    assert info.violates
    assert info.violates <= set(INVARIANTS)
    assert len(info.change) > 10


@pytest.mark.parametrize(("name", "node"), [(n, c) for n, cs in sorted(CHECKS.items()) for c in cs])
def test_each_check_says_why_and_how(name: str, node: ast.FunctionDef) -> None:
    text = ast.get_docstring(node) or ""
    assert "\n\nWhy: " in text, f"{name} {node.name}: the docstring lacks 'Why:'"
    assert "\nHow: " in text, f"{name} {node.name}: the docstring lacks 'How:'"
    assert len(text.split("\n")[0]) > 20


def test_the_document_is_made_from_the_catalogue() -> None:
    assert (ROOT / "docs" / "invariants.md").read_text() == docs.invariants(load_catalogue()), (
        "run: make docs"
    )


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(CatalogueError, match="catalogue 99 does not exist"):
        load_catalogue(99)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"incidnts": ["A01"]}, "an invariant has no incidnts"),
        ({"since": "one"}, "Expected `int`, got `str`"),
        ({"profiles": ["smok"]}, "one of these is not known: profile"),
        ({"remedy": 1}, "Expected `str`, got `int`"),
    ],
)
def test_a_mistake_in_an_entry_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(CatalogueError, match=re.escape(message)):
        catalogue._invariant("CKC-SMOK-001", {**ENTRY, **change})


@pytest.mark.parametrize("name", ["statement", "why", "remedy", "basis", "profiles"])
def test_an_entry_that_lacks_a_field_is_refused(name: str) -> None:
    entry = {key: value for key, value in ENTRY.items() if key != name}
    message = f"CKC-SMOK-001: Object missing required field `{name}`"
    with pytest.raises(CatalogueError, match=re.escape(message)):
        catalogue._invariant("CKC-SMOK-001", entry)
