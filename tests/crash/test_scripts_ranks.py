"""`explore -- torchrun ...`: scripts of two ranks, and what they leave behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stopped import PATIENCE, Place, place, wait
from test_scripts import SCRIPTS, Told, run

from ckpt_conformance.crash.script.rehearsal import last_words

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["place"]
TORCHRUN = (str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2")
SAID = """
import os, subprocess, sys, threading
from ckpt_conformance.crash.script import child, ranks
from ckpt_conformance.crash.script.command import start_of
os.chdir(sys.argv[1])
if sys.argv[2] == "forked":
    sys.is_forked = True
    ranks.become(start_of(sys.argv[3:]))
child.execute(sys.argv[3:])
"""
# A launcher of its own, by torchrun's name: what does it see of the processes that it starts?
LAUNCHER = """#!{python}
import os, signal, subprocess, sys, threading
rank = [sys.executable, "-u", "rank.py", "a b", "c"]
threading.Thread(target=lambda: None).start()
def start(words=rank, **given):
    return subprocess.Popen(words, env={{**os.environ, "RANK": "7"}}, **given)
print("ended", start().wait(), flush=True)
killed = start([*rank, "wait"], start_new_session=True)
print("group is its own", os.getpgid(killed.pid) == killed.pid)
os.killpg(killed.pid, signal.SIGTERM)
print("killed", killed.wait())
with open("kept", "w") as file:
    print("kept", start(stdout=file, stderr=file).wait(), open("kept").read().split())
piped = start(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print("piped", piped.communicate()[0].split(), piped.returncode)
print("another program", start(["sh", "-c", "exit 5"]).wait(), flush=True)
print("other", start(["env", "OMP_NUM_THREADS=3", sys.executable, "rank.py"]).wait())
"""
RANK = """
import os, sys, time
if "wait" in sys.argv:
    time.sleep(600)
with open("how", "a") as file:
    file.write("forked " if hasattr(sys, "is_forked") else "started ")
print(sys.argv, __name__, os.environ["RANK"], os.getppid() > 1)
print(os.environ.get("OMP_NUM_THREADS"), sys.path[0] == os.getcwd(), file=sys.stderr)
sys.exit(3)
"""


def ddp(out: Path, *options: str, more: tuple[str, ...] = ()) -> Told:
    command = (*TORCHRUN, str(SCRIPTS / "ddp.py"), *more, "--out", "{out}")
    return run(out, *options, command=command)


@pytest.mark.slow
def test_ranks_that_save_in_place_lose_everything(tmp_path: Path) -> None:
    told = ddp(tmp_path / "out", "--model", "kill")
    assert told.code == 1, told.text
    assert "LOST_ALL" in told.worst("kill")
    assert "removed-before-replaced" in told.audit()
    assert "ddp.py:" in told.text, "the script's own line is named, although a rank issued it"
    assert told.body["explorations"][0]["unknown"] == [], "a ring that polls sockets is harmless"


@pytest.mark.slow
def test_ranks_that_save_durably_stand_kills_and_power_cuts(tmp_path: Path) -> None:
    told = ddp(tmp_path / "out", "--model", "kill", "--model", "xfs", more=("--durable",))
    assert told.code == 0, told.text
    for model in ("kill", "xfs"):
        assert set(told.outcomes(model)) <= {"NEW", "PREVIOUS", "COLD_START"}
        assert not told.worst(model)


def test_a_forked_rank_is_as_one_that_was_started(tmp_path: Path) -> None:
    """What a launcher and its ranks can tell of each other is the same in both."""
    launcher = tmp_path / "torchrun"
    launcher.write_text(LAUNCHER.format(python=sys.executable))
    launcher.chmod(0o755)
    (tmp_path / "rank.py").write_text(RANK)
    said = partial(_said, tmp_path, str(launcher))
    forked, how = said("forked"), (tmp_path / "how").read_text()
    assert how.split() == ["forked", "forked", "started", "started"], "a pipe is no plain start"
    assert forked == said("started")
    assert "group is its own True" in forked
    assert "killed -15" in forked


def _said(folder: Path, launcher: str, how: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SAID, str(folder), how, launcher],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return done.stdout + done.stderr


LEAVES = """
import os, subprocess, sys, time
one = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(os.environ["CKC_MARK"], "w").close()
time.sleep({seconds})
"""


@pytest.mark.parametrize("how", ["recorded", "at its end"])
def test_no_process_outlives_the_run(how: str, place: Place) -> None:
    """Not one with a session of its own, as ranks have; also where a recording is stopped."""
    script = place.folder / "train.py"
    script.write_text(LEAVES.format(seconds=600 if how == "recorded" else 0))
    process = place.start("explore", "--jobs", "1", "--", sys.executable, "train.py", "{out}")
    if how == "recorded":
        place.wait_for_save()
        process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE)
    is_clean: Callable[[], bool] = place.is_clean
    wait(is_clean)
    assert process.returncode == (143 if how == "recorded" else 3), out


def test_of_a_rank_that_a_signal_ends_the_code_is_told() -> None:
    """As torchrun tells it: the rule under its table is the last line, and names nothing."""
    table = "train.py FAILED\nRoot Cause:\n  rank      : 1\n  exitcode  : -6 (pid: 7)\n======\n"
    assert last_words(table) == "exitcode  : -6 (pid: 7)"
    assert last_words("begins\n-----\n") == "begins"
    assert last_words("") == "it printed nothing"
