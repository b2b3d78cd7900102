"""A proxy in front of a store of objects: it records every request, and injects faults.

It listens on loopback, in a thread of its own, and hands requests on as they came, the signed
`Host` included. Bodies are held in memory, one for each request in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.fault_injectors.object_store import protocol
from ckpt_conformance.fault_injectors.object_store.faults import StoreFault
from ckpt_conformance.trace import requests
from ckpt_conformance.trace.requests import Action, StoreRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from aiohttp import ClientSession, web

    from ckpt_conformance.fault_injectors.object_store.protocol import Answer, Head

    Watcher = Callable[[StoreRequest], None]

LOOPBACK = "127.0.0.1"
OF_A_HOP = frozenset(  # headers that are for the next machine only (RFC 9110, 7.6.1)
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "expect", "content-length"),
    }
)
STARTS, STOPS = 30.0, 30.0  # seconds in which a thread of ours has to do so
OF_PARTS = frozenset({Action.CREATE_UPLOAD, Action.COMPLETE, Action.LIST_UPLOADS, Action.ABORT})
WRITES = frozenset({Action.PUT, Action.COPY, Action.COMPLETE})


@dataclass
class Armed:
    """A fault, how many requests of its kind have come, and how often it has struck."""

    fault: StoreFault
    earlier: int = 0
    fired: int = 0


class StoreProxy:
    """Records what clients ask of a store, and does to it what stores do.

    A context manager; as long as it is open, `endpoint` answers like the store's own one.

    Attributes:
        folder: gets `requests.jsonl`, a line when a request has ended, and `bodies/`.
    """

    def __init__(
        self,
        store: str,
        folder: Path,
        *faults: StoreFault,
        before: Watcher | None = None,
        after: Watcher | None = None,
        knows_uploads: bool = True,
    ) -> None:
        """Stand in front of a store; nothing is opened yet.

        Args:
            store: the endpoint, such as `http://127.0.0.1:5000`.
            folder: of the recording; made where it is not there.
            faults: armed from the beginning; `arm` adds some.
            before: called in the proxy's thread when a request has arrived whole, before the store
                is asked.
            after: called when the store has answered, before the client hears of it.
            knows_uploads: whether the store says NoSuchUpload of one that has ended; where it does
                not (moto says 500), the proxy says it.
        """
        self.folder = folder
        self._store = store.rstrip("/")
        self._before, self._after = before, after
        self._knows_uploads = knows_uploads
        self._gone: set[str] = set()  # uploads that have ended
        self._armed = [Armed(one) for one in faults]
        self._ticks, self._indices = itertools.count(1), itertools.count()
        self._flying: dict[int, StoreRequest] = {}
        self._ended: list[StoreRequest] = []
        self._newest: list[str] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="store proxy", daemon=True)
        self._opened = threading.Event()
        self._closing: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._port = 0

    # ---- for who uses it -----------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where clients find it."""
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def requests(self) -> list[StoreRequest]:
        """All requests so far, in the order in which they began; those in flight have no end."""
        with self._lock:
            found = [*self._ended, *self._flying.values()]
        return sorted(found, key=lambda one: one.index)

    @property
    def was_asked_about_parts(self) -> bool:
        """Whether a client has asked anything about uploads in parts."""
        return any(one.action in OF_PARTS for one in self.requests)

    def arm(self, *faults: StoreFault) -> None:
        """Add faults; each counts the requests from now on."""
        with self._lock:
            self._armed += [Armed(one) for one in faults]

    def disarm(self) -> None:
        """Let every fault end; what has fired is still told by the recording."""
        with self._lock:
            self._armed.clear()

    def require_fired(self) -> None:
        """Raise Unknown unless every fault that has to fire has, and nothing of ours failed."""
        if self._error is not None:
            raise Unknown(f"the proxy failed: {self._error!r}") from self._error
        with self._lock:
            idle = [one.fault for one in self._armed if one.fault.has_to_fire and not one.fired]
        if idle:
            named = ", ".join(f"{one.name} at {one.key}" for one in idle)
            raise Unknown(f"the fault did not fire: {named}: no such request came")

    def __enter__(self) -> Self:
        """Listen; raises ImportError without aiohttp, and OSError where no port is free."""
        (self.folder / requests.BODIES).mkdir(parents=True, exist_ok=True)
        self._thread.start()
        if not self._opened.wait(STARTS):
            msg = f"the proxy in front of {self._store} did not start within {STARTS:.0f} s"
            raise TimeoutError(msg)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening, and write down what was still in flight."""
        if self._closing is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by an error of its own
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(STOPS)
        with self._lock:
            left = list(self._flying.values())
        self._write_lines(left)

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001  who opens it gets it
            self._error = error
            self._opened.set()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web

        self._closing = asyncio.Event()
        connector = TCPConnector(limit=0, force_close=True)
        # Nothing of ours: no time limit, no cookies, no other encoding than the client's.
        async with ClientSession(
            connector=connector,
            timeout=ClientTimeout(total=None),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
        ) as session:

            async def handle(request: web.BaseRequest) -> web.StreamResponse:
                return await self._handle(request, session)

            server = web.Server(handle)
            runner = web.ServerRunner(server, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, LOOPBACK, 0)
            await site.start()
            self._port = runner.addresses[0][1]
            self._opened.set()
            await self._closing.wait()
            await runner.cleanup()
            await _end_others()

    async def _handle(self, request: web.BaseRequest, session: ClientSession) -> web.StreamResponse:
        """Answer one request; whatever happens to it, it is written down."""
        from aiohttp import ClientError

        head = protocol.head_of(request.method, request.raw_path, request.headers)
        index, armed = self._begin(head)
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # it waits for that
        try:
            answer = await self._answer(index, head, armed, request, session)
            if answer is None:
                self._note(index, end=next(self._ticks))
                return _cut(request)
            return await self._send(index, request, answer)
        except (OSError, ClientError):
            return _cut(request)  # the client, or the store, has gone
        except Exception as error:  # noqa: BLE001  of ours: no answer of the store's may be made of it
            self._error = self._error or error
            return _cut(request)
        finally:
            self._end(index)

    async def _answer(
        self,
        index: int,
        head: Head,
        armed: Armed | None,
        request: web.BaseRequest,
        session: ClientSession,
    ) -> Answer | None:
        """Return what the client gets; None: the connection is cut."""
        fault = armed.fault if armed else StoreFault()
        taken = fault.takes(head)
        if taken is not None:
            await _read_some(request, taken)
            self._strike(index, armed)
            return None
        body = await _read(request)
        sent = fault.sent(body)
        self._note_body(index, head, sent)
        self._call(self._before, index)
        answer = fault.instead(head)
        if answer is not None or sent is not body:
            self._strike(index, armed)
        if answer is not None and fault.ends_upload:
            await self._ask(session, request, b"", request.raw_path, method="DELETE")
            self._gone.add(head.query.get("uploadId", ""))
        if answer is None and not self._knows_uploads:
            answer = self._of_ended_upload(head)
        if answer is not None:
            return answer
        answer = await self._ask(session, request, sent, fault.asked(request.raw_path))
        self._note_answer(index, head, answer)
        self._call(self._after, index)
        heard = fault.heard(answer, self._newest[::-1])
        if heard is not answer:
            self._strike(index, armed)
        return heard

    def _of_ended_upload(self, head: Head) -> Answer | None:
        """Return what S3 says of a part or of a Complete whose upload has ended."""
        of_live = head.action not in {Action.UPLOAD_PART, Action.COMPLETE}
        if of_live or head.query["uploadId"] not in self._gone:
            return None
        return protocol.error(404, "NoSuchUpload", "The specified upload does not exist.", head.key)

    async def _ask(
        self,
        session: ClientSession,
        request: web.BaseRequest,
        body: bytes,
        target: str,
        method: str = "",
    ) -> Answer:
        """Ask the store for a path and a query."""
        from yarl import URL

        url = URL(f"{self._store}{target}", encoded=True)
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in OF_A_HOP]
        async with session.request(
            method or request.method,
            url,
            headers=headers,
            data=io.BytesIO(body) if body else body,  # aiohttp warns of large bytes
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            allow_redirects=False,
        ) as response:
            data = await response.read()
            is_head = request.method == "HEAD"
            kept = {
                name: value
                for name, value in response.headers.items()
                if name.lower() not in OF_A_HOP or (is_head and name.lower() == "content-length")
            }
            return protocol.Answer(response.status, kept, data)

    async def _send(
        self, index: int, request: web.BaseRequest, answer: Answer
    ) -> web.StreamResponse:
        """Send an answer. Its tick is that of before: nobody can know of it earlier."""
        from aiohttp import web

        body = None if request.method == "HEAD" else answer.body
        response = web.Response(status=answer.status, headers=dict(answer.headers), body=body)
        self._note(index, end=next(self._ticks), answered=answer.status)
        try:
            await response.prepare(request)
            await response.write_eof()
        except OSError:
            self._note(index, answered=0)
            raise
        return response

    # ---- faults --------------------------------------------------------------------------------

    def _fault_for(self, head: Head) -> Armed | None:
        """Return the first fault that is to strike; all count the request."""
        found: Armed | None = None
        for armed in self._armed:
            if armed.fault.is_for(head):
                if found is None and armed.fault.strikes(armed.earlier):
                    found = armed
                armed.earlier += 1
        return found

    def _strike(self, index: int, armed: Armed | None) -> None:
        """Write down that a fault did something to a request."""
        if armed is not None:
            armed.fired += 1
            self._note(index, fault=armed.fault.name)

    def _call(self, watcher: Watcher | None, index: int) -> None:
        if watcher is not None:
            watcher(self._flying[index])

    # ---- records -------------------------------------------------------------------------------

    def _begin(self, head: Head) -> tuple[int, Armed | None]:
        with self._lock:
            armed, index = self._fault_for(head), next(self._indices)
            self._flying[index] = StoreRequest(
                index=index,
                action=head.action,
                method=head.method,
                bucket=head.bucket,
                key=head.key,
                query=head.query,
                headers=head.headers,
                upload=head.query.get("uploadId", ""),
                part=int(head.query.get("partNumber", "0")),
                source=head.headers.get("x-amz-copy-source", ""),
                account=head.account,
                begin=next(self._ticks),
            )
        return index, armed

    def _note(self, index: int, **found: object) -> None:
        with self._lock:
            self._flying[index] = msgspec.structs.replace(self._flying[index], **found)

    def _note_body(self, index: int, head: Head, body: bytes) -> None:
        """Keep a body, and read what it names."""
        payload = protocol.payload_of(head, body)
        digest = requests.digest_of(payload)
        (self.folder / requests.BODIES / digest).write_bytes(payload)
        parts = protocol.parts_of(payload) if head.action is Action.COMPLETE else ()
        keys = protocol.keys_of(payload) if head.action is Action.DELETE_MANY else ()
        self._note(index, size=len(payload), digest=digest, parts=parts, keys=keys)

    def _note_answer(self, index: int, head: Head, answer: Answer) -> None:
        tags = {name.lower(): value for name, value in answer.headers.items()}
        upload = head.query.get("uploadId", "")
        if head.action is Action.CREATE_UPLOAD:
            upload = protocol.upload_of(answer.body)
        has_xml = head.action not in {Action.GET, Action.HEAD}
        failed = has_xml and protocol.is_error(answer.body)
        tag = tags.get("etag", "").strip('"')
        self._note(
            index,
            status=answer.status,
            failed=failed,
            tag=tag,
            upload=upload,
            done=next(self._ticks),
        )
        if head.action in {Action.COMPLETE, Action.ABORT} and self._flying[index].succeeded:
            self._gone.add(upload)
        if head.action in WRITES and self._flying[index].succeeded:
            self._newest = [one for one in self._newest if one != head.key] + [head.key]

    def _end(self, index: int) -> None:
        if not self._flying[index].end:
            self._note(index, end=next(self._ticks))
        with self._lock:
            ended = self._flying.pop(index)
            self._ended.append(ended)
        self._write_lines([ended])

    def _write_lines(self, ended: Sequence[StoreRequest]) -> None:
        with (self.folder / requests.LINES).open("ab") as file:
            file.write(requests.written(ended))


async def _end_others() -> None:
    """End what else runs in this loop, such as a request of a client that has died."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for _ in range(3):  # a connection that was closed or aborted ends in the next turn of the loop
        await asyncio.sleep(0)


async def _read(request: web.BaseRequest) -> bytes:
    """Read a body; raises ConnectionError where the client goes before its end."""
    from aiohttp.http_exceptions import HttpProcessingError
    from aiohttp.streams import EofStream

    try:
        return await request.content.read()
    except (HttpProcessingError, EofStream, OSError) as error:
        raise ConnectionError(str(error)) from error


async def _read_some(request: web.BaseRequest, size: int) -> None:
    """Read so many bytes of a body, or all of it."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        await request.content.readexactly(size)


def _cut(request: web.BaseRequest) -> web.StreamResponse:
    """End a connection without an answer."""
    from aiohttp import web

    if request.transport is not None:
        request.transport.abort()
    return web.Response()  # nobody gets it
