"""The client's end of a cluster: connect, check every worker, deal out batches, clean up."""

from __future__ import annotations

import contextlib
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_conformance.cluster import worker
from ckpt_conformance.cluster.dealer import Dealer
from ckpt_conformance.cluster.local import Listening
from ckpt_conformance.cluster.messages import ADVICE, NOTHING, Answer, Batch, Job
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.processes import keeper, signals

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from ckpt_conformance.cluster.dealer import Deals, Group
    from ckpt_conformance.cluster.place import Place
    from ckpt_conformance.work.identity import Identity
    from ckpt_conformance.work.items import Item

CONNECT = 20.0  # seconds until a scheduler has to answer
FIRST_WORKER = 60.0  # seconds until it has to have a worker
NO_WORKER = 300.0  # seconds without any, after which the run is given up
LOOK = 2.0  # seconds between two looks at the cluster, while nothing comes
GATHER = 30.0  # seconds for one result to come from its worker
TRIES = 3  # times that an item may take its runner or its workers down
TRIPS = 5  # batches without items, to measure what handing one out costs
CLOSE = worker.END + 10.0  # seconds for the workers to clean up


class LostError(Exception):
    """The cluster went away in the middle of a run; what has come of it is known."""


@dataclass(frozen=True)
class Result:
    """What came of one item: a result, or the reason why there is none."""

    item: str
    worker: str
    content: bytes = b""
    lost: str = ""


@dataclass
class Sent:
    """A batch in flight."""

    batch: Group
    tries: int
    worker: str  # that it was meant for
    is_alone: bool = False  # a suspect, with nothing else in flight


@dataclass
class Retry:
    """Items of a batch that took its runner or its workers down."""

    batch: Group
    tries: int
    reason: str
    worker: str  # where


@dataclass
class Cluster:
    """A cluster whose workers are ready for one job."""

    client: Any  # a distributed.Client
    job: Job
    job_files: bytes = b""  # a tar archive: files that the job needs on each worker
    facts: dict[str, msgspec.Raw] = field(default_factory=dict[str, msgspec.Raw])  # by worker
    on_files: Callable[[bytes], None] = lambda _: None  # takes a tar archive of a batch
    trip: float = 0.0  # seconds that a batch without items takes

    def __post_init__(self) -> None:
        """Begin with nothing in flight."""
        self._job = msgspec.json.encode(self.job)
        self._ended = queue.SimpleQueue[Any]()  # futures
        self._sent: dict[Any, Sent] = {}
        self._again: list[Retry] = []
        self._suspects: list[Group] = []
        self._slots: dict[str, int] = {}
        self._sent_files: Any = b""  # a future, once there is something to send
        self._seen = time.monotonic()  # when there was a worker
        self._number = 0

    # -- before anything runs ---------------------------------------------------------------------

    def prepare(self) -> None:
        """Start a runner on every worker; raises RequestError if one of them can't do the job."""
        self._wait_for_workers()
        self._require_same_dask()
        troubles = ["they come and go, and none could be asked"]
        answers, refused, died = dict[str, object](), list[str](), list[str]()
        for _ in range(TRIES):  # a kill costs what is in flight, and no more
            self._wait_for_workers()
            answers = self.client.run(worker.prepare, self._job, self.job_files, on_error="return")
            refused, died = self._read(answers)
            troubles = refused or died or troubles
            if refused or (answers and not died):
                break
        if refused or not answers or died:
            more = f" ({len(troubles) - 1} more are in trouble)" if len(troubles) > 1 else ""
            raise RequestError(f"worker {troubles[0]}{more}")
        self.trip = self._measured_trip()

    def _read(self, answers: Mapping[str, object]) -> tuple[list[str], list[str]]:
        """Keep the facts of each worker; return which refused, and whose process has died."""
        refused: list[str] = []
        died: list[str] = []
        for address, content in answers.items():
            if isinstance(content, bytes):
                answer = msgspec.json.decode(content, type=Answer)
                if answer.facts != NOTHING:
                    self.facts[answer.worker] = answer.facts
                refused += [f"{address}: {answer.refused}"] if answer.refused else []
                died += [f"{address}: {answer.died}"] if answer.died else []
            else:  # an exception: OSError where the worker itself has died
                trouble = f"{address}: {type(content).__name__}: {content}"
                (died if isinstance(content, OSError) else refused).append(trouble)
        return refused, died

    def _wait_for_workers(self) -> None:
        """Wait for the first worker; raises RequestError if there is none in time."""
        try:
            self.client.wait_for_workers(1, timeout=FIRST_WORKER)
        except TimeoutError:
            raise RequestError(
                f"the scheduler has no worker after {FIRST_WORKER:g} seconds; start one, such as "
                "dask worker HOST:PORT --nthreads 1"
            ) from None

    def _require_same_dask(self) -> None:
        versions = self.client.get_versions()
        mine = _versions(versions["client"])
        for name, other in versions["workers"].items():
            theirs = _versions(other)
            for package, version in mine.items():
                if theirs.get(package) != version:
                    raise RequestError(
                        f"worker {name}: {package} is {version} here and {theirs.get(package)} "
                        f"there; {ADVICE}"
                    )

    def _measured_trip(self) -> float:
        """Return the median of what a batch without items takes, in seconds."""
        times: list[float] = []
        for _ in range(TRIPS):
            begun = time.monotonic()
            self._submit((), 0).result(timeout=GATHER)
            times.append(time.monotonic() - begun)
        return sorted(times)[TRIPS // 2]

    # -- the run ----------------------------------------------------------------------------------

    def run(self, items: Sequence[Item]) -> Iterator[Result]:
        """Run items and yield what comes of each, in any order; raises as `run_dealt` does."""
        yield from self.run_dealt(Dealer(items, self.trip))

    def run_dealt(self, dealer: Deals) -> Iterator[Result]:
        """Run what a dealer has, and yield what comes of each item, in any order.

        Raises LostError if the cluster goes away, and RequestError if a worker that came later
        can't do the job.
        """
        self.dealer = dealer
        self._look()
        while self.dealer or self._again or self._suspects or self._sent:
            self._refill()
            try:
                future = self._ended.get(timeout=LOOK)
            except queue.Empty:
                self._look()
                continue
            if future in self._sent:
                yield from self._take(future, self._sent.pop(future))

    def _look(self) -> None:
        """See which workers there are; raises LostError where nothing can come any more."""
        if self.client.status != "running":
            raise LostError("the scheduler does not answer any more")
        try:
            self._slots = dict(self.client.nthreads())
        except (OSError, TimeoutError) as error:
            raise LostError(f"the scheduler does not answer any more: {error}") from error
        if self._slots:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > NO_WORKER:
            raise LostError(f"the cluster had no worker for {NO_WORKER:g} seconds")

    def _refill(self) -> None:
        """Send a batch to every worker that has a thread without one."""
        load = Counter(sent.worker for sent in self._sent.values())
        slots = sum(self._slots.values())
        for address, threads in self._slots.items():
            while load[address] < threads and self._send_next(address, slots):
                load[address] += 1

    def _send_next(self, address: str, slots: int) -> bool:
        """Send a batch; one that is tried again goes elsewhere, where there is another worker."""
        alone = len(self._slots) == 1
        again = next((one for one in self._again if alone or one.worker != address), None)
        if again:
            self._again.remove(again)
            batch, tries = again.batch, again.tries
        else:
            batch, tries = self.dealer.next(address, slots), 0
        is_alone = not batch and not self._sent and bool(self._suspects)
        if is_alone:
            batch = self._suspects.pop()
        if not batch:
            return False
        future = self._submit(batch, tries)
        self._sent[future] = Sent(batch, tries, address, is_alone)
        future.add_done_callback(self._ended.put)
        return True

    def _submit(self, batch: Group, tries: int) -> Any:  # noqa: ANN401
        """Send a batch as a task; if its worker is lost dask sends it to another one.

        No worker is named: a task for one that has died waits for ever, even where others are
        allowed, and only those that the batch is meant for have a thread to spare.
        """
        self._number += 1
        key = f"ckpt-conformance-{self.job.id}-{self._number}"
        content = msgspec.json.encode(
            Batch(tuple(msgspec.Raw(msgspec.json.encode(item)) for item in batch))
        )
        return self.client.submit(
            worker.run_batch,
            *(key, self._job, content, self._files_there()),
            key=key,
            priority=-tries,
            pure=False,
        )

    def _files_there(self) -> Any:  # noqa: ANN401
        """Return the job's files as what a task may depend on: a worker that has none gets it.

        It is a task itself, whose content the scheduler keeps: it outlives each worker.
        """
        if not self.job_files:
            return b""
        if not self._sent_files or self._sent_files.status in {"error", "lost", "cancelled"}:
            self._number += 1
            key = f"ckpt-conformance-{self.job.id}-files-{self._number}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of large tasks: this one is what it is
                self._sent_files = self.client.submit(
                    worker.same, self.job_files, key=key, pure=False
                )
        return self._sent_files

    def _take(self, future: Any, sent: Sent) -> Iterator[Result]:  # noqa: ANN401
        """Yield the results of a batch that has ended in some way."""
        from distributed import KilledWorker

        try:
            answer = msgspec.json.decode(future.result(timeout=GATHER), type=Answer)
        except KilledWorker as error:
            yield from self._suspect(sent, f"its workers died: {error}")
            return
        except Exception as error:
            if future.status in {"cancelled", "lost"} or self.client.status != "running":
                raise LostError(f"the scheduler does not answer any more: {error}") from error
            reason = f"{type(error).__name__}: {error}"
            yield from self._try_again(sent, sent.batch, reason, sent.worker)
            return
        self._swap(sent, answer.worker)
        if answer.refused:
            raise RequestError(f"worker {answer.worker}: {answer.refused}")
        if answer.files:
            self.on_files(answer.files)
        if answer.facts != NOTHING:
            self.facts.setdefault(answer.worker, answer.facts)
        for found in answer.found:
            yield Result(found.item, answer.worker, bytes(found.result))
        known = {found.item for found in answer.found}
        left = tuple(item for item in sent.batch if item.id not in known)
        if left:
            reason = answer.died or "the worker said nothing of it"
            yield from self._try_again(sent, left, reason, answer.worker)
        else:
            spent = sum(found.seconds for found in answer.found)
            self.dealer.learn(sent.batch, spent, self.trip + max(0.0, answer.seconds - spent))

    def _swap(self, sent: Sent, worker: str) -> None:
        """Note that a batch has run elsewhere: what was meant for that worker did so, too."""
        if worker != sent.worker:
            other = next((one for one in self._sent.values() if one.worker == worker), None)
            if other:
                other.worker = sent.worker

    def _suspect(self, sent: Sent, reason: str) -> Iterator[Result]:
        """Try items whose workers died again, each with nothing beside it.

        Dask counts a worker's death for all that it had been sent, and not only for what it ran.
        """
        if sent.is_alone:
            yield Result(sent.batch[0].id, sent.worker, lost=reason)
        else:
            self._suspects += [(item,) for item in sent.batch]

    def _try_again(self, sent: Sent, left: Group, reason: str, address: str) -> Iterator[Result]:
        """Try items one by one elsewhere; one that was tried often enough is lost."""
        tries = sent.tries + 1
        for item in left:
            if tries < TRIES:
                self._again.append(Retry((item,), tries, reason, address))
            else:
                yield Result(item.id, address, lost=reason)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what is in flight and end the runners; the cluster itself goes on.

        Where the scheduler is gone nobody can be told; runners end when nobody asks for them.
        """
        if self.client.status != "running":
            return
        self.client.cancel([*self._sent, *([self._sent_files] if self._sent_files else [])])
        self.client.run(worker.end, self.job.id, on_error="ignore")


def _versions(described: dict[str, Any]) -> dict[str, str]:
    """Return the versions that two processes must share to speak with each other."""
    packages = described.get("packages", {})
    python = str(described.get("host", {}).get("python", "")).split(".final")[0]
    return {"Python": python, "distributed": str(packages.get("distributed"))}


@contextlib.contextmanager
def connect(place: Place, function: str, request: bytes, identity: Identity) -> Generator[Cluster]:
    """Connect to a cluster, or start one here; yield it when every worker is ready for the job.

    Raises RequestError if no scheduler answers, it has no workers, or one can't do the job.
    """
    with opened(place) as client, ready(client, function, request, identity) as cluster:
        yield cluster


@contextlib.contextmanager
def opened(place: Place) -> Generator[Any]:
    """Connect to a scheduler, or start a cluster here; yield a distributed.Client.

    Raises RequestError if no scheduler answers.
    """
    with contextlib.ExitStack() as stack:
        address, security = _address(place, stack)
        client = _client(place, address, security)
        stack.callback(_within, CLOSE, lambda: client.close(timeout=CONNECT))
        yield client


@contextlib.contextmanager
def ready(
    client: Any,  # noqa: ANN401  a distributed.Client
    function: str,
    request: bytes,
    identity: Identity,
    job_files: bytes = b"",
) -> Generator[Cluster]:
    """Yield the cluster of a client when every worker is ready for the job.

    `job_files` is a tar archive of files that the job needs; each runner unpacks it. Raises
    RequestError if there are no workers, or one can't do the job.
    """
    job = Job(
        id=uuid.uuid4().hex,
        function=function,
        request=msgspec.Raw(request),
        identity=identity,
        files_size=len(job_files),
    )
    cluster = Cluster(client, job, job_files)
    try:
        cluster.prepare()
        yield cluster
    finally:
        _within(CLOSE, cluster.close)


def _address(place: Place, stack: contextlib.ExitStack) -> tuple[str, Any]:
    """Return the scheduler's address and how to be let in; a local one is started, and ended."""
    import distributed

    untyped: Any = distributed  # it annotates only a part of itself
    if place.local:
        listening = stack.enter_context(local_cluster(place.local))
        pem = {"tls_client_cert": listening.certificate, "tls_client_key": listening.key}
        trusted = untyped.Security(
            tls_ca_file=listening.certificate, require_encryption=True, **pem
        )
        return listening.address, trusted
    return place.address, place.security()


def _client(place: Place, address: str, security: Any) -> Any:  # noqa: ANN401
    import logging

    import distributed

    untyped: Any = distributed
    for name in [
        name for name in logging.root.manager.loggerDict if name.startswith("distributed")
    ]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we say what went wrong
    try:
        return untyped.Client(address, timeout=CONNECT, security=security, set_as_default=False)
    except Exception as error:
        reason = f"--on {place.name}: no scheduler can be spoken to there ({_first_line(error)})"
        raise RequestError(
            f"{reason}; is it running, is the address that which it printed, does it want TLS "
            "(tls://, --tls-ca, --tls-cert, --tls-key)?"
        ) from error


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause) or type(cause).__name__).strip().splitlines()[0]


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Do something that must not keep a command from ending: a machine may hang."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)


@contextlib.contextmanager
def local_cluster(workers: int) -> Generator[Listening]:
    """Start a cluster on loopback; end it, and all that it left, at the end.

    Raises RequestError if it does not start.
    """
    with contextlib.ExitStack() as left:
        with signals.deferred():
            folder = Path(tempfile.mkdtemp(prefix="ckc-cluster-"))
            left.callback(shutil.rmtree, folder, ignore_errors=True)
        with signals.deferred():
            process = _started_local(folder, workers)
            left.callback(_end_local, process, folder)
        line = process.stdout.readline() if process.stdout else b""
        if not line.endswith(b"\n"):
            log = _log_in(folder)
            reason = log.read_text(errors="replace")[-1500:] if log.exists() else ""
            raise RequestError(f"--on local:{workers}: the cluster did not start: {reason}")
        yield msgspec.json.decode(line, type=Listening)


def _started_local(folder: Path, workers: int) -> subprocess.Popen[bytes]:
    """Start a cluster, and the keeper that ends it with this process."""
    modules = "ckpt_conformance.processes.keeper", "ckpt_conformance.cluster.local"
    with _log_in(folder).open("wb") as errors:
        return subprocess.Popen(  # noqa: S603  our own modules
            [
                *(sys.executable, "-m", modules[0], str(folder)),
                *(sys.executable, "-m", modules[1], str(workers)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )


def _log_in(folder: Path) -> Path:
    return folder / "log"


def _end_local(process: subprocess.Popen[bytes], folder: Path) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(worker.END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if folder.exists():
        keeper.end(folder)
