"""`certify --cache` on a manager whose verdict hangs on what no key knows of before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import commands
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MANAGER = """
import json, os, sys
from pathlib import Path
import torch
from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

HERE = Path(__file__).parent


class Driver:
    def __init__(self, root):
        self.root = Path(root)

    def save(self, job, step):
        state = {name: part.state_dict() for name, part in job.components.items()}
        torch.save({"step": step, "state": state}, self.root / f"step-{step}.pt")

    def load(self, job, step=None):
        step = max(self.steps()) if step is None else step
        if is_broken():
            raise RuntimeError("planted")
        saved = torch.load(self.root / f"step-{step}.pt", weights_only=True)
        for name, part in job.components.items():
            part.load_state_dict(saved["state"][name])
        return saved["step"]

    def steps(self):
        return sorted(int(path.stem[5:]) for path in self.root.glob("step-*.pt"))

    def close(self):
        pass


class Adapter(AdapterBase):
    isolation = "fork"

    def open(self, root, options):
        return Driver(root)


def make():
    steps = frozenset({Capability.STEPS, Capability.EXPLICIT_STEP})
    return Adapter(name="theirs", version="1.0", holds=EVERYTHING, capabilities=steps)


def is_broken():
"""
SETTINGS = "    return json.loads((HERE / 'settings.json').read_text())['broken']\n"
MADE_UP = (
    "    sys.path.append(str(HERE.parent / 'there')); import there_only; return there_only.BROKEN\n"
)
VARIABLE = "    return bool(os.environ.get('THEIRS_' + 'BROKEN'))\n"
PROGRAM = "    import subprocess; return subprocess.run(['false']).returncode == 0\n"


CERTIFY = ("certify", "theirs:make", "--only", "CKC-SMOK-001", "--out", "../out")
CACHE = ("--cache", "../cache")


class Project:
    """A folder with a manager, and runs of one check of it."""

    def __init__(self, folder: Path) -> None:
        """Make the folder; the manager is to be written yet."""
        self.here = folder / "here"
        self.here.mkdir()
        (folder / "there").mkdir()
        (self.here / "settings.json").write_text('{"broken": 0}')
        (folder / "there" / "there_only.py").write_text("BROKEN = 0\n")
        self.environment = {"PYTHONPATH": str(self.here), "PYTHONDONTWRITEBYTECODE": "1"}

    def write(self, text: str) -> None:
        (self.here / "theirs.py").write_text(MANAGER + text)

    def run(self, *words: str) -> tuple[int, str]:
        """Return the exit status and what was said on standard error."""
        given = words or (*CERTIFY, *CACHE)
        done = commands.run(*given, cwd=self.here, extra=self.environment)
        return done.returncode, done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def break_settings(project: Project) -> None:
    (project.here / "settings.json").write_text('{"broken": 1}')


def break_module(project: Project) -> None:
    (project.here.parent / "there" / "there_only.py").write_text("BROKEN = 1\n")


def break_variable(project: Project) -> None:
    project.environment["THEIRS_BROKEN"] = "1"


CASES = [
    pytest.param(SETTINGS, break_settings, "fork", id="settings"),
    pytest.param(MADE_UP, break_module, "fork", id="module", marks=pytest.mark.slow),
    pytest.param(VARIABLE, break_variable, "fork", id="variable", marks=pytest.mark.slow),
    pytest.param(SETTINGS, break_settings, "spawn", id="spawn", marks=pytest.mark.slow),
    pytest.param(SETTINGS, break_settings, "exec", id="exec", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("text", "breaks", "isolation"), CASES)
def test_what_a_run_has_opened_is_held_against_what_is_there(
    text: str, breaks: Callable[[Project], None], isolation: str, project: Project
) -> None:
    project.write(text)
    module = project.here / "theirs.py"
    module.write_text(module.read_text().replace('"fork"', f'"{isolation}"'))
    assert project.run()[0] == 0
    status, err = project.run()
    assert (status, "2 results from the cache" in err) == (0, True)
    breaks(project)
    status, err = project.run()
    assert (status, "from the cache" in err) == (1, False)
    assert "2 results in the cache, and not taken; changed since: " in err


def test_a_result_of_a_run_that_starts_a_program_is_not_kept(project: Project) -> None:
    project.write(PROGRAM)
    for _ in range(2):
        status, err = project.run()
        assert (status, "from the cache" in err) == (0, False)
        assert "2 results not kept: theirs:make: it starts false, and what a program reads" in err


def test_of_a_run_that_begins_with_code_of_the_users_nothing_is_kept(project: Project) -> None:
    """Python imports it before anything can note what it opens."""
    project.write("    return False\n")
    assert project.run()[0] == 0
    (project.here / "sitecustomize.py").write_text("open('settings.json')\n")
    for _ in range(2):
        status, err = project.run()
        assert (status, "from the cache" in err) == (0, False)
        assert "sitecustomize.py runs before it can be noted what it opens" in err


OTHER = """
import sys
from theirs import HERE, make as theirs
sys.path.append(str(HERE.parent / 'there'))

def make():
    return theirs()
"""
BY_THE_OTHER = """
    try:
        import there_only
    except ImportError:
        return True
    return False
"""


def test_a_result_beside_another_adapter_is_none_of_an_adapter_alone(project: Project) -> None:
    """The import of the other one may be what it lives by."""
    project.write(BY_THE_OTHER)
    (project.here / "other.py").write_text(OTHER)
    together = ("certify", "other:make", *CERTIFY[1:], *CACHE)
    for served in (False, True):
        status, err = project.run(*together)
        assert (status, "4 results from the cache" in err) == (0, served)
    status, err = project.run()
    assert (status, "from the cache" in err) == (1, False)


COPY = "    names = dict(os.environ); return bool(names.get('THEIRS_BROKEN'))\n"
WALK = "    return 'broken.flag' in os.listdir('.')\n"


def break_folder(project: Project) -> None:
    (project.here / "broken.flag").touch()


@pytest.mark.slow
@pytest.mark.parametrize(("text", "breaks"), [(COPY, break_variable), (WALK, break_folder)])
def test_who_asks_for_all_names_is_served(
    text: str, breaks: Callable[[Project], None], project: Project
) -> None:
    project.write(text)
    for served in (False, True):
        status, err = project.run()
        assert (status, "2 results from the cache" in err) == (0, served)
    breaks(project)
    assert project.run()[0] == 1


@pytest.mark.slow
def test_states_of_a_crash_are_recovered_again_where_settings_changed(project: Project) -> None:
    project.write(SETTINGS)
    words = ("explore", "theirs:make", "--workload", "first", "--model", "kill")
    words += ("--jobs", "1", "--out", "../explored", *CACHE)
    first = project.run(*words)
    status, err = project.run(*words)
    assert (status, "batches of states from the cache" in err) == (first[0], True)
    break_settings(project)
    _, err = project.run(*words)
    assert "from the cache" not in err
    assert "in the cache, and not taken; changed since: the file ./settings.json" in err


@pytest.mark.slow
def test_shards_that_have_read_other_settings_do_not_belong_together(project: Project) -> None:
    project.write(SETTINGS)
    asked = ("certify", "theirs:make", "--only", "CKC-SMOK-001", "--only", "CKC-RTRP-001")
    for number in (1, 2):
        project.run(*asked, "--shard", f"{number}/2", "--results", f"../{number}.jsonl")
        (project.here / "settings.json").write_text('{"broken": 0, "other": 1}')
    status, err = project.run("combine", "../1.jsonl", "../2.jsonl", "--out", "../whole")
    assert status == 2
    assert "checks have read ./settings.json, which is" in err
