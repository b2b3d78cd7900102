"""`explore` in parts: its plan, the lines that a part writes, and one report of all of them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_conformance.cli import parts
from ckpt_conformance.cli.recordings import SCRIPT
from ckpt_conformance.cli.stopping import INTERRUPTED
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown
from ckpt_conformance.report import exploration, files
from ckpt_conformance.work import lines
from ckpt_conformance.work.items import Item, Plan, Shard

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.cli.explore import Run
    from ckpt_conformance.cli.states_found import Found
    from ckpt_conformance.crash.explore.evidence import Basis, Evidence, Known, Notebook
    from ckpt_conformance.crash.explore.exploration import BaseExplorer, Violation
    from ckpt_conformance.report.certificate import Json
    from ckpt_conformance.work.identity import Identity

COMMAND = "explore"
BATCHES = {"quick": 16, "full": 256}  # of a workload, by budget
ABOUT = "about"  # the subject of the fact that says what was explored
SHRUNK = "shrunk"


class Request(msgspec.Struct, frozen=True):
    """What was asked for, as far as results depend on it."""

    explored: list[str]  # an adapter, or the words of a command
    model: list[str]
    workload: list[str]
    budget: str
    seed: int
    options: dict[str, Any] = {}  # of a command

    @property
    def asked(self) -> exploration.Asked:
        """The same, as `result.json` says it."""
        workloads = [] if self.workload == [SCRIPT] else self.workload
        return exploration.Asked(self.seed, self.budget, self.model, workloads)


def request_of(
    asked: exploration.Asked, explored: Sequence[str], options: Mapping[str, Any]
) -> Request:
    """Return a request; a command has one workload."""
    workloads = list(asked.workloads) or [SCRIPT]
    models = list(asked.models)
    return Request(list(explored), models, workloads, asked.budget, asked.seed, dict(options))


class BatchItem(Item, frozen=True, kw_only=True):
    """A batch of the crash states of a workload; `number` counts from 0."""

    workload: str
    number: int


def plan_of(request: Request) -> Plan[BatchItem]:
    """Plan the batches of each workload; how many states are in one shows when it is recorded."""
    count = BATCHES[request.budget]
    return Plan(
        tuple(
            BatchItem(id=name, group=name, workload=workload, number=number)
            for workload in request.workload
            for number in range(count)
            for name in [f"{workload} {number + 1}/{count}"]
        )
    )


def share_of(plan: Plan[BatchItem], shard: Shard) -> Plan[BatchItem]:
    """Return one part of neighbours: so most shards record one workload, and not each of them."""
    count = len(plan.items)
    first, stop = (count * number // shard.count for number in (shard.number - 1, shard.number))
    return plan.only(item.id for item in plan.items[first:stop])


@dataclass
class Part:
    """The part of an exploration that runs here, and the file that its lines go to."""

    request: Request
    shard: Shard
    writer: lines.Writer
    depends: Identity | None = None
    items: dict[str, dict[int, str]] = field(default_factory=dict[str, dict[int, str]])
    found: Found | None = None  # where evidence is found beside here, and is kept

    @property
    def is_whole(self) -> bool:
        """Whether there is no other part."""
        return self.shard.count == 1

    def begin(self) -> None:
        """Write the header, and find the batches by workload and number."""
        whole = plan_of(self.request)
        mine = share_of(whole, self.shard)
        for item in mine.items:
            self.items.setdefault(item.workload, {})[item.number] = item.id
        self.writer.write(
            parts.header(
                COMMAND,
                msgspec.to_builtins(self.request),
                plan=whole.digest,
                shard=self.shard,
                items=[item.id for item in mine.items],
                depends=self.depends,
            )
        )

    def notebook(self, explorer: BaseExplorer, workload: str) -> Notebook:
        """Return what writes down the exploration of a workload."""
        from ckpt_conformance.crash.explore.evidence import Notebook, to_json

        mine = self.items.get(workload, {})
        notebook = Notebook(explorer, mine, BATCHES[self.request.budget], self.write)

        def write_basis(basis: Basis) -> None:
            subject = f"{workload} {basis.digest}"
            self.writer.write(lines.Fact(subject=subject, fact=msgspec.Raw(to_json(basis))))

        notebook.on_basis = write_basis
        if self.found:
            notebook.elsewhere, notebook.on_found = self.found.elsewhere, self.found.keep
        return notebook

    def write(self, item: str, evidence: Evidence) -> None:
        """Write what came of an item."""
        from ckpt_conformance.crash.explore.evidence import to_json

        origin: lines.Origin = "cache" if self.found and item in self.found.known else "run"
        content = msgspec.Raw(to_json(evidence))
        self.writer.write(lines.Line(item=item, origin=origin, result=content))

    def finish(self, notebook: Notebook, workload: str) -> None:
        """Write what came after the batches of a workload."""
        notebook.finish(f"{workload} {SHRUNK} {self.shard}")

    def give_up(self, workload: str, error: NotApplicable | Unknown) -> None:
        """Write why nothing of a workload can be explored."""
        from ckpt_conformance.crash.explore.evidence import Evidence

        if isinstance(error, NotApplicable):
            evidence = Evidence(not_applicable=str(error))
        else:
            evidence = Evidence(failed=str(error))
        for item in self.items.get(workload, {}).values():
            self.write(item, evidence)

    def describe(self, about: Json) -> None:
        """Write what was explored."""
        fact = msgspec.json.encode(about)
        self.writer.write(lines.Fact(subject=ABOUT, fact=msgspec.Raw(fact)))


@contextlib.contextmanager
def writing(part: Part | None, run: Run) -> Generator[None]:
    """Write the lines of a part, from its header to how it ended."""
    if part is None:
        yield
        return
    with contextlib.suppress(KeyboardInterrupt), part.writer:
        part.begin()
        yield
        if run.findings.interrupted:
            raise KeyboardInterrupt


def say_part(run: Run, part: Part, results: Path) -> int:
    """Say what a part found, and what to do with it; return the exit status."""
    count = sum(map(len, part.items.values()))
    tried = sum(result.recovered for result in run.explorations)
    classes = sum(len(result.classes()) for result in run.explorations)
    found = files.count(classes, "finding") if classes else "no finding"
    files.say(
        f"shard {part.shard}: {count} batches, {files.count(tried, 'run')} of recovery, {found}"
    )
    for line in run.findings.unknown:
        files.say(f"? unknown  {line}")
    if run.findings.interrupted:
        files.say(parts.stopped(results))
        return INTERRUPTED
    files.say(parts.complete(results))
    return 0


# ---- one report of all parts ---------------------------------------------------------------------


def combine(whole: lines.Results, paths: Sequence[Path], out: Path) -> int:
    """Make the report of all parts below `out`; return the exit status.

    Raises LinesError for lines that are no evidence, RequestError for those of another suite.
    """
    request = _request(whole.header)
    exploration.prepare(out)
    report = _Report(whole, request, paths, out)
    for workload in request.workload:
        report.add(workload)
    report.say_lacking()
    return report.finish()


def _request(header: lines.Header) -> Request:
    """Read what was asked for; raises RequestError if the suite here plans something else."""
    with contextlib.suppress(msgspec.ValidationError, KeyError):
        request = msgspec.convert(header.request, Request)
        if plan_of(request).digest == header.plan:
            return request
    raise RequestError(
        f"these results were planned by another version of the suite ({header.version}, "
        f"commit {header.commit}); combine them with that one"
    )


class _Report:
    """Puts the parts of an exploration together."""

    def __init__(
        self, whole: lines.Results, request: Request, paths: Sequence[Path], out: Path
    ) -> None:
        from ckpt_conformance.cli.explore import Run
        from ckpt_conformance.crash.explore.exploration import Limits

        self.whole, self.request, self.paths = whole, request, paths
        self.run = Run(request.asked, Limits(), out, keep=False)
        header = whole.header
        self.run.findings.made = exploration.Made(
            header.version, header.commit, header.created, header.environment
        )

    def add(self, workload: str) -> None:
        """Explore one workload from its evidence; each recording of it on its own."""
        from ckpt_conformance.crash.explore.evidence import Basis

        findings, lines_of = self.run.findings, dict(self._evidence(workload))
        evidence, name = lines_of.values(), self._name(workload)
        failed = dict.fromkeys(f"{name}: {part.failed}" for part in evidence if part.failed)
        unfit = dict.fromkeys(
            f"{name}: {part.not_applicable}" for part in evidence if part.not_applicable
        )
        findings.unknown += failed
        findings.not_applicable += unfit
        bases = [
            _decoded(fact, Basis, subject)
            for subject, fact in self.whole.facts.items()
            if subject.rpartition(" ")[0] == workload
        ]
        if len(bases) > 1:
            findings.unknown.append(_recordings_differ(name, len(bases)))
        elif not bases and not failed and not unfit:
            findings.unknown.append(f"{name}: nothing of it was explored{self._why()}")
        for basis in bases:
            self._explore(basis, {k: v for k, v in lines_of.items() if v.basis == basis.digest})

    def say_lacking(self) -> None:
        """Note the batches of which nothing is known, also where no state of theirs was chosen."""
        lacking = len(self.whole.undone) if self.whole.stopped else 0
        if self.whole.missing or lacking:
            self.run.findings.unknown.append(f"not all parts are there{self._why()}")

    def _evidence(self, workload: str) -> Iterator[tuple[str, Evidence]]:
        """Yield the lines of a workload by item: batches in order, then what came after them."""
        from ckpt_conformance.crash.explore.evidence import Evidence

        count = BATCHES[self.request.budget]
        names = [f"{workload} {number + 1}/{count}" for number in range(count)]
        names += sorted(
            name for name in self.whole.results if name.startswith(f"{workload} {SHRUNK} ")
        )
        for name in names:
            line = self.whole.results.get(name)
            if line is not None:
                yield name, _decoded(line.result, Evidence, name)

    def _name(self, workload: str) -> str:
        """Return what people call a workload: that of a command has the name of the script."""
        about = self._about().get("script", {})
        return str(about.get("name", workload)) if workload == SCRIPT else workload

    def _explore(self, basis: Basis, evidence: Mapping[str, Evidence]) -> None:
        """Explore one recording of a workload; `evidence` is by item."""
        from ckpt_conformance.crash.explore import exploration as engine
        from ckpt_conformance.crash.explore.evidence import Known

        known = Known(basis, list(evidence.values()))
        engine.run(known, self.request.model)
        known.conclude()
        batches = sum(f" {SHRUNK} " not in name for name in evidence)
        if known.unvisited and batches < BATCHES[self.request.budget]:
            known.unknown(
                f"{known.unvisited} of {files.count(len(basis.chosen), 'chosen state')} were not "
                f"visited{self._why()}"
            )
            known.result.interrupted = not self.whole.ended
        findings = self.run.findings
        findings.notes += [note for note in basis.notes if note not in findings.notes]
        findings.without_a_crash += basis.without_a_crash
        self.run.take(known, self._copy_bundle)
        findings.interrupted = False  # who combines has stopped nothing

    def _why(self) -> str:
        """Say why something may not be there."""
        missing = [f"missing {', '.join(self.whole.missing)}"] if self.whole.missing else []
        stopped = [] if self.whole.ended else ["a shard was stopped"]
        why = "; ".join([*missing, *stopped])
        return f": {why}" if why else ""

    def _copy_bundle(self, folder: Path, known: Known, violation: Violation) -> Path | None:
        """Copy the bundle of a violation from beside the results of the shard that kept it."""
        from ckpt_conformance.crash.explore import bundles

        for source in self._kept():
            if bundles.is_of(source, violation):
                return bundles.adopt(source, folder, known.result.workload, violation)
        line = (
            f"no bundle of {violation.outcome} under {violation.case.model} is beside the results"
        )
        self.run.findings.notes.append(line)
        return None

    def _kept(self) -> Iterator[Path]:
        """Yield the bundles beside the results."""
        for folder in dict.fromkeys(path.parent / "bundles" for path in self.paths):
            yield from sorted(path.parent for path in folder.glob("*/violation.json"))
            yield from sorted(path.parent for path in folder.glob("*/*/violation.json"))

    def _about(self) -> Json:
        about: Json = msgspec.json.decode(self.whole.facts.get(ABOUT, b"{}"))
        return about

    def finish(self) -> int:
        """Write and print the report; return the exit status."""
        return self.run.finish(self._about())


def _recordings_differ(workload: str, count: int) -> str:
    return (
        f"{workload}: the shards recorded {count} different saves, so none was explored whole: "
        "names or bytes of this manager are new each time, or the machines differ. Record once, "
        "with explore --record DIR, and explore that in each shard, with --recording DIR"
    )


def _decoded(content: msgspec.Raw, kind: type[Any], name: str) -> Any:  # noqa: ANN401
    from ckpt_conformance.crash.explore.evidence import from_json

    try:
        return from_json(content, kind)
    except ValueError as error:
        raise lines.LinesError(f"the line of {name!r} holds no evidence: {error}") from error


def bundles_of(out: Path, shard: Shard) -> Path:
    """Return the folder of the bundles that a shard keeps: others may use the same `--out`."""
    folder = out / "bundles"
    return folder if shard.count == 1 else folder / f"shard-{shard.number}-of-{shard.count}"
