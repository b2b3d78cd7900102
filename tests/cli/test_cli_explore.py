"""`explore` and `replay` as a user meets them: what they print, keep, and leave as exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import commands
import jsonschema
import pytest

from ckpt_conformance.cli import explore, main
from ckpt_conformance.crash.explore import engine
from ckpt_conformance.report.environment import OutputError
from ckpt_conformance.trace.operations import Recording

pytestmark = pytest.mark.xdist_group("cli-explore")  # they share the exploration below

IN_PLACE = "torch-save-inplace"


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the command line in this process; give the exit status and what it printed."""
    before, sys.argv = sys.argv, ["ckpt-conformance", *arguments]
    try:
        main.main()
    except SystemExit as end:
        out = capsys.readouterr()
        return int(end.code or 0), out.out + out.err
    finally:
        sys.argv = before
    return 0, capsys.readouterr().out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Explore the in-place recipe once, as a process of its own."""
    out = tmp_path_factory.mktemp("explored")
    command = ["explore", IN_PLACE, "--model", "kill", "--workload", "second", "--out", str(out)]
    done = commands.run(*command, "--keep")
    return done.returncode, done.stdout + done.stderr, out


def test_keep_replaces_a_recording_and_nothing_else(tmp_path: Path) -> None:
    """What stands where a recording would be kept may be somebody's only checkpoint."""
    keep = getattr(explore, "_keep")  # noqa: B009  what --keep calls
    recording = Recording(str(tmp_path), tmp_path / "new", [], [])
    recording.folder.mkdir()
    recording.save()
    target = tmp_path / "out" / "recordings" / "second"
    target.mkdir(parents=True)
    for foreign in ({}, {"recording.json": "{}"}, {"model.pt": "weights"}):
        for name, text in foreign.items():
            (target / name).write_text(text)
        with pytest.raises(OutputError, match=r"holds no recording of explore.*--out"):
            keep(recording.folder, target)
        assert {path.name: path.read_text() for path in target.iterdir()}.items() >= foreign.items()
    for path in target.iterdir():
        path.unlink()
    (target / "recording.json").write_text((recording.folder / "recording.json").read_text())
    (target / "data").write_bytes(b"of an earlier run")
    keep(recording.folder, target)
    assert [path.name for path in target.iterdir()] == ["recording.json"]


def bundle_of(out: Path) -> Path:
    return out / "bundles" / "second-kill-LOST_ALL"


def test_a_violation_is_told_with_its_replay_command(found: tuple[int, str, Path]) -> None:
    code, text, out = found
    assert code == 1, text
    assert "second:" in text
    assert "runs of recovery" in text
    assert "LOST_ALL" in text
    assert f"replay: ckpt-conformance replay {bundle_of(out)}" in text
    assert "removed-before-replaced" in text, "the audit names the truncate"
    assert "reproduced with a real process" in text, "a real kill left that state"


def test_what_is_counted_is_said_and_the_numbers_agree(found: tuple[int, str, Path]) -> None:
    """Several states have one content, which is recovered from once: outcomes are of states."""
    _, text, out = found
    line = next(line for line in text.splitlines() if " different contents; " in line)
    numbers = re.search(
        r"kill +(\d+) states with (\d+) different contents; (\d+) contents recovered from, "
        r"so (\d+) states judged: (.*)",
        line,
    )
    assert numbers, line
    states, contents, recovered, judged = map(int, numbers.groups()[:4])
    assert states >= judged >= recovered
    assert states >= contents >= recovered
    assert sum(int(end.split()[1]) for end in numbers[5].split(", ")) == judged
    page = (out / "report.html").read_text()
    assert f"{recovered} contents recovered from, so {judged} states judged" in page


def test_the_exploration_is_written_as_json_and_as_a_page(found: tuple[int, str, Path]) -> None:
    _, text, out = found
    body = json.loads((out / "result.json").read_text())
    schema = Path(engine.__file__).parents[2] / "report" / "schemas" / "exploration.schema.json"
    jsonschema.validate(body, json.loads(schema.read_text()))
    (one,) = body["explorations"]
    assert one["workload"] == "second"
    kill = one["models"]["kill"]
    assert kill["candidates"] >= kill["distinct"] >= kill["visited"] > 0
    assert sum(sum(each.values()) for each in kill["points"].values()) == sum(
        kill["outcomes"].values()
    )
    assert {violation["outcome"] for violation in kill["violations"]} >= {"LOST_ALL"}
    assert body["crash"]["kill"]["outcomes"] == kill["outcomes"]
    assert (out / "recordings" / "second" / "recording.json").exists()
    assert f"report: {out / 'report.html'}" in text
    assert IN_PLACE in (out / "report.html").read_text()


@pytest.mark.usefixtures("served")
def test_a_bundle_replays_with_1_and_mended_with_0(
    found: tuple[int, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bundle_of(found[2])
    code, text = run("replay", str(folder), capsys=capsys)
    assert (code, "still violates" in text) == (1, True), text
    mended = tmp_path / "bundle"
    subprocess.run(["cp", "-a", str(folder), str(mended)], check=True)
    (whole,) = sorted((mended / "legal").glob("*-step-2"))
    data = (whole / "checkpoint.pt").read_bytes()
    (mended / "checkpoints" / "checkpoint.pt").write_bytes(data)
    code, text = run("replay", str(mended), capsys=capsys)
    assert (code, "as it should be" in text) == (0, True), text


@pytest.mark.usefixtures("served")
def test_a_bundle_whose_control_fails_is_unknown(
    found: tuple[int, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = tmp_path / "bundle"
    subprocess.run(["cp", "-a", str(bundle_of(found[2])), str(spoilt)], check=True)
    for path in (spoilt / "legal").rglob("checkpoint.pt"):
        path.write_bytes(b"")
    code, text = run("replay", str(spoilt), capsys=capsys)
    assert (code, "control failed" in text) == (3, True), text


def test_the_script_for_upstream_needs_only_torch(
    found: tuple[int, str, Path], tmp_path: Path
) -> None:
    folder = bundle_of(found[2])
    script = (folder / "repro.py").read_text()
    assert "import ckpt_conformance" not in script
    assert "from ckpt_conformance" not in script
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(folder / "repro.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "after the crash:" in done.stdout


def test_the_operations_are_listed_with_the_crash_point(found: tuple[int, str, Path]) -> None:
    text = (bundle_of(found[2]) / "operations.txt").read_text()
    assert text.count("---- crash here") == 1
    (guilty,) = [line for line in text.splitlines() if line.startswith(">>")]
    assert "truncate" in guilty
    assert "torch_save.py" in guilty, "the line of the manager that issued it"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["explore", IN_PLACE, "--model", "ext5"], "ext5"),
        (["explore", IN_PLACE, "--workload", "fourth"], "fourth"),
        (["explore", IN_PLACE, "--real", "zfs"], "zfs"),
        (["explore", "no-such-adapter"], "no-such-adapter"),
        (["replay", "no-such-bundle"], "no bundle"),
    ],
)
def test_a_usage_error_leaves_with_2(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = run(*arguments, capsys=capsys)
    assert code == 2, text
    assert told in text


@pytest.mark.usefixtures("served")
def test_ctrl_c_prints_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "CHUNK", 4)
    monkeypatch.setattr("ckpt_conformance.cli.explore.Progress.__call__", stop)
    arguments = ["explore", IN_PLACE, "--model", "kill", "--workload", "second"]
    code, text = run(*arguments, "--out", str(tmp_path / "out"), capsys=capsys)
    assert code == 130, text
    assert "4 runs of recovery" in text
    assert "Stopped before the end" in text


def test_the_command_line_of_explore_starts_without_torch() -> None:
    code = (
        "import sys; from ckpt_conformance.cli import main, explore; "
        "from ckpt_conformance.crash.explore import bundles, engine, verdicts, workloads; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_root_real_images_are_unknown_and_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    out = tmp_path / "out"
    code, text = run("explore", IN_PLACE, "--real", "ext4", "--out", str(out), capsys=capsys)
    assert code == 3, text
    assert "mounting an image needs Linux and root" in text
    assert "leave --real ext4 out" in text
    assert not out.exists(), "nothing was explored, so nothing is written"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["dcp-per-step", "--ranks", "2", "--model", "ext4"], "not for --ranks 2"),
        (["dcp-per-step", "--model", "node-loss"], "not for --ranks 1; of 1 rank there is kill"),
        (["--ranks", "2", "--", "python", "train.py"], "explored with one rank"),
        (["reference", "--model", "object-store", "--model", "kill"], "is explored alone"),
        (["--model", "object-store", "--", "python", "t.py", "{out}"], "is explored alone"),
        (["reference", "--model", "fuse-object", "--model", "kill"], "does not go with the model"),
        (["reference", "--model", "fuse-object:s3fs", "--cache", "c"], "does not go with --cache"),
        (["reference", "--model", "fuse-object:ext4"], "fuse-object:s3fs"),
    ],
)
def test_what_ranks_cannot_have_is_refused(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run("explore", "--out", str(tmp_path / "out"), *arguments, capsys=capsys)
    assert code == 2
    assert told in " ".join(text.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("served")
def test_a_manager_without_ranks_is_said_to_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--ranks", "2", "--workload", "second", "--out", str(tmp_path)]
    _, text = run("explore", IN_PLACE, *more, capsys=capsys)
    assert "not applicable second: the adapter does not declare ranks" in " ".join(text.split())
