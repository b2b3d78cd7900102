"""Variables of a session: which names these are, and which of them a file has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.work import session_variables
from ckpt_conformance.work.session_variables import is_of_a_session, named_in

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["PWD", "_", "HOSTNAME", "SLURM_JOB_ID", "GITHUB_RUN_ID"])
def test_names_of_a_session(name: str) -> None:
    assert is_of_a_session(name)


@pytest.mark.parametrize("name", ["TMPDIR2", "HOSTNAMES", "TERMS", "USER", "SLURM_NTASKS", "_X"])
def test_names_of_others(name: str) -> None:
    assert not is_of_a_session(name)


def test_names_that_stand_in_files(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("run = os.environ.get('SLURM_JOB_ID', 0) or MY_HOSTNAME or a._ or TERM_")
    (tmp_path / "go.sh").write_text("echo ${HOSTNAME}-$GITHUB_RUN_ID")
    (tmp_path / "folder").mkdir()
    files = [str(tmp_path / name) for name in ("train.py", "go.sh", "folder", "nothing")]
    assert named_in(files) == {"SLURM_JOB_ID", "HOSTNAME", "GITHUB_RUN_ID"}


def test_large_files_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_variables, "MOST_BYTES", 4)
    (tmp_path / "data").write_text("HOSTNAME")
    assert named_in([str(tmp_path / "data")]) == set()
