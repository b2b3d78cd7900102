"""`mutants --generated`: every small change of the reference manager, and the check that sees it.

All mutants are judged by one fork server in this process. Several processes are several shards.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from ckpt_conformance.cli import parts
from ckpt_conformance.cli.generated.first_kills import OF_TRAINER, Reach, Search
from ckpt_conformance.cli.sessions import Progress, Work
from ckpt_conformance.cli.stopping import INTERRUPTED
from ckpt_conformance.cli.unreached import Recorder
from ckpt_conformance.contract.registry import GENERATED
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.harness.client import ServerError
from ckpt_conformance.mutants import TRAINER, generated
from ckpt_conformance.report import environment, files, survivors, terminal
from ckpt_conformance.report.generated import Fate, Judged, table_of
from ckpt_conformance.report.result import encode
from ckpt_conformance.report.survivors import Class
from ckpt_conformance.work.cache import key_of
from ckpt_conformance.work.items import Item, Plan
from ckpt_conformance.work.lines import Line, Results, Writer, gather

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.cli.unreached import Recorded
    from ckpt_conformance.harness.client import Server
    from ckpt_conformance.mutants.generated import Mutant
    from ckpt_conformance.plugin.options import SessionOptions
    from ckpt_conformance.plugin.plan import CheckItem
    from ckpt_conformance.work.cache import KeyParts
    from ckpt_conformance.work.lines import Origin

COMMAND = "generated mutants"
GENERATORS = "ckpt_conformance.mutants.generated"
DEADLINE = 20.0  # seconds that a child has: those of the quick budget take two at most
IN_A_SESSION = 100  # mutants: a session keeps all its outcomes in memory
# The unbroken managers on which it is recorded what each check enters, by the name of the base.
UNBROKEN = {
    "reference": "mutant:unbroken-reference",
    "reference-dcp": "mutant:unbroken-reference-dcp",
    TRAINER: TRAINER,
}
ON_RANKS = {f"{name}{generated.WITH_RANKS}": name for name in UNBROKEN if name != TRAINER}
PROFILE_OF_RANKS = "distributed"


@dataclass(frozen=True)
class Request:
    """Which mutants are asked for, in the words of the command line."""

    only: tuple[str, ...] = ()  # patterns of names, as a shell has them
    sample: int | None = None
    seed: int = 0
    ranks: bool = False  # by jobs of several ranks; by default those of their modules alone
    whole: bool = False  # ask each check on all bases at once

    def to_plain(self) -> dict[str, Any]:
        """Turn it into what a file of results says of it."""
        return asdict(self) | {"only": list(self.only)}

    def mutants(self) -> list[Mutant]:
        """Return the mutants, in their order; raises RequestError for a pattern without any."""
        of_all = self.ranks and self.only  # who names some means these, of whatever module
        made = generated.all_generated().values()
        every = [one for one in made if of_all or one.spans_ranks is self.ranks]
        for pattern in self.only:
            if not any(fnmatch.fnmatchcase(one.name, pattern) for one in every):
                raise RequestError(
                    f"--only {pattern!r} names no generated mutant; a pattern such as 'saving.*' "
                    "or '*:swap:*' does, and --list prints their names"
                )
        chosen = [one for one in every if not self.only or _matches(one, self.only)]
        if self.sample is None or self.sample >= len(chosen):
            return chosen
        names = random.Random(self.seed).sample([one.name for one in chosen], self.sample)  # noqa: S311  no secret
        return [one for one in chosen if one.name in set(names)]

    def bases(self, mutants: Sequence[Mutant]) -> Mapping[str, str]:
        """Return the unbroken managers that judge mutants, by the name of the base."""
        if self.ranks:
            return ON_RANKS
        asks_trainer = any(one.module == OF_TRAINER for one in mutants)
        return {name: UNBROKEN[name] for name in UNBROKEN if asks_trainer or name != TRAINER}

    def options(self, adapters: Iterable[str]) -> SessionOptions:
        """Ask for the checks that judge them, on some adapters."""
        from ckpt_conformance.plugin.options import SessionOptions

        profiles = (PROFILE_OF_RANKS,) if self.ranks else ()
        return SessionOptions(
            adapters=tuple(adapters), profiles=profiles, seed=self.seed, deadline=DEADLINE
        )


def _matches(mutant: Mutant, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(mutant.name, pattern) for pattern in patterns)


def plan_of(mutants: Sequence[Mutant]) -> Plan[Item]:
    """Plan mutants: one item for each, by its name."""
    return Plan(tuple(Item(id=one.name, group=one.name, family=one.module) for one in mutants))


@dataclass
class Run:
    """One run: what is known is taken from the cache, the rest is asked of the checks."""

    request: Request
    work: Work
    writer: Writer
    progress: Progress
    done: int = 0
    killed: int = 0
    hints: dict[str, str] = field(default_factory=dict[str, str])
    passed_over: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        """Plan; read what results depend on, where they are kept."""
        from ckpt_conformance.plugin import depends

        whole = self.request.mutants()
        self.whole = plan_of(whole)
        chosen = {item.id for item in self.whole.shard(self.work.shard).items}
        self.mutants = [one for one in whole if one.name in chosen]
        self.options = self.request.options(["reference"])
        scratch = environment.filesystem_type(Path(tempfile.gettempdir()))
        self.inputs = depends.inputs(self.options, scratch) if self.work.cache else None

    def run(self) -> None:
        """Judge every mutant of the shard; each is written as it is known."""
        self.writer.write(
            parts.header(
                COMMAND,
                self.request.to_plain(),
                plan=self.whole.digest,
                shard=self.work.shard,
                items=[one.name for one in self.mutants],
            )
        )
        self._pass_over()
        left = [one for one in self.mutants if one.name not in self.passed_over]
        left = [one for one in left if not self._is_known(one)]
        random.Random(self.request.seed).shuffle(left)  # noqa: S311  so a part of a run is a sample
        for is_of_trainer in (False, True):  # what asks on one base more comes last
            some = [one for one in left if (one.module == OF_TRAINER) is is_of_trainer]
            if some:
                self._judge(some, self.request.bases(some))

    def _pass_over(self) -> None:
        """Write the fate of what need not be asked about: equivalent, or nothing that runs."""
        known = {} if self.request.whole else survivors.by_name()
        for one in self.mutants:
            said = known.get(one.name)
            if said and said.kind is Class.EQUIVALENT and said.confirmed:
                self._write(Judged(mutant=one.name, fate=Fate.EQUIVALENT), "cache")
            elif not compiles(one.name):
                self._write(Judged(mutant=one.name, fate=Fate.SENSELESS), "run")
            else:
                continue
            self.passed_over.add(one.name)

    def _judge(self, left: Sequence[Mutant], bases: Mapping[str, str]) -> None:
        from ckpt_conformance.harness.client import Server
        from ckpt_conformance.plugin.session import scratch_folder
        from ckpt_conformance.plugin.trials import run_trials

        reach = Reach(self._recorded(bases.values()), bases)
        same = (f"{GENERATED}{generated.SAME}@{base}" for base in bases)
        self.progress.begin(COMMAND, "starting")
        with Server((*bases.values(), *same)) as server, scratch_folder() as scratch:
            options = self.request.options(bases.values())
            asked = replace(options, server=server.socket, scratch=scratch)
            search = Search(
                *(reach, self._keep, lambda: cpu_of(server)), self.request.whole, self.hints
            )
            for at in range(0, len(left), IN_A_SESSION):
                run_trials(search.trials(left[at : at + IN_A_SESSION]), asked)

    def _recorded(self, adapters: Iterable[str]) -> dict[CheckItem, Recorded]:
        """Return what the checks run of the unbroken managers."""
        from ckpt_conformance.plugin.plan import plan_of as checks_of

        found: dict[CheckItem, Recorded] = {}
        for name in adapters:  # one by one: what is recorded is kept
            self.progress.begin(f"which statements of {name} each check runs", "recording")
            options = self.request.options([name])
            recorder = Recorder(
                options, self.work.cache, self.inputs, self.progress, statements=True
            )
            found |= recorder.recorded(checks_of(options).items)
        return found

    def _keep(self, judged: Judged) -> None:
        self._write(judged, "run")
        if self.work.cache and self.inputs:
            content = msgspec.json.encode(judged)
            if judged.fate is not Fate.UNKNOWN:
                self.work.cache.put(self._inputs_of(judged.mutant), content)
            if judged.check:
                self.work.cache.put(_hint(judged.mutant), msgspec.json.encode(judged.check))

    def _is_known(self, mutant: Mutant) -> bool:
        """Take what is known of a mutant from the cache, if it is; else the check to ask first."""
        cache, inputs = self.work.cache, self.inputs
        if cache is None or inputs is None:
            return False
        content = cache.get(key_of(self._inputs_of(mutant.name)))
        if content is not None:
            self._write(msgspec.json.decode(content, type=Judged), "cache")
        elif (hint := cache.get(key_of(_hint(mutant.name)))) is not None:
            self.hints[mutant.name] = msgspec.json.decode(hint, type=str)
        return content is not None

    def _inputs_of(self, mutant: str) -> KeyParts:
        """Return what the fate of a mutant depends on: all suites, and the reference manager."""
        return self._common | {"generated": mutant}

    @functools.cached_property
    def _common(self) -> KeyParts:
        from ckpt_conformance.plugin.plan import plan_of as checks_of

        inputs = self.inputs
        if inputs is None:
            raise TypeError("without a cache nothing is looked up")
        checks = checks_of(self.request.options(["reference"])).items
        suites = {item.check.module for item in checks}
        modules = inputs.modules_of("reference", *suites, GENERATORS)
        return inputs.of_other(
            "reference",
            {
                "checks": sorted(item.check.key for item in checks),
                "all sources": inputs.tree.digest(modules),
                "seed": self.options.seed,
                "deadline": self.options.deadline,
                "whole": self.request.whole,
            },
        )

    def _write(self, judged: Judged, origin: Origin) -> None:
        result = msgspec.Raw(msgspec.json.encode(judged))
        self.writer.write(Line(item=judged.mutant, origin=origin, result=result))
        self.done += 1
        self.killed += judged.fate in (Fate.MUST, Fate.SHOULD)
        self.progress.update(self.done, len(self.mutants), f"{self.killed} killed")


def compiles(name: str) -> bool:
    """Return whether the changed text of a mutant is Python at all."""
    try:
        compile(generated.changed_text(name), name, "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def cpu_of(server: Server) -> float:
    """Return the core-seconds of this process, of a server, and of its children so far.

    Raises ServerError where the server has ended.
    """
    if server.process.poll() is not None:
        raise ServerError("the fork server went away")
    text = Path(f"/proc/{server.process.pid}/stat").read_text(encoding="utf-8")
    ticks = sum(map(int, text.rpartition(")")[2].split()[11:15]))  # its own, and of the reaped
    return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()


def _hint(mutant: str) -> KeyParts:
    """Name the entry of the check that has killed a mutant last, whatever has changed since."""
    return {"generated": mutant, "killed by": "last"}


def run(request: Request, work: Work) -> Results:
    """Judge the mutants of a request, or its part; return what is known of them.

    Raises RequestError for what cannot be asked, ServerError where the fork server ends.
    """
    writer = Writer(work.results)
    with contextlib.suppress(KeyboardInterrupt), writer, Progress(COMMAND) as progress:
        Run(request, work, writer, progress).run()
    return gather(writer.lines)


def deliver(results: Results, *, as_json: bool) -> int:
    """Print the table of some results; return the exit status.

    It is 1 where a mutant is left of which nobody has said why.
    """
    every = generated.all_generated()
    judged = [
        msgspec.json.decode(line.result, type=Judged)
        for line in results.results.values()
        if line.item in every
    ]
    table = table_of(
        judged,
        every,
        ranks=bool(results.header.request["ranks"]),
        undone=len(results.undone),
        interrupted=not results.ended,
    )
    if as_json:
        typer.echo(json.dumps(encode(table), indent=2))
    else:
        files.show("generated.txt.j2", table=table)
    if table.interrupted:
        return INTERRUPTED
    return int(bool(table.unread) or bool(table.undone))


def command(request: Request, work: Work, *, as_json: bool) -> int:
    """Do what `mutants --generated` asks for; return the exit status."""
    results = run(request, work)
    if work.shard.count > 1:
        say_part(results, work)
        return INTERRUPTED if not results.ended else 0
    return deliver(results, as_json=as_json)


def say_part(results: Results, work: Work) -> None:
    """Say what a shard found, and what to do with it."""
    lines = results.results.values()
    fates = Counter(msgspec.json.decode(line.result, type=Judged).fate for line in lines)
    found = ", ".join(f"{number} {fate}" for fate, number in sorted(fates.items()))
    files.say(f"shard {work.shard}: {terminal.count(len(results.results), 'mutant')} ({found})")
    files.say(parts.complete(work.results) if results.ended else parts.stopped(work.results))


def say_names(request: Request) -> None:
    """Print the mutants of a request, each with its change."""
    for one in request.mutants():
        typer.echo(f"{one.name}  line {one.line}: {shorter(one.before)}  ->  {shorter(one.after)}")


def shorter(text: str, limit: int = 90) -> str:
    """Cut a line of Python that is too long for a list."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
