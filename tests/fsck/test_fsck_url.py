"""Fsck and diff on URLs: verdicts as on paths, requests for ranges, clear errors."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import fsck_corpus
import fsspec
import megatron_layouts
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli_fsck import cli
from test_fsck_scale import shards
from typer.testing import CliRunner
from url_stores import Broken, Watched, upload

from ckpt_conformance.cli.disk import app
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.fault_injectors import at_rest
from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import Judged, Options, judge
from ckpt_conformance.fsck.source.findings import Kind, State
from ckpt_conformance.fsck.source.places import place
from ckpt_conformance.fsck.source.remote import AHEAD, BLOCK, RemoteFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# One worker writes the corpus, once.
pytestmark = pytest.mark.xdist_group("fsck-url")

# Ranks are processes and take seconds; their format is that of one rank.
WRITERS = {name: one for name, one in fsck_corpus.WRITERS.items() if name != "dcp-4-ranks"}
WRITERS |= {"verl-v2": megatron_layouts.v2_sharded, "verl-pre-v2": megatron_layouts.pre_v2}
GOLDEN = ("accelerate", "transformers", "lightning", "deepspeed")


@pytest.fixture(autouse=True)
def stores() -> Iterator[None]:
    """Empty stores, which fsspec finds by their names."""
    for kind in (Watched, Broken):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
        kind.store.clear()
    Watched.asked.clear()
    Broken.failing.clear()
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, Path]:
    """Every layout, undamaged."""
    base = tmp_path_factory.mktemp("corpus")
    found: dict[str, Path] = {}
    for name, write in WRITERS.items():
        (base / name / "run").mkdir(parents=True)
        found[name] = write(base / name / "run")
    for name in GOLDEN:
        found[name] = repository / "tests" / "golden" / "fsck" / name
    return found


def told(judged: Judged) -> dict[str, Any]:
    """Give all that was said, with names relative to what was judged."""
    found: dict[str, Any] = json.loads(json.dumps(judged.to_json()).replace(str(judged.path), "."))
    found["checkpoints"].sort(key=lambda one: one["path"])  # of one step, the times decide
    assert all(one.pop("changed") for one in found["checkpoints"])  # a copy is younger
    return found | {"newest_whole": bool(found["newest_whole"])}


# -- the same as on a path -------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*WRITERS, *GOLDEN])
def test_a_url_is_judged_as_the_path(layout: str, corpus: dict[str, Path]) -> None:
    url = upload(corpus[layout], "memory://bucket/run")
    far, near = judge(place(url), Options(jobs=4)), judge(corpus[layout], Options(jobs=2))
    assert told(far) == told(near)
    assert far.state is State.WHOLE
    assert far.newest_whole
    assert str(far.newest_whole.path).startswith(url)


@pytest.mark.parametrize("fault", at_rest.AT_REST)
@pytest.mark.parametrize("layout", WRITERS)
def test_a_url_shows_the_same_damage(
    layout: str, fault: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    try:
        rng = random.Random(1)  # noqa: S311  which bytes, no secret
        at_rest.copy_damaged(corpus[layout], tmp_path / "copy", fault, rng)
    except (Unknown, ValueError) as error:
        pytest.skip(f"{layout} cannot have it: {error}")
    if not list(trees.files(tmp_path / "copy")):
        pytest.skip("it was the only file, and a store has no empty folder")
    url = upload(tmp_path / "copy", "memory://bucket/run")
    assert told(judge(place(url))) == told(judge(tmp_path / "copy"))


@pytest.mark.parametrize("layout", GOLDEN)
def test_damage_of_what_libraries_wrote_is_the_same(
    layout: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    for fault in ("bit-flip", "truncation-half", "missing-file"):
        rng = random.Random(2)  # noqa: S311  as above
        at_rest.copy_damaged(corpus[layout], tmp_path / fault, fault, rng)
        url = upload(tmp_path / fault, f"memory://{fault}/run")
        assert told(judge(place(url))) == told(judge(tmp_path / fault)), fault


def test_one_file_may_be_named(corpus: dict[str, Path]) -> None:
    url = upload(corpus["torch"], "memory://bucket") + "/checkpoint-5.pt"
    (report,) = judge(place(url)).reports
    assert (str(report.path), report.step, report.state) == (url, 5, State.WHOLE)
    with pytest.raises(RequestError, match="a part of a DCP checkpoint"):
        judge(place(upload(corpus["dcp"], "memory://x") + "/step_5/__0_0.distcp"))


def test_the_command_takes_urls(corpus: dict[str, Path], tmp_path: Path) -> None:
    """As a user meets it: by a scheme that another process reads, too."""
    shutil.copytree(corpus["reference-dcp"], tmp_path / "run")
    url = f"file://{tmp_path}/run"
    command = ["fsck", url, "--newest-whole"]
    assert CliRunner().invoke(app, command).stdout == f"{url}/dcp_000005\n"
    os.truncate(tmp_path / "run" / "dcp_000005" / "__0_0.distcp", 100)
    done = cli("fsck", url, "--newest-whole")
    assert (done.returncode, done.stdout) == (0, f"{url}/dcp_000002\n")
    assert f"passed over: {url}/dcp_000005: damaged" in done.stderr
    done = CliRunner().invoke(app, ["fsck", f"{url}/", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["newest_whole"] == f"{url}/dcp_000002"
    done = CliRunner().invoke(app, ["fsck", url])
    assert done.stdout.startswith("✗ damaged           dcp_000005  ")


def test_diff_takes_urls(corpus: dict[str, Path]) -> None:
    url = upload(corpus["dcp"], "memory://bucket/run")
    compared = diff(place(url), corpus["torch"])
    assert compared.is_judged
    assert compared.counts["differs"] == 0
    assert len(compared.same) > 10
    done = CliRunner().invoke(app, ["diff", url, str(corpus["torch"]), "--only", "^model"])
    assert done.exit_code == 0, done.output


def test_of_two_without_a_step_the_younger_is_the_newest() -> None:
    for name in ("zeta", "alpha"):
        stream = io.BytesIO()
        torch.save({"w": torch.ones(2)}, stream)
        fsspec.filesystem("memory").pipe_file(f"/bucket/run/{name}/w.pt", stream.getvalue())
        store = MemoryFileSystem.store[f"/bucket/run/{name}/w.pt"]
        store.created = datetime(2026, 1, 1 + (name == "alpha"), tzinfo=UTC)
    newest = judge(place("memory://bucket/run")).newest_whole
    assert newest
    assert str(newest.path) == "memory://bucket/run/alpha/w.pt"


def test_nans_are_counted_behind_a_url(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "checkpoint-5.pt")
    url = upload(tmp_path, "memory://bucket/run")
    (report,) = judge(place(url), Options(nan=True)).reports
    assert [one.tensor for one in report.not_finite or ()] == ["w"]


def test_links_are_not_followed_in_a_url(corpus: dict[str, Path], tmp_path: Path) -> None:
    """A path follows links inside of the folder; a store has none, and file:// may not guess."""
    shutil.copytree(corpus["dcp"], tmp_path / "run")
    shard = tmp_path / "run" / "step_5" / "__0_0.distcp"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    (report,) = judge(place(f"file://{tmp_path}/run")).reports
    assert report.state is State.DAMAGED
    assert {"symbolic link" in one.what for one in report.findings} == {True}


# -- requests --------------------------------------------------------------------------------------


def test_a_large_file_is_read_in_ranges_once(tmp_path: Path) -> None:
    state = {f"w{at}": torch.randn(1_500_000) for at in range(4)}
    torch.save(state, tmp_path / "checkpoint-5.pt")
    size = (tmp_path / "checkpoint-5.pt").stat().st_size
    url = upload(tmp_path, "watched://run")
    assert judge(place(url), Options(jobs=2)).state is State.WHOLE
    reads = [length for what, length in Watched.asked if what == "read"]
    assert max(reads) <= AHEAD
    assert size <= sum(reads) < size + 40 * BLOCK
    assert len(reads) < 60


def test_many_shards_are_known_by_one_listing(tmp_path: Path) -> None:
    shards(tmp_path / "run" / "step_5", 300)
    url = upload(tmp_path / "run", "watched://run")
    judged = judge(place(url), Options(metadata_only=True))
    assert judged.state is State.WHOLE, judged.reports[0].findings
    kinds = [what for what, _ in Watched.asked]
    assert kinds.count("ls") <= 2
    assert kinds.count("info") <= 1
    assert kinds.count("read") <= 3


def test_what_changed_between_two_runs_is_seen(corpus: dict[str, Path]) -> None:
    """No listing is remembered from one call to the next."""
    url = upload(corpus["dcp"], "memory://bucket/run")
    assert judge(place(url)).state is State.WHOLE
    del MemoryFileSystem.store["/bucket/run/step_5/__0_0.distcp"]
    assert judge(place(url)).state is State.INCOMPLETE


READS = st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.integers(0, 2 * BLOCK), st.booleans()))


@given(size=st.integers(0, 3 * BLOCK), reads=READS)
@settings(max_examples=30, deadline=None)
def test_a_file_behind_a_url_reads_as_any_other(
    size: int, reads: list[tuple[int, int, bool]]
) -> None:
    data = random.Random(size).randbytes(size)  # noqa: S311  any bytes
    near, far = io.BytesIO(data), RemoteFile(lambda start, end: data[start:end], size)
    assert far.seek(0, io.SEEK_END) == size
    for at, length, foretold in reads:
        if foretold:
            far.expect(at, at + length)
        near.seek(at)
        assert far.seek(at) == at
        expected, got = near.read(length), b""
        while len(got) < length and (piece := far.read(length - len(got))):
            got += piece
        assert got == expected


# -- errors ----------------------------------------------------------------------------------------


def refused(url: str, *words: str) -> str:
    """Give what the command says of a usage error: `main` makes exit status 2 of it."""
    done = CliRunner().invoke(app, ["fsck", url, *words])
    assert isinstance(done.exception, RequestError), done.output
    assert not done.stdout
    return str(done.exception)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s4://bucket/run", ("fsspec knows no s4://", "s3")),
        ("memory://nothing", ("memory://nothing does not exist", "give the folder")),
        ("simplecache::s3://bucket", ("a chain of URLs", "the folder itself")),
        ("absent://bucket", ("not installed", "pip install absent-package")),
    ],
)
def test_what_cannot_be_read_is_a_usage_error(url: str, words: tuple[str, ...]) -> None:
    fsspec.register_implementation(
        "absent", "absent_package.Files", clobber=True, errtxt="pip install absent-package"
    )
    said = refused(url)
    assert url in said
    assert all(word in said for word in words), said


def test_a_store_without_fsspec_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert "pip install 'ckpt-conformance[reference]'" in refused("s3://bucket/run")


@pytest.mark.parametrize("what", ["info", "ls"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError("Access Denied"), ("Access Denied", "use ")),
        (ConnectionError("no route"), ("no route", "try again")),
        (RuntimeError("no credentials"), ("no credentials", "look at")),
    ],
)
def test_a_store_that_refuses_is_a_usage_error(
    what: str, error: Exception, words: tuple[str, ...], corpus: dict[str, Path]
) -> None:
    url = upload(corpus["dcp"], "broken://bucket/run")
    Broken.failing[what] = ("run", error)
    said = refused(url)
    assert url in said
    assert all(word in said for word in words), said


@pytest.mark.parametrize("error", [TimeoutError("late"), PermissionError("Forbidden")])
def test_a_file_that_does_not_come_is_unknown_and_not_damaged(
    error: Exception, corpus: dict[str, Path]
) -> None:
    url = upload(corpus["reference-dcp"], "broken://bucket/run")
    Broken.failing["read"] = ("dcp_000005/__0_0.distcp", error)
    newest, older = judge(place(url)).reports
    assert (newest.state, older.state) == (State.UNKNOWN, State.WHOLE)
    assert {one.kind for one in newest.findings} == {Kind.UNKNOWN}
    assert CliRunner().invoke(app, ["fsck", url]).exit_code == 2


def test_a_file_whose_kind_is_not_known_is_not_passed_over(tmp_path: Path) -> None:
    """Only the first bytes say whether a .bin is an archive, and they do not come."""
    (tmp_path / "step_5").mkdir()
    for name in ("model.pt", "optimizer.bin"):
        torch.save({"w": torch.ones(2)}, tmp_path / "step_5" / name)
    url = upload(tmp_path, "broken://bucket/run")
    assert judge(place(url)).state is State.WHOLE
    for error in (TimeoutError("late"), PermissionError("Forbidden")):
        Broken.failing["read"] = ("optimizer.bin", error)
        (report,) = judge(place(url)).reports
        assert [(one.kind, one.file) for one in report.findings] == [
            (Kind.UNKNOWN, "optimizer.bin")
        ]


@pytest.mark.parametrize("error", [TimeoutError("late"), PermissionError("Forbidden")])
def test_a_gate_chooses_nothing_where_the_network_failed(
    error: Exception, corpus: dict[str, Path]
) -> None:
    """What was not read may be the newest whole one: an older one would lose its steps."""
    url = upload(corpus["reference-dcp"], "broken://bucket/run")
    Broken.failing["read"] = ("dcp_000005/__0_0.distcp", error)
    assert judge_newest(place(url)).newest_whole
    said = refused(url, "--newest-whole")
    assert str(error) in said
    assert "try again" in said


def test_a_store_without_ranges_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.randn(BLOCK)}, tmp_path / "checkpoint-5.pt")
    url = upload(tmp_path, "broken://bucket/run")
    monkeypatch.setattr(
        Broken, "cat_file", lambda self, path, *_, **__: self.store[path].getvalue()
    )
    (report,) = judge(place(url)).reports
    assert report.state is State.UNKNOWN
    assert "no ranges" in report.findings[0].what


def cutting(times: int, asked: list[str]) -> Any:  # noqa: ANN401  a method of a filesystem
    """Return a `cat_file` that cuts the first answers for a shard short."""

    def cat_file(self: Broken, path: str, start: int, end: int, **_: object) -> bytes:
        data: bytes = self.store[path].getvalue()[start:end]
        if not path.endswith(".distcp"):
            return data
        asked.append(path)
        return data[: len(data) // 2] if len(asked) <= times else data

    return cat_file


@pytest.mark.parametrize("times", [1, 2, 10**6])
def test_an_answer_that_is_cut_short_is_asked_for_again(
    times: int, corpus: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no damage of the file, whose size the store says."""
    url = upload(corpus["dcp"], "broken://bucket/run")
    monkeypatch.setattr(Broken, "cat_file", cutting(times, []))
    judged = judge(place(url))
    if times < 3:
        assert judged.state is State.WHOLE
        return
    assert judged.state is State.UNKNOWN
    found = [one for report in judged.reports for one in report.findings]
    assert found
    assert all("cut short on the way" in one.what and "try again" in one.what for one in found)
    assert CliRunner().invoke(app, ["fsck", url]).exit_code == 2
    assert "cut short on the way" in refused(url, "--newest-whole")
