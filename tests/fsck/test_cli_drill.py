"""The command drill as a user meets it: a table of faults, and what fsck says of each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import jsonschema
import pytest
import torch
from fsck_runs import Finished
from test_cli_fsck import cli

from ckpt_conformance.contract import trees
from ckpt_conformance.fault_injectors import drills

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "step_5"
    folder.mkdir(parents=True)
    torch.save({"w": torch.randn(400)}, folder / "model.pt")
    torch.save(
        {"state": {0: {"exp_avg": torch.randn(400)}}, "param_groups": []}, folder / "optimizer.pt"
    )
    (folder / "config.json").write_text(json.dumps({"width": 5, "name": "five"}))
    return tmp_path / "run"


def test_every_fault_has_a_row_and_the_original_stays(run: Path, repository: Path) -> None:
    before = trees.listing(run)
    told = json.loads(Finished("drill", run, "--json", "--times", "2").out)
    schema = repository / "ckpt_conformance" / "report" / "schemas" / "drill.schema.json"
    jsonschema.validate(told, json.loads(schema.read_text()))
    rows = told["drills"]
    assert [one["fault"] for one in rows] == [name for name in drills.FAULTS for _ in range(2)]
    assert {one["seed"] for one in rows} == {0, 1}
    assert "impossible" not in {one["says"] for one in rows}
    assert trees.listing(run) == before
    in_payload = [one for one in rows if one["fault"].startswith("truncation")]
    assert {one["says"] for one in in_payload} <= {"damaged", "incomplete"}


def test_a_row_is_what_corrupt_does(run: Path, tmp_path: Path) -> None:
    (row,) = json.loads(Finished("drill", run, "--json", "--fault", "bit-flip", "--seed", "7").out)[
        "drills"
    ]
    words = (
        "corrupt",
        run,
        "--fault",
        "bit-flip",
        "--seed",
        "7",
        "--out",
        tmp_path / "copy",
        "--json",
    )
    done = json.loads(Finished(*words).out)
    assert (row["file"], row["offset"]) == (done["file"], done["offset"])
    assert row["says"] in Finished("fsck", tmp_path / "copy").out


def test_the_table_ends_with_how_many_were_seen(run: Path) -> None:
    done = Finished("drill", run, "--fault", "missing-file", "--fault", "zeroed-block")
    lines = done.out.splitlines()
    assert done.status == 0
    assert lines[0].split() == ["fault", "fsck", "says", "where,", "and", "why"]
    assert len(lines) == 4
    assert lines[-1].startswith("fsck sees")


def test_what_is_impossible_says_why(run: Path) -> None:
    (run / "step_5" / "config.json").unlink()
    done = Finished("drill", run, "--fault", "edited-number")
    assert "impossible" in done.out
    assert f"{run} holds no JSON file" in done.out
    assert "sees 0 of 0" in done.out


@pytest.mark.parametrize("length", [0, 50, None])
def test_it_begins_with_what_is_whole(length: int | None, run: Path) -> None:
    """Where it is not, or there is none, there is nothing to learn."""
    for path in (run / "step_5").iterdir():
        path.unlink() if length is None else path.write_bytes(path.read_bytes()[:length])
    done = cli("drill", run, "--fault", "bit-flip")
    assert done.returncode == 2
    assert "as it is" in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--fault", "bitflip"), "did you mean bit-flip"),
        (("--file", "../x"), "leads out"),
        (("--times", "0"), "whole number from 1"),
    ],
)
def test_what_is_wrong_is_refused(words: tuple[str, ...], reason: str, run: Path) -> None:
    done = cli("drill", run, *words)
    assert done.returncode == 2
    assert reason in done.stderr
