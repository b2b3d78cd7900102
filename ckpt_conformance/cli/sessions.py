"""Run a session of the suites for a command: its plan, its progress, and the lines it gives.

All that a command says of a session comes from lines (`work/lines.py`), so that `combine` says the
same of the shards of one.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.cli import parts
from ckpt_conformance.cli import progress as cli_progress
from ckpt_conformance.cli.options import part_of
from ckpt_conformance.cli.stopping import INTERRUPTED
from ckpt_conformance.contract.registry import AdapterInfo
from ckpt_conformance.contract.verdicts import Cause, CheckOutcome, Verdict
from ckpt_conformance.report import environment, files, terminal
from ckpt_conformance.report.result import STOPPED
from ckpt_conformance.work.cache import Cache, key_of
from ckpt_conformance.work.items import Shard
from ckpt_conformance.work.lines import (
    Fact,
    Header,
    Line,
    Opened,
    Origin,
    Results,
    Writer,
    gather,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.cli.options import Where
    from ckpt_conformance.cli.remote.checks import Facts
    from ckpt_conformance.cluster.client import Result
    from ckpt_conformance.cluster.place import Place
    from ckpt_conformance.plugin.depends import Inputs
    from ckpt_conformance.plugin.openings import Seen
    from ckpt_conformance.plugin.options import CheckOptions, SessionOptions
    from ckpt_conformance.plugin.plan import CheckItem
    from ckpt_conformance.work.items import Plan

_REASONS = 5  # why results of a cache are not taken, the most frequent ones
NOT_ASKED = (
    "server",
    "out",
    "selection",
    "reach",
    "statements",
)  # of options: no choice of the user's


class Progress(cli_progress.Progress):
    """Shows how far a session is, and how many violations there are."""

    beats = True  # pytest and the client of a cluster fork nothing; a check may take minutes

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
    place: Place | None = None  # a cluster; None: this machine
    is_whole: bool = True  # whether pairs run that cannot come out differently


def work_of(
    shard: str, results: Path | None, cache: Path | None, where: Where | None = None
) -> Work:
    """Read the options of a run's part; raises RequestError for what they cannot be."""
    place = where.place() if where else None
    part = part_of(shard, results)
    return Work(part, results, _opened_cache(cache) if cache else None, place)


def _opened_cache(folder: Path) -> Cache:
    cache = Cache.open(folder)
    if cache.is_read_only:
        terminal.say(
            f"--cache {folder} cannot be written: results are read, none is kept", error=True
        )
    return cache


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
        files.say(parts.stopped(work.results))
        return INTERRUPTED
    files.say(parts.complete(work.results))
    return 0


def run(
    options: SessionOptions, what: str, described: Sequence[str] = (), work: Work | None = None
) -> Session:
    """Run a part of the plan; return the outcomes, and facts of the `described` adapters.

    Raises AdapterError for an adapter that can't be made.
    """
    work = work or Work()
    writer = Writer(work.results)
    one = _Run(options, what, described, work, writer)
    with contextlib.suppress(KeyboardInterrupt), writer:
        one.run()
    _say_not_kept(one.not_kept)
    if not any(isinstance(line, Header) for line in writer.lines):
        return Session(None, {}, {}, interrupted=True)
    session = session_of(gather(writer.lines))
    if session.cached:
        terminal.say(f"{terminal.count(session.cached, 'result')} from the cache", error=True)
    say_unused(work.cache)
    if unreached := sum(map(len, session.unreached.values())):
        what = "that enter nothing of what the mutant changes"
        terminal.say(f"{terminal.count(unreached, 'check')} {what}: as without it", error=True)
    return session


def say_unused(cache: Cache | None) -> None:
    """Say which results of the cache were not taken, or could not be written, and why."""
    if cache is None:
        return
    for why, number in cache.unused.most_common(_REASONS):
        found = f"{terminal.count(number, 'result')} in the cache, and not taken"
        terminal.say(f"{found}; changed since: {why}", error=True)
    for why, number in cache.unwritten.items():
        lost = f"{terminal.count(number, 'result')} not kept: {cache.folder} cannot be written"
        terminal.say(f"{lost} ({why}); these will run again", error=True)


def _say_not_kept(reasons: Mapping[str, str]) -> None:
    """Say which results were not put into the cache, and why: they will run again."""
    by_reason = Counter(f"{item.partition(' ')[0]}: {why}" for item, why in reasons.items())
    for reason, number in sorted(by_reason.items()):
        terminal.say(f"{terminal.count(number, 'result')} not kept: {reason}", error=True)


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
        self.whole = plan_of(options)
        self.plan = self.whole.shard(work.shard)
        self.items = {item.id: item for item in self.plan.items}
        self.done = 0
        scratch = environment.filesystem_type(Path(tempfile.gettempdir()))
        self.inputs = depends.inputs(options, scratch) if work.cache else None
        self.server: Path | None = None  # the folder of ours
        self.not_kept: dict[str, str] = {}  # by item: why it is not in the cache
        # Entries of a cache depend on it; others who combine results compare it.
        self.notes_opened = bool(work.cache or work.results)
        self.opened = defaultdict[str, dict[str, str]](dict)  # by adapter

    def run(self) -> None:
        with Progress(self.what) as self.progress:
            if self.work.place is None:
                self._run_here()
            else:
                self._run_on(self.work.place)
            for name, opened in self.opened.items():
                self.writer.write(Opened(subject=name, opened=opened))

    def _run_here(self) -> None:
        from ckpt_conformance.harness import facts
        from ckpt_conformance.plugin.session import scratch_folder

        self._begin(environment.describe_environment(Path(tempfile.gettempdir())))
        if self.inputs is not None:
            self.progress.begin(self.what, "reading the code that results depend on, and the cache")
        left = self.plan.without(self._known([self.inputs]))
        left = left.without(self._unreached(left))
        if not left.items and self._describe_from_cache():
            return
        self.progress.begin(self.what, "starting the fork server, which imports torch and adapters")
        with scratch_folder() as scratch:
            served = facts.serve(
                *(self.options.adapters, self.described, self.options.device),
                notes_opened=self.notes_opened,
            )
            with served as (server, infos):
                self.server = Path(server).parent
                for name, info in infos.items():
                    self._describe(name, info, {name: self._seen(name)})
                if left.items:
                    self._run_suites(left, server, scratch)

    def _run_on(self, place: Place) -> None:
        """Run on a cluster; a result is kept in the cache as one of the machine it came from."""
        from ckpt_conformance.cli.remote import checks as remote
        from ckpt_conformance.cluster import client

        asked = replace(self.options, out=None, server="", selection=None).to_plain()
        request = remote.Request(
            *(asked, tuple(self.described), self.options.out is not None),
            notes_opened=self.notes_opened,
        )
        identity = remote.identity_of(self.options.adapters)
        content = msgspec.json.encode(request)
        with client.connect(place, remote.FUNCTION, content, identity) as cluster:
            workers = _Workers(cluster.facts, self.inputs)
            self._begin(workers.environment())
            for name, info in workers.infos().items():
                self._describe(name, info, workers.seen(), workers.inputs())
            left = self.plan.without(self._known(workers.inputs()))
            if out := self.options.out:
                cluster.on_files = lambda files: remote.unpack_bundles(files, out)
            try:
                for result in cluster.run(left.items):
                    outcome = self._outcome_of(result)
                    seen = remote.seen_in(result.content)
                    self._keep(outcome, workers.inputs_of(result.worker), seen)
                    self._step(outcome)
            except client.LostError as error:
                self._lose(left, str(error))

    def _outcome_of(self, result: Result) -> CheckOutcome:
        """Read the outcome that a worker sent; UNKNOWN where none of them could."""
        return self._lost(result.item, result.lost) if result.lost else _outcome(result.content)

    def _lost(self, item: str, reason: str) -> CheckOutcome:
        check = self.items[item].check
        return CheckOutcome(
            *(self.items[item].adapter, check.invariant, check.key, Verdict.UNKNOWN),
            reason=f"the cluster did not judge it: {reason}",
            seed=self.options.seed,
            cause=Cause.HARNESS,
        )

    def _lose(self, left: Plan[CheckItem], reason: str) -> None:
        """Write an UNKNOWN for each item of which the cluster has told nothing."""
        known = {line.item for line in self.writer.lines if isinstance(line, Line)}
        for item in left.without(known).items:
            outcome = self._lost(item.id, reason)
            self._keep(outcome)
            self._step(outcome)

    def _begin(self, described: Mapping[str, str | int | None]) -> None:
        """Write what the run is; `described` is where it runs."""
        from ckpt_conformance.cli.remote import checks as remote

        kept = self.work.results is not None  # for others, who have to know what it is of
        asked = {
            name: value for name, value in self.options.to_plain().items() if name not in NOT_ASKED
        }
        self.writer.write(
            parts.header(
                self.what,
                msgspec.to_builtins(asked),
                plan=self.whole.digest,
                shard=self.work.shard,
                items=[item.id for item in self.plan.items],
                described=described,
                depends=remote.identity_of(self.options.adapters) if kept else None,
            )
        )

    def _step(self, outcome: CheckOutcome) -> None:
        self.done += 1
        self.progress(self.done, len(self.plan.items), outcome)

    def _describe(
        self,
        name: str,
        info: AdapterInfo,
        seen: Mapping[str, Seen],
        machines: Sequence[Inputs | None] = (),
    ) -> None:
        """Write what an adapter says of itself, and keep it for the machines that it said so on."""
        fact = msgspec.json.encode(info)
        self.writer.write(Fact(subject=name, fact=msgspec.Raw(fact)))
        for inputs in machines or [self.inputs]:
            if self.work.cache and inputs and not seen[name].why_not:
                self.work.cache.put(inputs.of_adapter(name), fact, seen[name].opened)

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
        self.progress.begin(self.what, "collecting the checks")
        from ckpt_conformance.plugin.plan import selection
        from ckpt_conformance.plugin.session import run_session

        def take(done: int, _: int, outcome: CheckOutcome | None) -> None:
            del done
            if outcome is not None:
                self._keep(outcome, self.inputs, self._seen(outcome.adapter))
                self._step(outcome)

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

    def _known(self, machines: Sequence[Inputs | None]) -> list[str]:
        """Write a line for each item whose outcome on one of the machines is cached; name them."""
        known: list[str] = []
        for item in self.items.values():
            content = self._cached(item, machines)
            if content is not None and not self._needs_a_bundle(content):
                self._write(item.id, content, "cache")
                known.append(item.id)
        self.done = len(known)
        return known

    def _cached(self, item: CheckItem, machines: Sequence[Inputs | None]) -> bytes | None:
        for inputs in machines:
            if self.work.cache and inputs:
                content = self.work.cache.get(key_of(inputs.of(item)))
                if content is not None:
                    return content
        return None

    def _unreached(self, left: Plan[CheckItem]) -> list[str]:
        """Write a line for each check that enters nothing of its mutant's change; name them."""
        if self.work.is_whole:
            return []
        from ckpt_conformance.cli.remote import checks as remote
        from ckpt_conformance.cli.unreached import Recorder

        self.progress.begin("which functions each check enters", "recording")
        recorder = Recorder(self.options, self.work.cache, self.inputs, self.progress)
        outcomes = recorder.outcomes(left.items)
        self.progress.begin(self.what, "starting")
        for item, outcome in outcomes.items():
            self._write(item, remote.encode(outcome), "unreached")
        self.done += len(outcomes)
        return list(outcomes)

    def _needs_a_bundle(self, content: bytes) -> bool:
        """Return whether an outcome is a violation of which a bundle is to be kept: it must run."""
        bad = {Verdict.VIOLATION, Verdict.NOT_MET}
        return self.options.out is not None and _outcome(content).verdict in bad

    def _seen(self, adapter: str) -> Seen:
        """Return what results of an adapter depend on that were found here."""
        from ckpt_conformance.plugin import openings

        if not self.notes_opened or self.server is None:
            return openings.Seen()
        return openings.of_adapter(self.server, adapter, self.options.adapters)

    def _keep(
        self, outcome: CheckOutcome, inputs: Inputs | None = None, seen: Seen | None = None
    ) -> None:
        """Write an outcome as it comes; what may be the machine's doing is not cached.

        Nor is what depends on something that cannot be held against what is there later.
        """
        from ckpt_conformance.cli.remote import checks as remote

        name, content = remote.item_of(outcome), remote.encode(outcome)
        self._write(name, content, "run")
        if seen and seen.opened:
            self.opened[outcome.adapter] |= seen.opened
        item = self.items.get(name)
        if item and self.work.cache and inputs and outcome.verdict is not Verdict.UNKNOWN:
            if seen and seen.why_not:
                self.not_kept[name] = seen.why_not
            else:
                self.work.cache.put(inputs.of(item), content, seen.opened if seen else {})

    def _write(self, item: str, content: bytes, origin: Origin) -> None:
        self.writer.write(Line(item=item, origin=origin, result=msgspec.Raw(content)))


class _Workers:
    """The machines of a cluster, as its workers described them."""

    def __init__(self, facts: Mapping[str, msgspec.Raw], inputs: Inputs | None) -> None:
        self._raw, self._inputs = facts, inputs
        self._machines: dict[str, Inputs] = {}  # by a digest of the machine
        self._of: dict[str, Inputs] = {}  # by worker

    def seen(self) -> dict[str, Seen]:
        """Return what the descriptions of adapters depend on that `infos` gives."""
        return next(iter(self._facts().values())).seen

    def environment(self) -> dict[str, str | int | None]:
        from ckpt_conformance.cli.remote import checks as remote

        return remote.together(facts.environment for facts in self._facts().values())

    def infos(self) -> dict[str, AdapterInfo]:
        return next(iter(self._facts().values())).infos

    def inputs(self) -> list[Inputs | None]:
        """Return what results depend on, for each kind of machine that is there."""
        for worker in self._raw:
            self.inputs_of(worker)
        return list(self._machines.values())

    def inputs_of(self, worker: str) -> Inputs | None:
        """Return what the results of one worker depend on; None without a cache."""
        if self._inputs is None or worker not in self._raw:
            return None
        if worker not in self._of:
            machine = self._facts()[worker].machine
            inputs = replace(self._inputs, machine=machine)
            self._of[worker] = self._machines.setdefault(key_of(machine), inputs)
        return self._of[worker]

    def _facts(self) -> dict[str, Facts]:
        from ckpt_conformance.cli.remote import checks as remote

        return {
            worker: msgspec.json.decode(raw, type=remote.Facts) for worker, raw in self._raw.items()
        }


def session_of(results: Results) -> Session:
    """Read the session of some results: here, or of shards from elsewhere."""
    session = Session(results.header, {}, defaultdict(list), interrupted=not results.ended)
    for name, fact in results.facts.items():
        session.infos[name] = AdapterInfo(**msgspec.json.decode(fact))
    order = {item: number for number, item in enumerate(results.header.items)}
    last = len(order)
    for line in sorted(results.results.values(), key=lambda line: order.get(line.item, last)):
        outcome = _outcome(line.result)  # in the plan's order, whoever found it first
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


def _outcome(content: bytes | msgspec.Raw) -> CheckOutcome:
    return CheckOutcome.from_message(msgspec.json.decode(content))
