"""`explore` in parts: shards of one exploration, recordings that are shared, one report of all."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from explorations import IN_PLACE, REFERENCE, ckpt, result_of

from ckpt_conformance.cli import scripts
from ckpt_conformance.crash.script.command import Script
from ckpt_conformance.work import lines

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ckpt"]
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "in_place.py"
SHARDS = 3


def shards(ckpt: Callable[..., tuple[int, str]], *words: str, count: int = SHARDS) -> list[str]:
    """Run every shard of an exploration; return the files of their lines."""
    names = [f"parts/{number}.jsonl" for number in range(1, count + 1)]
    for number, name in enumerate(names, 1):
        part = ("--shard", f"{number}/{count}", "--results", name, "--out", "parts")
        status, text = ckpt("explore", *part, *words)
        assert status == 0, text
        assert f"shard {number}/{count}: " in text
        assert "all shards: ckpt-conformance combine FILE..." in text
    return names


@pytest.mark.parametrize(("adapter", "verdict"), [(IN_PLACE, 1), (REFERENCE, 0)])
def test_shards_make_the_report_of_one_run(
    ckpt: Callable[..., tuple[int, str]], adapter: str, verdict: int
) -> None:
    words = (adapter, "--workload", "second")
    assert ckpt("explore", *words, "--record", "kept")[0] == 0
    explored = (*words, "--recording", "kept")
    status, whole = ckpt("explore", *explored, "--out", "whole")
    assert status == verdict, whole
    names = shards(ckpt, *explored)
    visited = [sum(map(_recoveries, lines.read(Path(n)).results.values())) for n in names]
    assert all(visited), f"every shard has something to do: {visited}"
    assert max(visited) < sum(_visited("whole")), "no shard does it all"
    assert not Path("parts/result.json").exists()
    status, combined = ckpt("combine", *reversed(names), "--out", "combined")
    assert status == verdict, combined
    assert result_of("combined") == result_of("whole")
    printed = [line.replace("combined/", "whole/") for line in combined.splitlines()]
    assert [line for line in printed if "runs of recovery" not in line] == [
        line for line in whole.splitlines() if "runs of" not in line and "states/s" not in line
    ]
    if verdict:
        kept = result_of("combined")["bundles"]
        assert kept, "violations have bundles"
        assert ckpt("replay", f"combined/bundles/{next(iter(kept))}")[0] == 1


def _recoveries(line: lines.Line) -> int:
    evidence: dict[str, Any] = json.loads(bytes(line.result))
    return len(evidence.get("recoveries", ()))


def _visited(folder: str) -> list[int]:
    return [one["visited"] for one in result_of(folder)["explorations"]]


@pytest.mark.slow
def test_shards_of_a_script_make_the_report_of_one_run(
    ckpt: Callable[..., tuple[int, str]],
) -> None:
    words = ("--model", "kill", "--jobs", "2")
    command = ("--", sys.executable, str(SCRIPT), "--out", "{out}")
    assert ckpt("explore", *words, "--record", "kept", *command)[0] == 0
    explored = (*words, "--recording", "kept")
    status, whole = ckpt("explore", *explored, "--out", "whole", *command)
    assert status == 1, whole
    names = shards(ckpt, *explored, *command, count=2)
    status, combined = ckpt("combine", *names, "--out", "combined")
    assert status == 1, combined
    assert result_of("combined") == result_of("whole")
    assert result_of("combined")["bundles"]


def test_a_deterministic_manager_may_be_recorded_by_each_shard(
    ckpt: Callable[..., tuple[int, str]],
) -> None:
    words = (IN_PLACE, "--workload", "second", "--model", "ext4")
    names = shards(ckpt, *words, count=2)
    status, text = ckpt("combine", *names, "--out", "combined")
    assert status == 1, text
    assert result_of("combined")["unknown"] == []


def test_different_recordings_are_unknown_and_say_what_to_do(
    ckpt: Callable[..., tuple[int, str]],
) -> None:
    names = shards(ckpt, REFERENCE, "--workload", "second", "--model", "kill", count=2)
    status, text = ckpt("combine", *names, "--out", "combined")
    assert status == 3, text
    assert "second: the shards recorded 2 different saves" in text
    assert "explore --record DIR" in text
    assert len(result_of("combined")["explorations"]) == 2


def test_a_missing_shard_is_named_and_its_states_are_counted(
    ckpt: Callable[..., tuple[int, str]],
) -> None:
    words = (REFERENCE, "--workload", "second", "--model", "kill")
    assert ckpt("explore", *words, "--record", "kept")[0] == 0
    names = shards(ckpt, *words, "--recording", "kept")
    status, text = ckpt("combine", names[0], names[2], "--out", "combined")
    assert status == 3, text
    assert "1 shard missing: 2/3" in text
    assert "chosen states were not visited: missing 2/3" in text
    (told,) = Path("combined").rglob("result.json")
    assert "not all parts are there: missing 2/3" in told.read_text()


def test_what_a_killed_shard_wrote_counts(ckpt: Callable[..., tuple[int, str]]) -> None:
    words = (IN_PLACE, "--workload", "second", "--model", "btrfs")
    name = "all.jsonl"
    status, text = ckpt("explore", *words, "--results", name, "--out", "whole")
    assert status == 1, text
    written = Path(name).read_bytes().splitlines(keepends=True)
    at = [number for number, line in enumerate(written) if b'"recoveries":' in line][2]
    Path(name).write_bytes(b"".join(written[:at]) + written[at][:100])
    status, text = ckpt("combine", name, "--out", "combined")
    assert status == 1, text
    assert "1 shard stopped before the end: 1/1" in text
    part = result_of("combined")["explorations"][0]
    assert 0 < part["visited"] < _visited("whole")[0]
    assert part["models"]["btrfs"]["violations"], "what was found before stands"
    assert any("were not visited" in doubt for doubt in part["unknown"])


def test_shards_of_other_requests_do_not_belong_together(
    ckpt: Callable[..., tuple[int, str]],
) -> None:
    words = (IN_PLACE, "--workload", "second", "--model", "kill")
    ckpt("explore", *words, "--shard", "1/2", "--results", "a.jsonl")
    ckpt("explore", *words, "--shard", "2/2", "--results", "b.jsonl", "--seed", "7")
    status, text = ckpt("combine", "a.jsonl", "b.jsonl")
    assert status == 2
    assert "--seed is 0 and 7" in text


@pytest.mark.slow
def test_a_script_that_was_edited_since_its_recording_is_refused(
    ckpt: Callable[..., tuple[int, str]],
) -> None:
    """Between the recording and a shard, and between two shards; what is beside it counts, too."""
    shutil.copy(SCRIPT, "train.py")
    shutil.copy(SCRIPT.with_name("training.py"), "training.py")
    words = ("--model", "kill", *("--", sys.executable, "train.py"), "--out", "{out}")
    given = (
        "--recording",
        "kept",
        "--shard",
        "1/2",
        "--results",
        "parts/1.jsonl",
        "--out",
        "parts",
    )
    assert ckpt("explore", "--record", "kept", *words)[0] == 0
    assert ckpt("explore", *given, *words)[0] == 0
    for name in ("train.py", "training.py"):
        text = Path(name).read_text()
        Path(name).write_text(text + "# edited\n")
        status, said = ckpt("explore", *given, *words)
        assert status == 2
        assert f"--recording kept depends on what differs now: {name} is " in said
        Path(name).write_text(text)
    other = ("--shard", "2/2", "--results", "parts/2.jsonl", "--out", "parts")
    assert ckpt("explore", "--recording", "kept", *other, *words)[0] == 0
    assert ckpt("combine", "parts/1.jsonl", "parts/2.jsonl", "--out", "whole")[0] in {0, 1}
    header, *rest = Path("parts/2.jsonl").read_text().splitlines(keepends=True)
    content = json.loads(header)
    content["depends"]["files"]["train.py"] = "another"
    Path("parts/2.jsonl").write_text("".join([json.dumps(content) + "\n", *rest]))
    status, said = ckpt("combine", "parts/1.jsonl", "parts/2.jsonl", "--out", "whole")
    assert status == 2
    assert "what results depend on differs: train.py is " in said


def test_a_configuration_that_a_command_names_counts(tmp_path: Path) -> None:
    script = Path(tmp_path, "src", "train.py")
    script.parent.mkdir()
    for path in (script, script.with_name("model.py"), tmp_path / "job.yaml"):
        path.write_text("x = 1\n")
    words = ("python", "src/train.py", "--config=job.yaml", "--data", "/dev/zero", "{out}")
    files = scripts.identity_of(Script(command=words, root="", cwd=str(tmp_path))).files
    assert files is not None
    assert files.keys() == {"train.py", "model.py", "job.yaml"}


def test_a_module_that_a_command_runs_is_that_of_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever this process looks for modules first: a worker runs in another folder."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
        (folder / "run_as_module.py").write_text(f"x = '{folder}'\n")
    (mine / "beside.py").write_text("x = 1\n")
    words = ("python", "-m", "run_as_module", "{out}")
    script = Script(command=words, root="", cwd=str(mine))
    files = scripts.identity_of(script).files
    monkeypatch.syspath_prepend(other)
    path = list(sys.path)
    assert scripts.identity_of(script).files == files
    assert sys.path == path
    assert files is not None
    assert files.keys() == {"run_as_module.py", "beside.py"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--shard 1/2", "--shard 1/2 makes no report: name a file with --results"),
        ("--ranks 2 --results x", "--ranks 2 and --results: the recoveries of several ranks"),
        ("--ranks 2 --record x", "--ranks does not go with --record"),
        ("--record x --recording y", "give one"),
        ("--record x --results y", "--results does not go with --record"),
        ("--record full", "the folder holds 'thesis.txt'"),
        ("--recording full", "holds no recordings that were made to the end"),
        ("--recording other", "what is explored was ['reference'] and is"),
    ],
)
def test_what_can_not_be_done_is_refused(
    ckpt: Callable[..., tuple[int, str]], words: str, told: str
) -> None:
    Path("full").mkdir()
    Path("full/thesis.txt").write_text("")
    Path("other").mkdir()
    content = {"schema": "ckpt-conformance/recorded/v1", "explored": [REFERENCE]}
    Path("other/recorded.json").write_text(json.dumps(content))
    status, text = ckpt("explore", IN_PLACE, *words.split())
    assert status == 2, text
    assert told in " ".join(text.split())
    assert not Path("reports").exists()
    assert [path.name for path in Path("full").iterdir()] == ["thesis.txt"]


def test_a_workload_that_was_not_recorded_is_refused(
    ckpt: Callable[..., tuple[int, str]],
) -> None:
    ckpt("explore", IN_PLACE, "--workload", "second", "--record", "kept")
    words = ("--workload", "first", "--recording", "kept")
    status, text = ckpt("explore", IN_PLACE, *words)
    assert status == 2
    assert "has no workload 'first', it has second" in text
