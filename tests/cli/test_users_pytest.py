"""Commands run their checks by pytest, and nothing that a user has for a pytest of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import commands
import pytest

if TYPE_CHECKING:
    from pathlib import Path

ONE = ("certify", "torch-save-inplace", "--only", "CKC-SMOK-001", "--jobs", "1", "--out", "out")
LEAVES_A_MARK = "import pathlib\npathlib.Path({!r}).touch()\nraise RuntimeError('a conftest')\n"


@pytest.mark.parametrize("place", ["conftest.py", "tests/conftest.py"])
def test_a_conftest_in_the_users_folder_is_not_run(tmp_path: Path, place: str) -> None:
    """Pytest looks for one where it is called, and in folders there that begin with `test`."""
    mark, conftest = tmp_path / "mark", tmp_path / place
    conftest.parent.mkdir(exist_ok=True)
    conftest.write_text(LEAVES_A_MARK.format(str(mark)), encoding="utf-8")
    done = commands.run(*ONE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not mark.exists()


@pytest.mark.parametrize(
    "extra",
    [
        {"PYTEST_ADDOPTS": "-k nothing_has_this_name"},
        {"PYTEST_ADDOPTS": "--no-such-option"},
        {"PYTEST_PLUGINS": "no_such_plugin"},
    ],
    ids=["a selection", "an unknown option", "a plugin"],
)
def test_options_for_the_users_pytest_change_nothing(tmp_path: Path, extra: dict[str, str]) -> None:
    done = commands.run(*ONE, cwd=tmp_path, extra=extra)
    assert done.returncode == 0, done.stderr
    assert "1 kept" in done.stdout
