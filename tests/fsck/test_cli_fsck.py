"""The commands fsck and corrupt as a user meets them: output, exit status, what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import fsck_corpus
import jsonschema
import pytest
import torch
from commands import run as cli

from ckpt_conformance.contract import trees

if TYPE_CHECKING:
    from pathlib import Path

NO_TORCH = """
import sys
from ckpt_conformance.__main__ import main
try:
    main()
finally:
    sys.stderr.write("torch imported" if "torch" in sys.modules else "no torch")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, the newer one damaged, written by the reference manager."""
    base = tmp_path_factory.mktemp("runs")
    root = fsck_corpus.write("reference-dcp", base / "run")
    shard = root / "dcp_000005" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    return root


def test_fsck_tells_each_step_and_the_newest_whole_one(runs: Path) -> None:
    before = trees.listing(runs)
    done = cli("fsck", runs, "--jobs", "2")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("✗ damaged           dcp_000005  < 1 min ago  ")
    assert lines[0].endswith("KiB  next: take an older one, or another copy of it")
    assert any(line.startswith("✓ whole (verified)  dcp_000002  < 1 min ago  ") for line in lines)
    assert "2 checkpoints (reference-dcp): 1 damaged, 1 whole (verified)" in lines
    assert lines[-1] == f"newest whole (verified): {runs / 'dcp_000002'}"
    assert "damaged  __0_0.distcp bytes" in done.stdout
    assert trees.listing(runs) == before


def test_newest_whole_prints_one_path_for_a_script(runs: Path) -> None:
    done = cli("fsck", runs, "--newest-whole")
    assert (done.returncode, done.stdout) == (0, f"{runs / 'dcp_000002'}\n")
    assert "passed over" in done.stderr
    none = cli("fsck", runs / "dcp_000005", "--newest-whole")
    assert (none.returncode, none.stdout) == (1, "")


@pytest.mark.parametrize("sign", ["\n", "\r"])
def test_a_path_with_a_line_break_is_printed_with_a_nul_only(sign: str, tmp_path: Path) -> None:
    (tmp_path / f"a{sign}b").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / f"a{sign}b" / "step_5.pt")
    for folder in (tmp_path, tmp_path / f"a{sign}b"):
        refused = cli("fsck", folder, "--newest-whole")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "read it with --null" in refused.stderr
    whole = os.fsencode(tmp_path / f"a{sign}b" / "step_5.pt") + b"\0"
    command = [sys.executable, "-m", "ckpt_conformance", "fsck", str(tmp_path), "--newest-whole"]
    done = subprocess.run([*command, "-0"], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, whole)


def test_a_nul_ends_nothing_but_the_newest_whole(runs: Path) -> None:
    for words in ((), ("--newest-whole", "--json")):
        assert cli("fsck", runs, "--null", *words).returncode == 2


def test_what_does_not_exist_is_a_usage_error(runs: Path) -> None:
    shard = runs / "dcp_000002" / "__0_0.distcp"  # a part of a checkpoint
    for words in (
        ("fsck", runs / "absent"),
        ("fsck",),
        ("fsck", runs, "--jobs", "0"),
        ("fsck", shard),
    ):
        assert cli(*words).returncode == 2, words


@pytest.mark.parametrize("words", [("fsck",), ("fsck", "--newest-whole"), ("diff", ".")])
def test_an_empty_variable_is_not_the_current_folder(words: tuple[str, ...]) -> None:
    done = cli(*words, "")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'' is no path; is a variable of the script empty?" in done.stderr


@pytest.mark.parametrize("command", ["fsck", "diff"])
def test_what_nobody_can_look_at_is_told_in_one_line(command: str, tmp_path: Path) -> None:
    done = cli(command, tmp_path / ("x" * 300), *[tmp_path] * (command == "diff"))
    assert done.returncode == 2
    assert done.stderr.endswith("cannot be looked at: File name too long\n")


def test_a_gate_does_not_pass_over_what_could_not_be_judged(tmp_path: Path) -> None:
    """As of a store: it may be the newest whole one, and steps would be lost without a word."""
    state = {"w": torch.ones(3)}
    torch.save(state, tmp_path / "step_10.pt", _use_new_zipfile_serialization=False)
    alone = cli("fsck", tmp_path, "--newest-whole")
    torch.save(state, tmp_path / "step_5.pt")
    for done in (alone, cli("fsck", tmp_path, "--newest-whole")):
        assert (done.returncode, done.stdout) == (2, "")
        assert "step_10.pt could not be judged, and may be the newest" in done.stderr
    torch.save(state, tmp_path / "step_20.pt")
    newer = cli("fsck", tmp_path, "--newest-whole")
    assert (newer.returncode, newer.stdout) == (0, f"{tmp_path / 'step_20.pt'}\n")


def test_the_step_inside_of_a_file_tells_its_age(tmp_path: Path) -> None:
    """Lightning keeps the newest as last.ckpt: by its name alone it would be the oldest."""
    for name, step in (("last.ckpt", 12), ("epoch=0-step=4.ckpt", 4), ("best.ckpt", 8)):
        state = {"w": torch.ones(3)}
        inside = {"pytorch-lightning_version": "2.6.6", "global_step": step, "state_dict": state}
        torch.save(inside, tmp_path / name)
    done = cli("fsck", tmp_path, "--newest-whole")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'last.ckpt'}\n")
    (tmp_path / "last.ckpt").unlink()
    assert cli("fsck", tmp_path, "--newest-whole").stdout == f"{tmp_path / 'best.ckpt'}\n"


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("2>&-", 1),
        ("| true", 141),
        (">/dev/full", 2),
        ("--newest-whole 2>&-", 0),
        ("--newest-whole >&-", 2),
    ],
)
def test_what_becomes_of_the_output_is_no_verdict(runs: Path, ending: str, status: int) -> None:
    command = f"set -o pipefail; {sys.executable} -m ckpt_conformance fsck {runs} {ending}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


def test_nothing_to_judge_is_neither_whole_nor_damaged(tmp_path: Path) -> None:
    done = cli("fsck", tmp_path)
    assert done.returncode == 2
    assert "nothing here looks like a checkpoint" in done.stdout
    assert cli("fsck", tmp_path, "--newest-whole").returncode == 1


@pytest.mark.parametrize("option", [(), ("--newest-whole",), ("--metadata-only",)])
def test_json_is_what_its_schema_says(
    runs: Path, repository: Path, option: tuple[str, ...]
) -> None:
    schema = repository / "ckpt_conformance" / "report" / "schemas" / "fsck.schema.json"
    done = cli("fsck", runs, "--json", *option)
    told: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(told, json.loads(schema.read_text(encoding="utf-8")))
    whole = runs / ("dcp_000005" if "--metadata-only" in option else "dcp_000002")
    assert told["newest_whole"] == str(whole)
    assert told["checkpoints"][0]["step"] == 5


def test_fsck_imports_no_torch(runs: Path) -> None:
    command = [sys.executable, "-c", NO_TORCH, "fsck", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("no torch")


def test_a_gate_imports_nothing_of_certifying(runs: Path) -> None:
    """A launch script waits for it: no templates, no explorer, no numpy unless it is asked for."""
    code = NO_TORCH.replace(
        '"torch imported" if "torch" in sys.modules else "no torch"',
        "' '.join(sorted(sys.modules))",
    )
    command = [sys.executable, "-c", code, "fsck", str(runs), "--newest-whole"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    loaded = set(done.stderr.splitlines()[-1].split())
    assert "ckpt_conformance.fsck.judge.judge" in loaded
    heavy = {
        "torch",
        "numpy",
        "jinja2",
        "pytest",
        "hypothesis",
        "ckpt_conformance.report.certificate",
    }
    assert not loaded & heavy
    assert not [one for one in loaded if one.startswith("ckpt_conformance.crash")]


def test_both_entries_have_the_same_commands(runs: Path) -> None:
    for entry in ("ckpt_conformance", "ckpt_conformance.cli"):
        command = [sys.executable, "-m", entry, "fsck", str(runs), "--newest-whole"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"{runs / 'dcp_000002'}\n")


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "evil\x1b[2J\n-5.pt").write_bytes(b"x")
    done = cli("fsck", tmp_path)
    assert "\x1b" not in done.stdout
    assert "evil\\x1b[2J\\n-5.pt" in done.stdout


def test_corrupt_damages_a_copy_and_says_what(runs: Path, tmp_path: Path) -> None:
    source = runs / "dcp_000002"
    before = trees.listing(source)
    for name in ("first", "second"):
        done = cli(
            *("corrupt", source, "--fault", "bit-flip", "--seed", "3"),
            *("--file", "__0_0.distcp", "--out", tmp_path / name),
        )
        assert done.returncode == 0, done.stderr
        assert "bit-flip in __0_0.distcp at byte" in done.stdout
    assert trees.listing(source) == before
    first, second = (
        {path.name: path.read_bytes() for path in trees.files(tmp_path / name)}
        for name in ("first", "second")
    )
    assert first == second
    changed = [name for name in first if first[name] != (source / name).read_bytes()]
    assert changed == ["__0_0.distcp"]
    assert cli("fsck", tmp_path / "first").returncode == 1


def test_corrupt_hits_the_file_that_is_named(runs: Path, tmp_path: Path) -> None:
    words = ("corrupt", runs, "--fault", "truncation-half", "--file", "dcp_000002/extra_state.pt")
    done = cli(*words, "--json", "--out", tmp_path / "copy")
    told = json.loads(done.stdout)
    assert (told["file"], told["fault"]) == ("dcp_000002/extra_state.pt", "truncation")
    assert told["before"] != told["after"]


def test_corrupt_refuses_and_leaves_nothing(runs: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").touch()
    for words, reason in (
        (("--fault", "bitflip", "--out", tmp_path / "new"), "did you mean bit-flip"),
        (("--fault", "bit-flip", "--out", there), "exists"),
        (("--fault", "bit-flip", "--out", runs / "inside"), "inside of"),
        (("--fault", "edited-name", "--file", "latest", "--out", tmp_path / "new"), "cannot be"),
        (("--fault", "bit-flip", "--file", "../x", "--out", tmp_path / "new"), "leads out"),
    ):
        done = cli("corrupt", runs, *words)
        assert done.returncode == 2, words
        assert reason in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == [there]
    (tmp_path / "new.unfinished").mkdir()
    done = cli("corrupt", runs, "--fault", "bit-flip", "--out", tmp_path / "new")
    assert (done.returncode, "new.unfinished is there" in done.stderr) == (2, True)
    (tmp_path / "new.unfinished").rmdir()
    assert [path.name for path in there.iterdir()] == ["mine"]
    assert cli("corrupt", there / "mine", "--fault", "bit-flip", "--out", "x").returncode == 2
