"""What is known of generated mutants that survive: the file, the page, and the table."""

from __future__ import annotations

import pytest

from ckpt_conformance.contract.registry import AdapterError
from ckpt_conformance.mutants import generated
from ckpt_conformance.report import survivors
from ckpt_conformance.report.generated import Fate, Judged, table_of
from ckpt_conformance.report.survivors import Basis, Class, Known, Survivor


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Name three mutants; here, and not on import: to make all takes seconds."""
    return list(generated.all_generated())[:3]


def test_the_file_names_mutants_that_are_made() -> None:
    for one in survivors.known().survivor:
        assert one.mutant in generated.all_generated(), one.mutant
        assert one.why.strip()


def test_few_are_called_equivalent_by_reading_alone() -> None:
    known = survivors.known()
    judged = sum(sample.judged for sample in known.sample)
    read = [
        one for one in known.survivor if one.kind is Class.EQUIVALENT and one.by is Basis.READING
    ]
    assert len(read) <= survivors.MOST_BY_READING * judged


def test_the_page_shows_each_change_and_what_is_said_of_it(names: list[str]) -> None:
    mutant = generated.all_generated()[names[0]]
    found = Known(survivor=[Survivor(mutant=names[0], kind=Class.MISSING, why="Because.")])
    text = survivors.page(found)
    assert f"### {names[0]}\n" in text
    assert f"- {mutant.before}\n+ {mutant.after}\n" in text
    assert "Because. (by reading; not confirmed yet)" in text
    gone = Known(survivor=[Survivor(mutant="saving.f:swap:0", kind=Class.OUTSIDE, why="x")])
    with pytest.raises(AdapterError, match="no such change"):
        survivors.page(gone)


def test_a_table_says_of_which_nobody_has_said_why(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {names[0]: Survivor(mutant=names[0], kind=Class.EQUIVALENT, why="Because.")}
    monkeypatch.setattr(survivors, "by_name", lambda: said)
    judged = [
        Judged(mutant=names[0], fate=Fate.SURVIVED, tried=4, cpu=1.5),
        Judged(mutant=names[1], fate=Fate.UNENTERED),
        Judged(mutant=names[2], fate=Fate.MUST, check="suite::check", tried=1, cpu=0.5),
    ]
    table = table_of(judged, generated.all_generated())
    assert {row.mutant for row in table.left} == set(names[:2])
    assert [row.mutant for row in table.unread] == [names[1]]
    assert (table.checks, table.cpu, table.killers) == (5, 2.0, {"suite::check": 1})
    assert sum(table.fates.values()) == table.judged == len(judged)
