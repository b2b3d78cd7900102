"""The protocol of S3 as far as it has to be read: what a request asks for, how errors are said.

Addresses are of the path style, `/bucket/key`: the one that works on a loopback address.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote, unquote_plus, urlencode
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from ckpt_conformance.trace.requests import Action, Part

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

KEPT = (  # headers that say what a request means
    *("if-match", "if-none-match", "content-md5", "content-encoding", "range"),
    *("x-amz-copy-source", "x-amz-checksum-type", "x-amz-sdk-checksum-algorithm"),
)
CHECKSUM = "x-amz-checksum-"
CHUNKED = "aws-chunked"
_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/")  # of Signature Version 4
JOINT = {  # methods at a key with an id of an upload
    "PUT": Action.UPLOAD_PART,
    "POST": Action.COMPLETE,
    "DELETE": Action.ABORT,
}
ALONE = {
    "PUT": Action.PUT,
    "GET": Action.GET,
    "HEAD": Action.HEAD,
    "DELETE": Action.DELETE,
}


class Head(NamedTuple):
    """What a request asks for, by its first line and its headers."""

    action: Action
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    account: str


class Answer(NamedTuple):
    """An answer of a store: a status, headers, and a body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def head_of(method: str, target: str, headers: Mapping[str, str]) -> Head:
    """Read the head of a request; `target` is the path and the query as they were sent."""
    path, _, query = target.partition("?")
    bucket, _, key = path.removeprefix("/").partition("/")
    asked = dict(parse_qsl(query, keep_blank_values=True))
    low = {name.lower(): value for name, value in headers.items()}
    kept = {name: low[name] for name in low if name in KEPT or name.startswith(CHECKSUM)}
    action = _action(method, bucket, key, asked, kept)
    account = _CREDENTIAL.search(low.get("authorization", ""))
    who = account[1] if account else ""
    return Head(action, method, unquote(bucket), unquote(key), asked, kept, who)


def _action(
    method: str, bucket: str, key: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> Action:
    if not key:
        return _action_at_bucket(method, bucket, query)
    if method == "POST" and "uploads" in query:
        return Action.CREATE_UPLOAD
    if "uploadId" in query:
        return JOINT.get(method, Action.OTHER)
    if method == "PUT" and "x-amz-copy-source" in headers:
        return Action.COPY
    return ALONE.get(method, Action.OTHER)


def _action_at_bucket(method: str, bucket: str, query: Mapping[str, str]) -> Action:
    if not bucket:
        return Action.OTHER
    if method == "GET" and "uploads" in query:
        return Action.LIST_UPLOADS
    if method == "POST" and "delete" in query:
        return Action.DELETE_MANY
    is_list = method == "GET" and ("list-type" in query or not query.keys() - {"prefix"})
    return Action.LIST if is_list else Action.BUCKET


def payload_of(head: Head, body: bytes) -> bytes:
    """Return the bytes that a body stands for; raises ValueError for chunks that are none.

    A client that signs as it goes sends chunks with a line before each, and trailers behind them.
    """
    if CHUNKED not in head.headers.get("content-encoding", ""):
        return body
    payload, rest = bytearray(), body
    while True:
        line, end, rest = rest.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        if not end or len(rest) < size:
            msg = f"{head.method} {head.key}: a chunk of {size} bytes is cut short"
            raise ValueError(msg)
        if not size:
            return bytes(payload)
        payload += rest[:size]
        rest = rest[size + 2 :]


def parts_of(body: bytes) -> tuple[Part, ...]:
    """Read the parts that a Complete names; raises ValueError where the body is no such list."""
    found = [one for one in _parsed(body) if _name(one) == "Part"]
    named = [(_text(one, "PartNumber"), _text(one, "ETag")) for one in found]
    return tuple(Part(int(number), tag.strip('"')) for number, tag in named)


def keys_of(body: bytes) -> tuple[str, ...]:
    """Read the keys that a DeleteObjects names; raises ValueError where there is no such list."""
    return tuple(_text(one, "Key") for one in _parsed(body) if _name(one) == "Object")


def upload_of(body: bytes) -> str:
    """Read the id that the answer to a CreateMultipartUpload gives; empty where there is none."""
    try:
        return _text(_parsed(body), "UploadId")
    except ValueError:
        return ""


def is_error(body: bytes) -> bool:
    """Whether an answer says Error, whatever its status is."""
    try:
        return bool(body.strip()) and _name(_parsed(body)) == "Error"
    except ValueError:
        return False


def error(status: int, code: str, message: str, key: str = "") -> Answer:
    """Make the answer of a store that refuses."""
    fields = {"Code": code, "Message": message, "Key": key, "RequestId": "injected"}
    inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items() if value)
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}</Error>'
    return Answer(status, {"Content-Type": "application/xml"}, body.encode())


def with_page(target: str, keys: int) -> str:
    """Return the path and the query of a listing that asks for so many keys, or for fewer."""
    path, _, query = target.partition("?")
    asked = dict(parse_qsl(query, keep_blank_values=True))
    asked["max-keys"] = str(min(keys, int(asked.get("max-keys", keys))))
    return f"{path}?{urlencode(asked)}"


def is_cut(body: bytes) -> bool:
    """Whether a listing says that there is more; no body of another kind does."""
    try:
        return _text(_parsed(body), "IsTruncated") == "true"
    except ValueError:
        return False


def without_keys(body: bytes, hidden: Collection[str]) -> tuple[bytes, int]:
    """Return a listing without some keys, and how many were left out."""
    listing = _parsed(body)
    _, brace, name = listing.tag.rpartition("}")
    if brace:
        ET.register_namespace("", listing.tag[1 : -len(name) - 1])
    plain = unquote_plus if _text(listing, "EncodingType") == "url" else str
    objects = [one for one in listing if _name(one) == "Contents"]
    gone = [one for one in objects if plain(_text(one, "Key")) in hidden]
    for one in gone:
        listing.remove(one)
    for one in listing:
        if gone and _name(one) == "KeyCount":
            one.text = str(int(one.text or 0) - len(gone))
    return ET.tostring(listing, encoding="utf-8", xml_declaration=True), len(gone)


def _parsed(body: bytes) -> ET.Element:
    """Parse XML of a client or a store on loopback that this process has started itself."""
    try:
        return ET.fromstring(body)  # noqa: S314  see above
    except ET.ParseError as error_:
        msg = f"not XML: {body[:80]!r}"
        raise ValueError(msg) from error_


def _name(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(element: ET.Element, name: str) -> str:
    for one in element:
        if _name(one) == name:
            return one.text or ""
    return ""
