"""Mirrors at URLs, and several of them: what has a receipt is there, bit for bit."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import s3_stores
import torch
from s3_stores import BUCKET
from test_reference_job import KINDS, Job, listing, same
from test_reference_retention import manager, small

from ckpt_conformance.reference_impl import (
    CheckpointManager,
    DirectoryMirror,
    Retries,
    UrlMirror,
    mirror_at,
)
from ckpt_conformance.reference_impl.url_mirror import PartSums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [s3_stores.quiet, pytest.mark.xdist_group("mirror-s3")]
QUICKLY = Retries(attempts=4, first_pause=0, deadline=60)


@pytest.fixture(params=s3_stores.BOTH)
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """A client of a server with an empty bucket."""
    s3_stores.lead_to(s3_stores.endpoint(request.param), monkeypatch)
    return s3_stores.emptied()


@pytest.fixture(params=["memory", *s3_stores.BOTH])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place of each kind that nobody has used."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    if s3_stores.MISSING:
        pytest.skip(s3_stores.NEEDS)
    s3_stores.lead_to(s3_stores.endpoint(request.param), monkeypatch)
    s3_stores.emptied()
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/run"


def brought_back(url: str, folder: Path) -> Path:
    """All that is at a URL, in a folder."""
    files, path = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    folder.mkdir()
    for name in files.find(path):
        place = folder / name.removeprefix(path).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(files.cat_file(name))
    return folder


@contextmanager
def closing(one: CheckpointManager) -> Iterator[CheckpointManager]:
    try:
        yield one
    finally:
        one.close()


@KINDS
def test_a_run_goes_on_from_the_mirror_alone(tmp_path: Path, url: str, kind: str) -> None:
    """What rotation deleted here is there, with the pointer; another machine resumes from it."""
    root, job = tmp_path / "root", Job()
    for step in (1, 2, 3):
        job.train(1)
        with closing(manager(root, kind, keep_last=1, mirror=UrlMirror(url))) as one:
            one.save(step, **job.parts)
    saved = job.state()
    assert manager(root, kind).steps() == [3]
    there = brought_back(url, tmp_path / "there")
    assert manager(there, kind).steps() == [1, 2, 3]
    assert (there / "latest").read_text() == (root / "latest").read_text()
    other = Job(seed=9)
    assert CheckpointManager(there).load(**other.parts).step == 3
    assert same(other.state(), saved)


def test_a_step_that_is_saved_again_is_sent_again(tmp_path: Path, url: str) -> None:
    """A receipt names the content (MX7)."""
    root = tmp_path / "root"
    for _ in range(2):
        with closing(manager(root, keep_last=0, mirror=UrlMirror(url))) as one:
            one.save(1, **small())
    there = brought_back(url, tmp_path / "there")
    assert (there / "meta_000001.json").read_bytes() == (root / "meta_000001.json").read_bytes()
    module = torch.nn.Linear(1, 1)
    assert CheckpointManager(there).load(model=module).step == 1


class Faulty(UrlMirror):
    """Its store fails where it is told to."""

    def __init__(self, url: str, fail: Callable[[str, int], None], **given: Any) -> None:  # noqa: ANN401, D107
        super().__init__(url, retries=QUICKLY, **given)
        real = self._files.put_file
        calls: list[str] = []

        def put_file(source: str, target: str, **named: Any) -> None:  # noqa: ANN401
            calls.append(target)
            fail(target, len(calls))
            real(source, target, **named)

        self._files = Wrapped(self._files, put_file)
        self.calls = calls


class Wrapped:
    """A filesystem with another `put_file`."""

    def __init__(self, files: Any, put_file: Callable[..., None]) -> None:  # noqa: ANN401, D107
        self.files, self.put_file = files, put_file

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401, D105
        return getattr(self.files, name)


def test_an_error_that_passes_is_tried_again(tmp_path: Path, url: str) -> None:
    """Twice slow down, then well: a receipt."""

    def fail(_: str, call: int) -> None:
        if call <= 2:
            raise OSError(5, "SlowDown: please reduce your request rate")

    mirror = Faulty(url, fail)
    with closing(manager(tmp_path / "root", keep_last=1, mirror=mirror)) as one:
        one.save(1, **small())
    with closing(manager(tmp_path / "root", keep_last=1, mirror=mirror)) as one:
        one.save(2, **small())
    assert one.steps() == [2]


@pytest.mark.parametrize(
    ("error", "tries"), [(OSError(5, "gone"), 4), (PermissionError(13, "denied"), 1)]
)
def test_an_error_that_stays_is_no_receipt(
    tmp_path: Path, error: OSError, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Bounded tries, one for what does not pass; nothing is deleted here (M013, M014)."""

    def fail(_: str, __: int) -> None:
        raise error

    mirror = Faulty(f"memory://{uuid.uuid4().hex}", fail)
    with closing(manager(tmp_path / "root", keep_last=1, mirror=mirror)) as one:
        one.save(1, **small())
    assert len(mirror.calls) == tries
    assert f"tried {tries} times" in caplog.text
    one.save(2, **small())
    one.close()
    assert one.steps() == [1, 2]


def test_no_attempt_begins_after_the_deadline(tmp_path: Path) -> None:
    """However many are left."""

    def fail(_: str, __: int) -> None:
        raise OSError(5, "gone")

    mirror = Faulty(f"memory://{uuid.uuid4().hex}", fail)
    mirror.retries = Retries(attempts=10**6, first_pause=1e6, deadline=1)
    with closing(manager(tmp_path / "root", mirror=mirror)) as one:
        one.save(1, **small())
    assert len(mirror.calls) == 1


def test_what_arrives_wrong_is_no_receipt(tmp_path: Path, url: str) -> None:
    """By the store's own digest, or read back: one bit of one file (D07)."""

    class Lossy(UrlMirror):
        def _send_file(self, source: Path, target: str, entry: Any) -> None:  # noqa: ANN401
            if source.name.startswith("model"):
                data = source.read_bytes()
                twin = source.with_name("twin")
                twin.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
                real, self._files = (
                    self._files,
                    Wrapped(
                        self._files,
                        lambda _, where, **named: files.put_file(str(twin), where, **named),
                    ),
                )
                files = real
                try:
                    super()._send_file(source, target, entry)
                finally:
                    self._files = real
                    twin.unlink()
            else:
                super()._send_file(source, target, entry)

    for step in (1, 2):
        mirror = Lossy(url, retries=QUICKLY)
        with closing(manager(tmp_path / "root", keep_last=1, mirror=mirror)) as one:
            one.save(step, **small())
    assert one.steps() == [1, 2]


def test_what_is_damaged_here_is_no_copy_of_its_save(tmp_path: Path, url: str) -> None:
    """The bytes that were sent have to be those of the manifest."""
    root = tmp_path / "root"
    manager(root, keep_last=0).save(1, **small())
    path = root / "model_000001.pt"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with closing(manager(root, keep_last=1, mirror=UrlMirror(url, retries=QUICKLY))) as one:
        one.save(2, **small())
    assert not [name for name in listing(root) if name.startswith("receipt_000001")]


# ---- several mirrors ---------------------------------------------------------------------------


def test_rotation_asks_each_mirror_that_is_required(tmp_path: Path, url: str) -> None:
    """One of two has nothing yet: nothing is deleted; once it has, it is (MX7)."""
    root, near = tmp_path / "root", DirectoryMirror(tmp_path / "near")

    def fail(_: str, __: int) -> None:
        raise OSError(5, "gone")

    for far, left in (
        (Faulty(url, fail), [1, 2]),
        (UrlMirror(url), [1, 2, 3]),
        (UrlMirror(url), [4]),
    ):
        with closing(manager(root, keep_last=1, mirror=[near, far])) as one:
            step = 1 + max(one.steps(), default=0)
            one.save(step, **small())
            if step == 1:
                one.close()
                one.save(2, **small())
        assert one.steps() == left
    assert manager(tmp_path / "near").steps() == [1, 2, 3, 4]
    assert manager(brought_back(url, tmp_path / "there")).steps() == [1, 2, 3, 4]


def test_a_mirror_that_is_not_required_keeps_nothing_back(tmp_path: Path) -> None:
    """Its uploads fail, and rotation goes on by the receipts of the other."""

    def fail(_: str, __: int) -> None:
        raise OSError(5, "gone")

    near = DirectoryMirror(tmp_path / "near")
    for step in (1, 2, 3):
        far = Faulty(f"memory://{uuid.uuid4().hex}", fail, required=False)
        with closing(manager(tmp_path / "root", keep_last=1, mirror=[near, far])) as one:
            one.save(step, **small())
    assert one.steps() == [3]


# ---- S3 ----------------------------------------------------------------------------------------


@s3_stores.needed
def test_a_large_file_goes_in_parts_and_is_compared_by_their_sums(
    tmp_path: Path,
    s3: Any,  # noqa: ANN401
) -> None:
    """Nothing is read back: the store's own digest of the parts tells."""
    model = torch.nn.Linear(2**11, 2**11)  # 16 MiB
    read: list[str] = []

    class Watched(UrlMirror):
        def _read(self, url: str) -> Iterator[bytes]:
            read.append(url)
            return super()._read(url)

    mirror = Watched(f"s3://{BUCKET}/run", part_bytes=5 << 20)
    with closing(manager(tmp_path / "root", mirror=mirror)) as one:
        one.save(1, model=model)
    head = s3.head_object(Bucket=BUCKET, Key="run/model_000001.pt")
    assert head["ETag"].endswith('-4"')
    assert read == []
    assert [name for name in listing(tmp_path / "root") if name.startswith("receipt_000001")]


@s3_stores.needed
def test_parts_that_a_dead_upload_left_are_aborted(tmp_path: Path, s3: Any) -> None:  # noqa: ANN401
    """Of names of ours below our prefix, and of nobody else's."""
    for key in ("run/model_000001.pt", "run/dcp_000001/__0_0.distcp", "run/notes.txt", "other/x"):
        s3.create_multipart_upload(Bucket=BUCKET, Key=key)
    with closing(manager(tmp_path / "root", mirror=UrlMirror(f"s3://{BUCKET}/run"))) as one:
        one.save(2, **small())
    left = [one["Key"] for one in s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]
    assert sorted(left) == ["other/x", "run/notes.txt"]


@s3_stores.needed
def test_a_bucket_that_is_not_there_is_said_once(
    tmp_path: Path,
    s3: Any,  # noqa: ANN401
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No receipt, no second try, and the name in the words."""
    del s3
    mirror = UrlMirror("s3://no-such-bucket/run", retries=QUICKLY)
    with closing(manager(tmp_path / "root", mirror=mirror)) as one:
        one.save(1, **small())
    assert "no-such-bucket" in caplog.text
    assert not [name for name in listing(tmp_path / "root") if name.startswith("receipt")]


@pytest.mark.parametrize("size", [0, 1, 4, 5, 8, 9, 100])
@pytest.mark.parametrize("chunk", [1, 3, 4, 50])
def test_sums_of_parts_do_not_depend_on_how_bytes_come(size: int, chunk: int) -> None:
    data = bytes(range(256))[:size]
    sums, whole = PartSums(4), PartSums(4)
    for at in range(0, size, chunk):
        sums.update(data[at : at + chunk])
    whole.update(data)
    like = "0" * 32 + "-2"
    assert sums.tag("0" * 32) == whole.tag("0" * 32)
    assert sums.tag(like) == whole.tag(like)
    assert int(sums.tag(like).partition("-")[2]) == -(-size // 4)


@pytest.mark.parametrize(
    ("place", "words"),
    [("bucket/run", "'bucket/run' has no protocol"), ("file:///x", "'file:///x' is a directory")],
)
def test_a_url_that_is_none_is_refused(place: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        UrlMirror(place)


def test_a_place_gets_its_kind_of_mirror(tmp_path: Path) -> None:
    """A directory by its path, or by a URL of it, is one that is synced."""
    for place in (str(tmp_path / "a b"), (tmp_path / "a b").as_uri()):
        mirror = mirror_at(place)
        assert isinstance(mirror, DirectoryMirror)
        assert mirror.target == tmp_path / "a b"
    assert isinstance(mirror_at("memory://run", required=False), UrlMirror)
