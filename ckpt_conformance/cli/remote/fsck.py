"""What a worker of a cluster does for `fsck`: it opens the place itself, and judges checkpoints."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import msgspec

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.judge import stored
from ckpt_conformance.fsck.judge.judge import Options
from ckpt_conformance.fsck.judge.judging import Job, Judging, Slice, is_there
from ckpt_conformance.fsck.source import places
from ckpt_conformance.fsck.source.trust import Trust
from ckpt_conformance.report import environment
from ckpt_conformance.work.identity import Identity, identity
from ckpt_conformance.work.items import Item

if TYPE_CHECKING:
    from ckpt_conformance.cluster.runner import Feed
    from ckpt_conformance.fsck.judge.stored import FoundJson
    from ckpt_conformance.fsck.source.places import Where

FUNCTION = "ckpt_conformance.cli.remote.fsck:judge"
FAR_THREADS = 8  # each with at most 9 MiB
DISTRIBUTIONS = ("numpy", "msgspec", "blake3", "fsspec")  # what judgements are made with


class Request(TypedDict):
    """What was asked for, as `stored.encode` writes it: a path may hold what is no UTF-8."""

    place: str  # as the user named it
    folder: str  # in which the client runs: a relative place is one of it
    metadata_only: bool
    sample: float
    seed: int
    nan: bool
    allow_name: list[str]
    allow_code: bool
    left: float | None  # seconds, of --timeout
    file_timeout: float | None
    listed: FoundJson | None  # something that the client has listed


class Facts(msgspec.Struct, frozen=True):
    """What a worker says of itself; `sees` is whether what the client has listed is there."""

    sees: bool


class JobItem(Item, frozen=True, kw_only=True):
    """A checkpoint of the plan, or a slice of one."""

    number: int
    found: msgspec.Raw  # as `stored` writes it
    slice: tuple[int, int] = (1, 1)

    @property
    def job(self) -> Job:
        """The same, to be judged."""
        return Job(
            self.number, stored.found_of(stored.decode(bytes(self.found))), Slice(*self.slice)
        )


def identity_here() -> Identity:
    """Return what must be the same here and on a worker: the suite, and what it reads with."""
    return identity(environment.suite_commit(), {}, distributions=DISTRIBUTIONS)


def judge(feed: Feed) -> None:
    """Judge the checkpoints of each batch; refuses, by RequestError, a place that is not here."""
    feed.require(identity_here())
    request: Request = stored.decode(bytes(feed.job.request))
    where = _place(request)
    listed = request["listed"]
    sees = listed is None or is_there(where, stored.found_of(listed))
    feed.ready(msgspec.Raw(msgspec.json.encode(Facts(sees))))
    judging = Judging(where, _options(request, where))
    for batch in feed:
        items = [msgspec.json.decode(item, type=JobItem) for item in batch.items]
        _judge(feed, judging, items)


def _place(request: Request) -> Where:
    """Open the place as the client has it; raises RequestError where that cannot be done."""
    where = places.place(request["place"])
    if isinstance(where, Path) and not where.is_absolute():
        try:
            os.chdir(request["folder"])  # reports name the place as the user does
        except OSError as error:
            reason = (
                f"{where} is a path in {request['folder']}, which is not here: {error.strerror}"
            )
            raise RequestError(f"{reason}; name it by its absolute path") from error
    try:
        places.check_there(where)
    except RequestError as error:
        what = "a place that every worker can read: a shared folder at the same path, or a URL"
        raise RequestError(f"{error}; name {what}") from error
    return where


def _options(request: Request, where: Where) -> Options:
    """Return how to judge: as asked for, with the threads of one worker of a machine's many."""
    return Options(
        jobs=threads_of_worker(where),
        metadata_only=request["metadata_only"],
        sample=request["sample"],
        seed=request["seed"],
        nan=request["nan"],
        trust=Trust(frozenset(request["allow_name"]), request["allow_code"]),
        end=None if request["left"] is None else time.monotonic() + request["left"],
        file_timeout=request["file_timeout"],
    )


def threads_of_worker(where: Where) -> int:
    """Return how many threads read payload in one worker, of which there is one for each core."""
    return FAR_THREADS if places.is_far(where) else 1


def _judge(feed: Feed, judging: Judging, items: list[JobItem]) -> None:
    """Judge a batch; a few checkpoints are open at once, so each gets the time since the last."""
    ids = {(item.number, item.slice[0]): item.id for item in items}
    last = time.monotonic()
    for job, judgement in judging.run(item.job for item in items):
        content = stored.encode(stored.result_json(job, judgement))
        now = time.monotonic()
        feed.put(ids[job.number, job.slice.number], content, now - last)
        last = now
