"""What a worker of a cluster does for `explore`: it recovers from batches of crash states."""

from __future__ import annotations

import contextlib
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_conformance.cli import scripts
from ckpt_conformance.cli.recordings import SCRIPT, Kit
from ckpt_conformance.cli.remote import checks
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.explore.evidence import Doubt, Evidence, basis_of, evidence_of, to_json
from ckpt_conformance.crash.explore.exploration import FULL, Limits
from ckpt_conformance.crash.script.command import Script
from ckpt_conformance.plugin import depends
from ckpt_conformance.plugin.openings import Seen, of_adapter, of_command
from ckpt_conformance.report import environment
from ckpt_conformance.work.identity import Identity, identity
from ckpt_conformance.work.items import Item

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from ckpt_conformance.cluster.runner import Feed
    from ckpt_conformance.crash.explore.engine import Explorer
    from ckpt_conformance.crash.explore.exploration import BaseExplorer, Case
    from ckpt_conformance.crash.script.explore import ScriptExplorer
    from ckpt_conformance.subject.subject import Subject

FUNCTION = "ckpt_conformance.cli.remote.states:recover"


class Request(msgspec.Struct, frozen=True):
    """What is explored. The recordings are what each worker is sent (`job_files`)."""

    explored: tuple[str, ...]  # an adapter, or the words of a command
    options: dict[str, Any]  # of a command
    script: Script | None
    models: tuple[str, ...]
    workloads: tuple[str, ...]
    seed: int
    budget: str
    limits: Limits
    notes_opened: bool = False  # whether the client has a cache


class Sent(msgspec.Struct, frozen=True):
    """What a worker found out of a batch, and what that depends on."""

    evidence: Evidence
    seen: Seen


class StatesItem(Item, frozen=True, kw_only=True):
    """A batch of the crash states of a workload; `basis` is the digest of all that were listed."""

    workload: str
    basis: str
    contents: tuple[str, ...]


class Facts(msgspec.Struct, frozen=True):
    """What a worker says of its machine: results in a cache depend on it."""

    machine: dict[str, Any]


def identity_of(request: Request) -> Identity:
    """Return what recoveries depend on: it reads the code of the adapter or of the script."""
    if request.script:
        return scripts.identity_of(request.script)
    return checks.identity_of(request.explored)


def recover(feed: Feed) -> None:
    """Recover from the states of each batch; each as if it were the first one."""
    request = msgspec.json.decode(feed.job.request, type=Request)
    feed.require(identity(environment.suite_commit(), {}))
    scratch = environment.filesystem_type(Path(tempfile.gettempdir()))
    with contextlib.ExitStack() as stack:
        source = (_OfScript if request.script else _OfAdapter)(request, feed, stack)
        facts = Facts(depends.machine(scratch))
        feed.ready(msgspec.Raw(msgspec.json.encode(facts)))
        for batch in feed:
            for raw in batch.items:
                item, begun = msgspec.json.decode(raw, type=StatesItem), time.monotonic()
                evidence = source.evidence(item)
                sent = Sent(evidence, source.seen())
                feed.put(item.id, to_json(sent), time.monotonic() - begun)


class _Source(ABC):
    """Gives evidence of batches; the states of one workload at a time are listed."""

    def __init__(self, request: Request, feed: Feed, stack: contextlib.ExitStack) -> None:
        self.request = request
        given = (request.explored, request.options, request.workloads)
        self.kit = Kit.open(
            feed.job_files, *given, feed.job.identity
        )  # which is ours: see `require`
        self._workload = self._basis = ""
        self._listing: BaseExplorer | None = None
        self._chosen: list[Case] = []
        self._open = stack.enter_context(contextlib.ExitStack())  # what is held of a workload

    def evidence(self, item: StatesItem) -> Evidence:
        """Recover from the states of a batch; raises RequestError if others are listed here."""
        try:
            return self._evidence(item)
        except Unknown as error:
            return Evidence(basis=item.basis, doubts=(Doubt.of(error),))

    def _evidence(self, item: StatesItem) -> Evidence:
        if item.workload != self._workload or self._listing is None:
            self._list(item.workload)
        if self._basis != item.basis or self._listing is None:
            raise RequestError(
                f"{item.workload}: the recording gives other crash states here than at the client; "
                "install the same versions on every machine"
            )
        explorer = self.explorer()
        explorer.share_listing(self._listing)
        wanted = set(item.contents)
        cases = [case for case in self._chosen if case.content in wanted]
        return evidence_of(explorer, item.basis, cases, self.free())

    def _list(self, workload: str) -> None:
        """List the states of a workload, as the client has."""
        self._open.close()
        self._workload, self._listing = workload, None
        self.begin(workload, self._open)
        listing = self.explorer()
        self._chosen = listing.listed(self.request.models)
        self._basis = basis_of(listing, self._chosen).digest
        self._listing = listing

    @abstractmethod
    def begin(self, workload: str, stack: contextlib.ExitStack) -> None:
        """Take the recording of a workload, and hold the recorded directory."""

    @abstractmethod
    def explorer(self) -> BaseExplorer:
        """Make an explorer of the workload that has done nothing yet."""

    def seen(self) -> Seen:
        """Return what recoveries depend on that is only known once they were made."""
        return Seen()

    def free(self) -> Container[str]:
        """Return contents that cost no visit of their own."""
        return ()


class _OfAdapter(_Source):
    """Recovers with an adapter, from a fork server of its own."""

    def __init__(self, request: Request, feed: Feed, stack: contextlib.ExitStack) -> None:
        from ckpt_conformance.cli.explore import subject_of

        (adapter,) = request.explored
        given = (adapter, request.seed, request.budget)
        opened = subject_of(*given, notes_opened=request.notes_opened)
        self.subject: Subject = stack.enter_context(opened)  # what cannot be imported is told first
        feed.require(checks.own_identity_of([adapter]))
        super().__init__(request, feed, stack)

    def seen(self) -> Seen:
        if not self.request.notes_opened:
            return Seen()
        return of_adapter(Path(self.subject.client.path).parent, self.request.explored[0])

    def begin(self, workload: str, stack: contextlib.ExitStack) -> None:
        self._recorded = stack.enter_context(self.kit.workload(workload))

    def explorer(self) -> Explorer:
        from ckpt_conformance.crash.explore import engine

        return engine.Explorer(self.subject, self._recorded, self.request.limits)


class _OfScript(_Source):
    """Recovers by starting a command, in a worker of `crash.script` of its own."""

    def __init__(self, request: Request, feed: Feed, stack: contextlib.ExitStack) -> None:
        script = request.script
        if script and not Path(script.cwd).is_dir():
            raise RequestError(
                f"the command runs in {script.cwd}, which is not here; it and what it reads have "
                "to be at the same paths on every worker, as on a shared disk"
            )
        feed.require(identity_of(request))
        super().__init__(request, feed, stack)

    def begin(self, workload: str, stack: contextlib.ExitStack) -> None:
        from ckpt_conformance.crash.script import kept
        from ckpt_conformance.crash.script.rehearsal import Stage

        del workload
        if self.request.script is None:
            raise TypeError("a request without a script")
        folder = self.kit.folder / SCRIPT
        known = kept.read(folder, self.request.script)
        stack.enter_context(self.kit.directory(known.script.root))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        notes = self.request.notes_opened
        place = Path(scratch) / "work"
        place.mkdir()
        stage = Stage(known.script, place, 1, lambda _: None, stack, notes_opened=notes)
        self._noted_in = place if notes else None
        self._rehearsal = kept.resume(stage, known, folder)
        limits = self.request.limits
        if limits.recoveries < FULL.recoveries:
            limits = self._rehearsal.within(limits, len(self.request.models))
        self._limits = limits

    def explorer(self) -> ScriptExplorer:
        from ckpt_conformance.crash.script.explore import ScriptExplorer

        return ScriptExplorer(self._rehearsal, self._limits, self.request.seed)

    def seen(self) -> Seen:
        return of_command(self._noted_in) if self._noted_in else Seen()

    def free(self) -> Container[str]:
        return self._rehearsal.controls


def request_of(  # noqa: PLR0913  one for each thing that it says
    explored: Sequence[str],
    options: dict[str, Any],
    script: Script | None,
    *,
    models: Sequence[str],
    workloads: Sequence[str],
    seed: int,
    budget: str,
    limits: Limits,
) -> Request:
    """Say what is explored; a worker has one process at a time."""
    return Request(
        tuple(explored),
        options,
        script,
        tuple(models),
        tuple(workloads),
        seed,
        budget,
        replace(limits, jobs=1),
    )
