"""The command diff as a user meets it: output, exit status, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import jsonschema
import pytest
import torch
from test_cli_fsck import NO_TORCH, cli

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files: a tensor, a value and a name differ."""
    folder = tmp_path_factory.mktemp("both")
    names = (folder / "a-5.pt", folder / "b-6.pt")
    for at, path in enumerate(names):
        weights = torch.ones(3, 4)
        weights[1, 2] += at * 2**-20
        state = {"w": weights, "same": torch.zeros(2), "step": 5 + at, f"only{at}\x1b": 1}
        torch.save(state, path)
    return names


def test_diff_tells_each_difference_and_sums_up(both: tuple[Path, Path]) -> None:
    done = cli("diff", *both)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        f"A  {both[0]}  (torch, step 5)",
        f"B  {both[1]}  (torch, step 6)",
        "  only in A  only0\\x1b: 1",
        "  only in B  only1\\x1b: 1",
        "  differs  step: 5 and 6",
        "  differs  w: float32 [3, 4]: 1 of 12 (8.33 %), first at [1, 2], max abs 9.53674e-07, max ULPs 8",  # noqa: E501  one line
        "1 same, 2 of other bits or values, 1 only in A, 1 only in B (56 bytes of tensors)",
        "different",
    ]


def test_the_same_is_0_and_damage_is_2(both: tuple[Path, Path], tmp_path: Path) -> None:
    done = cli("diff", both[0], both[0])
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "the same, bit for bit"
    cut = tmp_path / "cut-5.pt"
    cut.write_bytes(both[0].read_bytes()[:-9])
    done = cli("diff", both[0], cut)
    assert done.returncode == 2
    assert "damaged  cut-5.pt" in done.stdout
    assert "not judged" in done.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--rename", "nothing"), "is no REGEX=NEW"),
        (("--rename", "(=x"), "is no regular expression"),
        (("--rename", "absent=x"), "matches no name of A"),
        (("--only", "["), "is no regular expression"),
        (("--jobs", "0"), "no whole number"),
    ],
)
def test_wrong_options_are_usage_errors(
    words: tuple[str, ...], reason: str, both: tuple[Path, Path]
) -> None:
    done = cli("diff", *both, *words)
    assert done.returncode == 2
    assert reason in done.stderr


def test_few_differences_are_shown_unless_all_are_asked_for(tmp_path: Path) -> None:
    for at in range(2):
        torch.save({f"k{number}": at for number in range(30)}, tmp_path / f"{at}.pt")
    short, whole = (
        cli("diff", tmp_path / "0.pt", tmp_path / "1.pt", *more) for more in ((), ("--all",))
    )
    assert "and 10 more differences" in short.stdout
    assert len(whole.stdout.splitlines()) == len(short.stdout.splitlines()) + 9
    assert whole.stdout.index("k9:") < whole.stdout.index("k10:")


@pytest.mark.parametrize("option", [(), ("--all",), ("--only", "w|same")])
def test_json_is_what_its_schema_says(
    both: tuple[Path, Path], repository: Path, option: tuple[str, ...]
) -> None:
    schema = repository / "ckpt_conformance" / "report" / "schemas" / "diff.schema.json"
    told = json.loads(cli("diff", *both, "--json", *option).stdout)
    jsonschema.validate(told, json.loads(schema.read_text(encoding="utf-8")))
    (weights,) = (one for one in told["differences"] if one["name"] == "w")
    assert (weights["count"], weights["first"], weights["max_ulps"]) == (1, [1, 2], 8)
    assert told["counts"]["same"] == 1
    assert told.get("same_names") == (["same"] if option == ("--all",) else None)


def test_infinite_distances_are_json(tmp_path: Path) -> None:
    for at, value in enumerate((float("inf"), 1.0)):
        torch.save({"w": torch.tensor([value])}, tmp_path / f"{at}.pt")
    done = cli("diff", tmp_path / "0.pt", tmp_path / "1.pt", "--json")
    assert json.loads(done.stdout)["differences"][0]["max_abs"] == "inf"


def test_diff_imports_no_torch(both: tuple[Path, Path]) -> None:
    command = [sys.executable, "-c", NO_TORCH, "diff", *map(str, both)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "no torch")
