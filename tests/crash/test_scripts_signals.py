"""`explore --preempt` and `--kill-rank`: real scripts that get real signals, and their reports."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from test_scripts import SCRIPTS, Told, run

from ckpt_conformance.report import files

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMAS = Path(files.__file__).parent / "schemas"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def preempted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Told]:
    """Preempt a script that does one thing at SIGTERM."""

    @cache
    def preempt(last: str) -> Told:
        out = tmp_path_factory.mktemp("preempted") / "out"
        script = (sys.executable, str(SCRIPTS / "preempted.py"), last, "--out", "{out}")
        return run(out, "--model", "kill", "--preempt", command=script)

    return preempt


def signals(told: Told, kind: str = "preempt") -> list[dict[str, Any]]:
    kinds = {one["kind"]: one["signals"] for one in told.body["signals"]}
    return list(kinds[kind])


def replay(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ckpt_conformance", "replay", str(folder)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_a_script_that_saves_well_at_sigterm_loses_nothing(
    preempted: Callable[[str], Told],
) -> None:
    told = preempted("well")
    assert told.code == 0, told.text
    found = signals(told)
    ended = [one for one in found if one["handled"].startswith("handled: exit status 0 after")]
    cut = [one for one in found if one["handled"].startswith("handled: SIGKILL while it wrote")]
    assert ended, "it took the signal, and ended by itself"
    assert cut, "the grace ended in its last checkpoint, too"
    assert len(ended) + len(cut) == len(found)
    assert any("SIGKILL inside write step.tmp" in one["what"] for one in cut)
    assert any(one["first_line"].startswith("resumed from step") for one in ended)
    assert not any(one["violates"] for one in found)
    schema = json.loads((SCHEMAS / "exploration.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(told.body, schema)
    assert "Signals to a running job" in (told.out / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_last_checkpoint_over_the_only_one_is_lost_when_the_grace_ends_in_it(
    preempted: Callable[[str], Told],
) -> None:
    told = preempted("in-place")
    assert told.code == 1, told.text
    bad = [one for one in signals(told) if one["violates"]]
    assert {one["outcome"] for one in bad} <= {"LOST_ALL", "REFUSED_UNTYPED"}
    assert "LOST_ALL" in {one["outcome"] for one in bad}
    assert all("SIGKILL" in one["what"] for one in bad), "only where the grace ended in the save"
    assert not told.worst("kill"), "its other saves are well"
    bundle = told.out / "bundles" / "preempted.py-preempt-LOST_ALL"
    again = replay(bundle)
    assert again.returncode == 1, again.stdout + again.stderr
    assert again.stdout.startswith("LOST_ALL: SIGTERM after ")
    assert "SIGKILL inside write latest.pt" in again.stdout
    content = json.loads((bundle / "violation.json").read_text())
    assert content["signal"]["ends_after"] > 0
    assert "---- signal here ----" in (bundle / "operations.txt").read_text()
    content["script"]["command"][2] = "well"
    (bundle / "violation.json").write_text(json.dumps(content))
    assert replay(bundle).returncode == 0, "the control: the same moments, and a good last save"


@pytest.mark.slow
def test_a_handler_that_removes_the_checkpoint_loses_what_was_acknowledged(
    preempted: Callable[[str], Told],
) -> None:
    told = preempted("forgets")
    assert told.code == 1, told.text
    bad = [one for one in signals(told) if one["violates"]]
    assert {one["outcome"] for one in bad} == {"COLD_START"}
    assert any(not one["violates"] for one in signals(told)), "before the first step was promised"
    assert replay(told.out / "bundles" / "preempted.py-preempt-COLD_START").returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("last", ["ignores", "default"])
def test_who_takes_no_notice_of_sigterm_violates_nothing(
    preempted: Callable[[str], Told], last: str
) -> None:
    told = preempted(last)
    assert told.code == 0, told.text
    reaction = {"ignores": "ignored: exit status 0", "default": "not handled: SIGTERM ended it"}
    assert all(one["handled"].startswith(reaction[last]) for one in signals(told))


NEVER_ENDS = """
import os, signal, sys, torch
torch.manual_seed(0)
out = sys.argv[1]
path = out + "/latest.pt"
state = torch.load(path) if os.path.exists(path) else {"step": 0}
def hold(*_):
    print("asked to end", flush=True)
    while True:
        signal.pause()
signal.signal(signal.SIGTERM, hold)
while state["step"] < 3:
    state["step"] += 1
    torch.save(state, out + "/latest.tmp")
    os.rename(out + "/latest.tmp", path)
    print("step", state["step"])
"""


@pytest.mark.slow
def test_a_handler_that_never_ends_is_killed_when_the_grace_is_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NEVER_ENDS)
    command = (sys.executable, "train.py", "{out}")
    options = ("--model", "kill", "--preempt", "--grace", "0")
    told = run(tmp_path / "out", *options, command=command, cwd=tmp_path)
    assert told.code == 0, told.text
    reactions = [one["handled"] for one in signals(told)]
    assert all(text.startswith("handled: SIGKILL at the end of the grace") for text in reactions)


@pytest.mark.slow
def test_a_rank_that_dies_in_its_save_takes_the_only_checkpoint_along(tmp_path: Path) -> None:
    command = (sys.executable, *TORCHRUN, str(SCRIPTS / "ddp.py"), "--out", "{out}")
    options = ("--model", "kill", "--kill-rank", "0")
    told = run(tmp_path / "out", *options, command=command)
    assert told.code == 1, told.text
    found = signals(told, "rank-0-dies")
    assert "LOST_ALL" in {one["outcome"] for one in found if one["violates"]}
    assert all("SIGKILL of rank 0 after" in one["what"] for one in found)
    assert all(one["handled"].startswith("exit status 1 after") for one in found), "torchrun ends"
    again = replay(told.out / "bundles" / "ddp.py-rank-0-dies-LOST_ALL")
    assert again.returncode == 1, again.stdout + again.stderr


@pytest.mark.slow
def test_the_death_of_the_other_rank_loses_nothing_of_a_durable_save(tmp_path: Path) -> None:
    command = (sys.executable, *TORCHRUN, str(SCRIPTS / "ddp.py"), "--durable", "--out", "{out}")
    options = ("--model", "kill", "--kill-rank", "1", "--kill-rank", "0")
    told = run(tmp_path / "out", *options, command=command)
    assert told.code == 0, told.text
    assert signals(told, "rank-0-dies")
    assert signals(told, "rank-1-dies")


# Its launcher waits for both ranks, one after the other; rank 0 waits for each step of rank 1.
WAITS = """
import os, subprocess, sys
out = sys.argv[1]
if "RANK" not in os.environ:
    read, write = os.pipe()
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv, str(read), str(write)],
            env={**os.environ, "RANK": str(rank)},
            pass_fds=(read, write),
        )
        for rank in (0, 1)
    ]
    END
read, write = map(int, sys.argv[2:])
rank, path = int(os.environ["RANK"]), out + "/rank-" + os.environ["RANK"]
step = int(open(path).read()) if os.path.exists(path) else 0
if rank == 1:
    os.write(write, b"." * step)
elif step:
    os.read(read, step)
while step < 3:
    step += 1
    if rank == 0:
        os.read(read, 1)
    with open(path + ".tmp", "w") as file:
        file.write(str(step))
    os.rename(path + ".tmp", path)
    if rank == 0:
        print("step", step)
    else:
        os.write(write, b".")
"""
HANGS = "sys.exit(max(rank.wait() for rank in ranks))"
# As torchrun does: the first rank that fails is the end of all.
ENDS = """code = os.waitstatus_to_exitcode(os.wait()[1]) or os.waitstatus_to_exitcode(os.wait()[1])
    [rank.kill() for rank in ranks]
    sys.exit(code != 0)"""


def kill_ranks(folder: Path, end: str, *ranks: str) -> Told:
    """Explore two ranks; `end` is what their launcher does when it has started them."""
    (folder / "train.py").write_text(WAITS.replace("END", end))
    command = (sys.executable, "train.py", "{out}")
    options = ("--model", "kill", "--result-file", "rank-0", "--checkpoint-glob", "rank-?")
    options += ("--deadline", "20", *(word for rank in ranks for word in ("--kill-rank", rank)))
    return run(folder / "out", *options, command=command, cwd=folder)


@pytest.mark.slow
def test_the_death_of_a_rank_ends_the_job_and_costs_nothing(tmp_path: Path) -> None:
    told = kill_ranks(tmp_path, ENDS, "0", "1")
    assert told.code == 0, told.text
    for rank in ("0", "1"):
        found = signals(told, f"rank-{rank}-dies")
        assert all(f"SIGKILL of rank {rank} after" in one["what"] for one in found)
        assert all(one["handled"].startswith("exit status 1 after") for one in found), told.text
        assert any("operations of its own, at rename" in one["what"] for one in found)


@pytest.mark.slow
def test_survivors_that_wait_for_a_dead_rank_are_a_hang(tmp_path: Path) -> None:
    told = kill_ranks(tmp_path, HANGS, "1")
    assert told.code == 1, told.text
    assert not told.worst("kill")
    hangs = [one for one in signals(told, "rank-1-dies") if one["outcome"] == "HANG"]
    assert hangs, told.text
    assert all("the job did not end after rank 1 had died" in one["summary"] for one in hangs)
    assert all(one["began"] != "hang" for one in hangs), "started again, it does its work"
    assert replay(told.out / "bundles" / "train.py-rank-1-dies-HANG").returncode == 1


@pytest.mark.slow
def test_a_rank_that_is_not_there_is_unknown(tmp_path: Path) -> None:
    command = (sys.executable, str(SCRIPTS / "preempted.py"), "well", "--out", "{out}")
    told = run(tmp_path / "out", "--model", "kill", "--kill-rank", "3", command=command)
    assert told.code == 3, told.text
    assert "--kill-rank 3: no process of the job was that rank (seen: none)" in told.text
