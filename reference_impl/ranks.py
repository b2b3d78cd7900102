"""The ranks that save and load together, and how they agree.

Each rank does its part; then all of them learn whether every part succeeded. If one failed, every
rank raises the same error: no rank publishes, serves or goes on alone (N01, N02, N07). No rank
waits for ever: a peer that dies or hangs becomes `RankLost`.

The ranks talk through connections of their own over CPU (gloo), never through the job's group, so
that a save which takes longer than the job's own deadline harms nothing (N09), and jobs on NCCL
need no device for it. What they say is JSON: nobody's pickle is run. All speak with the first
rank: it knows by name which rank did not answer.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ckpt_conformance.reference_impl.durable import digest_bytes
from ckpt_conformance.reference_impl.errors import Failure, RankLost, joint

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from ckpt_conformance.reference_impl.manifest import Json

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds that a rank waits for the others: longer than the longest write of one rank."""

_GRACE = 30.0
"""Seconds that the others wait longer for the first rank, so that it can say who is lost."""

_MAX_ERROR = 2000
"""Characters of an error's message that are sent."""

_MAX_BYTES = 1 << 30
"""Bytes that a rank may announce: a larger message is not one of ours."""

_PIECE = 64 << 20
"""Bytes that are sent at a time."""

_groups: list[tuple[object, dict[str, int]]] = []
"""At most one entry: the store of the job, and how many groups each set of members has made."""

_c10d: Any = dist.distributed_c10d


class Ranks:
    """A group of ranks. Every method but the properties is to be called by all of them.

    Attributes:
        rank: of this process in the group; 0 leads.
        size: how many there are.
        timeout: seconds.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT) -> None:
        """Speak for a group of torch.distributed, by default all ranks. Nothing is sent yet."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout
        self._members = dist.get_process_group_ranks(group or dist.group.WORLD)  # torch 2.7 asks
        self._connections: Any = None
        self._lost = ""
        self._name = ""

    @property
    def leads(self) -> bool:
        """Whether this rank decides, publishes and deletes: only one does (A13, C09)."""
        return self.rank == 0

    # ---- agreement -----------------------------------------------------------------------------

    def together(
        self,
        what: str,
        part: Callable[[], T],
        report: Callable[[T], Json] = lambda _: None,
    ) -> tuple[T, list[Json]]:
        """Let every rank do its part, and go on only if all of them succeeded.

        Args:
            what: the same words on every rank; ranks that say different words all fail.
            part: what this rank does. It must not speak to other ranks.
            report: what the first rank is to know of the result.

        Returns:
            This rank's result, and on the first rank the reports of all, by rank.

        Raises:
            RankFailed: on every rank, if any failed.
            RankLost: a rank died or did not answer in time.
        """
        self.connect(what)  # first: a rank that dies in its part is missed at once then
        own_error: BaseException | None = None
        result: Any = None
        outcome: dict[str, Json] = {"what": what}
        try:
            result = part()
            outcome["ok"] = report(result)
        except BaseException as error:  # noqa: BLE001 - peers must learn of it, then it is raised
            own_error = error
            outcome["failed"] = self._failure(error)
        with self.speaking(what):
            outcomes = self._collect(what, outcome)
            verdict = self._tell(what, self._verdict(what, outcomes) if self.leads else None)
        self._raise_if_failed(what, verdict, own_error)
        return result, [outcome["ok"] for outcome in outcomes]

    def lead(self, what: str, decide: Callable[[], Json]) -> Json:
        """Let the first rank decide or do something; all ranks get its result.

        Raises:
            RankFailed: on every rank, if it failed there.
            RankLost: a rank died or did not answer in time.
        """
        own_error: BaseException | None = None
        verdict: dict[str, Json] | None = None
        if self.leads:
            try:
                verdict = {"what": what, "ok": decide()}
            except BaseException as error:  # noqa: BLE001 - peers must learn of it, then it is raised
                own_error = error
                verdict = {"what": what, "failed": [self._failure(error)]}
        with self.speaking(what):
            verdict = self._tell(what, verdict)
        self._raise_if_failed(what, verdict, own_error)
        return verdict["ok"]

    def _failure(self, error: BaseException) -> Json:
        """The fields of a `Failure` of this rank, as they are sent."""
        kind = type(error).__name__
        return [self.rank, kind, str(error)[:_MAX_ERROR]]

    def _verdict(self, what: str, outcomes: list[dict[str, Json]]) -> dict[str, Json]:
        """The verdict on the parts of all ranks."""
        failed = [outcome["failed"] for outcome in outcomes if "failed" in outcome]
        failed += [
            [rank, "RankFailed", f"it is at {outcome['what']!r} while rank 0 is at {what!r}"]
            for rank, outcome in enumerate(outcomes)
            if outcome["what"] != what
        ]
        return {"what": what, "failed": failed} if failed else {"what": what, "ok": None}

    def _raise_if_failed(
        self,
        what: str,
        verdict: dict[str, Json],
        own_error: BaseException | None,
    ) -> None:
        """Raise what the verdict says: the same on every rank."""
        if "failed" in verdict:
            if own_error is not None and not isinstance(own_error, Exception):
                raise own_error  # an interrupt of this rank's own process stays one
            error = joint(what, [Failure(*failure) for failure in verdict["failed"]])
            raise error from own_error
        if verdict["what"] != what:
            raise self._leave(f"rank 0 is at {verdict['what']!r} while this rank is at {what!r}")

    # ---- messages ------------------------------------------------------------------------------

    @contextmanager
    def speaking(self, what: str) -> Generator[None]:
        """Leave the group if an error ends an exchange of messages half-way, Ctrl-C too.

        After half an exchange the next message would be taken for the rest of this one. To leave
        also ends the wait of the other ranks. Use it around `send_memory` and `receive_memory`.
        """
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            raise self._leave(f"rank {self.rank} left ({what}): {error!r}") from error
        except BaseException as error:
            self._leave(f"rank {self.rank} left ({what}): {error!r}")
            raise

    def _collect(self, what: str, outcome: dict[str, Json]) -> list[dict[str, Json]]:
        """Gather the outcomes of all ranks on the first; an empty list on the others."""
        if not self.leads:
            self.send_bytes(what, 0, json.dumps(outcome).encode())
            return []
        until = time.monotonic() + self.timeout
        return [
            outcome,
            *(json.loads(self.receive_bytes(what, rank, until)) for rank in range(1, self.size)),
        ]

    def _tell(self, what: str, verdict: dict[str, Json] | None) -> dict[str, Json]:
        """Broadcast the first rank's verdict; the others pass None. Returns it on every rank."""
        if verdict is None:
            until = time.monotonic() + self.timeout + min(_GRACE, self.timeout)
            answer: dict[str, Json] = json.loads(self.receive_bytes(what, 0, until))
            return answer
        data = json.dumps(verdict).encode()
        for rank in range(1, self.size):
            self.send_bytes(what, rank, data)
        return verdict

    def send_bytes(self, what: str, rank: int, data: bytes) -> None:
        """Send bytes to a rank, which has to call `receive_bytes`."""
        self.send_memory(what, rank, memoryview(bytearray(len(data).to_bytes(8, "little"))))
        self.send_memory(what, rank, memoryview(bytearray(data)))

    def receive_bytes(self, what: str, rank: int, until: float) -> bytes:
        """Bytes from a rank; `until` is a time of `time.monotonic`."""
        length = bytearray(8)
        self.receive_memory(what, rank, memoryview(length), until)
        size = int.from_bytes(length, "little")
        if size > _MAX_BYTES:
            raise self._leave(f"rank {rank} announced {size} bytes ({what})")
        data = bytearray(size)
        self.receive_memory(what, rank, memoryview(data), until)
        return bytes(data)

    def send_memory(self, what: str, rank: int, memory: memoryview) -> None:
        """Send memory to a rank, which has to call `receive_memory` for as much."""
        connections = self.connect(what)
        wait = timedelta(seconds=self.timeout + min(_GRACE, self.timeout))
        try:
            for piece in _pieces(memory):
                connections.send([piece], rank, 0).wait(wait)
        except RuntimeError as error:
            raise self._leave(f"rank {rank} is gone ({what}): {_brief(error)}") from error

    def receive_memory(
        self,
        what: str,
        rank: int,
        memory: memoryview,
        until: float | None = None,
    ) -> None:
        """Fill memory with what a rank sends; `until` is a time of `time.monotonic`."""
        connections = self.connect(what)
        until = time.monotonic() + self.timeout if until is None else until
        try:
            for piece in _pieces(memory):
                connections.recv([piece], rank, 0).wait(_time_left(until))
        except RuntimeError as error:
            why = "did not answer in time" if time.monotonic() >= until else "is gone"
            raise self._leave(f"rank {rank} {why} ({what}): {_brief(error)}") from error

    # ---- connections ---------------------------------------------------------------------------

    def connect(self, what: str) -> Any:  # noqa: ANN401  gloo's class has no types
        """The connections of this group, made at the first call.

        Not by `dist.new_group`: with local synchronisation it gives the name of a group that was
        destroyed to the next one, which then waits for the old group's addresses.
        """
        if self._lost:
            raise RankLost(f"{what}: {self._lost}. This group ended with it: start the job again")
        if self._connections is None:
            store = self._store(new=True)
            wait = timedelta(seconds=self.timeout)
            try:
                self._connections = _c10d.ProcessGroupGloo(store, self.rank, self.size, wait)
            except RuntimeError as error:
                raise self._leave(f"not all ranks came to {what}: {_brief(error)}") from error
        return self._connections

    def _store(self, *, new: bool = False) -> Any:  # noqa: ANN401  as above
        """The part of the job's store in which the ranks find each other; `new` begins another."""
        store = _c10d._get_default_store()  # noqa: SLF001 - torch has no public way to it
        if new:
            members = digest_bytes(json.dumps(self._members).encode())[:16]
            self._name = f"checkpoint_ranks/{members}/{_count_group(store, members)}"
        return _c10d.PrefixStore(self._name, store)

    def _leave(self, why: str) -> RankLost:
        """Leave the group for good: keep the reason where the others find it, end the connections.

        Returns:
            The error to raise, with the first rank's reason if it has left one.
        """
        if self.leads:
            with suppress(RuntimeError):
                self._store().set("lost", why)
        else:
            why = self._reason() or why
        self._lost = why.partition("\n")[0]
        self.close()
        logger.error("rank %d of %d: %s", self.rank, self.size, self._lost)
        return RankLost(f"{self._lost}. Nothing more can be agreed with it: start the job again")

    def _reason(self) -> str:
        """The reason that the first rank left; empty if it left none within a second."""
        with suppress(RuntimeError):
            store = self._store()
            store.wait(["lost"], timedelta(seconds=1))
            return bytes(store.get("lost")).decode()
        return ""

    def close(self) -> None:
        """End the connections."""
        self._connections = None


def ranks_of(group: dist.ProcessGroup | None, timeout: float) -> Ranks | None:
    """The ranks of a group, by default all of the job; None for a process alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError("this process is no member of the group that the manager was given")
    return Ranks(group, timeout) if size > 1 else None


def _count_group(store: object, members: str) -> int:
    """Count one more group of these members; return how many there are now.

    Its members make their groups in the same order, so each of them gets the same number.
    """
    if not _groups or _groups[0][0] is not store:  # torch was initialised anew
        _groups[:] = [(store, {})]
    counts = _groups[0][1]
    counts[members] = counts.get(members, 0) + 1
    return counts[members]


def _pieces(memory: memoryview) -> Iterator[torch.Tensor]:
    """Memory in pieces that one message can hold."""
    for at in range(0, len(memory), _PIECE):
        yield torch.frombuffer(memory[at : at + _PIECE], dtype=torch.uint8)


def _brief(error: RuntimeError) -> str:
    """The message of gloo, without the place in its source and its advice."""
    message = str(error).partition("\n")[0].partition(". This is typically")[0]
    return message.partition("] ")[2] if message.startswith("[/") else message


def _time_left(until: float) -> timedelta:
    """The time until then, at least a millisecond."""
    return timedelta(seconds=max(until - time.monotonic(), 0.001))
