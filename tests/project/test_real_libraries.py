"""The tables of what real libraries violate: they can be read, and say what a certificate may."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

REAL = Path(__file__).parent.parent / "real"
FOLDERS = sorted(path.parent for path in REAL.glob("*/adapter.py"))
TOLD = ("VIOLATION", "SAME_CAUSE", "UNKNOWN")


@pytest.fixture(scope="module")
def real() -> Any:  # noqa: ANN401  a script that is no module of a package
    spec = importlib.util.spec_from_file_location("real_libraries", REAL / "real.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_table_has_a_reason_and_a_script_for_what_is_violated(
    folder: Path,
    real: Any,  # noqa: ANN401
) -> None:
    for entry in real.known(folder).values():
        assert entry.verdict in TOLD
        assert entry.why.strip()


@pytest.mark.parametrize(
    ("verdict", "races", "may"),
    [
        ("VIOLATION", False, {"VIOLATION"}),
        ("VIOLATION", True, {"VIOLATION", "UNKNOWN", "PASS", "NOT_APPLICABLE"}),
        ("UNKNOWN", False, {"UNKNOWN"}),
        ("UNKNOWN", True, {"UNKNOWN", "PASS", "NOT_APPLICABLE"}),
    ],
)
def test_a_race_of_the_library_may_be_kept_or_unknown_and_no_more(
    verdict: str,
    races: bool,  # noqa: FBT001
    may: set[str],
    real: Any,  # noqa: ANN401
) -> None:
    table = {"CKC-A": real.Known("CKC-A", verdict, "why", races=races)}
    every = (*TOLD, "PASS", "NOT_APPLICABLE")
    agree = {one for one in every if not real.differing({"CKC-A": {"verdict": one}}, table)}
    assert agree == may
    (line,) = real.differing({"CKC-B": {"verdict": "UNKNOWN", "reason": "no"}}, {})
    assert line == "CKC-B: UNKNOWN, and the table says nothing: no"
