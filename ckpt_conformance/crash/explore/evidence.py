"""What an exploration rests on, as messages, so that parts of it can run apart and be put together.

A `Basis` is what all parts of one workload have in common: the operations, the states that the
models allow, and which of them are chosen. `Evidence` is what the recoveries of one part came to.
`Known` is an explorer that recovers from nothing: it looks the recoveries up. So a report of parts
is made by the code that makes the report of one run.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from ckpt_conformance.contract.verdicts import Cause, Unknown
from ckpt_conformance.crash.explore.exploration import BaseExplorer, Case, Limits, nothing, shape_of
from ckpt_conformance.crash.explore.judging import Recovery, Version
from ckpt_conformance.trace.operations import Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from ckpt_conformance.crash.model.states import State

Kind = TypeVar("Kind")


class Basis(msgspec.Struct, frozen=True):
    """What every part of one workload's exploration must have in common.

    `recording` is the text of `recording.json`. `models` has, for each state that a model lists,
    the index of its content in `contents`; `chosen` are the indices of those to recover from, in
    order. `places` are words for the versions of a script; `notes` and `without_a_crash` are what
    was found out about it before the first crash.
    """

    workload: str
    recording: str
    versions: tuple[Version, ...]
    contents: tuple[str, ...]
    models: dict[str, tuple[int, ...]]
    chosen: tuple[int, ...]
    limits: Limits
    seed: int
    strict: bool = False
    places: dict[int, str] = {}
    notes: tuple[str, ...] = ()
    without_a_crash: tuple[str, ...] = ()

    @property
    def chosen_contents(self) -> list[str]:
        """The contents to recover from, in order."""
        return [self.contents[number] for number in self.chosen]

    @property
    def digest(self) -> str:
        """A name for the states and what is promised in them: evidence of another one is apart."""
        operations = Recording.parse(self.recording, Path()).operations
        calls = [(str(op.kind), op.path, op.target, op.offset, op.size) for op in operations]
        parts = (calls, self.versions, self.contents, self.models, self.chosen, self.limits)
        return hashlib.blake2b(repr((*parts, self.seed)).encode(), digest_size=16).hexdigest()


class Doubt(msgspec.Struct, frozen=True):
    """An `Unknown` as a message."""

    reason: str
    cause: Cause
    see: str = ""

    @classmethod
    def of(cls, unknown: Unknown) -> Doubt:
        """Write an exception down."""
        return cls(unknown.reason, unknown.cause, unknown.see)

    @property
    def unknown(self) -> Unknown:
        """The exception that it was."""
        return Unknown(self.reason, cause=self.cause, see=self.see)


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one part came to; `basis` is the digest of what it rests on.

    `free` are contents that cost no visit of their own. `made_up` names the contents of states that
    were made to shrink a violation. `left` are contents that a killed process left, with the crash
    point. `not_applicable` and `failed` say why there is no more than that.
    """

    basis: str = ""
    recoveries: dict[str, Recovery] = {}
    used: dict[str, str] = {}
    free: tuple[str, ...] = ()
    made_up: dict[str, str] = {}
    left: tuple[tuple[str, int], ...] = ()
    doubts: tuple[Doubt, ...] = ()
    seconds: float = 0.0
    batch_seconds: float = 0.0
    not_applicable: str = ""
    failed: str = ""


def to_json(message: msgspec.Struct) -> bytes:
    """Write a message, as JSON that stands in a line of results.

    A manager's own names may hold lone surrogates, which are in no valid JSON: then it is a text,
    which holds the JSON that Python's own `json` writes.
    """
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        return json.dumps(json.dumps(msgspec.to_builtins(message))).encode()


def from_json(content: bytes | msgspec.Raw, kind: type[Kind]) -> Kind:
    """Read a message; raises ValueError (msgspec.ValidationError) if it is of another kind."""
    plain = json.loads(bytes(content))
    plain = json.loads(plain) if isinstance(plain, str) else plain
    return msgspec.convert(plain, kind, str_keys=True)


def basis_of(explorer: BaseExplorer, chosen: Sequence[Case]) -> Basis:
    """Return the basis of an exploration whose states are listed and chosen."""
    numbers: dict[str, int] = {}
    models = {
        name: tuple(numbers.setdefault(case.content, len(numbers)) for case in cases)
        for name, cases in explorer.cases.items()
    }
    return Basis(
        workload=explorer.result.workload,
        recording=explorer.recording.text,
        versions=tuple(explorer.versions),
        contents=tuple(numbers),
        models=models,
        chosen=tuple(dict.fromkeys(numbers[case.content] for case in chosen)),
        limits=replace(explorer.limits, jobs=1),  # each part has its own
        seed=explorer.seed,
        strict=explorer.result.strict,
    )


def batches_of(contents: Sequence[str], chunk: int, count: int) -> list[list[str]]:
    """Cut contents into `count` batches of neighbours; a chunk is never cut, a batch may be empty.

    Any run of batches holds its share of the chunks, however few there are.
    """
    batches: list[list[str]] = [[] for _ in range(count)]
    chunks = -(-len(contents) // chunk)
    for number in range(chunks):
        at = (2 * number + 1) * count // (2 * chunks)
        batches[at] += contents[number * chunk : (number + 1) * chunk]
    return batches


def adopt(explorer: BaseExplorer, evidence: Evidence) -> None:
    """Take recoveries that were made elsewhere, as if they had been made here; not the doubts."""
    result = explorer.result
    for content, recovery in evidence.recoveries.items():
        result.recoveries[content] = recovery
        result.recovered += content not in evidence.free
    result.used |= evidence.used
    result.seconds += evidence.seconds
    result.batch_seconds += evidence.batch_seconds


class Batches(Protocol):
    """Where evidence of batches may come from, beside here; without an entry it is found here.

    Takes the basis and the contents of batches by id; gives evidence of some of them, in any order.
    """

    def __call__(
        self, basis: Basis, batches: Mapping[str, Sequence[str]]
    ) -> Iterable[tuple[str, Evidence]]:
        """Find what is known, or can be found out, elsewhere."""
        ...


class Notebook:
    """Takes an exploration's share of the states, and writes down what comes of each batch.

    `mine` are the ids of its batches by their number, of `count`; `write` takes evidence by id.
    `elsewhere` gives evidence that needs no recovery here, `on_found` takes what was found here.
    """

    def __init__(
        self,
        explorer: BaseExplorer,
        mine: Mapping[int, str],
        count: int,
        write: Callable[[str, Evidence], None],
    ) -> None:
        """Write nothing yet."""
        self.explorer, self.mine, self.count, self.write = explorer, mine, count, write
        self.on_basis: Callable[[Basis], None] = nothing
        self.complete: Callable[[Basis], Basis] = lambda basis: basis
        self.elsewhere: Batches = _nowhere
        self.on_found: Callable[[Basis, Sequence[str], Evidence], None] = nothing
        self.basis = ""
        self.free: set[str] = set()
        self._left: dict[str, set[str]] = {}  # contents by id, of batches that are not done
        self._batches: dict[str, list[str]] = {}
        self._written: set[str] = set()
        self._basis: Basis | None = None  # once recoveries may begin here
        self._doubts = self._doubts_before = 0
        self._seconds = self._batch_seconds = 0.0

    def share(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases of the batches that are recovered from here."""
        basis = self.complete(basis_of(self.explorer, cases))
        self.basis = basis.digest
        self.on_basis(basis)
        batches = batches_of(basis.chosen_contents, self.explorer.chunk, self.count)
        self._batches = {name: batches[number] for number, name in self.mine.items()}
        self._left = {name: set(contents) for name, contents in self._batches.items()}
        self._take(())  # what is empty is done
        self._take_from_elsewhere(basis)
        self._basis = basis
        self._doubts_before = len(self.explorer.result.doubts)
        self.explorer.on_recovered = self._take
        mine = {content for contents in self._left.values() for content in contents}
        return [case for case in cases if case.content in mine]

    def _take_from_elsewhere(self, basis: Basis) -> None:
        """Take evidence that others have; doubts in the order of batches, whoever was first."""
        waiting = {name: self._batches[name] for name in self._left}
        total = sum(map(len, waiting.values()))
        begun, done = time.monotonic(), 0
        doubts: dict[str, tuple[Doubt, ...]] = {}
        try:
            for name, evidence in self.elsewhere(basis, waiting):
                adopt(self.explorer, evidence)
                self.write(name, evidence)
                doubts[name] = evidence.doubts
                self._written.update(self._left.pop(name))
                done += len(waiting[name])
                self.explorer.on_progress(done, total, time.monotonic() - begun)
        finally:
            for name in waiting:
                for doubt in doubts.get(name, ()):
                    self.explorer.unknown(doubt.unknown)
            result = self.explorer.result
            self._doubts = len(result.doubts)
            self._seconds, self._batch_seconds = result.seconds, result.batch_seconds

    def _take(self, cases: Sequence[Case]) -> None:
        """Note that some contents were tried, and write the batches that are done now."""
        contents = {case.content for case in cases}
        for name in list(self._left):
            self._left[name] -= contents
            if not self._left[name]:
                del self._left[name]
                evidence = self._evidence(self._batches[name])
                self.write(name, evidence)
                if self._basis and len(self.explorer.result.doubts) == self._doubts_before:
                    self.on_found(self._basis, self._batches[name], evidence)

    def finish(self, name: str) -> None:
        """Write what came after the batches: shrinking, confirming, and what was interrupted."""
        result = self.explorer.result
        rest = [content for content in result.recoveries if content not in self._written]
        evidence = self._evidence(rest)
        made_up = {
            shape: content
            for shape, content in self.explorer.made_up.items()
            if content in result.recoveries
        }
        self.write(
            name,
            msgspec.structs.replace(evidence, made_up=made_up, left=tuple(sorted(result.left))),
        )

    def _evidence(self, contents: Sequence[str]) -> Evidence:
        """Return what is known of some contents, and what is new besides."""
        result = self.explorer.result
        self._written.update(contents)
        doubts, self._doubts = result.doubts[self._doubts :], len(result.doubts)
        seconds = result.seconds - self._seconds, result.batch_seconds - self._batch_seconds
        self._seconds, self._batch_seconds = result.seconds, result.batch_seconds
        return Evidence(
            basis=self.basis,
            recoveries={c: result.recoveries[c] for c in contents if c in result.recoveries},
            used={c: result.used[c] for c in contents if c in result.used},
            free=tuple(content for content in contents if content in self.free),
            doubts=tuple(map(Doubt.of, doubts)),
            seconds=seconds[0],
            batch_seconds=seconds[1],
        )


def _nowhere(basis: Basis, batches: Mapping[str, Sequence[str]]) -> Iterable[tuple[str, Evidence]]:
    del basis, batches
    return ()


def evidence_of(
    explorer: BaseExplorer, basis: str, cases: Sequence[Case], free: Container[str] = ()
) -> Evidence:
    """Recover from a batch with an explorer that has done nothing yet; return what came of it.

    `free` are contents that cost no visit of their own.
    """
    explorer.recover(cases)
    result = explorer.result
    contents = dict.fromkeys(case.content for case in cases)
    return Evidence(
        basis=basis,
        recoveries={c: result.recoveries[c] for c in contents if c in result.recoveries},
        used={c: result.used[c] for c in contents if c in result.used},
        free=tuple(content for content in contents if content in free),
        doubts=tuple(map(Doubt.of, result.doubts)),
        seconds=result.seconds,
        batch_seconds=result.batch_seconds,
    )


class Known(BaseExplorer):
    """Explores from evidence alone: what no part recovered from stays unknown."""

    def __init__(self, basis: Basis, parts: Sequence[Evidence]) -> None:
        """Take what all parts found, the first word on a content; nothing is judged yet."""
        recording = Recording.parse(basis.recording, Path())
        versions = list(basis.versions)
        super().__init__(basis.workload, recording, versions, basis.limits, basis.seed)
        self.basis, self.parts = basis, parts
        self.result.strict = basis.strict
        self.known: dict[str, Recovery] = {}
        self.used: dict[str, str] = {}
        for part in reversed(parts):
            self.known |= part.recoveries
            self.used |= part.used
            self.made_up |= part.made_up
        self.free = {content for part in parts for content in part.free}
        self._listed: Iterator[int] = iter(())

    def enumerate(self, name: str) -> list[Case]:
        """List the states of one model; their contents are those of the basis."""
        self._listed = iter(self.basis.models[name])
        return super().enumerate(name)

    def content_of(self, state: State) -> str:
        """Return the content of the next state that is listed."""
        number = next(self._listed, None)
        if number is None:
            raise Unknown(
                f"{self.basis.workload}: the model allows other states here than where they were "
                f"recovered from (at point {state.point}); combine with the version that explored"
            )
        return self.basis.contents[number]

    def content_of_made_up(self, state: State) -> str:
        """Return a content that a part named, or else a name that stands for none."""
        shape = shape_of(state)
        return self.made_up.get(shape, shape)

    def choose(self, cases: Sequence[Case]) -> list[Case]:
        """Choose what the parts chose."""
        chosen = set(self.basis.chosen_contents)
        return [case for case in cases if case.content in chosen]

    def recover(self, cases: Sequence[Case]) -> None:
        """Look up what the parts recovered from."""
        for content in dict.fromkeys(case.content for case in cases):
            recovery = self.known.get(content)
            if recovery is not None and content not in self.result.recoveries:
                self.result.recoveries[content] = recovery
                self.result.recovered += content not in self.free
                if content in self.used:
                    self.result.used[content] = self.used[content]

    def promised(self, point: int) -> str:
        """Return, in words, what a load may give, or a resume of a script."""
        if not self.basis.strict:
            return super().promised(point)
        last = self.result.facts(point).last_acknowledged
        return promised_of_script("" if last is None else self.basis.places[last])

    def conclude(self) -> None:
        """Add what the parts found besides recoveries: after `exploration.run`.

        Each part killed a process at what it held for the simplest; one of these is the simplest.
        """
        result = self.result
        simplest = {(v.case.content, v.case.state.point) for v in result.violations}
        for part in self.parts:
            result.left.update(simplest.intersection(part.left))
            result.seconds += part.seconds
            result.batch_seconds += part.batch_seconds
            for doubt in part.doubts:
                self.unknown(doubt.unknown)
        for report in result.models.values():
            for outcome, violation in report.worst.items():
                grade = result.grade(violation.case)
                report.worst[outcome] = replace(violation, grade=grade)

    @property
    def unvisited(self) -> int:
        """How many chosen contents no part recovered from."""
        return sum(content not in self.known for content in self.basis.chosen_contents)


def promised_of_script(place: str) -> str:
    """Say what a resume may give: a script may always run further than `place`."""
    if not place:
        return "nothing was promised yet: it may begin anew"
    return f"the result of a run that {place}, or of a later one"
