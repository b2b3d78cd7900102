"""The page about releases of torch says what the recorded results say, and no more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.report import torch_versions
from ckpt_conformance.report.torch_versions import (
    FORMATS,
    Certificate,
    Finding,
    Matrix,
    Note,
    Reading,
    Release,
    outcome,
    page,
)

if TYPE_CHECKING:
    from pathlib import Path

PASS, BAD, NOT_MET = Verdict.PASS, Verdict.VIOLATION, Verdict.NOT_MET
NONE, UNKNOWN = Verdict.NOT_APPLICABLE, Verdict.UNKNOWN
RESULT = {
    "schema": "ckpt-conformance/result/v2",
    "suite": {"version": "0.1.0", "commit": None, "catalogue": 1},
    "created": "2026-11-22T12:00:00+00:00",
    "interrupted": False,
    "environment": {
        "python": "3.11.2",
        "torch": "2.15.0",
        "kernel": "Linux",
        "filesystem": "ext4",
        "cpus": 2,
        "releases": "torch 2.7.1 (7 runs)",
        "one_sided": {"torch 2.7.1": ["optimizer/x"]},
    },
    "adapter": {
        "name": "reference",
        "version": "0.1.0",
        "shape": "manager",
        "capabilities": [],
        "holds": [],
        "library": "",
        "recipe": "",
        "owner": "recipe",
        "notes": "",
    },
    "seed": 0,
    "budget": "quick",
    "claims": [],
    "asked": {"profiles": [], "only": []},
    "profiles": {},
    "profile_details": {},
    "harness": [],
    "crash": {},
    "waivers": [],
}


def invariant(verdict: Verdict, reason: str = "") -> dict[str, object]:
    return {
        "family": "VERS",
        "statement": "It loads.",
        "why": "So.",
        "basis": "contract",
        "level": "MUST",
        "profiles": [],
        "incidents": [],
        "verdict": str(verdict),
        "owner": None,
        "grade": None,
        "rate": None,
        "reason": reason,
        "checks": [],
        "evidence": {},
        "reproduce": "",
    }


def release(name: str) -> Release:
    return Release(
        asked=name,
        torch=f"{name}.0",
        python="3.11.2",
        packages={"numpy": "2"},
        suite="0.1.0",
        commit=None,
        date="2026-11-22",
        machine="x86_64",
        made={"seconds": 240, "peak_bytes": 8 << 30},
    )


def reading(*verdicts: Verdict, reader: str = "2.15", reason: str = "") -> Reading:
    findings = {
        f"CKC-VERS-00{number}": Finding(verdict=verdict, reason=reason)
        for number, verdict in enumerate(verdicts, 2)
    }
    return Reading(
        reader=reader,
        writer="2.7",
        adapter="reference",
        date="2026-11-22",
        commit=None,
        findings=findings,
    )


def certificate(name: str, **verdicts: Verdict) -> Certificate:
    findings = {
        f"CKC-{key}-001": Finding(verdict=one, reason="so") for key, one in verdicts.items()
    }
    return Certificate(
        release=name,
        adapter="reference",
        date="2026-11-22",
        commit=None,
        budget="quick",
        findings=findings,
    )


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        ((PASS, PASS, PASS, PASS), "bit for bit + ranks"),
        ((PASS, PASS, PASS, NONE), "bit for bit"),
        ((PASS, PASS, PASS, BAD), "bit for bit, not so on ranks"),
        ((PASS, PASS, PASS, UNKNOWN), "bit for bit, on ranks UNKNOWN"),
        ((PASS, PASS, NOT_MET, NONE), "refused"),
        ((PASS, BAD, PASS, PASS), "other state"),
        ((BAD, UNKNOWN, UNKNOWN, NONE), "passed over"),
        ((PASS, UNKNOWN, UNKNOWN, NONE), "UNKNOWN"),
        ((NONE, NONE, NONE, NONE), "not applicable"),
    ],
)
def test_a_cell_is_never_better_than_the_verdicts(verdicts: tuple[Verdict, ...], told: str) -> None:
    assert outcome(reading(*verdicts)) == told


def test_what_was_not_run_is_said() -> None:
    matrix = Matrix(
        releases=[release("2.7"), release("2.15")],
        readings=[reading(PASS, PASS, NOT_MET, NONE, reason="it is refused")],
        certificates=[certificate("2.7", SMOK=PASS, ATOM=BAD), certificate("2.15", SMOK=PASS)],
    )
    text = page(matrix, [Note(title="A change", text="It changed.", links=["https://x.test/1"])])
    assert outcome(None) == "not run"
    assert "| 2.7 |  | refused |" in text
    assert "| 2.15 | not run |  |" in text
    assert "2.7 read by 2.15, CKC-VERS-004: NOT_MET: it is refused" in text
    assert "| CKC-ATOM-001 | VIOLATION | not run |" in text
    assert "CKC-SMOK-001" not in text
    assert "- <https://x.test/1>" in text
    assert "8.0 GiB of disk at most" in text
    assert text.count("Not run on 2.7, 2.15.") == len(FORMATS) - 1


def write(results: Path, place: str, found: dict[str, dict[str, object]], **more: object) -> None:
    folder = results / place / "reference"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({**RESULT, **more, "invariants": found}))


def test_a_record_is_made_of_what_ended(tmp_path: Path) -> None:
    for name in ("2.15", "2.7"):
        (tmp_path / name).mkdir()
        text = json.dumps(torch_versions.msgspec.to_builtins(release(name)))
        (tmp_path / name / "release.json").write_text(text)
    found = {"CKC-VERS-002": invariant(BAD, "x" * 999), "CKC-VERS-001": invariant(PASS)}
    write(tmp_path, "2.15/read/2.7", found)
    write(tmp_path, "2.15/certificates", {**found, "CKC-SMOK-001": invariant(PASS)})
    write(tmp_path, "2.7/certificates", found, interrupted=True)
    matrix = torch_versions.record(tmp_path)
    assert [one.asked for one in matrix.releases] == ["2.7", "2.15"]
    (read,) = matrix.readings
    assert (read.writer, read.reader, read.date) == ("2.7", "2.15", "2026-11-22")
    assert list(read.findings) == ["CKC-VERS-002"]
    assert len(read.findings["CKC-VERS-002"].reason) < 250
    assert read.one_sided == {"torch 2.7.1": ["optimizer/x"]}
    assert "`reference`: only torch 2.7.1 has optimizer/x" in page(matrix, [])
    (certified,) = matrix.certificates
    assert list(certified.findings) == ["CKC-SMOK-001", "CKC-VERS-001"]


def test_what_is_recorded_names_the_versions_and_the_dates(repository: Path) -> None:
    matrix, _ = torch_versions.load(repository / "docs")
    assert [one.asked for one in matrix.releases] == ["2.7", "2.10", "2.13", "2.15"]
    text = (repository / "docs" / torch_versions.PAGE).read_text(encoding="utf-8")
    for one in matrix.releases:
        assert one.torch.startswith(one.asked)
        assert f"| {one.asked} | {one.torch} | {one.python} |" in text
        assert one.date in text
    for one in matrix.readings:
        assert one.writer != one.reader
