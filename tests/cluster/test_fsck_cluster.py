"""`fsck --on`: byte for byte what one process prints, whatever is killed, and bounded memory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import msgspec
import pytest
import torch
from fsck_runs import Finished, flip, large, run
from stopped import PATIENCE, Place, place, wait

from ckpt_conformance.cli.disk import plan as fsck_plan
from ckpt_conformance.cli.remote import fsck as remote_fsck
from ckpt_conformance.cli.remote import fsck_client
from ckpt_conformance.cli.remote.fsck import Facts, JobItem
from ckpt_conformance.cli.remote.fsck_client import PlanDealer
from ckpt_conformance.cluster import client, runner
from ckpt_conformance.cluster.client import LostError, Result
from ckpt_conformance.cluster.messages import Batch, Done, Found, Job, Ready, Refused, Said
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.judge import stored
from ckpt_conformance.fsck.judge.judge import Options
from ckpt_conformance.fsck.source.places import place as place_of
from ckpt_conformance.processes import keeper
from ckpt_conformance.work import lines
from ckpt_conformance.work.items import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.cluster.dealer import Deals

pytest.importorskip("distributed", reason="the extra cluster is not installed")
pytest.importorskip("cryptography", reason="the extra cluster is not installed")
__all__ = ["large", "place", "run"]
pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.filterwarnings("ignore")]

ON = ("--on", "local:2")


# -- the report ------------------------------------------------------------------------------------


def test_the_report_is_that_of_one_process(run: Path, scratch: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for words in ([], ["--json", "--sample", "0.5", "--seed", "3", "--results", file]):
        whole = Finished("fsck", run, *words)
        spread = Finished("fsck", run, *words, *ON)
        assert spread.out == whole.out
        assert spread.status == whole.status == 1
    assert Finished("combine", file, "--json").out == whole.out
    assert list(scratch.iterdir()) == []


def test_a_relative_place_is_one_of_the_clients_folder(
    run: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del scratch
    monkeypatch.chdir(tmp_path / "run")
    name = f"../{run.name}/step_1"
    whole = Finished("fsck", name, "--json")
    assert Finished("fsck", name, "--json", *ON).out == whole.out
    assert json.loads(whole.out)["path"] == name


@pytest.mark.slow
def test_a_large_checkpoint_is_cut_and_a_shard_may_use_a_cluster(
    large: Path, scratch: Path, tmp_path: Path
) -> None:
    del scratch
    flip(large / "step_2" / "part_3.pt")
    whole = Finished("fsck", large, "--json")
    plan, files = tmp_path / "plan.jsonl", [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    Finished("fsck", large, "--write-plan", plan)
    for number, file in enumerate(files, 1):
        part = ["--shard", f"{number}/2", "--results", file]
        assert Finished("fsck", large, "--plan", plan, *part, *ON).status == 0
    items = [item for file in files for item in lines.read(file).results]
    assert any("step_2 slice 2/" in item for item in items)
    assert Finished("combine", *files, "--json").out == whole.out
    assert Finished("fsck", large, "--json", *ON).out == whole.out


def test_what_a_rotation_removed_since_the_plan_is_unknown(
    run: Path, scratch: Path, tmp_path: Path
) -> None:
    del scratch
    plan = tmp_path / "plan.jsonl"
    Finished("fsck", run, "--write-plan", plan)
    shutil.rmtree(run / "step_6")
    whole = Finished("fsck", run, "--plan", plan, "--json")
    spread = Finished("fsck", run, "--plan", plan, "--json", *ON)
    assert spread.out == whole.out
    assert "was it removed meanwhile?" in whole.out
    assert f"{run}/step_6: unknown: it was listed" in spread.err
    assert "note: worker tls://127.0.0.1:" in spread.err


# -- kills -----------------------------------------------------------------------------------------

VICTIMS = {"worker": "spawn_main", "runner": "-m ckpt_conformance.cluster.runner"}


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def victims(scratch: Path) -> list[int]:
    there = {pid for kept in scratch.glob("ckc-cluster-*") for pid in keeper.carriers(kept)}
    words = {pid: command(pid) for pid in sorted(there)}
    return [
        pid
        for pid, text in words.items()
        if any(word in text for word in VICTIMS.values()) and "processes.keeper" not in text
    ]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kills_change_nothing(
    run: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for at in range(30):
        torch.save({"w": torch.ones(3)}, run / f"model_{10 + at}.pt")
    whole = Finished("fsck", run, "--json")
    chance, killed = random.Random(seed), list[int]()  # noqa: S311  no secret
    take = fsck_client._Spread.take

    def kill_and_take(*given: object) -> None:
        if chance.random() < 0.15 and (there := victims(scratch)):
            killed.append(chance.choice(there))
            os.kill(killed[-1], signal.SIGKILL)
        take(*given)

    monkeypatch.setattr(fsck_client, "MOST_JOBS", 1)  # so that there are many batches
    monkeypatch.setattr(fsck_client._Spread, "take", kill_and_take)
    assert Finished("fsck", run, "--json", *ON).out == whole.out
    assert killed
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_keeps_the_results_and_leaves_nothing_else(place: Place) -> None:
    """The last checkpoint is a pipe that nobody writes to: a worker waits there, and is stopped."""
    for step in range(4):
        path = place.folder / "run" / f"step_{step}" / "model.pt"
        path.parent.mkdir(parents=True)
        torch.save({"w": torch.ones(3)}, path)
    code = (
        "import os, pathlib, time\n"
        "from ckpt_conformance.fsck.judge import judging\n"
        "examine = judging.examine\n"
        "def waits(overview, *given):\n"
        "    if str(given[0].path).endswith('step_3'):\n"
        "        pathlib.Path(os.environ['CKC_MARK']).touch()\n"
        "        time.sleep(600)\n"
        "    return examine(overview, *given)\n"
        "judging.examine = waits\n"
    )
    (place.folder / "sitecustomize.py").write_text(code)
    process = place.start("fsck", "run", "--results", "found.jsonl", *ON, path=place.folder)
    file = place.folder / "found.jsonl"
    wait(lambda: (place.folder / "mark").exists() and file.read_bytes().count(b"\n") >= 5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, (place.folder / "err").read_text()
    assert out == ""
    assert (
        "Stopped before the end; found.jsonl has what was found."
        in (place.folder / "err").read_text()
    )
    assert sorted(lines.read(file).results) == ["step_0", "step_1", "step_2"]
    wait(place.is_clean)  # the keeper of the cluster outlives the command


# -- what a worker cannot read ---------------------------------------------------------------------


def test_a_bucket_that_a_worker_cannot_open_is_one_error_that_names_it(scratch: Path) -> None:
    """What is in the memory of this process is a bucket that nobody else reaches."""
    del scratch
    store = fsspec.filesystem("memory")
    content = io.BytesIO()
    torch.save({"w": torch.ones(3)}, content)
    store.pipe("/fsck-on/step_1/model.pt", content.getvalue())
    try:
        assert Finished("fsck", "memory://fsck-on").status == 0
        expected = r"worker tls://127\S+: memory://fsck-on does not exist.*every worker can read"
        with pytest.raises(RequestError, match=expected):
            Finished("fsck", "memory://fsck-on", *ON)
    finally:
        store.rm("/fsck-on", recursive=True)


def said(request: remote_fsck.Request, *items: JobItem) -> list[Said]:
    """Let a runner in this process judge items; give what it says to its worker."""
    job = Job(
        id="job",
        function=remote_fsck.FUNCTION,
        request=msgspec.Raw(stored.encode(request)),
        identity=remote_fsck.identity_here(),
    )
    batch = Batch(tuple(msgspec.Raw(msgspec.json.encode(item)) for item in items))
    out = io.BytesIO()
    source = io.BytesIO(msgspec.json.encode(batch) + b"\n")
    runner.run(runner.Feed(job, source, out))
    return [msgspec.json.decode(line, type=Said) for line in out.getvalue().splitlines()]


def sees(request: remote_fsck.Request) -> bool:
    first, *_ = said(request)
    assert isinstance(first, Ready)
    return msgspec.json.decode(first.facts, type=Facts).sees


@contextlib.contextmanager
def planned(folder: Path) -> Iterator[fsck_plan.Jobs]:
    top = place_of(str(folder))
    with fsck_plan.made(top, is_weighed=True, tell=lambda *_: None) as plan:
        yield plan.jobs(Options(), Shard(1, 1), is_cut=True)


def test_a_worker_says_whether_it_sees_what_was_listed(
    run: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del scratch
    monkeypatch.chdir(Path.cwd())  # where it goes back to: the runner changes it
    with planned(run) as jobs:
        request = fsck_client._request(run, jobs)
        assert sees(request)
        (run / "hidden").mkdir()
        other = request | {"place": str(run / "hidden")}
        assert not sees(other)
        elsewhere = request | {"place": "run", "folder": str(run / "absent")}
        (refused,) = said(elsewhere)
        assert isinstance(refused, Refused)
        assert f"run is a path in {run}/absent, which is not here: No such" in refused.reason
        other = request | {"place": str(run / "absent")}
        (refused,) = said(other)
        assert isinstance(refused, Refused)
        assert refused.reason.endswith("a shared folder at the same path, or a URL")


class Fake:
    """A cluster whose workers say what a test wants."""

    def __init__(self, results: list[Result], error: str = "", *, sees: bool = True) -> None:
        self.results, self.error, self.trip = results, error, 0.01
        self.facts = {"w": msgspec.Raw(msgspec.json.encode(Facts(sees)))}

    def run_dealt(self, dealer: Deals) -> Iterator[Result]:
        while dealer:
            dealer.next("w", 1)
        yield from self.results
        if self.error:
            raise LostError(self.error)

    @contextlib.contextmanager
    def connect(self, *_: object) -> Iterator[Fake]:
        yield self


def test_a_worker_that_sees_something_else_is_one_error(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "connect", Fake([], sees=False).connect)
    with pytest.raises(RequestError, match=rf"worker w: {run} is there, and not \S+ in it, which"):
        Finished("fsck", run, *ON)
    shutil.rmtree(run / "step_1")


def test_what_no_worker_judged_is_unknown_and_so_is_what_was_left(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned(large) as jobs:
        count, names = len(jobs), [str(job.found.name) for job in jobs]
        whole = {str(number): _judged(large, jobs, number) for number in range(count)}
    assert names.count("step_2") > 2
    lost = [Result(name, "w", content) for name, content in whole.items()]
    last = names.index("step_2") + 1
    lost[last] = Result(str(last), "w", lost="the machine burns")
    monkeypatch.setattr(client, "connect", Fake(lost).connect)
    done = Finished("fsck", large, "--json", *ON)
    (newest, older) = json.loads(done.out)["checkpoints"]
    assert (newest["state"], older["state"], done.status) == ("unknown", "whole", 2)
    (finding,) = newest["findings"]
    part = f"slice 2 of {names.count('step_2')}"
    assert finding["what"] == f"{part}: the cluster did not judge it: the machine burns"
    monkeypatch.setattr(client, "connect", Fake([], "the scheduler is gone").connect)
    done = Finished("fsck", large, "--json", *ON)
    states = [one["state"] for one in json.loads(done.out)["checkpoints"]]
    assert (states, done.status) == (["unknown"] * 2, 2)
    assert "the cluster did not judge it: the scheduler is gone" in done.out


def _judged(top: Path, jobs: fsck_plan.Jobs, number: int) -> bytes:
    """Judge one job as a worker does."""
    items = {item.id: item for item in _items(PlanDealer(jobs, 0.01))}
    messages = said(fsck_client._request(top, jobs), items[str(number)])
    assert [type(message) for message in messages] == [Ready, Found, Done]
    return bytes(next(one.result for one in messages if isinstance(one, Found)))


def test_what_a_worker_does_not_see_and_is_here_is_unknown(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned(run) as jobs:
        (run / "step_6").rename(run / "away")
        number = next(job.number for job in jobs if job.found.name == "step_6")
        gone = _judged(run, jobs, number)
        (run / "away").rename(run / "step_6")
    monkeypatch.setattr(client, "connect", Fake([Result(str(number), "w", gone)], "over").connect)
    told = json.loads(Finished("fsck", run, "--json", *ON).out)
    mine = next(one for one in told["checkpoints"] if one["path"] == str(run / "step_6"))
    assert mine["state"] == "unknown"
    assert "worker w does not see it, and it is here" in mine["findings"][0]["what"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--newest-whole"], "--newest-whole stops at the first .* leave out --on"),
        (["--write-plan", "p"], "--write-plan lists and judges nothing: leave out --on"),
        (["--jobs", "4"], "--jobs 4 is a number of threads here, and --on local:2 has workers"),
    ],
)
def test_options_that_do_not_go_with_a_cluster(words: list[str], reason: str, run: Path) -> None:
    with pytest.raises(RequestError, match=reason):
        Finished("fsck", run, *words, *ON)


# -- the dealer ------------------------------------------------------------------------------------


def _items(dealer: PlanDealer, slots: int = 2) -> list[JobItem]:
    return [item for batch in _batches(dealer, slots) for item in batch]


def _batches(dealer: PlanDealer, slots: int) -> list[list[JobItem]]:
    batches: list[list[JobItem]] = []
    while batch := dealer.next("worker", slots):
        items = [item for item in batch if isinstance(item, JobItem)]
        batches.append(items)
        dealer.learn(batch, sum(item.cost for item in items), 0.001)
    return batches


def test_every_job_is_dealt_once_the_large_ones_first(run: Path) -> None:
    torch.save({"w": torch.ones(40_000_000)}, run / "model_8.pt")
    with planned(run) as jobs:
        dealer = PlanDealer(jobs, 0.001)
        items = _items(dealer)
        assert [item.id for item in items[1:]] == sorted((i.id for i in items[1:]), key=int)
        assert items[0].job.found.name == "model_8.pt"
        assert sorted(map(repr, (item.job for item in items))) == sorted(map(repr, jobs))
        for item in items[2:]:
            assert dealer.finish(item.id).number == item.number
        assert {job.number for job in dealer.unfinished()} == {one.number for one in items[:2]}
        assert not dealer


def test_what_was_not_dealt_is_unfinished_too(run: Path) -> None:
    with planned(run) as jobs:
        dealer = PlanDealer(jobs, 0.001)
        dealer.next("worker", 2)
        assert len(list(dealer.unfinished())) == len(dealer) == len(jobs)


def test_a_batch_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck_client, "MOST_JOBS", 3)
    with planned(run) as jobs:
        sizes = [len(batch) for batch in _batches(PlanDealer(jobs, 1000.0), 1)]
    assert max(sizes) == 3


def test_a_job_that_waits_is_a_row_of_numbers(tmp_path: Path) -> None:
    """Of 4,000 more checkpoints in a plan some 40 bytes each are in memory."""

    def peak(count: int) -> int:
        root = tmp_path / str(count)
        root.mkdir()
        for step in range(count):
            (root / f"model_{step}.pt").touch()
        with planned(root) as jobs:
            tracemalloc.start()
            dealer = PlanDealer(jobs, 0.01)
            kept = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            assert len(dealer) == count
        return kept

    few, many = peak(1000), peak(5000)
    assert (many - few) / 4000 < 120
