"""CKC-SMOK-003 reads what was exported: a file alone is no model."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import exports
import pytest

from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.harness import client, facts
from ckpt_conformance.subject.subject import Subject
from ckpt_conformance.suites.controls import test_smoke as suite

if TYPE_CHECKING:
    from collections.abc import Iterator

WHOLE = "reference-dcp"
ODD = tuple(f"exports:{way}" for way in ("newest", "empty", "plain", "kept", "refused"))
pytestmark = pytest.mark.xdist_group("exports")  # they share a server


@pytest.fixture(scope="module")
def server() -> Iterator[client.Server]:
    """Serve the adapters of tests/support/exports.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(exports.__file__).parent), prepend=os.pathsep)
        with client.Server((WHOLE, *ODD)) as running:
            yield running


@pytest.fixture
def subject(
    request: pytest.FixtureRequest, server: client.Server, tmp_path: Path
) -> Iterator[Subject]:
    """Give the subject of a manager, with two steps that are saved."""
    with closing(client.Client(server.socket)) as own:
        made = Subject(facts.read(own, request.param, tmp_path / "facts"), own, tmp_path / "own")
        made.materialize(made.golden())
        yield made


@pytest.mark.parametrize("subject", ["exports:newest", "exports:empty"], indirect=True)
def test_an_export_without_the_model_of_the_step_is_told(subject: Subject) -> None:
    with pytest.raises(Violation, match="of step 2"):
        suite._export(subject)


@pytest.mark.parametrize("subject", ["exports:kept"], indirect=True)
def test_an_export_that_leaves_an_older_one_is_told(subject: Subject) -> None:
    with pytest.raises(Violation, match=r"of step 4 .* where one of step 2 stood"):
        suite._export(subject)


@pytest.mark.parametrize("subject", [WHOLE, "exports:plain", "exports:refused"], indirect=True)
def test_an_export_of_the_model_is_fine(subject: Subject) -> None:
    suite._export(subject)
