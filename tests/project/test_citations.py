"""Every id that is cited resolves inside of the repository, and nothing refers to what it lacks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.catalogue import load_catalogue
from ckpt_conformance.contract.references import load_incidents, load_requirements
from ckpt_conformance.report.citations import BUG, checked_by, cited_by, ids_in

if TYPE_CHECKING:
    from pathlib import Path

INCIDENTS = load_incidents()
REQUIREMENTS = load_requirements()
KNOWN = {*INCIDENTS.incident, *REQUIREMENTS.requirement}
CITING = {".py", ".md", ".toml", ".ini"}

# Documents of the authors that are not in the repository. Brackets keep this file itself clean.
PRIVATE = re.compile(
    r"\bDES[I]GN\b|\b[Ii]ss[u]e \d|\bbug[s]\.md|CHECK[L]IST|FIEL[D]\.md|MANAGER[S]\.md|ANCH[O]RS"
)


@pytest.fixture(scope="module")
def texts(repository: Path, committed: list[Path]) -> dict[Path, str]:
    """Read every file, links aside."""
    return {
        path: (repository / path).read_bytes().decode("utf-8", errors="replace")
        for path in committed
        if not (repository / path).is_symlink()
    }


def test_every_cited_id_resolves(texts: dict[Path, str]) -> None:
    """An id that is nowhere explained says nothing to a reader."""
    unknown = {
        f"{path}: {name}"
        for path, text in texts.items()
        if path.suffix in CITING or path.name == "Makefile"
        for name in ids_in(text)
        if name not in KNOWN
    }
    assert not unknown, sorted(unknown)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("(A02, checklist M044; KX1)", {"A02", "M044", "KX1"}),
        ("M009-M012, A13 to A14", {"M009", "M010", "M011", "M012", "A13", "A14"}),
        ("the mutant B10-dcp", {"B10"}),
        ("`MX10` of [I01](x.md#i01)", {"MX10", "I01"}),
        ("A99", {"A99"}),
        ("M999", {"M999"}),
        (
            "noqa: S603, D101, H200, UTF-16, 0xA02, CKC-ATOM-001, T01, A1, M4, x.A02, /A02",
            set[str](),
        ),
        ('{"F16": 16, "A02": 1}', set[str]()),
    ],
)
def test_what_is_a_citation(text: str, ids: set[str]) -> None:
    assert ids_in(text) == ids


def test_no_requirement_is_left_that_nothing_cites(texts: dict[Path, str]) -> None:
    cited = {name for path, text in texts.items() if path.suffix == ".py" for name in ids_in(text)}
    cited |= {name for entry in load_catalogue().invariants.values() for name in entry.requirements}
    assert REQUIREMENTS.requirement.keys() - cited == set()


@pytest.mark.parametrize("name", sorted(INCIDENTS.incident))
def test_each_bug_is_told_in_short_and_has_a_thread(name: str) -> None:
    bug = INCIDENTS.incident[name]
    assert BUG.fullmatch(name)
    assert name[0] in INCIDENTS.area
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", bug.thread)
    assert 20 < len(bug.what) <= 220
    assert bug.what.endswith(".")
    assert 1 <= len(re.findall(r"[.;](?: |$)", bug.what)) <= 3


@pytest.mark.parametrize("name", sorted(REQUIREMENTS.requirement))
def test_each_requirement_is_one_sentence_of_a_known_source(name: str) -> None:
    text = REQUIREMENTS.requirement[name]
    assert name[0] in REQUIREMENTS.source
    assert 20 < len(text) <= 220
    assert re.findall(r"\.(?: |$)", text) == ["."]


def test_a_citation_is_found_in_its_test(tmp_path: Path) -> None:
    """With its decorators; what stands outside of a test counts for the file."""
    folder = tmp_path / "suites"
    folder.mkdir()
    source = '''"""Of A01."""


@check("CKC-ATOM-001")
@mark("x")  # A02
def test_it() -> None:
    """Of KX1 and A02."""


def helper() -> None:
    """Of M044."""
'''
    (folder / "test_x.py").write_text(source)
    assert cited_by(tmp_path, ["suites"]) == {
        "A01": ["suites/test_x.py"],
        "A02": ["suites/test_x.py::test_it"],
        "KX1": ["suites/test_x.py::test_it"],
        "M044": ["suites/test_x.py"],
    }
    assert checked_by(tmp_path) == {"CKC-ATOM-001": ["suites/test_x.py::test_it"]}


def test_nothing_refers_to_what_outsiders_cannot_open(texts: dict[Path, str]) -> None:
    wrong = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not wrong, "say the reason in words, or name a public address:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "missing"),  # the samples lack a letter, so that the test above finds none here
    [
        ("(DES_GN 4)", "I"),
        ("I_sue 2", "s"),
        ("the tracker's i_sue 12", "s"),
        ("see _ugs.md A04", "b"),
        ("the CHECK_IST", "L"),
    ],
)
def test_a_private_reference_is_recognized(text: str, missing: str) -> None:
    """The control of the test above."""
    assert PRIVATE.search(text.replace("_", missing))
    assert not PRIVATE.search(
        "designed: https://github.com/a/b/issues/12, an issue of 2020; 2 bugs."
    )
