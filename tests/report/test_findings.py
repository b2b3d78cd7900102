"""What a terminal shows first: the worst, each blame once, and a page for several managers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from ckpt_conformance.contract.catalogue import Catalogue, Invariant
from ckpt_conformance.contract.registry import AdapterInfo
from ckpt_conformance.contract.verdicts import Cause, CheckOutcome, Verdict
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.report import certificate, environment, files, findings
from ckpt_conformance.report.result import decode, encode

if TYPE_CHECKING:
    from ckpt_conformance.report.result import Result

INFO = AdapterInfo("toy", "1", "manager", [], ["model"], "lib 1", "r", "recipe", "")
MUSTS = ("CKC-ATOM-001", "CKC-ATOM-002", "CKC-COMP-001", "CKC-IOER-001")
SHOULDS = ("CKC-CORR-001", "CKC-DURA-001", "CKC-DURA-004", "CKC-SECU-003", "CKC-SIDE-005")


def invariant(name: str, basis: str) -> Invariant:
    remedy = f"Keep {name}."
    return Invariant(name, f"{name} holds.", "Because.", remedy, basis, ("crash",), ("A01",))


CATALOGUE = Catalogue(
    1,
    {name: invariant(name, "contract") for name in MUSTS}
    | {name: invariant(name, "practice") for name in SHOULDS},
    {},
)


def build(**told: tuple[str, dict[str, Any]]) -> Result:
    """Build a result: id with `_` -> verdict and evidence; all other invariants are kept."""
    given = {name.replace("_", "-"): outcome for name, outcome in told.items()}
    given |= {name: ("NOT_MET", given[name][1]) for name in SHOULDS if name in given}
    outcomes = [
        CheckOutcome(
            *("toy", name, "suite::check", Verdict(verdict), f"{name} is broken"),
            evidence=evidence,
            cause=Cause.HARNESS if verdict == "UNKNOWN" else None,
        )
        for name in CATALOGUE.invariants
        for verdict, evidence in [given.get(name, ("PASS", {}))]
    ]
    facts = certificate.RunFacts(
        options=SessionOptions(adapters=("toy",)),
        catalogue=CATALOGUE,
        profiles={"crash": "killed"},
        environment=environment.describe_environment(Path("/")),
        commit=None,
        interrupted=False,
    )
    made = encode(certificate.build_result(INFO, outcomes, facts))
    return decode(json.loads(json.dumps(made)))


def crash(outcome: str, blame: str) -> tuple[str, dict[str, Any]]:
    """Return a violation of a crash state, with more evidence than is shown."""
    rest = {f"detail {number}": number for number in range(9)}
    return "VIOLATION", {**rest, "outcome": outcome, "blame": blame}


@pytest.fixture
def result() -> Result:
    return build(
        CKC_ATOM_001=crash("LOST_STEP", "the old is removed"),
        CKC_ATOM_002=crash("LOST_ALL", "the old is removed"),
        CKC_COMP_001=("UNKNOWN", {}),
        CKC_IOER_001=("VIOLATION", {"outcome": "SILENT_WRONG"}),
        CKC_CORR_001=("VIOLATION", {"first": {"outcome": "SILENT_WRONG"}}),
        CKC_DURA_001=crash("LOST_ALL", "the old is removed"),
        CKC_DURA_004=crash("LOST_STEP", "never synced"),
        CKC_SECU_003=("VIOLATION", {}),
        CKC_SIDE_005=("VIOLATION", {}),
    )


def told(found: list[findings.Finding]) -> list[tuple[str, str]]:
    return [(one.name.removeprefix("CKC-"), one.like.removeprefix("CKC-")) for one in found]


def test_a_blame_is_told_once_and_three_shoulds_show_their_evidence(result: Result) -> None:
    """Of the SHOULDs those with a new blame, the worst outcome first."""
    assert told(findings.findings(result)) == [
        ("ATOM-001", ""),
        ("ATOM-002", "ATOM-001"),
        ("IOER-001", ""),
        ("COMP-001", ""),
        ("CORR-001", ""),
        ("DURA-004", ""),
        ("SECU-003", ""),
    ]


def test_where_the_first_is_known_the_next_one_tells_the_blame(result: Result) -> None:
    assert told(findings.findings(result, {"CKC-ATOM-001"}))[0] == ("ATOM-002", "")


def test_few_shoulds_are_filled_up_with_those_of_a_blame_that_was_told() -> None:
    result = build(CKC_ATOM_001=crash("LOST_ALL", "same"), CKC_DURA_001=crash("LOST_ALL", "same"))
    assert told(findings.findings(result)) == [("ATOM-001", ""), ("DURA-001", "ATOM-001")]


def test_the_brief_list_begins_with_the_worst_must(result: Result) -> None:
    names = [name for name, _ in told(findings.briefly(result))]
    assert names == ["IOER-001", "ATOM-001", "ATOM-002", "COMP-001"]


def test_of_many_unknown_that_one_invariant_explains_two_are_told() -> None:
    """A manager whose every load fails has dozens: they fit on no page."""
    result = build(**{name.replace("-", "_"): ("UNKNOWN", {}) for name in MUSTS})
    own = {name: replace(result.invariants[name], cause=Cause.CONTROL) for name in MUSTS}
    explained = {name: replace(one, see="CKC-SMOK-001") for name, one in own.items()}
    result = replace(result, invariants={**result.invariants, **explained})
    assert told(findings.findings(result)) == [("ATOM-001", ""), ("ATOM-002", "")]
    assert len(findings.briefly(result)) == len(MUSTS)
    text = files.render_text(
        "result.txt.j2", 100, result=result, known={}, asides={}, folder="reports"
    )
    assert "? 2 more, see CKC-SMOK-001" in text
    assert "CKC-COMP-001, CKC-IOER-001" in text
    result = replace(result, invariants={**result.invariants, **own})  # nothing explains them
    assert len(findings.findings(result)) == len(MUSTS)


def test_the_blame_is_the_first_line_of_evidence(result: Result) -> None:
    text = files.render_text(
        "result.txt.j2", 100, result=result, known={}, asides={}, folder="reports"
    )
    of_first = text[text.index("✗ CKC-ATOM-001") : text.index("✗ CKC-ATOM-002")].splitlines()
    evidence = [line.strip() for line in of_first if line.startswith(" " * 6)]
    assert evidence[:2] == ["blame: the old is removed", "outcome: LOST_STEP"]
    assert evidence[-1] == "… 5 more in result.json"
    assert text.count("blame: the old is removed") == 1
    assert text.count("same blame as CKC-ATOM-001") == 1
    assert "○ CKC-CORR-001" in text
    assert '{"outcome": "SILENT_WRONG"}' in text


def test_several_managers_take_a_few_lines_each(result: Result) -> None:
    text = files.render_text(
        "brief.txt.j2", 10_000, result=result, known={}, asides={}, folder="reports/toy"
    )
    lines = text.strip().splitlines()
    assert lines[0].startswith("✗ toy: Not certified")
    assert lines[2] == "  ✗ CKC-IOER-001 CKC-IOER-001 is broken"
    assert lines[3].startswith("      fix: ")
    assert lines[4].startswith("      reproduce: ckpt-conformance certify toy --only CKC-IOER-001 ")
    assert "  ✗ CKC-ATOM-002 same blame as CKC-ATOM-001" in lines
    assert lines[-1] == "  report: reports/toy/report.html"
    told = [line for line in lines if line.startswith(("  ✗", "  ?"))]
    assert len(told) == files.BRIEFLY
    assert text.count("reproduce: ") == 1


def test_what_repairs_it_is_told_whole_where_several_managers_are_certified(
    result: Result,
) -> None:
    told = [
        files.render_text(
            "brief.txt.j2", width, result=result, known={}, asides={}, folder="reports/toy"
        )
        for width in (10_000, 40)
    ]
    wide, narrow = told
    fix = wide.splitlines()[3].strip()
    assert fix.startswith("fix: ")
    assert fix in " ".join(narrow.split())
    assert max(len(line) for line in narrow.splitlines() if "fix: " in line) <= 40
