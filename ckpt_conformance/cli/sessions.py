"""Run a session of the suites for a command: its plan, its progress, and the lines it gives.

All that a command says of a session comes from lines (`work/lines.py`), so that `combine` says the
same of the shards of one.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance import __version__
from ckpt_conformance.cli import progress as cli_progress
from ckpt_conformance.cli.options import part_of
from ckpt_conformance.contract.registry import AdapterInfo
from ckpt_conformance.contract.verdicts import Cause, CheckOutcome, Verdict
from ckpt_conformance.report import environment, files, terminal
from ckpt_conformance.report.certificate import plain
from ckpt_conformance.report.result import STOPPED
from ckpt_conformance.work.cache import Cache, key_of
from ckpt_conformance.work.items import Shard
from ckpt_conformance.work.lines import Fact, Header, Line, Origin, Results, Writer, gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.plugin.options import CheckOptions, SessionOptions
    from ckpt_conformance.plugin.plan import CheckItem
    from ckpt_conformance.work.items import Plan

INTERRUPTED = 130  # the exit status after Ctrl-C
NOT_ASKED = ("server", "out", "selection", "reach")  # of options: no choice of the user's


class Progress(cli_progress.Progress):
    """Shows how far a session is, and how many violations there are."""

    def __init__(self, what: str) -> None:
        """Start with nothing found."""
        super().__init__(what)
        self.violations = 0

    def __call__(self, done: int, total: int, outcome: CheckOutcome | None) -> None:
        """Take one step of the session."""
        self.violations += outcome is not None and outcome.verdict is Verdict.VIOLATION
        many = terminal.count(self.violations, "violation") if self.violations else ""
        self.update(done, total, many)


@dataclass(frozen=True)
class Work:
    """Which part of a plan is run, and what is kept of it."""

    shard: Shard = field(default_factory=Shard)
    results: Path | None = None  # a file of lines
    cache: Cache | None = None
    is_whole: bool = True  # whether pairs run that cannot come out differently


def work_of(shard: str, results: Path | None, cache: Path | None) -> Work:
    """Read the options of a run's part; raises RequestError for what they cannot be."""
    return Work(part_of(shard, results), results, Cache.open(cache) if cache else None)


@dataclass
class Session:
    """What a session gave: facts of the adapters, their outcomes, whether it was stopped."""

    header: Header | None  # what was asked for; None if it was stopped before that was known
    infos: dict[str, AdapterInfo]
    outcomes: dict[str, list[CheckOutcome]]
    interrupted: bool
    cached: int = 0  # outcomes that were known before
    unreached: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # checks


def say_part(session: Session, work: Work) -> int:
    """Say what a shard found, and what to do with it; return the exit status."""
    outcomes = [one for of_one in session.outcomes.values() for one in of_one]
    counts = Counter(one.verdict for one in outcomes)
    found = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    files.say(f"shard {work.shard}: {terminal.count(len(outcomes), 'result')} ({found})")
    if session.interrupted:
        files.say(f"Stopped before the end; {work.results} has what was found.")
        return INTERRUPTED
    files.say(f"{work.results}; all shards: ckpt-conformance combine FILE...")
    return 0


def run(
    options: SessionOptions, what: str, described: Sequence[str] = (), work: Work | None = None
) -> Session:
    """Run a part of the plan; return the outcomes, and facts of the `described` adapters.

    Raises AdapterError for an adapter that can't be made.
    """
    work = work or Work()
    writer = Writer(work.results)
    with contextlib.suppress(KeyboardInterrupt), writer:
        _Run(options, what, described, work, writer).run()
    if not any(isinstance(line, Header) for line in writer.lines):
        return Session(None, {}, {}, interrupted=True)
    session = session_of(gather(writer.lines))
    if session.cached:
        terminal.say(f"{terminal.count(session.cached, 'result')} from the cache", error=True)
    if unreached := sum(map(len, session.unreached.values())):
        what = "that enter nothing of what the mutant changes"
        terminal.say(f"{terminal.count(unreached, 'check')} {what}: as without it", error=True)
    return session


class _Run:
    """One run of a session: what is known already is taken from the cache, the rest is run."""

    def __init__(
        self,
        options: SessionOptions,
        what: str,
        described: Sequence[str],
        work: Work,
        writer: Writer,
    ) -> None:
        from ckpt_conformance.plugin import depends
        from ckpt_conformance.plugin.plan import plan_of  # they load pytest

        self.options, self.what, self.described = options, what, described
        self.work, self.writer = work, writer
        whole = plan_of(options)
        self.plan = whole.shard(work.shard)
        scratch = environment.filesystem_type(Path(tempfile.gettempdir()))
        self.inputs = depends.inputs(options, scratch) if work.cache else None
        writer.write(header(options, what, whole, self.plan, work.shard))

    def run(self) -> None:
        from ckpt_conformance.harness import facts
        from ckpt_conformance.plugin.session import scratch_folder

        with Progress(self.what) as self.progress, scratch_folder() as scratch:
            left = self.plan.without(self._known())
            left = left.without(self._unreached(left))
            if not left.items and self._describe_from_cache():
                return
            served = facts.serve(self.options.adapters, self.described, self.options.device)
            with served as (server, infos):
                for name, info in infos.items():
                    self._describe(name, info)
                if left.items:
                    self._run_suites(left, server, Path(scratch))

    def _describe(self, name: str, info: AdapterInfo) -> None:
        """Write what an adapter says of itself."""
        fact = msgspec.json.encode(info)
        self.writer.write(Fact(subject=name, fact=msgspec.Raw(fact)))
        if self.work.cache and self.inputs:
            self.work.cache.put(self.inputs.of_adapter(name), fact)

    def _describe_from_cache(self) -> bool:
        """Write what all adapters say of themselves, if that is known: no server is needed."""
        if self.work.cache is None or self.inputs is None:
            return not self.described
        keys = {name: key_of(self.inputs.of_adapter(name)) for name in self.described}
        known = {name: self.work.cache.get(key) for name, key in keys.items()}
        facts = {name: fact for name, fact in known.items() if fact is not None}
        if len(facts) < len(known):
            return False
        for name, fact in facts.items():
            self.writer.write(Fact(subject=name, fact=msgspec.Raw(fact)))
        return True

    def _run_suites(self, left: Plan[CheckItem], server: str, scratch: Path) -> None:
        from ckpt_conformance.plugin.plan import selection
        from ckpt_conformance.plugin.session import run_session

        self.items = {item.id: item for item in left.items}
        known = len(self.plan.items) - len(left.items)
        total = len(self.plan.items)

        def take(done: int, _: int, outcome: CheckOutcome | None) -> None:
            if outcome is not None:
                self._keep(outcome)
            self.progress(known + done, total, outcome)

        whole = len(left.items) == len(self.plan.items) and self.work.shard == Shard()
        run_session(
            replace(
                self.options,
                on_progress=take,
                scratch=scratch,
                server=server,
                selection=None if whole else selection(left.items),
            )
        )

    def _known(self) -> list[str]:
        """Write a line for each item whose outcome is in the cache; name them."""
        if self.work.cache is None or self.inputs is None:
            return []
        found: list[str] = []
        for item in self.plan.items:
            content = self.work.cache.get(key_of(self.inputs.of(item)))
            if content is not None and not self._needs_a_bundle(content):
                self._write(item.id, content, "cache")
                found.append(item.id)
        return found

    def _unreached(self, left: Plan[CheckItem]) -> list[str]:
        """Write a line for each check that enters nothing of its mutant's change; name them."""
        if self.work.is_whole:
            return []
        from ckpt_conformance.cli.unreached import Recorder

        self.progress.begin("which functions each check enters", "recording")
        recorder = Recorder(self.options, self.work.cache, self.inputs, self.progress)
        outcomes = recorder.outcomes(left.items)
        self.progress.begin(self.what, "starting")
        for item, outcome in outcomes.items():
            self._write(item, _encoded(outcome), "unreached")
        return list(outcomes)

    def _needs_a_bundle(self, content: bytes) -> bool:
        """Return whether an outcome is a violation of which a bundle is to be kept: it must run."""
        bad = {Verdict.VIOLATION, Verdict.NOT_MET}
        return self.options.out is not None and _outcome(content).verdict in bad

    def _keep(self, outcome: CheckOutcome) -> None:
        """Write an outcome as it comes; what may be the machine's doing is not cached."""
        item = self.items.get(f"{outcome.adapter} {outcome.check}")
        content = _encoded(outcome)
        self._write(item.id if item else f"{outcome.adapter} {outcome.check}", content, "run")
        if item and self.work.cache and self.inputs and outcome.verdict is not Verdict.UNKNOWN:
            self.work.cache.put(self.inputs.of(item), content)

    def _write(self, item: str, content: bytes, origin: Origin) -> None:
        self.writer.write(Line(item=item, origin=origin, result=msgspec.Raw(content)))


def header(
    options: SessionOptions,
    what: str,
    whole: Plan[CheckItem],
    part: Plan[CheckItem],
    shard: Shard,
) -> Header:
    """Say what was asked for, where, and which part of it this is."""
    asked = {name: value for name, value in options.to_plain().items() if name not in NOT_ASKED}
    return Header(
        command=what,
        version=__version__,
        commit=environment.suite_commit(),
        request=msgspec.to_builtins(asked),
        environment=environment.describe_environment(Path(tempfile.gettempdir())),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        plan=whole.digest,
        shard=str(shard),
        items=[item.id for item in part.items],
    )


def session_of(results: Results) -> Session:
    """Read the session of some results: here, or of shards from elsewhere."""
    session = Session(results.header, {}, defaultdict(list), interrupted=not results.ended)
    for name, fact in results.facts.items():
        session.infos[name] = AdapterInfo(**msgspec.json.decode(fact))
    for line in results.results.values():
        outcome = _outcome(line.result)
        session.outcomes[outcome.adapter].append(outcome)
        session.cached += line.origin == "cache"
        if line.origin == "unreached":
            session.unreached.setdefault(outcome.adapter, []).append(outcome.check)
    return session


def fill_in(session: Session, options: CheckOptions) -> None:
    """Add the UNKNOWN of each planned check that has no outcome.

    Of an invariant with two checks one that ran must not stand for the other.
    """
    from ckpt_conformance.plugin.plan import plan_of

    there = {f"{one.adapter} {one.check}" for many in session.outcomes.values() for one in many}
    reason = STOPPED if session.interrupted else "not run"
    cause = Cause.INTERRUPTED if session.interrupted else Cause.HARNESS
    for item in plan_of(options).items:
        if item.id not in there:
            outcome = CheckOutcome(
                *(item.adapter, item.check.invariant, item.check.key, Verdict.UNKNOWN, reason),
                cause=cause,
            )
            session.outcomes[item.adapter].append(outcome)


def _encoded(outcome: CheckOutcome) -> bytes:
    return msgspec.json.encode(outcome.to_message() | {"evidence": plain(outcome.evidence)})


def _outcome(content: bytes | msgspec.Raw) -> CheckOutcome:
    return CheckOutcome.from_message(msgspec.json.decode(content))
