"""The model of a store: its two sides against each other, and against a real server of S3."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import s3_stores
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from s3_stores import BUCKET

from ckpt_conformance.contract.verdicts import NotApplicable
from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.crash.explore.stores import store_saves
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.crash.model.states import Content, State
from ckpt_conformance.trace import requests
from ckpt_conformance.trace.operations import Kind, Recording, is_crash_point
from ckpt_conformance.trace.requests import Action, Part, StoreRequest
from ckpt_conformance.trace.store_recording import Mark, as_recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ckpt_conformance.subject.subject import Subject

MODEL = MODELS["object-store"]
KEYS = ("run/a", "run/d/b", "run/d/c", "other/x")


def made(folder: Path, asked: Sequence[StoreRequest], *marks: Mark) -> Recording:
    """A recording of requests, each with a body of its own."""
    (folder / requests.BODIES).mkdir(parents=True, exist_ok=True)
    for one in asked:
        if one.digest:
            (folder / requests.BODIES / one.digest).write_bytes(one.digest.encode() * one.size)
    return as_recording(asked, folder, str(folder / "root"), "run/", marks)


def put(index: int, key: str, begin: int, end: int, size: int = 1) -> StoreRequest:
    return StoreRequest(
        index=index,
        action=Action.PUT,
        method="PUT",
        key=key,
        size=size,
        digest=f"body{index}",
        status=200,
        begin=begin,
        end=end,
    )


def deleted(index: int, key: str, begin: int, end: int) -> StoreRequest:
    return StoreRequest(
        index=index,
        action=Action.DELETE,
        method="DELETE",
        key=key,
        status=204,
        begin=begin,
        end=end,
    )


def states(recording: Recording) -> list[State]:
    return list(MODEL.states(recording, random.Random(0), 100_000))  # noqa: S311


def held(recording: Recording, state: State) -> dict[str, int]:
    """The objects by key, without folders."""
    folders = {o.object for o in recording.operations if o.kind is Kind.MKDIR}
    return {path: number for path, number in state.names.items() if number not in folders}


@st.composite
def asked(draw: st.DrawFn) -> list[StoreRequest]:
    """Up to six requests that overlap as they like."""
    found: list[StoreRequest] = []
    ends: list[int] = []
    for index in range(draw(st.integers(1, 6))):
        begin = 10 * index + 1
        end = begin + draw(st.integers(1, 40))
        while end in ends or end % 10 == 1:
            end += 1
        ends.append(end)
        make = draw(st.sampled_from([put, put, deleted]))
        found.append(make(index, draw(st.sampled_from(KEYS)), begin, end))
    return found


@given(asked())
def test_what_one_side_lists_is_what_the_other_allows(
    tmp_path_factory: pytest.TempPathFactory, found: list[StoreRequest]
) -> None:
    """At each key: each object, or none, that is legal there is listed, and no other one."""
    recording = made(tmp_path_factory.mktemp("r"), found)
    listed = states(recording)
    for state in listed:
        assert MODEL.illegal(recording, state) == "", state
    objects = {o.target: [] for o in recording.operations if o.kind is Kind.RENAME}
    for operation in recording.operations:
        if operation.kind is Kind.RENAME:
            objects[operation.target].append(operation.object)
    by_point: dict[int, list[State]] = {}
    for state in listed:
        by_point.setdefault(state.point, []).append(state)
    for point, there in by_point.items():
        assert is_crash_point(recording.operations, point)
        for path, numbers in objects.items():
            seen = {held(recording, state).get(path) for state in there}
            allowed = {
                number
                for number in (None, *numbers)
                if any(
                    not MODEL.illegal(recording, moved)
                    for moved in _with(recording, there, path, number)
                )
            }
            assert seen == allowed, (point, path)


def _with(
    recording: Recording, there: Sequence[State], path: str, number: int | None
) -> Iterator[State]:
    """States with another object at a path, in folders of their own."""
    sizes = {o.object: o for o in recording.operations if o.kind is Kind.WRITE}
    folders = {o.path: o.object for o in recording.operations if o.kind is Kind.MKDIR}
    for state in there:
        files = held(recording, state)
        files.pop(path, None)
        contents = {n: state.contents[n] for n in files.values()}
        if number is not None:
            files[path] = number
            write = sizes[number]
            contents[number] = Content(write.size, (_extent(write),))
        above = {p: n for p, n in folders.items() if any(f.startswith(f"{p}/") for f in files)}
        yield replace(state, names=files | above, contents=contents)


def _extent(write: object) -> object:
    from ckpt_conformance.crash.model.states import Extent

    return Extent(0, write.size, write.index)  # type: ignore[attr-defined]


def test_any_subset_of_what_was_in_flight_took_effect(tmp_path: Path) -> None:
    """Three at once: eight contents at the last point, and one once all have been answered."""
    found = [put(0, "run/a", 1, 90), put(1, "run/d/b", 2, 91), put(2, "run/d/c", 3, 92)]
    recording = made(tmp_path, [*found, put(3, "run/e", 100, 101)])
    before = [s for s in states(recording) if len(held(recording, s)) <= 3 and s.point < 13]
    last = max(state.point for state in before if "e" not in state.names)
    assert len({tuple(held(recording, s)) for s in before if s.point == last}) == 8
    whole = [s for s in states(recording) if s.point == len(recording.operations)]
    assert {tuple(held(recording, s)) for s in whole} == {
        ("a", "d/b", "d/c"),
        ("a", "d/b", "d/c", "e"),
    }


def changed(recording: Recording, what: str) -> State:
    """The last whole state, with something that no store does."""
    point = len(recording.operations)
    state = next(one for one in states(recording) if one.point == point)
    names, contents = dict(state.names), dict(state.contents)
    number = names["a"]
    if what == "torn":
        contents[number] = replace(contents[number], size=contents[number].size - 1)
    elif what == "of zeros":
        contents[number] = replace(contents[number], extents=())
    elif what == "lost":
        del names["a"]
    elif what == "old":
        first = next(o for o in recording.operations if o.target == "a")
        write = next(o for o in recording.operations if o.object == first.object and o.size)
        names["a"] = first.object
        contents[first.object] = Content(write.size, (_extent(write),))  # type: ignore[arg-type]
    elif what == "a folder without an object":
        del names["d/b"]
    elif what == "from the future":
        return replace(state, point=next(o.index for o in recording.operations))
    elif what == "in part":
        inside = next(o.index for o in recording.operations if o.joined)
        return replace(state, point=inside, names={}, contents={})
    return replace(state, names=names, contents=contents)


@pytest.mark.parametrize(
    "what",
    [
        *("torn", "of zeros", "lost", "old", "a folder without an object"),
        *("from the future", "in part"),
    ],
)
def test_what_no_store_leaves_is_illegal(tmp_path: Path, what: str) -> None:
    found = [
        put(0, "run/a", 1, 2, 4),
        put(1, "run/d/b", 3, 4),
        put(2, "run/a", 5, 6, 4),
        put(3, "run/z", 9, 10),
    ]
    recording = made(tmp_path, found)
    assert MODEL.illegal(recording, changed(recording, what))


def test_parts_make_one_object_and_only_when_they_are_put_together(tmp_path: Path) -> None:
    """A part, a refusal, a read and a prefix of somebody else change nothing."""
    common = {"method": "PUT", "key": "run/m", "upload": "u", "status": 200}
    parts = [
        StoreRequest(
            index=n,
            action=Action.UPLOAD_PART,
            part=n + 1,
            tag=f"t{n}",
            size=3,
            digest=f"body{n}",
            begin=10 * n + 1,
            end=10 * n + 5,
            **common,  # type: ignore[arg-type]
        )
        for n in (0, 1)
    ]
    refused = replace_status(put(2, "run/no", 21, 22), 503)
    joined = StoreRequest(
        index=3,
        action=Action.COMPLETE,
        parts=(Part(1, "t0"), Part(2, "t1")),
        begin=31,
        end=32,
        **common,  # type: ignore[arg-type]
    )
    recording = made(tmp_path, [*parts, refused, joined, put(4, "other/x", 41, 42)])
    assert {tuple(held(recording, one)) for one in states(recording)} == {(), ("m",)}
    Materializer(recording, tmp_path / "root").apply(states(recording)[-2])
    assert (tmp_path / "root" / "m").read_bytes() == b"body0" * 3 + b"body1" * 3


def replace_status(request: StoreRequest, status: int) -> StoreRequest:
    return structs.replace(request, status=status)


def test_marks_stand_between_requests(tmp_path: Path) -> None:
    found = [put(0, "run/a", 1, 2), put(1, "run/b", 3, 4)]
    marks = [Mark(0, "begun", 2), Mark(1, "acknowledged", 2), Mark(2, "begun", 4)]
    recording = made(tmp_path, found, *marks)
    assert [o.mark or str(o.kind) for o in recording.operations] == [
        *("begun", "create", "write", "rename", "acknowledged", "create", "write", "rename"),
        "begun",
    ]
    at_mark = [s for s in states(recording) if s.point == 5]
    assert [tuple(held(recording, one)) for one in at_mark] == [("a",)]


def test_what_cannot_be_followed_is_told(tmp_path: Path) -> None:
    lost = StoreRequest(
        index=0,
        action=Action.COMPLETE,
        method="POST",
        key="run/m",
        parts=(Part(1, "t"),),
        status=200,
    )
    with pytest.raises(ValueError, match="part 1 of run/m was not recorded"):
        made(tmp_path, [lost])
    copied = StoreRequest(
        index=0, action=Action.COPY, method="PUT", key="run/m", source="b/k", status=200
    )
    with pytest.raises(ValueError, match="copies b/k"):
        made(tmp_path, [copied])


# ---- against a server ----------------------------------------------------------------------------

# A client of the standard library, since interpreters that import boto3 take a second each.
CLIENT = """
import http.client, re, sys, threading
place, least = sys.argv[1], int(sys.argv[2])
# moto lets nobody unknown delete; it looks at no signature, and SeaweedFS at no account.
WHO = {"Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, "
       "SignedHeaders=host, Signature=0"}
def ask(method, path, body=b""):
    one = http.client.HTTPConnection(place)
    one.request(method, "/bucket/run/" + path, body, WHO)
    answer = one.getresponse()
    return answer.getheader("ETag"), answer.read().decode()
def several(*jobs):
    threads = [threading.Thread(target=job) for job in jobs]
    [one.start() for one in threads]
    [one.join() for one in threads]
ask("PUT", "old", b"old")
several(*(lambda n=n: ask("PUT", f"d/{n}", b"%d" % n * 1000) for n in range(3)))
upload = re.search("<UploadId>(.*?)</UploadId>", ask("POST", "big?uploads")[1])[1]
tags = {}
def part(n):
    tags[n] = ask("PUT", f"big?uploadId={upload}&partNumber={n}", b"%d" % n * least)[0]
several(lambda: part(1), lambda: part(2), lambda: ask("DELETE", "old"))
named = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{tags[n]}</ETag></Part>" for n in (1, 2))
body = f"<CompleteMultipartUpload>{named}</CompleteMultipartUpload>".encode()
several(lambda: ask("POST", f"big?uploadId={upload}", body), lambda: ask("PUT", "d/0", b"again"))
ask("PUT", "latest", b"big")
"""


TOGETHER = (1, 3, 1, 3, 2, 1)  # so many requests of it are in flight at once
LEAST = {s3_stores.MOTO: 5000, s3_stores.SEAWEEDFS: 5 << 20}  # bytes of a part


def content_of(store: str) -> dict[str, bytes]:
    client = s3_stores.client(endpoint_url=store)
    listed = client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
    keys = [one["Key"] for one in listed]
    return {
        key.removeprefix("run/"): client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        for key in keys
    }


def all_at_once(found: list[StoreRequest]) -> list[StoreRequest]:
    """Let the requests overlap that the client sends together, as in any run they may.

    What a kill leaves is held against this one recording, in which a fast server answered one
    before another one came.
    """
    changed: list[StoreRequest] = []
    for count in TOGETHER:
        some = found[len(changed) : len(changed) + count]
        ticks = sorted(tick for one in some for tick in (one.begin, one.end))
        ends = dict(zip(sorted(one.end for one in some), ticks[count:], strict=True))
        changed += [
            structs.replace(one, begin=tick, end=ends[one.end])
            for one, tick in zip(some, ticks, strict=False)
        ]
    return changed


def run_client(
    store: str, folder: Path, least: int, at: int | None = None, *, asked_first: bool = False
) -> list[StoreRequest]:
    """Run the client; kill it at a request, before the store was asked or after it answered."""
    client: list[subprocess.Popen[bytes]] = []

    def kill(request: StoreRequest) -> None:
        if request.index == at:
            client[0].kill()
            client[0].wait()
            if not asked_first:
                raise ConnectionError

    hook = {"after" if asked_first else "before": kill}
    with s3_stores.proxied(store, folder, **hook) as proxy:
        place = proxy.endpoint.removeprefix("http://")
        words = [sys.executable, "-S", "-c", CLIENT, place, str(least)]
        client.append(subprocess.Popen(words))
        status = client[0].wait(120)
    assert status == (0 if at is None else -9)
    return proxy.requests


@s3_stores.needed
@s3_stores.quiet
@pytest.mark.xdist_group("mirror-s3")
@pytest.mark.parametrize("kind", s3_stores.BOTH)
def test_a_bucket_after_a_kill_is_one_that_the_model_lists(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real SIGKILL at each request, before and after the store did it."""
    from moto.s3 import models

    monkeypatch.setattr(models, "S3_UPLOAD_PART_MIN_SIZE", LEAST[s3_stores.MOTO])
    store = s3_stores.endpoint(kind)
    s3_stores.lead_to(store, monkeypatch)
    s3_stores.emptied()
    found = run_client(store, tmp_path / "whole", LEAST[kind])
    assert [one for one in found if one.status not in {200, 204}] == []
    found = all_at_once(found)
    recording = as_recording(found, tmp_path / "whole", str(tmp_path / "root"), "run/")
    listed = [materialized(recording, one, tmp_path / "root") for one in states(recording)]
    assert content_of(store) in listed
    seen: list[dict[str, bytes]] = []
    for at in range(len(found)):
        for asked_first in (False, True):
            s3_stores.emptied()
            folder = tmp_path / f"{at}-{asked_first}"
            run_client(store, folder, LEAST[kind], at, asked_first=asked_first)
            seen.append(content_of(store))
            assert seen[-1] in listed, (at, asked_first, sorted(seen[-1]))
    assert len({repr(sorted(one.items())) for one in seen}) >= 6


def materialized(recording: Recording, state: State, root: Path) -> dict[str, bytes]:
    Materializer(recording, root).apply(state)
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


# ---- saves of a manager --------------------------------------------------------------------------


@s3_stores.needed
@s3_stores.quiet
@pytest.mark.xdist_group("mirror-s3")
def test_saves_with_a_mirror_in_a_store_are_recorded(
    new_subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    """Three steps with their marks; the last content is what the bucket gives, and loads."""
    subject = new_subject("reference")
    recorded = store_saves.record(subject)
    recording = recorded.recording
    marks = [(o.mark, o.step) for o in recording.operations if o.kind is Kind.MARK]
    assert marks == [(what, n) for n in (2, 4, 6) for what in ("begun", "acknowledged")]
    last = [one for one in states(recording) if one.point == len(recording.operations)]
    assert len(last) == 1
    names = set(materialized(recording, last[0], tmp_path / "root"))
    assert names >= {"latest", *(f"meta_00000{n}.json" for n in (2, 4, 6)), "writer_000003"}
    assert {MODEL.illegal(recording, one) for one in states(recording)} == {""}


def test_an_adapter_that_takes_no_url_is_not_asked(
    new_subject: Callable[[str], Subject],
) -> None:
    with pytest.raises(NotApplicable, match="store"):
        store_saves.record(new_subject("torch-save-atomic-per-step"))
