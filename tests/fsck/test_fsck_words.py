"""The report of a run for people: one line a step, more of what is not whole, the answer last."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import uuid
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fsck_runs import NOW, Finished
from stopped import wait

from ckpt_conformance.fsck.judge import stored
from ckpt_conformance.fsck.judge.judge import Judged, Options, judge
from ckpt_conformance.fsck.source.findings import Kind, Report, Topic
from ckpt_conformance.fsck.source.places import place
from ckpt_conformance.report.fsck_lines import Style, age_of, fitted, lines, size_of

STEPS = 30
HOUR = 3600


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps, an hour apart, of which the newest and an older one are damaged."""
    root = tmp_path_factory.mktemp("words") / "a-run-with-a-name"
    for step in range(1, STEPS + 1):
        folder = root / f"step_{step}"
        folder.mkdir(parents=True)
        for number, name in enumerate(("model.pt", "extra.pt")):
            value = torch.full((300,), step + 100.0 * number)
            torch.save({"layers.0.mlp.weight": value}, folder / name)
        (folder / "notes.txt").write_text("none")
        for file in folder.iterdir():
            changed = NOW - (STEPS - step) * HOUR - 125
            os.utime(file, (changed, changed))
    for step in (30, 12):
        path = root / f"step_{step}" / "model.pt"
        was = path.stat().st_mtime
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"\xa5" * 8)
        os.utime(path, (was, was))
    return root


def told(judged: Judged, width: int | None = None, *, details: bool = False) -> list[str]:
    return list(lines(judged, Style(width, details, NOW)))


def test_each_step_has_one_line_and_the_answer_is_last(run: Path) -> None:
    said = told(judge(run))
    rows = [line for line in said if not line.startswith(" ")][:STEPS]
    names = [line.split("step_")[1].split()[0] for line in rows]
    assert names == [str(step) for step in range(STEPS, 0, -1)]
    assert rows[1].startswith("✓ whole (partly verified, ")
    assert "  62 min ago  " in rows[1]
    assert "   2 min ago  " in rows[0]
    assert "  29 h ago  " in rows[-1]
    assert rows[0].endswith("next: take an older one, or another copy of it")
    assert len({line.index("step_") for line in rows}) == 1
    assert said[1].startswith("    damaged  model.pt bytes ")
    assert said[2].startswith("✓")
    assert said[-2] == "  newer, and not whole: step_30"
    assert said[-1].endswith(f"{run / 'step_29'}")
    assert "30 checkpoints (files): 2 damaged, 28 whole (partly verified)" in said


def test_details_show_all_of_every_step(run: Path) -> None:
    short, long = told(judge(run)), told(judge(run), details=True)
    assert sum("bytes: digest" in line for line in short) == 0
    assert sum("bytes: digest" in line for line in long) == STEPS
    assert (
        "passed over, of no layout; no pickle was found in them, sources are not read: notes.txt"
        in "".join(long)
    )
    assert "  28 remarks: --details shows them, and everything else" in short
    alone = told(judge(run / "step_3"))
    assert any("bytes: digest" in line for line in alone)
    done = Finished("fsck", run, "--details")
    assert done.out.splitlines() == long


@pytest.mark.parametrize("width", [40, 60, 80, 99, 140])
def test_a_terminal_wraps_between_words(width: int, run: Path) -> None:
    judged = judge(run)
    said = told(judged, width=width)
    whole = [line for line in said if len(line) > width]
    assert [one for one in whole if " " in one.strip()] == []  # only a path is longer
    wrapped = " ".join(" ".join(said).split())
    assert wrapped == " ".join(" ".join(told(judged)).split())
    if width >= 80:
        rows = [line for line in said if line.startswith(("✓", "✗"))]
        assert len(rows) == STEPS
    for before, after in pairwise(said):
        if before.startswith("✗") and "next:" not in before:
            assert after.startswith(
                ("      next: ", "      2 min ago", "      18 h ago", "      step")
            )


def test_a_pipe_gets_lines_of_any_length() -> None:
    report = Report(Path("run/step_1"), layout="files", step=1)
    report.say(Kind.DAMAGED, "model.pt", "word " * 200)
    said = list(lines(Judged(report.path.parent, [report]), Style()))
    assert max(map(len, said)) > 1000
    assert max(map(len, lines(Judged(report.path.parent, [report]), Style(80)))) <= 80


def test_a_real_terminal_and_a_real_pipe(run: Path) -> None:
    """What tmux shows at 80 columns has no line that the terminal itself has cut."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: a real terminal is not looked at")
    command = [sys.executable, "-m", "ckpt_conformance", "fsck", run.name]  # a short one: no line
    given: dict[str, Any] = {"capture_output": True, "text": True, "cwd": run.parent}  # needs a cut
    piped = subprocess.run(command, check=False, **given).stdout
    name = f"ckc-{uuid.uuid4().hex}"
    done = run.parent / "done"
    shell = f"{shlex.join(command)}; touch {done}; sleep 600"
    tmux = ["tmux", "-L", name, "-f", "/dev/null"]
    size = ("-x", "80", "-y", "90", "-c", str(run.parent))
    subprocess.run([*tmux, "new-session", "-d", *size, shell], check=True)
    try:
        wait(done.exists)
        shown = subprocess.run(
            [*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True
        ).stdout
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
        done.unlink(missing_ok=True)
    assert " ".join(shown.split()) == " ".join(piped.split())
    rows = [line for line in shown.splitlines() if line.startswith(("✓", "✗"))]
    assert len(rows) == STEPS
    assert "      next: take an older one, or another copy of it" in shown.splitlines()


def test_many_findings_of_one_of_several_are_cut_short(run: Path) -> None:
    judged = judge(run)
    for number in range(9):
        judged.reports[0].say(Kind.DAMAGED, f"file{number}", "it ends early", topic=Topic.SIZE)
    said = told(judged)
    assert sum("it ends early" in line for line in said) == 4
    assert "    and 5 more (--details shows them)" in said
    assert "  more about this: ckpt-conformance fsck --explain checksum  (also: size)" in said


def test_a_step_that_the_name_does_not_say_is_told(tmp_path: Path) -> None:
    inside = {"pytorch-lightning_version": "2.6.6", "global_step": 12, "state_dict": {}}
    torch.save(inside, tmp_path / "last.ckpt")
    assert "last.ckpt (step 12)" in told(judge(tmp_path))[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3600, "in the future"),
        (-1, "< 1 min ago"),
        (59, "< 1 min ago"),
        (61, "1 min ago"),
        (7199, "119 min ago"),
        (7200, "2 h ago"),
        (47 * HOUR, "47 h ago"),
        (48 * HOUR, "2 d ago"),
        (1000 * 24 * HOUR, "1,000 d ago"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert age_of(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (581_879, "568 KiB"),
        (10 * 2**30 + 1, "10.0 GiB"),
        (2**62, "4,096.0 PiB"),
    ],
)
def test_sizes(number: int, text: str) -> None:
    assert size_of(number) == text


def test_a_path_is_not_cut() -> None:
    path = "/a-long/path-with-hyphens/" * 5
    assert list(fitted(f"newest whole: {path}", 60)) == ["newest whole:", f"      {path}"]


# -- when it was changed ---------------------------------------------------------------------------


def test_json_says_when_it_was_changed(run: Path) -> None:
    report = judge(run).reports[0]
    assert report.changed == pytest.approx(NOW - 125, abs=1)
    plain = report.to_json()
    assert plain["changed"] == report.changed
    assert stored.report_of(plain).changed == report.changed
    del plain["changed"]  # results of earlier releases
    old = stored.report_of(plain)
    assert old.changed is None
    assert " ago" not in told(Judged(run, [old], options=Options()))[0]


def test_what_does_not_say_when_it_was_changed_has_no_age() -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.pipe("/words/step_1.pt", b"no archive")
    report = judge(place("memory://words")).reports[0]
    assert report.changed is not None  # this one says when it was made
    report.changed = None
    assert " ago" not in told(Judged(report.path.parent, [report]))[0]


def test_a_remark_of_several_steps_is_told_once(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"step_{step}").mkdir()
        torch.save({"a": Namespace(lr=1)}, tmp_path / f"step_{step}" / "model.pt")
    lines = told(judge(tmp_path), details=True)
    remarks = [line for line in lines if "argparse.Namespace" in line]
    assert len(remarks) == 1
    assert lines.index(remarks[0]) < lines.index("    and 2 remarks as of step_3")
    assert lines.count("    and 2 remarks as of step_3") == 2
