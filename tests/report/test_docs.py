"""The documents that `make docs` makes are those of the data, the code and the tests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.report import docs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("documents")  # they share the documents, which are made once
NAMES = (
    "generated-mutants.md",
    "incidents.md",
    "invariants.md",
    "requirements.md",
    "torch-versions.md",
)


@pytest.fixture(scope="module")
def documents(repository: Path) -> Mapping[str, str]:
    return docs.documents(repository)


@pytest.mark.parametrize("name", NAMES)
def test_a_document_is_up_to_date(
    name: str, repository: Path, documents: Mapping[str, str]
) -> None:
    assert (repository / "docs" / name).read_text(encoding="utf-8") == documents[name], (
        "run: make docs"
    )


def test_every_link_between_the_documents_leads_to_a_heading(
    documents: Mapping[str, str],
) -> None:
    assert set(documents) == set(NAMES)
    headings = {
        f"{name}#{heading.lower()}"
        for name, text in documents.items()
        for heading in re.findall(r"^### (\S+)$", text, re.MULTILINE)
    }
    links = {
        link for text in documents.values() for link in re.findall(r"\]\((\w+\.md#[^)]+)\)", text)
    }
    assert len(links) > 200
    assert links <= headings


def test_a_requirement_shows_its_checks_and_its_tests(documents: Mapping[str, str]) -> None:
    name = "P041"
    text = documents["requirements.md"].partition(f"### {name}\n")[2].partition("\n### ")[0]
    assert "[CKC-RANK-001](invariants.md#ckc-rank-001)" in text
    assert "- `suites/test_rank_faults.py::" in text


def test_a_mutant_of_another_thread_names_it(documents: Mapping[str, str]) -> None:
    text = documents["incidents.md"].partition("### B10\n")[2].partition("\n### ")[0]
    assert "- thread: [nvidia-cosmos/cosmos-rl#232]" in text
    assert "`B10`" in text
    assert "`B10-steps` (from [isaac-sim/IsaacLab#3933](https://github.com/" in text


def test_the_files_are_written_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def documents(root: Path) -> Mapping[str, str]:
        return {"a.md": f"of {root.name}\n"}

    monkeypatch.setattr("sys.argv", ["docs", str(tmp_path)])
    monkeypatch.setattr(docs, "documents", documents)
    docs.main()
    assert (tmp_path / "a.md").read_text() == f"of {tmp_path.parent.name}\n"
