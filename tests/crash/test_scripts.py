"""`explore -- COMMAND`: real training scripts, none of which knows of this project."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import commands
import pytest

from ckpt_conformance.crash.model.models import OF_POWER_LOSS

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
CALLS = {  # a call that is left out, and what names it
    "file-sync": "renamed-unsynced",
    "directory-sync": "directory-not-synced",
}


@dataclass(frozen=True)
class Told:
    code: int
    text: str
    out: Path

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        return found

    def outcomes(self, model: str) -> dict[str, int]:
        found: dict[str, int] = self.body["explorations"][0]["models"][model]["outcomes"]
        return found

    def worst(self, model: str) -> set[str]:
        violations = self.body["explorations"][0]["models"][model]["violations"]
        return {violation["outcome"] for violation in violations}

    def audit(self) -> set[str]:
        return {finding["rule"] for finding in self.body["explorations"][0]["audit"]}


Explored = Callable[..., Told]


def run(out: Path, *options: str, command: tuple[str, ...], cwd: Path | None = None) -> Told:
    """Run the command line from an empty folder, as a process of its own."""
    words = ("explore", "--jobs", "2", "--out", str(out), *options, "--", *command)
    done = commands.run(*words, cwd=cwd or out.parent)
    return Told(done.returncode, done.stdout + done.stderr, out)


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    """Explore each script of the folder once."""

    @cache
    def one(name: str, *words: str, models: tuple[str, ...] = ()) -> Told:
        out = tmp_path_factory.mktemp("scripts") / "out"
        script = (sys.executable, str(SCRIPTS / f"{name}.py"), *words, "--out", "{out}")
        return run(out, *(f"--model={model}" for model in models), command=script)

    return one


@pytest.mark.slow
def test_a_script_that_saves_in_place_loses_everything_when_killed(explored: Explored) -> None:
    told = explored("in_place")
    assert told.code == 1, told.text
    assert {"LOST_ALL", "REFUSED_UNTYPED"} <= told.worst("kill")
    assert "removed-before-replaced" in told.audit()
    assert "in_place.py:" in told.text, "the script's own line is named"
    assert "first violation after" in told.text


def test_a_rename_without_a_sync_stands_a_kill_and_no_power_cut(explored: Explored) -> None:
    told = explored("renamed", models=("kill", "ext4"))
    assert told.code == 1, told.text
    assert not told.worst("kill")
    assert {"LOST_STEP", "COLD_START", "LOST_ALL"} <= told.worst("ext4")
    assert "renamed-unsynced" in told.audit()


@pytest.mark.slow
def test_a_rename_without_a_sync_is_seen_under_every_model_of_a_disk(explored: Explored) -> None:
    told = explored("renamed")
    assert told.code == 1, told.text
    assert not told.worst("kill")
    for model in OF_POWER_LOSS:
        assert {"LOST_STEP", "COLD_START", "LOST_ALL"} <= told.worst(model), model
    assert "renamed-unsynced" in told.audit()


@pytest.mark.slow
def test_a_correct_script_passes_everything(explored: Explored) -> None:
    told = explored("correct")
    assert told.code == 0, told.text
    assert not told.audit()
    for model in ("kill", *OF_POWER_LOSS):
        assert set(told.outcomes(model)) == {"NEW", "PREVIOUS", "COLD_START"}, "before the first"


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_each_missing_call_is_named_by_a_finding(explored: Explored, call: str) -> None:
    told = explored("correct", "--without", call)
    assert not told.worst("kill"), told.text
    assert CALLS[call] in told.audit()
    others = set(CALLS.values()) - {CALLS[call]}
    assert not told.audit() & others, "one call was left out, not two"


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_missing_sync_loses_steps(explored: Explored, call: str) -> None:
    told = explored("correct", "--without", call)
    assert told.code == 1, told.text
    assert {"LOST_STEP", "COLD_START"} <= told.worst("ext4")


@pytest.mark.slow
def test_a_script_that_begins_anew_is_a_cold_start_although_its_result_is_right(
    explored: Explored,
) -> None:
    told = explored("cold")
    assert told.code == 1, told.text
    assert told.worst("kill") == {"COLD_START"}


@pytest.mark.slow
def test_an_unseeded_script_is_unknown_and_says_what_to_seed(explored: Explored) -> None:
    told = explored("unseeded")
    assert told.code == 3, told.text
    assert "two uninterrupted runs differ in latest.pt" in told.text
    assert "Seed it: call torch.manual_seed(...) at its start" in told.text


@pytest.mark.slow
def test_a_bundle_replays_and_its_own_script_shows_it_too(explored: Explored) -> None:
    told = explored("renamed")
    for name in ("ext4-LOST_ALL", "ext4-LOST_STEP", "ext4-COLD_START", "btrfs-SILENT_WRONG"):
        folder = told.out / "bundles" / f"renamed.py-{name}"
        again = subprocess.run(
            [sys.executable, "-m", "ckpt_conformance", "replay", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert again.returncode == 1, again.stdout + again.stderr
        assert again.stdout.startswith(name.partition("-")[2])
        own = subprocess.run(
            [sys.executable, "-I", str(folder / "repro.py")],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
        assert own.returncode == 1, own.stdout + own.stderr


@pytest.mark.slow
def test_a_bundle_of_what_was_mended_passes(explored: Explored, tmp_path: Path) -> None:
    """The control of the test above: the same state, and a script that falls back."""
    bundle = explored("renamed").out / "bundles" / "renamed.py-ext4-REFUSED_UNTYPED"
    mended = tmp_path / "bundle"
    subprocess.run(["cp", "-r", str(bundle), str(mended)], check=True)
    path = mended / "violation.json"
    told = json.loads(path.read_text())
    assert told["facts"]["floor"] is None, "nothing had been promised"
    told["script"]["command"][1] = str(SCRIPTS / "correct.py")
    path.write_text(json.dumps(told))
    again = subprocess.run(
        [sys.executable, "-m", "ckpt_conformance", "replay", str(mended)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.slow
def test_started_anew_it_comes_to_the_same(explored: Explored, tmp_path: Path) -> None:
    forked = explored("cold")
    command = (sys.executable, str(SCRIPTS / "cold.py"), "--out", "{out}")
    told = run(tmp_path / "out", "--no-fork", "--model", "kill", command=command)
    assert told.code == 1, told.text
    assert told.worst("kill") == forked.worst("kill")
    assert "started anew for each state: --no-fork" in told.text


@pytest.mark.slow
def test_a_script_that_is_started_anew_after_all_is_recorded_from_an_empty_directory(
    tmp_path: Path,
) -> None:
    """What its forked run left was resumed from by the recorded one, which then saved nothing."""
    command = (sys.executable, str(SCRIPTS / "unlike.py"), "--out", "{out}")
    options = ("--model", "kill", "--result-file", "result.json")
    told = run(tmp_path / "out", *options, command=command)
    assert "started anew for each state: forked, it gives another result" in told.text
    assert told.code == 1, told.text
    anew = run(tmp_path / "anew", "--no-fork", *options, command=command)
    assert told.outcomes("kill") == anew.outcomes("kill")
    assert "LOST_ALL" in told.worst("kill")


@pytest.mark.slow
def test_ranks_of_torchrun_that_save_in_place_lose_everything(tmp_path: Path) -> None:
    launcher = str(Path(sys.executable).parent / "torchrun")
    command = (
        *(launcher, "--standalone", "--nproc-per-node", "2"),
        *(str(SCRIPTS / "ranks.py"), "--out", "{out}"),
    )
    told = run(tmp_path / "out", "--jobs", "4", "--model", "kill", command=command)
    assert told.code == 1, told.text
    assert told.worst("kill") & {"LOST_ALL", "SILENT_WRONG", "REFUSED_UNTYPED"}


@pytest.mark.parametrize(
    ("options", "command", "reason"),
    [
        ((), ("python", "train.py"), "has no {out}"),
        ((), ("no-such-program", "{out}"), "there is no program 'no-such-program'"),
        (("--step-regex", "("), ("python", "{out}"), "does not compile"),
        (("--result-file", "/etc/x"), ("python", "{out}"), "leads out of {out}"),
        (("--workload", "first"), ("python", "{out}"), "--workload goes with an adapter"),
        (("--no-fork",), ("reference",), "--no-fork goes with a command"),
        (("--resume-cmd", "a"), ("reference",), "--resume-cmd goes with a command"),
        (("--resume-cmd", "'a"), ("python", "{out}"), "No closing quotation"),
        (("--result-file", "a", "--result-cmd", "b"), ("python", "{out}"), "not both"),
        (("--grace", "5"), ("python", "{out}"), "--grace 5 is the time from SIGTERM to SIGKILL"),
        (("--preempt",), ("reference",), "--preempt does not go with an adapter"),
        (("--kill-rank", "1"), ("reference",), "--kill-rank does not go with an adapter"),
        (("--preempt", "--results", "r"), ("python", "{out}"), "does not go with --results"),
        (("--preempt", "--record", "r"), ("python", "{out}"), "does not go with --record"),
        (("--preempt", "--cache", "c"), ("python", "{out}"), "does not go with --cache"),
        (("--kill-rank", "-1"), ("python", "{out}"), "--kill-rank"),
    ],
)
def test_a_wrong_call_says_what_to_change(
    options: tuple[str, ...], command: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    told = run(tmp_path / "out", *options, command=command, cwd=tmp_path)
    assert told.code == 2, told.text
    assert reason in told.text
    assert not (tmp_path / "out").exists()


WRONG = {
    "fails": ("import sys; sys.exit('no data')", "ends with exit status 1: no data"),
    "writes nothing": ("print('step 1')", "wrote nothing below"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) for case in WRONG],
)
def test_a_script_that_can_not_be_judged_is_unknown(case: str, tmp_path: Path) -> None:
    text, reason = WRONG[case]
    (tmp_path / "train.py").write_text(text)
    command = (sys.executable, "train.py", "{out}")
    told = run(tmp_path / "out", command=command, cwd=tmp_path)
    assert told.code == 3, told.text
    assert reason in told.text


@pytest.mark.slow
def test_a_script_that_never_resumes_is_held_to_its_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "for step in (1, 2, 3):\n"
        "    torch.save({'step': step}, f'{sys.argv[1]}/step-{step}.pt')\n"
        "    print('step', step)\n"
    )
    command = (sys.executable, "train.py", "{out}")
    told = run(tmp_path / "out", "--model", "kill", command=command, cwd=tmp_path)
    assert told.code == 1, told.text
    assert told.worst("kill") == {"COLD_START"}
    assert "it never resumes" in told.text
    assert "--resume-cmd" in told.text


QUIET = """
import pathlib, sys, numpy as np
out = pathlib.Path(sys.argv[1])
value, step = np.zeros(4000), 0
if (out / "state.npz").exists():
    with np.load(out / "state.npz") as found:
        value, step = found["value"], int(found["step"])
while step < 4:
    value, step = value + step, step + 1
    with (out / "state.npz").open("wb") as file:
        np.savez(file, value=value, step=step)
"""


@pytest.mark.slow
def test_a_script_that_prints_nothing_is_measured_by_its_checkpoints(tmp_path: Path) -> None:
    """No torch in it, no steps told: what it writes says where it began."""
    (tmp_path / "train.py").write_text(QUIET)
    command = (sys.executable, "train.py", "{out}")
    options = ("--model", "kill", "--checkpoint-glob", "{out}/state.npz")
    told = run(tmp_path / "out", *options, command=command, cwd=tmp_path)
    assert told.code == 1, told.text
    assert "LOST_ALL" in told.worst("kill")
    assert "told by its checkpoints" in told.text
    assert set(tmp_path.iterdir()) == {tmp_path / "train.py", tmp_path / "out"}


STAGED = """
import os, sys, tempfile, torch
out = sys.argv[1]
torch.manual_seed(0)
value, step = torch.zeros(3000), 0
if os.path.exists(out + "/latest.pt"):
    found = torch.load(out + "/latest.pt")
    value, step = found["value"], found["step"]
    print("resumed from step", step)
while step < 3:
    value, step = value + step, step + 1
    with tempfile.NamedTemporaryFile(delete=False) as file:
        torch.save({"value": value, "step": step}, file)
        file.flush()
        SYNC
    os.rename(file.name, out + "/latest.pt")
    folder = os.open(out, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    print("step", step)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sync", [True, False])
def test_a_script_that_stages_in_tmpdir_is_followed(*, sync: bool, tmp_path: Path) -> None:
    """A rename from there works in a resume too; without a sync a power cut takes the bytes."""
    text = STAGED.replace("SYNC", "os.fsync(file.fileno())" if sync else "pass")
    (tmp_path / "train.py").write_text(text)
    command = (sys.executable, "train.py", "{out}")
    options = ("--model", "kill", "--model", "xfs")
    told = run(tmp_path / "out", *options, command=command, cwd=tmp_path)
    assert told.code == (0 if sync else 1), told.text
    assert not told.worst("kill")
    assert bool(told.worst("xfs")) is not sync
    assert told.body["explorations"][0]["unknown"] == []
