"""`--newest-whole --pin DIR`: what was judged stays until the launch has read it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsck_corpus
import pytest
import torch
from fsck_runs import Finished
from rotating import Trainer, tear, value_of
from stopped import Place, place, wait
from test_fsck_gate import Between
from test_fsck_stopped import END, is_open, sparse

from ckpt_conformance.cli.disk.pin import Pin
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.crash.explore import real_fs
from ckpt_conformance.fsck.judge import gate as gates
from ckpt_conformance.fsck.judge.gate import Moment
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.judge.judge import Judged

__all__ = ["place"]

GOLDEN = Path(__file__).parents[1] / "golden" / "fsck"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with Trainer(tmp_path_factory.mktemp("pin") / "run") as one:
        yield one


@pytest.fixture
def job(process: Trainer) -> Trainer:
    """A job with two steps, each of another value; nothing is beside its folder."""
    for old in process.root.parent.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
    process.root.mkdir()
    process("save", "step_10", 1.0)
    process("save", "step_20", 2.0)
    return process


@pytest.fixture
def between(job: Trainer, monkeypatch: pytest.MonkeyPatch) -> Between:
    made = Between(job)
    monkeypatch.setattr(gates, "reached", made)
    return made


def target_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.pin")


def pinned(run: Path, *words: str) -> tuple[Path, str]:
    """Pin, and return what is printed and said."""
    done = Finished("fsck", run, "--newest-whole", "--pin", target_of(run), *words)
    assert done.status == 0, done.err
    assert not target_of(run).with_name(f"{target_of(run).name}.unfinished").exists()
    return Path(done.out.removesuffix("\n")), done.err


def refused(run: str | Path, *words: str | Path) -> str:
    """Return why a request is refused: the command line says it and leaves with 2."""
    with pytest.raises(RequestError) as told:
        Finished("fsck", run, *words)
    return str(told.value)


# -- what is held ----------------------------------------------------------------------------------


def test_it_stays_when_the_job_removes_it(job: Trainer) -> None:
    before = {path: path.stat() for path in trees.files(job.root)}
    path, said = pinned(job.root)
    assert path == target_of(job.root) / "step_20"
    for name, was in before.items():  # nothing but the number of names
        now = name.stat()
        assert (now.st_ino, now.st_mtime_ns, now.st_size) == (
            was.st_ino,
            was.st_mtime_ns,
            was.st_size,
        )
    assert {one.stat().st_nlink for one in path.iterdir()} == {2}
    assert "2 files by hard link: " in said
    assert "a write into the file in place reaches both" in said
    assert f"rm -r {target_of(job.root)}" in said
    job("save", "step_30", 3.0)
    job("remove", "step_20")
    assert judge(path).state is State.WHOLE
    assert value_of(path) == {2.0}
    shutil.rmtree(target_of(job.root))
    assert judge(job.root).state is State.WHOLE


def alike(judged: Judged) -> list[tuple[str, int | None, str, int, int, float]]:
    return [
        (one.layout, one.step, str(one.state), one.tensors, one.size, one.coverage)
        for one in judged.reports
    ]


@pytest.mark.parametrize("layout", fsck_corpus.WRITERS)
def test_every_layout_is_pinned_under_its_names(
    layout: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    if corpus[layout].is_dir():
        shutil.copytree(corpus[layout], run)
    else:
        run.mkdir()
        shutil.copy(corpus[layout], run)
    newest = judge(run).newest_whole
    assert newest is not None
    path, _ = pinned(run)
    assert path.is_relative_to(target_of(run))
    held = judge(target_of(run))
    assert alike(held) == alike(judge(run))[: len(held.reports)]
    shutil.rmtree(run)
    assert held.reports[0].path == path
    assert judge(path).state is State.WHOLE


@pytest.mark.parametrize(
    "name", ["accelerate_run", "transformers_run", "deepspeed_run", "fsdp_run", "orbax"]
)
def test_what_libraries_wrote_is_pinned(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / name)
    tops = {one.path.parent for one in judge(tmp_path / name).reports if one.state is State.WHOLE}
    assert tops
    for top in sorted(map(str, tops)):
        run = Path(top)
        newest = judge(run).newest_whole
        assert newest is not None
        path, _ = pinned(run)
        (held,) = judge(path).reports
        wanted = (newest.layout, newest.step, newest.size, newest.coverage)
        assert (held.layout, held.step, held.size, held.coverage) == wanted
        shutil.rmtree(target_of(run))


def test_one_file_and_a_set_of_a_step(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    for step in (1, 2):
        for part in ("model", "optim"):
            torch.save({"w": torch.ones(3)}, run / f"{part}_{step}.pt")
    path, _ = pinned(run)
    assert sorted(one.name for one in target_of(run).iterdir()) == ["model_2.pt", "optim_2.pt"]
    shutil.rmtree(target_of(run))
    done = Finished("fsck", run / "model_1.pt", "--newest-whole", "--pin", tmp_path / "one")
    assert done.out == f"{tmp_path / 'one' / 'model_1.pt'}\n"
    assert path.parent == target_of(run) or path == target_of(run)


def test_links_inside_become_files(tmp_path: Path) -> None:
    """As of a cache that keeps blobs apart: what they lead to is removed, too."""
    run = tmp_path / "run"
    (run / "blobs").mkdir(parents=True)
    (run / "step_5").mkdir()
    torch.save({"w": torch.ones(3)}, run / "blobs" / "abc")
    (run / "step_5" / "model.pt").symlink_to("../blobs/abc")
    path, _ = pinned(run)
    shutil.rmtree(run)
    assert not (path / "model.pt").is_symlink()
    assert torch.load(path / "model.pt", weights_only=True)["w"].tolist() == [1.0] * 3


def test_a_link_to_a_folder_becomes_the_folder(tmp_path: Path) -> None:
    """Also where two links lead to it, where it has folders of its own, or lies in the step."""
    run = tmp_path / "run"
    for folder in ("shared/more", "step_5/own"):
        (run / folder).mkdir(parents=True)
        (run / folder / "tokens.json").write_text("[1]")
    (run / "shared" / "words.txt").write_text("one")
    torch.save({"w": torch.ones(3)}, run / "step_5" / "model.pt")
    for name, target in (("a", "../shared"), ("b", "../shared"), ("c", "own")):
        (run / "step_5" / name).symlink_to(target)
    path, _ = pinned(run)
    shutil.rmtree(run)
    for name in ("a", "b"):
        assert not (path / name).is_symlink()
        assert (path / name / "words.txt").read_text() == "one"
        assert (path / name / "more" / "tokens.json").read_text() == "[1]"
    assert (path / "c" / "tokens.json").read_text() == "[1]"


def test_links_that_lead_round_are_a_clear_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "shared").mkdir(parents=True)
    (run / "step_5").mkdir()
    torch.save({"w": torch.ones(3)}, run / "step_5" / "model.pt")
    (run / "shared" / "again").symlink_to("../shared")
    (run / "step_5" / "a").symlink_to("../shared")
    with pytest.raises(RequestError, match="links lead from folder to folder"):
        Finished("fsck", run, "--newest-whole", "--pin", tmp_path / "held")
    assert not (tmp_path / "held.unfinished").exists()


def test_a_run_of_one_checkpoint_is_held_under_its_name(job: Trainer) -> None:
    target = job.root.parent / "held"
    done = Finished("fsck", job.root / "step_10", "--newest-whole", "--pin", target)
    assert done.out == f"{target / 'step_10'}\n"


# -- beside a job ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "commands", "value"),
    [
        ((Moment.LISTED, "*"), [("remove", "step_20")], 1.0),
        ((Moment.JUDGING, "step_20"), [("remove", "step_20")], 1.0),
        ((Moment.JUDGING, "step_20"), [("replace", "step_20", 2.5)], 2.5),
        ((Moment.JUDGING, "step_20"), [("tear", "step_20")], 1.0),
        ((Moment.HELD, "step_20"), [("remove", "step_20")], 2.0),
        ((Moment.HELD, "step_20"), [("replace", "step_20", 2.5)], 2.0),
        ((Moment.HELD, "step_20"), [("tear", "step_20")], 1.0),  # in place: it reaches both
        ((Moment.JUDGED, "step_20"), [("remove", "step_20"), ("save", "step_30", 3.0)], 2.0),
        ((Moment.CHOSEN, "step_20"), [("remove", "step_20")], 2.0),
    ],
)
def test_what_is_pinned_is_one_whole_save(
    moment: tuple[Moment, str], commands: list[tuple[str, ...]], value: float, between: Between
) -> None:
    between.once[moment] = [*commands]
    path, _ = pinned(between.job.root)
    assert not between.once
    assert judge(path).state is State.WHOLE
    assert value_of(path) == {value}


SAVES: list[list[tuple[Any, ...]]] = [
    [("replace", "step_20", 9.0)],
    [("overwrite", "step_20", 9.0)],
    [("replace_file", "step_20", 9.0, name) for name in ("model.pt", "optimizer.pt")],
]


@pytest.mark.parametrize("commands", SAVES, ids=lambda one: one[0][0])
@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("words", [(), ("--pin-copy",)])
def test_files_of_two_saves_are_not_mixed(
    held: int,
    commands: list[tuple[Any, ...]],
    words: tuple[str, ...],
    job: Trainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job saves the step again when one of its files is held, or both."""
    hold, seen = Pin._take, list[str]()

    def take(self: Pin, name: str, goal: Path, entry: Any) -> None:  # noqa: ANN401
        hold(self, name, goal, entry)
        seen.append(name)
        if len(seen) == held:
            for command in commands:
                job(*command)

    monkeypatch.setattr(Pin, "_take", take)
    path, _ = pinned(job.root, *words)
    assert judge(path).state is State.WHOLE
    assert value_of(path) in ({9.0}, {2.0})
    is_linked = not words
    again = held == 1 or (is_linked and commands[0][0] == "overwrite")
    assert value_of(path) == ({9.0} if again else {2.0})


def test_a_write_in_place_while_it_is_judged_is_judged_again(between: Between) -> None:
    between.once[Moment.HELD, "step_20"] = [("overwrite", "step_20", 9.0)]
    path, _ = pinned(between.job.root)
    assert value_of(path) == {9.0}
    assert between.seen[Moment.HELD, "step_20"] == 2


@pytest.mark.parametrize("moment", [Moment.JUDGED, Moment.CHOSEN])
def test_a_write_in_place_before_it_has_its_name_is_seen(moment: Moment, between: Between) -> None:
    """The links are the job's files: only blocks that are shared, or a copy, are not reached."""
    name = "step_20" if moment is Moment.JUDGED else "*"
    between.once[moment, name] = [("overwrite", "step_20", 9.0)]
    said = refused(between.job.root, "--newest-whole", "--pin", target_of(between.job.root))
    assert "changed or went before it could be named" in said
    assert not target_of(between.job.root).exists()
    between.once[moment, name] = [("overwrite", "step_20", 8.0)]
    path, _ = pinned(between.job.root, "--pin-copy")
    assert value_of(path) == {9.0}


def test_of_a_job_that_rotates_faster_one_is_pinned(between: Between) -> None:
    """Without a pin nothing is: each is gone before it was judged."""
    newest = [20]

    def rotate(_: int) -> None:
        between.job("save", f"step_{newest[0] + 1}", float(newest[0] + 1))
        between.job("remove", f"step_{newest[0]}")
        newest[0] += 1

    between.job("remove", "step_10")
    between.always[Moment.HELD, "*"] = rotate
    path, _ = pinned(between.job.root)
    assert path.name == "step_20"
    assert judge(path).state is State.WHOLE


def test_of_what_is_not_whole_nothing_is_left(job: Trainer) -> None:
    job("tear", "step_10")
    job("cut", "step_20")
    done = Finished("fsck", job.root, "--newest-whole", "--pin", target_of(job.root))
    assert (done.status, done.out) == (1, "")
    assert done.err.count("passed over") == 2
    assert [one.name for one in job.root.parent.iterdir()] == ["run"]


# -- DIR -------------------------------------------------------------------------------------------


def test_the_same_again_is_the_same_and_another_is_refused(job: Trainer) -> None:
    target = target_of(job.root)
    target.mkdir()  # an empty one is taken
    path, _ = pinned(job.root)
    again, said = pinned(job.root)
    assert again == path
    assert "has it already, byte for byte" in said
    job("save", "step_30", 3.0)
    before = trees.listing(target)
    said = refused(job.root, "--newest-whole", "--pin", target)
    assert f"rm -r {target}" in said
    assert trees.listing(target) == before
    assert sorted(one.name for one in target.parent.iterdir()) == ["run", "run.pin"]


def test_what_is_no_place_for_it_is_refused(job: Trainer) -> None:
    root = job.root
    (root.parent / "file").touch()
    (root.parent / "link").symlink_to("nowhere")
    for words, why in (
        (("--pin", root / "inside"), f"name a folder beside it, as {root}.pin"),
        (("--pin", root.parent), "lies in it"),
        (("--pin", root.parent / "file"), "something else has that name"),
        (("--pin", root.parent / "link"), "something else has that name"),
        (("--pin", root.parent / "no" / "pin"), "is no folder"),
        (("--pin-copy",), "--pin-copy is for --pin DIR"),
    ):
        assert why in refused(root, "--newest-whole", *words)
    assert "--newest-whole" in refused(root, "--pin", root.parent / "pin")
    url = f"file://{root}"
    assert "is a URL: copy" in refused(url, "--newest-whole", "--pin", root.parent / "pin")
    assert sorted(one.name for one in root.parent.iterdir()) == ["file", "link", "run"]


def test_a_draft_of_somebody_is_left_alone(job: Trainer) -> None:
    draft = job.root.parent / "run.pin.unfinished"
    draft.mkdir()
    (draft / "mine").touch()
    said = refused(job.root, "--newest-whole", "--pin", target_of(job.root))
    assert "no pin made it" in said
    assert (draft / "mine").exists()


def test_two_do_not_pin_to_one_folder_at_once(job: Trainer) -> None:
    with Pin(target_of(job.root)) as pin:
        with pytest.raises(RequestError, match="another process pins"), Pin(target_of(job.root)):
            pass
        assert pin is not None
    assert not list(job.root.parent.glob("*.unfinished"))


def test_json_says_what_was_pinned(job: Trainer) -> None:
    done = Finished("fsck", job.root, "--newest-whole", "--pin", target_of(job.root), "--json")
    told = json.loads(done.out)
    assert told["newest_whole"] == str(job.root / "step_20")
    path = str(target_of(job.root) / "step_20")
    assert told["pin"] == {"path": path, "files": {"hard link": 2}}


# -- stopped ---------------------------------------------------------------------------------------

DIES = """
import os, sys
from ckpt_conformance.fsck.judge import gate
where = sys.argv.pop(1)
def reached(moment, name):
    if moment == where:
        os.kill(os.getpid(), 9)
gate.reached = reached
from ckpt_conformance.__main__ import main
main()
"""


@pytest.mark.parametrize("moment", [Moment.JUDGING, Moment.HELD, Moment.JUDGED, Moment.CHOSEN])
def test_a_kill_leaves_nothing_under_the_name(moment: Moment, job: Trainer) -> None:
    target = target_of(job.root)
    command = [sys.executable, "-c", DIES, moment, "fsck", str(job.root), "--newest-whole"]
    done = subprocess.run([*command, "--pin", str(target)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""
    assert not target.exists()
    path, _ = pinned(job.root)  # and the draft is removed by the next one
    assert path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(number: signal.Signals, place: Place) -> None:
    file = sparse(place.folder / "run" / "a.safetensors")
    process = place.start("fsck", "run", "--nan", "--newest-whole", "--pin", "pin")
    wait(lambda: is_open(process, file) or process.poll() is not None)
    process.send_signal(number)
    process.communicate(timeout=END)
    assert process.returncode == 128 + number
    assert not (place.folder / "pin").exists()
    assert not (place.folder / "pin.unfinished").exists()


# -- file systems ----------------------------------------------------------------------------------


@pytest.fixture(params=["btrfs", "xfs", "ext4"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own."""
    missing = real_fs.unavailable(request.param)
    if missing:
        pytest.skip(missing)
    with real_fs.Images(request.param) as images, images.mounted(images.fresh()) as mount:
        yield mount


def shares_blocks(mount: Path) -> bool:
    return real_fs_type(mount) in ("btrfs", "xfs")


def real_fs_type(path: Path) -> str:
    command = ["stat", "-f", "-c", "%T", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_blocks_are_shared_where_the_file_system_can(mounted: Path, job: Trainer) -> None:
    """There a write in place does not reach what was pinned; by a hard link it does."""
    run = mounted / "run"
    shutil.copytree(job.root, run)
    path, said = pinned(run)
    way = "reflink" if shares_blocks(mounted) else "hard link"
    assert f"2 files by {way}: " in said
    tear(run, "step_20")
    assert judge(path).state is (State.WHOLE if way == "reflink" else State.DAMAGED)
    assert judge(run / "step_20").state is State.DAMAGED


@pytest.mark.parametrize("mounted", ["ext4"], indirect=True)
def test_to_another_file_system_only_a_copy_leads(mounted: Path, job: Trainer) -> None:
    said = refused(job.root, "--newest-whole", "--pin", mounted / "pin")
    assert "is on another file system" in said
    assert "--pin-copy" in said
    assert [one.name for one in mounted.iterdir()] == ["lost+found"]
    done = Finished("fsck", job.root, "--newest-whole", "--pin", mounted / "pin", "--pin-copy")
    assert (done.status, done.out) == (0, f"{mounted / 'pin' / 'step_20'}\n")
    assert "2 files by copy: bytes of its own" in done.err
    tear(job.root, "step_20")
    assert value_of(mounted / "pin" / "step_20") == {2.0}


def test_a_copy_is_made_instead_of_hard_links(job: Trainer) -> None:
    path, said = pinned(job.root, "--pin-copy")
    assert "2 files by copy" in said
    assert {one.stat().st_nlink for one in path.iterdir()} == {1}
    times = {one.name: one.stat().st_mtime_ns for one in (job.root / "step_20").iterdir()}
    assert {one.name: one.stat().st_mtime_ns for one in path.iterdir()} == times
    again, said = pinned(job.root, "--pin-copy")
    assert (again, "byte for byte" in said) == (path, True)
