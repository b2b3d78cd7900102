"""The proxy in front of a store: what it records, and that each of its faults is what it says."""

from __future__ import annotations

import http.client
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import s3_stores
from s3_stores import BUCKET

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.fault_injectors.object_store import faults, protocol
from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy
from ckpt_conformance.trace import requests
from ckpt_conformance.trace.requests import Action, StoreRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [s3_stores.quiet, s3_stores.needed, pytest.mark.xdist_group("mirror-s3")]


@pytest.fixture(scope="module", params=s3_stores.BOTH)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def store(kind: str) -> str:
    return s3_stores.endpoint(kind)


@pytest.fixture
def proxy(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProxy]:
    with s3_stores.proxied(store, tmp_path / "recorded") as one:
        s3_stores.lead_to(one.endpoint, monkeypatch)
        s3_stores.emptied()
        yield one


def once(**given: Any) -> Any:  # noqa: ANN401
    """A client that asks once."""
    from botocore.config import Config

    return s3_stores.client(config=Config(retries={"total_max_attempts": 1}), **given)


def last(proxy: StoreProxy, count: int = 1) -> list[StoreRequest]:
    return proxy.requests[-count:]


def code_of(error: pytest.ExceptionInfo[Any]) -> str:
    code: str = error.value.response["Error"]["Code"]
    return code


def uploaded(client: Any, key: str, *parts: bytes, **given: str) -> str:  # noqa: ANN401
    """Put an object together of parts; gives the id of the upload."""
    upload: str = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    of = {"Bucket": BUCKET, "Key": key, "UploadId": upload}
    sent = [
        {"PartNumber": at, "ETag": client.upload_part(Body=data, PartNumber=at, **of)["ETag"]}
        for at, data in enumerate(parts, 1)
    ]
    client.complete_multipart_upload(MultipartUpload={"Parts": sent}, **of, **given)
    return upload


def held(store: str, key: str) -> bytes | None:
    """What the store itself has."""
    from botocore.config import Config

    config = Config(response_checksum_validation="when_required")  # as it is, damaged or not
    client = s3_stores.client(endpoint_url=store, config=config)
    try:
        data: bytes = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    except client.exceptions.NoSuchKey:
        return None
    return data


# ---- what is recorded --------------------------------------------------------------------------


def test_each_request_is_a_line_with_what_it_asked_and_got(proxy: StoreProxy) -> None:
    """Names with spaces and beyond ASCII, conditions, sizes, digests, tags."""
    client, key = s3_stores.client(), "a b/ü+%"
    client.put_object(Bucket=BUCKET, Key=key, Body=b"12345", IfNoneMatch="*")
    assert client.head_object(Bucket=BUCKET, Key=key)["ContentLength"] == 5
    assert client.get_object(Bucket=BUCKET, Key=key, Range="bytes=1-2")["Body"].read() == b"23"
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key}]})
    put, head, get, removed = last(proxy, 4)
    assert (put.action, put.bucket, put.key, put.size) == (Action.PUT, BUCKET, key, 5)
    assert put.headers["if-none-match"] == "*"
    assert requests.body_of(proxy.folder, put.digest) == b"12345"
    assert (put.status, put.answered, put.tag) == (200, 200, "827ccb0eea8a706c4c34a16891f84e7b")
    assert (head.action, head.tag, head.size) == (Action.HEAD, put.tag, 0)
    assert (get.action, get.headers["range"], get.status) == (Action.GET, "bytes=1-2", 206)
    assert (removed.action, removed.keys) == (Action.DELETE_MANY, (key,))
    assert [one.changes for one in last(proxy, 4)] == [True, False, False, True]


def test_a_large_body_goes_through(proxy: StoreProxy, store: str) -> None:
    body = bytes(range(256)) * 8192  # 2 MiB
    once().put_object(Bucket=BUCKET, Key="large", Body=body)
    assert held(store, "large") == body
    proxy.require_fired()


def test_an_upload_in_parts_is_told_by_its_id(proxy: StoreProxy, store: str) -> None:
    upload = uploaded(s3_stores.client(), "m", b"x" * 10)
    made, part, joined = last(proxy, 3)
    assert [one.upload for one in (made, part, joined)] == [upload] * 3
    assert (part.part, part.size) == (1, 10)
    assert joined.parts == (requests.Part(1, part.tag),)
    assert held(store, "m") == b"x" * 10


def test_what_follows_is_told_from_what_overlaps(proxy: StoreProxy) -> None:
    """The clock of the recording: one after another here; threads that write at once overlap."""
    client = s3_stores.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=b"a")
    client.put_object(Bucket=BUCKET, Key="b", Body=b"b")
    first, second = last(proxy, 2)
    assert first.begin < first.done < first.end < second.begin


def test_the_lines_are_read_back_as_they_were(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may hear of its answer before the line is written: all are once it is closed."""
    with s3_stores.proxied(store, tmp_path / "recorded") as proxy:
        s3_stores.lead_to(proxy.endpoint, monkeypatch)
        uploaded(s3_stores.client(), "m", b"x")
        proxy.arm(faults.SlowDown())
        with pytest.raises(Exception, match="SlowDown"):
            once().put_object(Bucket=BUCKET, Key="a", Body=b"a")
    assert requests.read(proxy.folder) == proxy.requests
    assert [one.status or one.answered for one in proxy.requests] == [200, 200, 200, 503]
    for line in (proxy.folder / requests.LINES).read_text().splitlines():
        assert json.loads(line)["action"]


def test_a_file_that_is_no_recording_is_told(tmp_path: Path) -> None:
    (tmp_path / requests.LINES).write_text('{"index": "one"}\n')
    with pytest.raises(ValueError, match="not a recording of requests"):
        requests.read(tmp_path)


def test_a_client_that_dies_inside_a_body_leaves_a_record_and_no_object(
    proxy: StoreProxy, store: str
) -> None:
    """The store gets a body whole or not at all."""
    connection = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc)
    connection.putrequest("PUT", f"/{BUCKET}/half")
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b"x" * 500)
    connection.close()
    s3_stores.client().head_bucket(Bucket=BUCKET)
    (half,) = [one for one in proxy.requests if one.key == "half"]
    assert (half.status, half.answered, half.digest) == (0, 0, "")
    assert held(store, "half") is None


def test_a_body_that_is_signed_as_it_goes_is_read(proxy: StoreProxy) -> None:
    """`aws-chunked`: lines between the chunks, and a trailer behind them."""
    head = protocol.head_of("PUT", "/b/k", {"Content-Encoding": "aws-chunked"})
    body = b"5;chunk-signature=1\r\n12345\r\n2\r\n67\r\n0\r\nx-amz-checksum-crc32:x\r\n\r\n"
    assert protocol.payload_of(head, body) == b"1234567"
    with pytest.raises(ValueError, match="a chunk of 9 bytes is cut short"):
        protocol.payload_of(head, b"9\r\n123\r\n")
    assert proxy.requests


# ---- faults ------------------------------------------------------------------------------------


def test_an_answer_that_is_lost_lets_the_next_try_meet_its_own_object(
    proxy: StoreProxy, store: str
) -> None:
    """The client tries again by itself, and is told that somebody was there before it."""
    proxy.arm(faults.LostAnswer(actions=(Action.PUT,)))
    client = s3_stores.client()
    with pytest.raises(client.exceptions.ClientError) as error:
        client.put_object(Bucket=BUCKET, Key="a", Body=b"mine", IfNoneMatch="*")
    assert code_of(error) == "PreconditionFailed"
    proxy.require_fired()
    first, second = last(proxy, 2)
    assert (first.status, first.answered, first.fault) == (200, 0, "lost-answer")
    assert (second.status, second.answered, second.fault) == (412, 412, "")
    assert held(store, "a") == b"mine"


def test_an_error_inside_of_200_puts_nothing_together(proxy: StoreProxy, store: str) -> None:
    proxy.arm(faults.ErrorInside(times=0))
    with pytest.raises(Exception, match="InternalError"):
        uploaded(once(), "m", b"x")
    proxy.require_fired()
    assert (last(proxy)[0].answered, last(proxy)[0].fault) == (200, "error-inside")
    assert held(store, "m") is None


def test_a_conflict_ends_the_upload(proxy: StoreProxy, store: str) -> None:
    """The same Complete again finds no upload, as S3 documents it."""
    proxy.arm(faults.Conflict())
    client = s3_stores.client()
    with pytest.raises(client.exceptions.ClientError) as error:
        uploaded(client, "m", b"x", IfNoneMatch="*")
    assert code_of(error) == "ConditionalRequestConflict"
    proxy.require_fired()
    gone = last(proxy)[0]
    with pytest.raises(client.exceptions.NoSuchUpload):
        client.complete_multipart_upload(
            Bucket=BUCKET,
            Key="m",
            UploadId=gone.upload,
            MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": gone.parts[0].tag}]},
        )
    assert held(store, "m") is None


@pytest.mark.parametrize(
    ("fault", "code", "status"),
    [
        (faults.SlowDown(), "SlowDown", 503),
        (faults.BadDigest(), "BadDigest", 400),
        (faults.ExpiredToken(), "ExpiredToken", 403),
        (faults.NoBucket(), "NoSuchBucket", 404),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_refusal_is_one_of_the_store(
    proxy: StoreProxy, store: str, fault: faults.StoreFault, code: str, status: int
) -> None:
    proxy.arm(fault)
    client = once()
    with pytest.raises(client.exceptions.ClientError) as error:
        client.put_object(Bucket=BUCKET, Key="a", Body=b"a")
    assert code_of(error) == code
    proxy.require_fired()
    struck = next(one for one in proxy.requests if one.fault)
    assert (struck.status, struck.answered, struck.fault) == (0, status, fault.name)
    assert held(store, "a") is None


def test_a_connection_is_cut_inside_of_a_part(proxy: StoreProxy, store: str) -> None:
    proxy.arm(faults.CutInBody(actions=(Action.UPLOAD_PART,), bytes=1000, times=0))
    with pytest.raises(Exception, match="Connection"):
        uploaded(once(), "m", b"x" * (1 << 20))
    proxy.require_fired()
    assert {(one.status, one.digest) for one in proxy.requests if one.fault} == {(0, "")}
    assert held(store, "m") is None


# One store keeps it; the other one compares it with the digest in the header, and refuses.
DAMAGED = {s3_stores.MOTO: (200, b"aa`a"), s3_stores.SEAWEEDFS: (400, None)}


def test_a_body_that_is_damaged_comes_to_the_store(
    proxy: StoreProxy, store: str, kind: str
) -> None:
    proxy.arm(faults.DamagedBody())
    client = once()
    with suppress(client.exceptions.ClientError):
        client.put_object(Bucket=BUCKET, Key="a", Body=b"aaaa")
    proxy.require_fired()
    (put,) = last(proxy)
    assert (put.status, held(store, "a")) == DAMAGED[kind]
    assert requests.body_of(proxy.folder, put.digest) == b"aa`a"


def test_a_late_listing_lacks_the_newest_and_a_lookup_does_not(proxy: StoreProxy) -> None:
    client = s3_stores.client()
    for key in ("a", "b c"):
        client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    proxy.arm(faults.LateListing())
    listed = client.list_objects_v2(Bucket=BUCKET)
    assert ([one["Key"] for one in listed["Contents"]], listed["KeyCount"]) == (["a"], 1)
    assert client.head_object(Bucket=BUCKET, Key="b c")["ContentLength"] == 1
    proxy.require_fired()
    proxy.disarm()
    assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 2


def test_a_listing_that_had_nothing_to_hide_has_not_fired(proxy: StoreProxy) -> None:
    proxy.arm(faults.LateListing(key="nothing"))
    s3_stores.client().list_objects_v2(Bucket=BUCKET)
    with pytest.raises(Unknown, match="the fault did not fire: late-listing at nothing"):
        proxy.require_fired()


def test_a_fault_strikes_the_requests_that_it_names(proxy: StoreProxy) -> None:
    """So many go well first; then so many are struck; other keys never are."""
    proxy.arm(faults.SlowDown(key="run/*", actions=(Action.PUT,), after=1, times=2))
    client = once()
    got = []
    for key in ("run/a", "b", "run/c", "run/d", "run/e"):
        try:
            client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
        except client.exceptions.ClientError:
            got.append(key)
    assert got == ["run/c", "run/d"]


def test_two_faults_at_one_request_take_turns(proxy: StoreProxy) -> None:
    """The first one that strikes; the other one has not fired, and says so."""
    proxy.arm(faults.SlowDown(), faults.BadDigest())
    client = once()
    with pytest.raises(client.exceptions.ClientError) as error:
        client.put_object(Bucket=BUCKET, Key="a", Body=b"x")
    assert code_of(error) == "SlowDown"
    with pytest.raises(Unknown, match="bad-digest"):
        proxy.require_fired()


def test_a_store_that_is_gone_is_a_connection_that_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no answer of the proxy's own, which would be taken for the store's."""
    with StoreProxy("http://127.0.0.1:9", tmp_path / "recorded") as one:
        s3_stores.lead_to(one.endpoint, monkeypatch)
        with pytest.raises(Exception, match="Connection was closed"):
            once().put_object(Bucket=BUCKET, Key="a", Body=b"x")
        assert {request.answered for request in one.requests} == {0}


def test_each_fault_is_listed_with_what_it_is() -> None:
    described = fault_injectors.all_faults()
    for name, kind in faults.AT_STORE.items():
        assert described[name].models
        assert described[name].proof
        assert kind in faults.StoreFault.__subclasses__()
    assert len(faults.AT_STORE) == len(faults.StoreFault.__subclasses__())


def test_a_listing_in_short_pages_can_be_read_to_its_end(store: str, proxy: StoreProxy) -> None:
    """Each page says that there are more; who reads the first one alone sees two objects."""
    del store
    client = s3_stores.client()
    keys = [f"run/{number} b" for number in range(5)]
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    proxy.arm(faults.ShortPages())
    proxy.require_fired()  # it is a circumstance: nobody has to list
    page = client.list_objects_v2(Bucket=BUCKET, Prefix="run/")
    assert ([one["Key"] for one in page["Contents"]], page["IsTruncated"]) == (keys[:2], True)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="run/")
    assert [[one["Key"] for one in page["Contents"]] for page in pages] == [
        *(keys[:2], keys[2:4], keys[4:])
    ]
    alone = client.list_objects_v2(Bucket=BUCKET, Prefix="run/", MaxKeys=1)
    assert [one["Key"] for one in alone["Contents"]] == keys[:1]
    struck = [one.fault for one in proxy.requests if one.action is Action.LIST]
    assert struck[-5:] == ["short-pages", "short-pages", "short-pages", "", "short-pages"]
