"""A mirror at a store that misbehaves: the upload is whole, or there is an error and no receipt.

The store is a real server of S3 on loopback, behind the proxy that injects what stores do.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import s3_stores
import torch
from s3_stores import BUCKET
from test_reference_job import listing, same
from test_reference_retention import manager
from test_reference_url_mirror import QUICKLY, Wrapped, brought_back, closing

from ckpt_conformance.fault_injectors.object_store import faults
from ckpt_conformance.reference_impl import (
    CheckpointError,
    CheckpointManager,
    UrlMirror,
    url_mirror,
)
from ckpt_conformance.reference_impl.mirror import MirrorError
from ckpt_conformance.trace.requests import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy

pytestmark = [s3_stores.quiet, s3_stores.needed, pytest.mark.xdist_group("mirror-s3")]
URL = f"s3://{BUCKET}/run"
MODEL, MANIFEST, POINTER = "run/model_*", "run/meta_*", "run/latest"
# Bytes of a part, and rows of a square model that has three; SeaweedFS takes no smaller part.
SIZES = {s3_stores.MOTO: (1 << 16, 200), s3_stores.SEAWEEDFS: (5 << 20, 1800)}


@dataclass
class Sizes:
    """Those that the store of a test takes."""

    part: int = 0
    rows: int = 0

    def module(self) -> torch.nn.Linear:
        return torch.nn.Linear(self.rows, self.rows)


SIZE = Sizes()


@pytest.fixture(scope="module", params=s3_stores.BOTH)
def store(request: pytest.FixtureRequest) -> str:
    SIZE.part, SIZE.rows = SIZES[request.param]
    return s3_stores.endpoint(request.param)


@pytest.fixture
def proxy(store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StoreProxy]:
    """A proxy in front of an empty bucket whose smallest part is of our size."""
    from moto.s3 import models

    monkeypatch.setattr(models, "S3_UPLOAD_PART_MIN_SIZE", SIZE.part)
    with s3_stores.proxied(store, tmp_path / "recorded") as one:
        s3_stores.lead_to(one.endpoint, monkeypatch)
        # moto keeps the sum that a client sends beside what it got, and does not compare them.
        monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
        s3_stores.emptied()
        yield one


def job(step: int) -> dict[str, torch.nn.Module]:
    """A model of three parts, another one at each step."""
    torch.manual_seed(step)
    return {"model": SIZE.module()}


def saved(
    root: Path,
    step: int,
    kind: type[UrlMirror] = UrlMirror,
    by: Callable[..., CheckpointManager] = manager,
    **given: Any,  # noqa: ANN401
) -> CheckpointManager:
    """Save a step by a new process's manager, with one to keep, and wait for the upload."""
    mirror = kind(URL, part_bytes=SIZE.part, retries=QUICKLY, **given)
    with closing(by(root, keep_last=1, mirror=mirror)) as one:
        one.save(step, **job(step))
    return one


def receipts(root: Path) -> set[int]:
    return {int(name[8:14]) for name in listing(root) if name.startswith("receipt_")}


def served_alone(folder: Path) -> int:
    """Load from what a mirror has, and compare with what was saved; gives the step."""
    module = SIZE.module()
    step = CheckpointManager(folder).load(model=module).step
    assert same(module.state_dict(), job(step)["model"].state_dict())
    return step


def require_promises(root: Path, there: Path) -> None:
    """What has a receipt loads from the mirror; what has none is here; nothing partial is served.

    The mirror alone serves step 1 or 2, bit for bit.
    """
    there = brought_back(URL, there)
    mirrored = set(manager(there).steps())
    assert receipts(root) <= mirrored
    assert {1, 2} <= mirrored | set(manager(root).steps())
    assert served_alone(there) in (1, 2)
    for step in receipts(root):
        module = SIZE.module()
        assert CheckpointManager(there).load(step=step, model=module).step == step
        assert same(module.state_dict(), job(step)["model"].state_dict())


PUT, PART_SENT, DONE = (Action.PUT,), (Action.UPLOAD_PART,), (Action.COMPLETE,)
PASSING = {
    "answer of the claim is lost": faults.LostAnswer(key="run/writer_*", actions=PUT),
    "answer of the manifest is lost": faults.LostAnswer(key=MANIFEST, actions=PUT),
    "answer of the pointer is lost": faults.LostAnswer(key=POINTER, actions=PUT),
    "answer of a part is lost": faults.LostAnswer(key=MODEL, actions=PART_SENT, after=1),
    "answer of Create is lost": faults.LostAnswer(key=MODEL, actions=(Action.CREATE_UPLOAD,)),
    "answer of Complete is lost": faults.LostAnswer(key=MODEL, actions=DONE),
    "answer of the comparison is lost": faults.LostAnswer(key=MODEL, actions=(Action.HEAD,)),
    "200 with an error inside": faults.ErrorInside(),
    "200 with an error inside, as often as but one try": faults.ErrorInside(times=3),
    "a conflict at Complete": faults.Conflict(),
    "slow down at the listing of uploads": faults.SlowDown(actions=(Action.LIST_UPLOADS,), times=0),
    "slow down at a part": faults.SlowDown(key=MODEL, actions=PART_SENT, times=2),
    "a wrong digest of a part": faults.BadDigest(key=MODEL, actions=PART_SENT),
    "a wrong digest of the manifest": faults.BadDigest(key=MANIFEST),
    "a damaged part": faults.DamagedBody(key=MODEL, actions=PART_SENT, after=1),
    "a damaged manifest": faults.DamagedBody(key=MANIFEST),
    "a damaged pointer": faults.DamagedBody(key=POINTER),
    "cut inside a part": faults.CutInBody(key=MODEL, bytes=1000),
    "cut inside the manifest": faults.CutInBody(key=MANIFEST, bytes=1),
    "credentials that expire once": faults.ExpiredToken(key=MODEL, times=1),
}
LASTING = {
    "200 with an error inside": faults.ErrorInside(times=0),
    "a conflict at Complete": faults.Conflict(times=0),
    "a wrong digest of a part": faults.BadDigest(key=MODEL, times=0),
    "damaged parts": faults.DamagedBody(key=MODEL, times=0),
    "damaged manifests": faults.DamagedBody(key=MANIFEST, times=0),
    "cut inside a part": faults.CutInBody(key=MODEL, bytes=1000, times=0),
    "credentials that have expired": faults.ExpiredToken(),
    "the bucket is gone": faults.NoBucket(),
    "slow down at the pointer": faults.SlowDown(key=POINTER, times=0),
}
ONCE = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}


@pytest.mark.parametrize("what", PASSING)
def test_what_passes_costs_nothing(proxy: StoreProxy, tmp_path: Path, what: str) -> None:
    """The upload is whole, its receipt is there, and rotation has gone on."""
    root = tmp_path / "root"
    saved(root, 1)
    proxy.arm(PASSING[what])
    # The client's own next try is what a lost answer is about.
    saved(root, 2, storage_options=None if "lost" in what else ONCE)
    proxy.require_fired()
    proxy.disarm()
    assert receipts(root) >= {2}
    require_promises(root, tmp_path / "there")
    assert served_alone(tmp_path / "there") == 2


@pytest.mark.parametrize("what", LASTING)
def test_what_lasts_is_a_typed_error_and_no_receipt(
    proxy: StoreProxy, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is deleted here, and the mirror serves what it had; once it is over all is sent."""
    root = tmp_path / "root"
    saved(root, 1)
    proxy.arm(LASTING[what])
    caplog.set_level(logging.WARNING)
    saved(root, 2, storage_options=ONCE)
    proxy.require_fired()
    proxy.disarm()
    said = [one.exc_info[0] for one in caplog.records if one.exc_info]
    assert said == [MirrorError]
    assert receipts(root) == set()  # step 1 was mirrored, and is gone here
    require_promises(root, tmp_path / "there")
    saved(root, 3)
    saved(root, 4)
    assert receipts(root) == {4}
    assert manager(brought_back(URL, tmp_path / "later")).steps() == [1, 2, 3, 4]
    left = s3_stores.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    assert not left


def test_a_lister_of_uploads_that_is_forbidden_forbids_no_upload(
    proxy: StoreProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Many who may write a bucket may not list what others upload to it."""
    proxy.arm(faults.ExpiredToken(actions=(Action.LIST_UPLOADS,)))
    caplog.set_level(logging.WARNING)
    saved(tmp_path / "root", 1)
    proxy.require_fired()
    assert receipts(tmp_path / "root") == {1}
    assert "unfinished uploads" in caplog.text


def test_an_upload_asks_for_no_listing_of_objects(proxy: StoreProxy, tmp_path: Path) -> None:
    """So one that is late does it no harm."""
    saved(tmp_path / "root", 1)
    of_run = [one for one in proxy.requests if one.key.startswith("run/")]
    assert {one.action for one in of_run} >= {Action.PUT, Action.HEAD, Action.COMPLETE}
    since = proxy.requests.index(of_run[0])
    assert Action.LIST not in {one.action for one in proxy.requests[since:]}


def test_credentials_are_read_anew_once_they_have_expired(
    proxy: StoreProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What renews them writes a file or a variable; a job of weeks must not need a restart."""
    root = tmp_path / "root"
    mirror = UrlMirror(URL, retries=QUICKLY)
    with closing(manager(root, mirror=mirror)) as one:
        one.save(1, **job(1))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    proxy.arm(faults.ExpiredToken(times=1, key="run/*"))
    with closing(manager(root, mirror=mirror)) as one:
        one.save(2, **job(2))
    proxy.require_fired()
    assert receipts(root) == {1, 2}
    assert {one.account for one in proxy.requests if one.fault} == {"testing"}
    assert proxy.requests[-1].account == "renewed"


def test_parts_that_a_failed_upload_left_are_aborted_by_the_next_one(
    proxy: StoreProxy, tmp_path: Path
) -> None:
    """Of the same process, too: its own Abort was not heard."""
    root = tmp_path / "root"
    mirror = UrlMirror(URL, part_bytes=SIZE.part, retries=QUICKLY, storage_options=ONCE)
    with closing(manager(root, mirror=mirror)) as one:
        one.save(1, **job(1))
        one.close()
        cut = faults.CutInBody(key="run/model_000002.pt", times=0)
        proxy.arm(cut, faults.BadDigest(actions=(Action.ABORT,), times=0))
        one.save(2, **job(2))
        one.close()
        proxy.require_fired()
        proxy.disarm()
        client = s3_stores.client()
        assert client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
        one.save(3, **job(3))
    assert not client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    assert receipts(root) == {2, 3}


# ---- that the tests above can fail: mirrors and managers that are broken -------------------------


class Unverified(UrlMirror):
    """Writes a receipt of what it has sent, and compares nothing."""

    def _compare(self, *_: Any) -> None:  # noqa: ANN401
        pass


class Believes(Unverified):
    """Takes each answer of 200 to a Complete for a yes, as a client of its own may."""

    def __init__(self, url: str, **given: Any) -> None:  # noqa: ANN401, D107
        super().__init__(url, **given)
        real = self._files.call_s3

        def put_file(source: str, target: str, **_: Any) -> None:  # noqa: ANN401
            bucket, key, _version = self._files.split_path(target)
            of = {"Bucket": bucket, "Key": key}
            of["UploadId"] = real("create_multipart_upload", **of)["UploadId"]
            with open(source, "rb") as file:  # noqa: PTH123
                tag = real("upload_part", PartNumber=1, Body=file.read(), **of)["ETag"]
            with suppress(OSError):  # an Error in its body
                parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
                real("complete_multipart_upload", MultipartUpload=parts, **of)

        self._files = Wrapped(self._files, put_file)


class Impatient(type(manager("x"))):  # type: ignore[misc]
    """Deletes what is beyond the number to keep, mirrored or not."""

    def may_delete(self, candidate: object) -> bool:
        del candidate
        return True


def require_none_is_lost(
    proxy: StoreProxy,
    tmp_path: Path,
    fault: faults.StoreFault,
    **given: Any,  # noqa: ANN401
) -> None:
    """Save two steps, the second one under a fault, then a third one; ask what is promised."""
    root = tmp_path / "root"
    saved(root, 1, **given)
    proxy.arm(fault)
    saved(root, 2, storage_options=ONCE, **given)
    saved(root, 3, storage_options=ONCE, **given)
    proxy.require_fired()
    proxy.disarm()
    there = brought_back(URL, tmp_path / "there")
    here = set(manager(root).steps())
    for step in {1, 2, 3} - here:
        module = SIZE.module()
        assert CheckpointManager(there).load(step=step, model=module).step == step
        assert same(module.state_dict(), job(step)["model"].state_dict())


BROKEN = {
    "a receipt without a comparison": (
        faults.DamagedBody(key=MODEL, times=0),
        {"kind": Unverified},
    ),
    "a Complete of 200 that is believed": (faults.ErrorInside(times=0), {"kind": Believes}),
    "deleted here before it is there": (
        faults.CutInBody(key=MODEL, bytes=1000, times=0),
        {"by": Impatient},
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_mirror_is_told_from_one_that_keeps_its_promise(
    proxy: StoreProxy, tmp_path: Path, what: str
) -> None:
    fault, broken = BROKEN[what]
    require_none_is_lost(proxy, tmp_path / "sound", fault)
    s3_stores.emptied()
    with pytest.raises((AssertionError, CheckpointError)):
        require_none_is_lost(proxy, tmp_path / "broken", fault, **broken)


def test_a_client_that_fails_at_its_own_retry_leaves_no_receipt(
    proxy: StoreProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Complete that was done, and whose answer was lost (arrow-rs-object-store#863)."""

    def believes(send: Callable[[], None], compare: Callable[[], None]) -> None:
        send()
        compare()

    monkeypatch.setattr(url_mirror, "_settle", believes)
    monkeypatch.setattr(url_mirror, "FINAL_CODES", url_mirror.FINAL_CODES | {"NoSuchUpload"})
    root = tmp_path / "root"
    saved(root, 1)
    proxy.arm(PASSING["answer of Complete is lost"])
    saved(root, 2)
    proxy.require_fired()
    assert 2 not in receipts(root)
