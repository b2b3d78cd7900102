"""What stores do to requests, each as a type: which requests it strikes, and what happens to them.

A fault is asked four times: for an answer in the place of the store's, for the query and the body
that the store is to get, and for what becomes of the store's answer. Those that do not strike
there say nothing.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

import msgspec

from ckpt_conformance.fault_injectors.object_store import protocol
from ckpt_conformance.trace.requests import CHANGING, Action

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.fault_injectors.object_store.protocol import Answer, Head
    from ckpt_conformance.trace.requests import StoreRequest

    Seen = Sequence[StoreRequest]


class StoreFault(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Which requests a fault strikes.

    Attributes:
        key: a pattern of keys, as of fnmatch; `*` is any.
        actions: only these; the ones at which stores do it, where nothing is given.
        after: so many such requests go well first.
        times: how many are struck then; 0 is all of them.
    """

    name: ClassVar[str] = ""
    usual: ClassVar[frozenset[Action]] = CHANGING
    ends_upload: ClassVar[bool] = False  # the store forgets the multipart upload
    has_to_fire: ClassVar[bool] = True  # a circumstance need not: not every client meets it

    key: str = "*"
    actions: tuple[Action, ...] = ()
    after: int = 0
    times: int = 1

    def is_for(self, head: Head) -> bool:
        """Whether a request is of those that it may strike."""
        return head.action in (self.actions or self.usual) and fnmatchcase(head.key, self.key)

    def strikes(self, earlier: int) -> bool:
        """Whether it strikes a request before which so many had been of those."""
        return self.after <= earlier and (not self.times or earlier < self.after + self.times)

    def takes(self, head: Head) -> int | None:
        """Return after how many bytes of the body the connection is cut; None: it is not."""
        del head
        return None

    def instead(self, head: Head) -> Answer | None:
        """Return the answer in the place of the store's; None: the store is asked."""
        del head
        return None

    def asked(self, target: str) -> str:
        """Return the path and the query that the store gets."""
        return target

    def sent(self, body: bytes) -> bytes:
        """Return the body that the store gets."""
        return body

    def heard(self, answer: Answer, newest: Sequence[str]) -> Answer | None:
        """Return what the client gets of the store's answer; None: the connection is cut.

        `newest` are the keys of the objects that were written, the last one first.
        """
        del newest
        return answer


class LostAnswer(StoreFault, frozen=True, kw_only=True):
    """The store did it, and nobody hears of it: the client's next try meets its own object.

    Models: a connection that breaks, or a proxy that gives up, after a request was executed.
    Does not model: an answer that comes in part.
    Proof: the record of the request has the store's status, `answered` 0, and the fault's name.
    """

    name: ClassVar[str] = "lost-answer"

    def heard(self, answer: Answer, newest: Sequence[str]) -> None:
        """Cut the connection."""
        del answer, newest


class ErrorInside(StoreFault, frozen=True, kw_only=True):
    """200, and a body that says Error: nothing was put together.

    Models: CompleteMultipartUpload of S3, which sends its head before the work is done.
    Does not model: the white space that a store sends meanwhile.
    Proof: the record has `answered` 200, no status of a store, and the fault's name.
    """

    name: ClassVar[str] = "error-inside"
    usual: ClassVar[frozenset[Action]] = frozenset({Action.COMPLETE, Action.COPY})

    def instead(self, head: Head) -> Answer | None:
        """Say that it failed, under a status that says the opposite."""
        message = "We encountered an internal error. Please try again."
        return protocol.error(200, "InternalError", message, head.key)


class Conflict(StoreFault, frozen=True, kw_only=True):
    """409 on Complete: the multipart upload is gone, and has to begin anew.

    Models: ConditionalRequestConflict of S3, when another request changes the key meanwhile.
    Does not model: that other request.
    Proof: the record has `answered` 409, and the fault's name.
    """

    name: ClassVar[str] = "conflict"
    usual: ClassVar[frozenset[Action]] = frozenset({Action.COMPLETE})
    ends_upload: ClassVar[bool] = True

    def instead(self, head: Head) -> Answer | None:
        """Refuse."""
        message = "A conflicting conditional operation is in progress against this resource."
        return protocol.error(409, "ConditionalRequestConflict", message, head.key)


class SlowDown(StoreFault, frozen=True, kw_only=True):
    """503 SlowDown: too many requests.

    Models: throttling, of any request.
    Does not model: the time that a throttled store takes.
    Proof: the record has `answered` 503, and the fault's name.
    """

    name: ClassVar[str] = "slow-down"
    usual: ClassVar[frozenset[Action]] = frozenset(Action)

    def instead(self, head: Head) -> Answer | None:
        """Refuse for now."""
        return protocol.error(503, "SlowDown", "Please reduce your request rate.", head.key)


class BadDigest(StoreFault, frozen=True, kw_only=True):
    """400 BadDigest: the body is not what its header says.

    Models: bytes that changed on their way, and a store that looks.
    Does not model: a store that stores them: `damaged-body` does.
    Proof: the record has `answered` 400, and the fault's name.
    """

    name: ClassVar[str] = "bad-digest"
    usual: ClassVar[frozenset[Action]] = frozenset({Action.PUT, Action.UPLOAD_PART})

    def instead(self, head: Head) -> Answer | None:
        """Refuse what arrived."""
        message = "The Content-MD5 or checksum value that you specified did not match."
        return protocol.error(400, "BadDigest", message, head.key)


class DamagedBody(StoreFault, frozen=True, kw_only=True):
    """One bit changes on the way, and the store keeps it.

    Models: memory or a network card that flips a bit before the store's own sums are made.
    Does not model: a store that compares digests of the client's: it would refuse.
    Proof: the record's digest is that of the changed body, and it has the fault's name.
    """

    name: ClassVar[str] = "damaged-body"
    usual: ClassVar[frozenset[Action]] = frozenset({Action.PUT, Action.UPLOAD_PART})

    def sent(self, body: bytes) -> bytes:
        """Flip the lowest bit of the byte in the middle; an empty body stays as it is."""
        at = len(body) // 2
        return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :] if body else body


class CutInBody(StoreFault, frozen=True, kw_only=True):
    """The connection is cut when `bytes` of the body have come.

    Models: a network that breaks inside of a part, and the client sees it.
    Does not model: a connection that hangs.
    Proof: the record has no digest, no status, and the fault's name.
    """

    name: ClassVar[str] = "cut-in-body"
    usual: ClassVar[frozenset[Action]] = frozenset({Action.PUT, Action.UPLOAD_PART})

    bytes: int = 1

    def takes(self, head: Head) -> int | None:
        """Return how much of the body is read."""
        del head
        return self.bytes


class ExpiredToken(StoreFault, frozen=True, kw_only=True):
    """403 ExpiredToken, for every request from there on.

    Models: credentials of a session whose time is over.
    Does not model: a client that gets new ones: `times` ends it then.
    Proof: the record has `answered` 403, and the fault's name.
    """

    name: ClassVar[str] = "expired-token"
    usual: ClassVar[frozenset[Action]] = frozenset(Action)

    times: int = 0

    def instead(self, head: Head) -> Answer | None:
        """Refuse whoever asks."""
        return protocol.error(403, "ExpiredToken", "The provided token has expired.", head.key)


class NoBucket(StoreFault, frozen=True, kw_only=True):
    """404 NoSuchBucket, for every request from there on.

    Models: a bucket that was never made, or was removed.
    Does not model: one that is in another region.
    Proof: the record has `answered` 404, and the fault's name.
    """

    name: ClassVar[str] = "no-bucket"
    usual: ClassVar[frozenset[Action]] = frozenset(Action)

    times: int = 0

    def instead(self, head: Head) -> Answer | None:
        """Know no such bucket."""
        return protocol.error(404, "NoSuchBucket", "The specified bucket does not exist", head.key)


class LateListing(StoreFault, frozen=True, kw_only=True):
    """A listing does not show the `behind` objects that were written last.

    Models: stores whose listings are consistent in the end, S3 as it was before 2020.
    Does not model: reads of an object that are late; deleted objects that are still listed.
    Proof: it counts as fired by a listing from which an object was left out.
    """

    name: ClassVar[str] = "late-listing"
    usual: ClassVar[frozenset[Action]] = frozenset({Action.LIST})

    times: int = 0
    behind: int = 1

    def heard(self, answer: Answer, newest: Sequence[str]) -> Answer | None:
        """Leave the newest ones out."""
        if answer.status != 200:  # noqa: PLR2004  of HTTP
            return answer
        body, left_out = protocol.without_keys(answer.body, newest[: self.behind])
        return answer._replace(body=body) if left_out else answer


class ShortPages(StoreFault, frozen=True, kw_only=True):
    """A listing has `keys` objects at most, and says that there are more.

    Models: a bucket with more objects than a page holds, 1,000 in S3, with few objects.
    Does not model: pages of multipart uploads; a store that verifies the signature of the query.
    Proof: it counts as fired by a listing that says that it is cut.
    """

    name: ClassVar[str] = "short-pages"
    usual: ClassVar[frozenset[Action]] = frozenset({Action.LIST})
    has_to_fire: ClassVar[bool] = False

    times: int = 0
    keys: int = 2

    def asked(self, target: str) -> str:
        """Ask for a page of so many keys."""
        return protocol.with_page(target, self.keys)

    def heard(self, answer: Answer, newest: Sequence[str]) -> Answer:
        """Give what the store says; one that is cut counts as struck."""
        del newest
        return answer._replace() if protocol.is_cut(answer.body) else answer


AnyStoreFault = (
    LostAnswer
    | ErrorInside
    | Conflict
    | SlowDown
    | BadDigest
    | DamagedBody
    | CutInBody
    | ExpiredToken
    | NoBucket
    | LateListing
    | ShortPages
)
AT_STORE: dict[str, type[StoreFault]] = {
    kind.name: kind
    for kind in (
        *(LostAnswer, ErrorInside, Conflict, SlowDown, BadDigest),
        *(DamagedBody, CutInBody, ExpiredToken, NoBucket, LateListing, ShortPages),
    )
}
"""The types by the names that users see."""


def of_objects(seen: Seen) -> Iterator[StoreFault]:
    """Yield what can be refused for good of single objects, by the requests of an upload.

    Of the object of which most was sent, under the name that it has in other steps, too; and what
    puts parts together, where a client does so.
    """
    written = [one for one in seen if one.action in BadDigest.usual]
    if written:
        largest = max(written, key=lambda one: one.size).key
        yield BadDigest(key=re.sub(r"\d+", "*", largest), times=0)
    if any(one.action is Action.COMPLETE for one in seen):
        yield ErrorInside(times=0)
