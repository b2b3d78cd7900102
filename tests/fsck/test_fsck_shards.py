"""Fsck in parts: shards, slices and plans make the report of one run; what differs is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import fsck_memory
import fsspec
import jsonschema
import pytest
import torch
from fsck_runs import Finished, flip, large, run
from test_cli_fsck import cli
from url_stores import Watched, upload

from ckpt_conformance.cli.disk import plan as fsck_plan
from ckpt_conformance.cli.disk import results as fsck_results
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.judge import judging
from ckpt_conformance.fsck.judge.examine import Checkpoints
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source import remote
from ckpt_conformance.fsck.source.places import place
from ckpt_conformance.work import lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["large", "run"]


def shards(tmp_path: Path, *words: str | Path, count: int = 3) -> list[Path]:
    files = [tmp_path / f"{number}-of-{count}.jsonl" for number in range(1, count + 1)]
    for number, file in enumerate(files, 1):
        done = Finished("fsck", *words, "--shard", f"{number}/{count}", "--results", file)
        assert (done.status, f"shard {number}/{count}: " in done.out) == (0, True)
    return files


@pytest.mark.parametrize("form", ["--json", ""])
@pytest.mark.parametrize(
    "words", [[], ["--metadata-only"], ["--sample", "0.5", "--seed", "3"], ["--nan"]], ids=str
)
def test_shards_make_the_report_of_one_run(
    words: list[str], form: str, run: Path, tmp_path: Path
) -> None:
    shown = [form] if form else []
    whole = Finished("fsck", run, *words, *shown)
    combined = Finished("combine", *reversed(shards(tmp_path, run, *words)), *shown)
    assert combined.out == whole.out
    assert (combined.status, combined.err) == (whole.status, "")
    assert whole.status == 1


def test_what_is_printed_is_what_the_library_says(run: Path) -> None:
    whole = Finished("fsck", run, "--json", "--jobs", "2")
    assert whole.out == json.dumps(judge(run, Options(jobs=2)).to_json(), indent=2) + "\n"
    nothing = Finished("fsck", run / "step_8.tmp", "--json")
    assert nothing.out == json.dumps(judge(run / "step_8.tmp").to_json(), indent=2) + "\n"


def test_every_checkpoint_is_judged_by_one_shard(run: Path, tmp_path: Path) -> None:
    parts = [list(lines.read(file).results) for file in shards(tmp_path, run, count=4)]
    items = [item for part in parts for item in part]
    assert sorted(items) == sorted(
        [
            *("step_1", "step_2", "step_3", "step_4", "step_5", "step_6", "step_9"),
            *("model_7.pt", "last.ckpt", "notes.pkl", "caf\\udce9/step_3.pt"),
        ]
    )
    assert all(parts)


def test_a_missing_shard_is_named_and_nothing_is_called_newest(
    run: Path, tmp_path: Path, repository: Path
) -> None:
    torch.save({"w": torch.ones(64)}, run / "step_4" / "part_1.pt")
    (run / "step_9").unlink()
    first, _, third = shards(tmp_path, run)
    done = Finished("combine", first, third)
    assert done.status == 2
    assert "error: 1 shard missing: 2/3; run them with the same arguments" in done.err
    assert done.out.splitlines()[-1] == "newest whole: unknown: not all was judged"
    told = json.loads(Finished("combine", first, third, "--json").out)
    schema = repository / "ckpt_conformance" / "report" / "schemas" / "fsck.schema.json"
    jsonschema.validate(told, json.loads(schema.read_text()))
    assert (told["state"], told["newest_whole"]) == ("unknown", None)
    assert told["missing_shards"] == ["2/3"]


def test_a_shard_that_was_killed_keeps_what_it_found_and_is_not_whole(
    run: Path, tmp_path: Path
) -> None:
    first, second = shards(tmp_path, run, count=2)
    text = second.read_bytes().splitlines(keepends=True)
    second.write_bytes(b"".join(text[:4]) + text[4][:40])  # header, facts, and one result
    done = Finished("combine", first, second, "--json")
    assert "error: 1 shard stopped before the end: 2/2; run them with the same" in done.err
    told = json.loads(done.out)
    assert told["missing_shards"] == ["2/2"]
    whole = json.loads(Finished("fsck", run, "--json").out)
    assert len(told["checkpoints"]) == len(lines.read(first).results) + 1
    known = {one["path"]: one for one in whole["checkpoints"]}
    alone = [one for one in told["checkpoints"] if not known[one["path"]]["findings"]]
    assert alone == [known[one["path"]] for one in alone]
    again = tmp_path / "again.jsonl"
    Finished("fsck", run, "--shard", "2/2", "--results", again)
    assert json.loads(Finished("combine", first, second, again, "--json").out) == whole


def test_of_a_run_that_was_stopped_at_once_nothing_is_said_of_what_is_there(
    run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "all.jsonl"
    Finished("fsck", run, "--results", file)
    before = [text for text in file.read_bytes().splitlines(keepends=True) if b'"item"' not in text]
    file.write_bytes(b"".join(text for text in before if b'"end"' not in text))
    done = Finished("combine", file)
    assert done.status == 2
    assert done.out.splitlines()[-1] == f"{run}: no checkpoint was judged yet"
    assert "nothing here looks like" not in done.out
    assert "error: 1 shard stopped before the end: 1/1" in done.err


def test_a_file_that_may_not_grow_is_an_error_with_its_reason(run: Path, tmp_path: Path) -> None:
    words = ["prlimit", "--fsize=99", sys.executable, "-m", "ckpt_conformance"]
    words += ["fsck", str(run), "--results", str(tmp_path / "lines")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: the output is not whole: File too large; raise the limit of the size of files "
        "(ulimit -f)"
    )


def test_a_listing_that_differs_is_noticed(run: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    Finished("fsck", run, "--shard", "1/2", "--results", first)
    for step in range(10, 15):
        torch.save({"w": torch.ones(3)}, run / f"model_{step}.pt")
    Finished("fsck", run, "--shard", "2/2", "--results", second)
    with pytest.raises(RequestError, match="a checkpoint came, went or changed") as error:
        Finished("combine", first, second)
    assert "shard 1/2 has listed 11 checkpoints, 26 files" in str(error.value)
    assert "shard 2/2 16 checkpoints, 31 files" in str(error.value)
    assert "--write-plan FILE" in str(error.value)
    assert "only shard 2/2 has model_10.pt (1 file, " in str(error.value)
    assert "and 2 more" in str(error.value)
    assert "only shard 1/2" not in str(error.value)


def test_of_too_many_checkpoints_the_way_to_see_what_differs_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsck_results, "MOST_NAMED", 11)
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    Finished("fsck", run, "--shard", "1/2", "--results", first)
    torch.save({"w": torch.ones(3)}, run / "model_10.pt")
    Finished("fsck", run, "--shard", "2/2", "--results", second)
    with pytest.raises(RequestError, match=r"12 checkpoints, .* kept for 11 at most"):
        Finished("combine", first, second)


def test_what_differs_is_named_where_the_numbers_are_the_same(run: Path, tmp_path: Path) -> None:
    """Two checkpoints were renamed, and one has grown by what another has lost."""
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    Finished("fsck", run, "--shard", "1/2", "--results", first)
    (run / "model_7.pt").rename(run / "model_70.pt")
    one, two = run / "step_5" / "part_0.pt", run / "step_6" / "part_0.pt"
    size = one.stat().st_size
    os.truncate(one, size - 7)
    two.write_bytes(two.read_bytes() + bytes(7))
    (run / os.fsdecode(b"caf\xe9/step_3.pt")).rename(run / os.fsdecode(b"caf\xe9/step_4.pt"))
    Finished("fsck", run, "--shard", "2/2", "--results", second)
    with pytest.raises(RequestError, match=r"11 checkpoints, .* 11 checkpoints, ") as error:
        Finished("combine", first, second)
    said = str(error.value)
    assert ", model_7.pt (1 file, " in said
    assert ", model_70.pt (1 file, " in said
    total = sum(path.stat().st_size for path in (run / "step_5").iterdir())
    assert f"step_5 is 5 files, {total + 7:,} bytes in shard 1/2 and 5 files, {total:,} " in said
    assert "only shard 1/2 has caf\\udce9/step_3.pt" in said  # whatever bytes a name has


def test_a_plan_holds_the_listing_still(run: Path, tmp_path: Path) -> None:
    whole, plan = Finished("fsck", run, "--json"), tmp_path / "plan.jsonl"
    said = Finished("fsck", run, "--write-plan", plan).out
    assert said.startswith(f"{plan}: 11 checkpoints, 26 files, ")
    alone = tmp_path / "alone.jsonl"
    assert Finished("fsck", run, "--plan", plan, "--results", alone, "--json").out == whole.out
    torch.save({"w": torch.ones(3)}, run / "model_10.pt")
    parts = shards(tmp_path, run, "--plan", plan)
    assert Finished("combine", *parts, "--json").out == whole.out
    assert Finished("combine", alone, "--json").out == whole.out
    assert Finished("fsck", run, "--plan", plan, "--json").out == whole.out


def test_what_a_rotation_removed_since_the_plan_is_unknown(run: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.jsonl"
    Finished("fsck", run, "--write-plan", plan)
    for name in ("step_6", "model_7.pt"):
        subprocess.run(["rm", "-r", str(run / name)], check=True)
    told = json.loads(Finished("fsck", run, "--plan", plan, "--json").out)
    gone = {one["path"]: one for one in told["checkpoints"] if one["state"] == "unknown"}
    assert set(gone) == {str(run / "step_6"), str(run / "model_7.pt")}
    assert [one["step"] for one in gone.values()] == [7, 6]
    for one in gone.values():
        assert "was it removed meanwhile?" in one["findings"][0]["what"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[: len(text) // 2], "is not whole: it was cut short or changed"),
        (lambda text: text.replace("step_5", "step_0"), "is not whole: it was cut short"),
        (lambda _: "", "is no plan that fsck --write-plan wrote"),
        (lambda _: '{"line":"header"}\n', "is no plan that fsck --write-plan wrote"),
    ],
)
def test_a_plan_that_is_none_is_refused(
    change: Callable[[str], str], reason: str, run: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.jsonl"
    Finished("fsck", run, "--write-plan", plan)
    plan.write_text(change(plan.read_text()))
    with pytest.raises(RequestError, match=reason):
        Finished("fsck", run, "--plan", plan)


def test_a_plan_of_another_place_and_files_of_others(run: Path, tmp_path: Path) -> None:
    plan, other = tmp_path / "plan.jsonl", tmp_path / "thesis.txt"
    Finished("fsck", run, "--write-plan", plan)
    Finished("fsck", run, "--write-plan", plan)  # one of its own is replaced
    with pytest.raises(RequestError, match=f"is of {run}, and not of {run}/step_1") as error:
        Finished("fsck", run / "step_1", "--plan", plan)
    assert "list this one with --write-plan" in str(error.value)
    other.write_text("chapter 1\n")
    for option in ("--write-plan", "--results"):
        with pytest.raises(RequestError, match="name another file"):
            Finished("fsck", run, option, other)
    assert other.read_text() == "chapter 1\n"
    with pytest.raises(RequestError, match="cannot be read"):
        Finished("fsck", run, "--plan", tmp_path / "absent")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.jsonl", "run", "thesis.txt"]


def test_a_plan_is_of_a_folder_and_not_of_its_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same relative name in another working directory, and another folder at the same path."""
    plan, other = tmp_path / "plan.jsonl", tmp_path / "other"
    monkeypatch.chdir(tmp_path)
    assert Finished("fsck", "run", "--write-plan", plan).status == 0
    whole = json.loads(Finished("fsck", "run", "--json").out)
    assert json.loads(Finished("fsck", "run", "--plan", plan, "--json").out) == whole
    shutil.copytree("run", other / "run", symlinks=True)
    monkeypatch.chdir(other)
    with pytest.raises(RequestError, match=f"is of {run}, and not of {other / 'run'}; name"):
        Finished("fsck", "run", "--plan", plan)
    monkeypatch.chdir(tmp_path)
    run.rename(tmp_path / "moved")
    shutil.copytree(other / "run", run, symlinks=True)
    with pytest.raises(RequestError, match=f"is of another folder, which was at {run} when"):
        Finished("fsck", "run", "--plan", plan)


def test_a_folder_that_was_moved_or_linked_is_the_one_that_was_listed(
    run: Path, tmp_path: Path
) -> None:
    plan, moved, link = tmp_path / "plan.jsonl", tmp_path / "moved", tmp_path / "link"
    Finished("fsck", run, "--write-plan", plan)
    many = len(json.loads(Finished("fsck", run, "--json").out)["checkpoints"])
    run.rename(moved)
    link.symlink_to(moved)
    for there in (moved, link):
        told = json.loads(Finished("fsck", there, "--plan", plan, "--json").out)
        assert len(told["checkpoints"]) == many


def test_on_another_machine_the_absolute_path_is_what_counts(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inode is another one there, such as that of a mounted store."""
    plan, boot, copy = tmp_path / "plan.jsonl", tmp_path / "boot_id", tmp_path / "copy"
    Finished("fsck", run, "--write-plan", plan)
    boot.write_text("another machine\n")
    monkeypatch.setattr(fsck_plan, "BOOT", boot)
    shutil.copytree(run, copy, symlinks=True)
    with pytest.raises(RequestError, match=r"needs the same absolute path: mount it there, or"):
        Finished("fsck", copy, "--plan", plan)
    shutil.rmtree(run)
    run.symlink_to(copy)
    assert json.loads(Finished("fsck", run, "--plan", plan, "--json").out)["checkpoints"]


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        (["--newest-whole", "--shard", "1/2", "--results", "r"], "--shard and --results"),
        (["--newest-whole", "--plan", "p"], "--plan"),
        (["--newest-whole", "--write-plan", "p"], "--write-plan"),
        (["--write-plan", "p", "--shard", "1/2", "--results", "r"], "--shard and --results"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], left_out: str, run: Path) -> None:
    done = cli("fsck", run, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.rstrip().endswith(f"leave out {left_out}")


def test_a_shard_needs_a_file(run: Path) -> None:
    with pytest.raises(RequestError, match="name a file with --results FILE"):
        Finished("fsck", run, "--shard", "1/2")


def test_results_of_another_request_are_refused(run: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    Finished("fsck", run, "--shard", "1/2", "--results", first)
    Finished("fsck", run, "--shard", "2/2", "--results", second, "--sample", "5%")
    with pytest.raises(RequestError, match=r"--sample is 1\.0 and 0\.05"):
        Finished("combine", first, second)
    header = first.read_text().replace('"command":"fsck"', '"command":"certify"')
    (tmp_path / "other").write_text(header)
    for files in ((first, tmp_path / "other"), (tmp_path / "other", first)):
        with pytest.raises(RequestError, match="certify"):
            Finished("combine", *files)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(RequestError, match="has no header line"):
        Finished("combine", first, tmp_path / "empty")


def test_a_reader_of_the_file_sees_results_as_they_come(run: Path, tmp_path: Path) -> None:
    """A process that is killed has written all that it judged."""
    file = tmp_path / "results.jsonl"
    code = (
        "import os, signal, sys\n"
        "from ckpt_conformance.cli.disk import results as fsck_results\n"
        "take, left, kill = fsck_results.Taker.take, [4], getattr(signal, sys.argv.pop())\n"
        "def count(*given):\n"
        "    take(*given)\n"
        "    left[0] -= 1\n"
        "    if not left[0]: os.kill(os.getpid(), kill)\n"
        "fsck_results.Taker.take = count\n"
        "from ckpt_conformance.__main__ import main\n"
        "main()"
    )
    for name, status, ended in (("SIGKILL", -9, 0), ("SIGTERM", 143, 1)):
        words = [sys.executable, "-c", code, "fsck", str(run), "--results", str(file), name]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        kinds = [type(line) for _, line in lines.stream(file)]
        assert kinds == [lines.Header, lines.Fact, *[lines.Line] * 4, *[lines.End] * ended]
        told = json.loads(Finished("combine", file, "--json").out)
        assert told["missing_shards"] == ["1/1"]
    assert "Stopped before the end" in done.stderr


# -- slices of a large checkpoint ------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--sample", "0.6"], ["--metadata-only"]], ids=str)
def test_slices_make_the_report_of_the_whole(words: list[str], large: Path, tmp_path: Path) -> None:
    for damaged in (None, large / "step_2" / "part_3.pt"):
        if damaged:
            flip(damaged)
        whole = Finished("fsck", large, *words, "--json")
        parts = shards(tmp_path, large, *words, count=4)
        items = [item for file in parts for item in lines.read(file).results]
        is_cut = any("step_2 slice 2/" in item for item in items)
        assert is_cut == (words != ["--metadata-only"]), items
        assert Finished("combine", *parts, "--json").out == whole.out
        if not words:
            assert whole.status == bool(damaged)


def test_each_work_is_in_one_slice(large: Path) -> None:
    """No byte is read twice, and all are read."""
    whole = judge(large).reports
    count = 5
    totals: dict[str, int] = {}
    for number in range(1, count + 1):
        engine = judging.Judging(large, Options())
        founds = Checkpoints(large)
        jobs = [judging.Job(0, found, judging.Slice(number, count)) for found in founds]
        for _, judgement in engine.run(jobs):
            assert judgement is not None
            name = str(judgement.report.path)
            totals[name] = totals.get(name, 0) + judgement.sums.crc
    assert totals == {str(report.path): report.crc for report in whole}


def test_a_checkpoint_that_changes_between_its_slices_is_unknown(
    large: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.jsonl"
    Finished("fsck", large, "--write-plan", plan)
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    Finished("fsck", large, "--plan", plan, "--shard", "1/2", "--results", first)
    torch.save({"w": torch.ones(3)}, large / "step_2" / "part_1.pt")
    Finished("fsck", large, "--plan", plan, "--shard", "2/2", "--results", second)
    done = Finished("combine", first, second, "--json")
    (newest, older) = json.loads(done.out)["checkpoints"]
    assert (newest["state"], older["state"]) == ("unknown", "whole")
    assert newest["findings"][0]["what"].startswith("it changed while its slices were judged")


def test_a_slice_that_is_missing_leaves_its_checkpoint_unknown(large: Path, tmp_path: Path) -> None:
    first, _ = shards(tmp_path, large, count=2)
    told = json.loads(Finished("combine", first, "--json").out)
    assert {one["state"] for one in told["checkpoints"]} == {"unknown"}
    assert "slices were not judged: " in told["checkpoints"][0]["findings"][0]["what"]


# -- a store ---------------------------------------------------------------------------------------


def test_a_plan_of_a_store_opens_no_file(run: Path, tmp_path: Path) -> None:
    fsspec.register_implementation(Watched.protocol, Watched, clobber=True)
    Watched.store.clear()
    (run / "step_9").unlink()
    url = upload(run, "watched://bucket/run")
    Watched.asked.clear()
    plan = tmp_path / "plan.jsonl"
    Finished("fsck", url, "--write-plan", plan)
    assert {what for what, _ in Watched.asked} == {"ls", "info"}
    assert sum(what == "info" for what, _ in Watched.asked) <= 4  # of the place itself
    whole = Finished("fsck", url, "--json")
    for more in ([], ["--plan", plan]):
        assert Finished("combine", *shards(tmp_path, url, *more), "--json").out == whole.out


class Together(Watched):
    """Answers the first listings of steps only when several ask at once."""

    protocol = "together"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    barrier: ClassVar[threading.Barrier] = threading.Barrier(4, timeout=60)

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:  # noqa: ANN401, FBT001, FBT002
        if path.rpartition("/")[2] in ("step_1", "step_2", "step_3", "step_4"):
            self.barrier.wait()
        return super().ls(path, detail, **more)


def test_folders_of_a_store_are_listed_at_the_same_time(run: Path) -> None:
    fsspec.register_implementation(Together.protocol, Together, clobber=True)
    Together.store.clear()
    (run / "step_9").unlink()
    listed = list(Checkpoints(place(upload(run, "together://bucket/run")), is_weighed=True))
    assert len(listed) == 10
    assert not Together.barrier.broken


@pytest.mark.parametrize("words", [[], ["--newest-whole"]])
def test_what_is_forgotten_is_asked_again(
    words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation(Watched.protocol, Watched, clobber=True)
    Watched.store.clear()
    (run / "step_9").unlink()
    url = upload(run, "watched://bucket/run")
    known = Finished("fsck", url, *words, "--json").out
    monkeypatch.setattr(remote, "MOST_LISTED", 1)
    monkeypatch.setattr(remote, "_MOST_ALONE", 8)  # more than there are levels
    assert Finished("fsck", url, *words, "--json").out == known


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_grows_with_checkpoints_a_little_and_not_with_files(tmp_path: Path) -> None:
    """Of 200 more checkpoints a row stays, and none of their 2,000 files; so in a shard.

    A row has what orders it (some 500 bytes) and what its neighbours are told of it (1,200).
    """
    torch.save({"w": torch.ones(2)}, tmp_path / "content.pt")
    cases = ("40,10,1", "240,10,1", "240,10,2")
    words = [sys.executable, fsck_memory.__file__, str(tmp_path / "content.pt"), *cases]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    few, many, half = map(int, done.stdout.split())
    assert many - few < 200 * 2048, (few, many)
    assert half - few < 200 * 2048, (few, half)
