"""Explorations that run in this process, against the fork server that all tests share."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.cli import explore, main
from ckpt_conformance.crash.explore import engine
from ckpt_conformance.subject.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

IN_PLACE = "torch-save-inplace"  # loses everything; what it writes is the same each time
REFERENCE = "reference"  # loses nothing; the names that it writes to are new each time


@pytest.fixture
def ckpt(
    new_subject: Callable[..., Subject],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Run a command line here; explorations use the fork server that all tests share."""
    count = iter(range(1000))

    @contextlib.contextmanager
    def subject_of(
        adapter: str, seed: int, budget: str = "full", *, notes_opened: bool = False
    ) -> Generator[Subject]:
        del notes_opened  # the shared server notes nothing, and what it forks is ours
        folder = tmp_path / f"ckc-explore-{next(count)}"
        shared = new_subject(adapter)
        try:
            yield Subject(shared.info, shared.client, folder, seed=seed, budget=budget)
        finally:
            shutil.rmtree(folder)

    monkeypatch.setattr(explore, "subject_of", subject_of)
    monkeypatch.setattr(engine, "CHUNK", 8)  # so that few states fill several batches
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["ckpt-conformance", *words])
        with pytest.raises(SystemExit) as end:
            main.main()
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out + out.err

    return run


def result_of(folder: str) -> dict[str, Any]:
    """Read a report, without what differs from run to run, and the records of its bundles."""
    text = (Path(folder) / "result.json").read_text().replace(f"{folder}/", "")
    content: dict[str, Any] = json.loads(text)
    del content["created"]
    for exploration in content["explorations"]:
        del exploration["seconds"]
    content["bundles"] = {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(Path(folder).glob("bundles/*/violation.json"))
    }
    return content
