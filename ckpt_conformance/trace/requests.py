"""Requests to an object store: typed records, one JSON line each, and the bodies by their digest.

What a system call is to a directory a request is to a bucket. `begin` and `end` are ticks of one
clock: a request that ended before another one began was known to the client by then; those that
overlap were in flight together.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path  # noqa: TC003  dataclasses read the annotations
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

LINES, BODIES = "requests.jsonl", "bodies"  # names in the folder of a recording


class Action(StrEnum):
    """What a request asks of the store, by S3's own names."""

    PUT = "PutObject"
    COPY = "CopyObject"
    DELETE = "DeleteObject"
    DELETE_MANY = "DeleteObjects"
    CREATE_UPLOAD = "CreateMultipartUpload"
    UPLOAD_PART = "UploadPart"
    COMPLETE = "CompleteMultipartUpload"
    ABORT = "AbortMultipartUpload"
    LIST_UPLOADS = "ListMultipartUploads"
    LIST = "ListObjects"
    GET = "GetObject"
    HEAD = "HeadObject"
    BUCKET = "of a bucket"  # made, asked for, removed
    OTHER = "other"


CHANGING = frozenset(
    {
        *(Action.PUT, Action.COPY, Action.DELETE, Action.DELETE_MANY, Action.CREATE_UPLOAD),
        *(Action.UPLOAD_PART, Action.COMPLETE, Action.ABORT),
    }
)


class Part(msgspec.Struct, frozen=True):
    """A part that a Complete names."""

    number: int
    tag: str


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, and what became of it.

    Attributes:
        index: in the order in which requests began.
        action: what it asks for.
        method: of HTTP.
        bucket: empty for the service itself.
        key: empty for a bucket; decoded.
        query: what is behind the question mark, decoded.
        headers: conditions, digests, sources of copies, ranges; names in small letters.
        size: of the body, in bytes, without the framing of `aws-chunked`.
        digest: SHA-256 of the body, in hex; empty where it did not arrive whole.
        upload: the id of the multipart upload that it belongs to, or that its answer gave.
        part: the number of the part.
        parts: what a Complete puts together.
        source: of a copy, `bucket/key`.
        keys: what a DeleteObjects names.
        status: what the store answered; 0 where it was not asked, or did not answer.
        answered: what the client got; 0 for nothing.
        failed: the answer has a body that says Error, whatever its status is.
        tag: the ETag that the store gave, without quotes.
        begin: tick at which the head of the request was there.
        done: tick at which the store had answered; 0 if it did not.
        end: tick at which the client had its answer, or the connection was gone; 0: in flight.
        fault: the name of the fault that struck it.
        account: the id of the key by which it is signed, which is no secret; empty without one.
    """

    index: int
    action: Action
    method: str
    bucket: str = ""
    key: str = ""
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    size: int = 0
    digest: str = ""
    upload: str = ""
    part: int = 0
    parts: tuple[Part, ...] = ()
    source: str = ""
    keys: tuple[str, ...] = ()
    status: int = 0
    answered: int = 0
    failed: bool = False
    tag: str = ""
    begin: int = 0
    done: int = 0
    end: int = 0
    fault: str = ""
    account: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the store did what was asked, by its own answer."""
        return 200 <= self.status < 300 and not self.failed  # noqa: PLR2004  of HTTP

    @property
    def changes(self) -> bool:
        """Whether it may change what the store holds."""
        return self.action in CHANGING


def digest_of(body: bytes) -> str:
    """Return the digest by which a body is kept."""
    return hashlib.sha256(body).hexdigest()


def body_of(folder: Path, digest: str) -> bytes:
    """Read the body of a request; raises FileNotFoundError where it was not kept."""
    return (folder / BODIES / digest).read_bytes()


def written(requests: Iterable[StoreRequest]) -> bytes:
    """Return requests as JSON lines."""
    return msgspec.json.Encoder().encode_lines(list(requests))


def read(folder: Path) -> list[StoreRequest]:
    """Read a recording of requests, in the order in which they began.

    Raises FileNotFoundError where there is none, and ValueError for lines that are none.
    """
    lines = (folder / LINES).read_bytes()
    try:
        found = msgspec.json.Decoder(StoreRequest).decode_lines(lines)
    except msgspec.DecodeError as error:
        msg = f"{folder / LINES}: not a recording of requests: {error}"
        raise ValueError(msg) from error
    return sorted(found, key=lambda one: one.index)
