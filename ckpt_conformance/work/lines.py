"""Results as lines of JSON: written one by one as they come, read when all are there.

A file begins with a `Header`, which says what was asked for, and holds a `Line` for each item. A
file of a run that was killed ends with the last line that is whole; nothing before it is lost. All
that a report says is in these lines, so that the parts of a run can be put together anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
from msgspec import Struct

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.work.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

SCHEMA = "ckpt-conformance/lines/v1"
Origin = Literal["run", "cache", "unreached"]  # how a result came to be known


class Header(Struct, frozen=True, kw_only=True, tag_field="line", tag="header"):
    """What a file of results is part of.

    `request` has the choices that results depend on; `plan` is the digest of all items, of which
    `items` are in this `shard`. Two files with the same command, version, request, plan and what
    results depend on belong together.
    """

    schema: str = SCHEMA
    command: str
    version: str  # of this suite
    commit: str | None = None
    request: dict[str, Any]
    environment: dict[str, Any]
    depends: Identity | None = None  # what results depend on besides; None: the version alone
    created: str  # ISO 8601, UTC
    plan: str
    shard: str = "1/1"
    items: list[str]


class Fact(Struct, frozen=True, kw_only=True, tag_field="line", tag="fact"):
    """What is known of a subject, such as an adapter's description."""

    subject: str
    fact: msgspec.Raw


class Opened(Struct, frozen=True, kw_only=True, tag_field="line", tag="opened"):
    """What a subject was seen to open, by digest: see `openings`; known when a part has ended."""

    subject: str
    opened: dict[str, str]


class Line(Struct, frozen=True, kw_only=True, tag_field="line", tag="result"):
    """What came of one item."""

    item: str
    origin: Origin = "run"
    result: msgspec.Raw


class End(Struct, frozen=True, kw_only=True, tag_field="line", tag="end"):
    """The run came to its end, or was stopped by its user."""

    interrupted: bool = False


AnyLine = Header | Fact | Opened | Line | End
_DECODER = msgspec.json.Decoder(AnyLine)


class LinesError(RequestError):
    """A file of results that cannot be used; the message says why, and what to do."""


class Writer:
    """Writes lines to a file as they come, each with one system call."""

    def __init__(self, path: Path | None, *, keep: bool = True) -> None:
        """Begin the file anew; None keeps the lines in memory alone. Raises LinesError.

        `keep` is whether lines that are in the file stay in memory, too.
        """
        self.lines: list[AnyLine] = []
        self._keep = keep
        self._file = None
        if path is None:
            return
        _refuse_foreign(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            reason = f"--results {path} cannot be written: {error.strerror}"
            raise LinesError(f"{reason}; name another file") from error

    def write(self, line: AnyLine) -> None:
        """Add a line; what raised OSError is in memory all the same."""
        if self._keep:
            self.lines.append(line)
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Say how the run ended, if it was not by an error; close the file."""
        if kind is None or issubclass(kind, KeyboardInterrupt):
            self.write(End(interrupted=kind is not None))
        if self._file is not None:
            self._file.close()


def _refuse_foreign(path: Path) -> None:
    """Raise LinesError for a file that `Writer` did not write: it would be overwritten."""
    if not path.is_file() or not path.stat().st_size:  # empty: killed before its header
        return
    try:
        gather(line for _, line in stream(path) if not isinstance(line, Line))
    except LinesError as error:
        reason = f"--results {path} is there and holds no results ({error})"
        raise LinesError(f"{reason}; move it away or name another file") from error


@dataclass(frozen=True)
class Results:
    """The lines of one run: of one file, or of all its parts together."""

    header: Header
    facts: dict[str, msgspec.Raw]  # by subject
    results: dict[str, Line]  # by item
    missing: tuple[str, ...] = ()  # shards of which there is no file
    stopped: tuple[str, ...] = ()  # shards whose file ends before its run did
    opened: dict[str, str] = field(default_factory=dict[str, str])  # digests, by what was opened

    @property
    def ended(self) -> bool:
        """Whether every part that is there came to its end."""
        return not self.stopped

    @property
    def undone(self) -> list[str]:
        """The items of the shards that are there, without a result."""
        return [item for item in self.header.items if item not in self.results]


def gather(lines: Iterable[AnyLine], name: str = "the results") -> Results:
    """Make the results of one file's lines; raises LinesError if they are not that."""
    header: Header | None = None
    facts: dict[str, msgspec.Raw] = {}
    results: dict[str, Line] = {}
    opened: dict[str, str] = {}
    ended = False
    for line in lines:
        if isinstance(line, Header):
            if header is not None:
                raise LinesError(f"{name}: two headers; write each run to a file of its own")
            header = line
        elif isinstance(line, Fact):
            facts[line.subject] = line.fact
        elif isinstance(line, Line):
            results[line.item] = line
        elif isinstance(line, Opened):
            opened |= line.opened
        else:
            ended = not line.interrupted
    if header is None:
        raise LinesError(f"{name} has no header line: it is no file that --results wrote")
    if header.schema != SCHEMA:
        reason = f"{name}: schema is {header.schema!r}, this version reads {SCHEMA!r}"
        raise LinesError(f"{reason}; combine with the version that wrote it ({header.version})")
    return Results(header, facts, results, (), () if ended else (header.shard,), opened)


def stream(path: Path) -> Iterator[tuple[int, AnyLine]]:
    """Yield the lines of a file one by one, each with its offset; raises as `read` does."""
    offset = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    return
                yield offset, _decode(text, f"{path}, line {number}")
                offset += len(text)
    except OSError as error:
        raise LinesError(f"{path} cannot be read: {error.strerror}") from error


def command_of(path: Path) -> str | None:
    """Return the command of the run that a file is of; None where its header is not there.

    Raises LinesError as `read` does.
    """
    _, line = next(stream(path), (0, None))
    return line.command if isinstance(line, Header) else None


def _decode(text: bytes, where: str) -> AnyLine:
    try:
        line: AnyLine = _DECODER.decode(text)
    except msgspec.DecodeError as error:
        reason = f"{where}, is no result: {error}"
        raise LinesError(f"{reason}; was the file edited, or cut and joined?") from error
    return line


def read(path: Path) -> Results:
    """Read a file; what a killed run left of its last line is passed over. Raises LinesError."""
    return gather((line for _, line in stream(path)), str(path))


@dataclass(frozen=True)
class Belonging:
    """Parts of one run.

    `header` is that of all together, `chosen` has the place of a part for each shard that is there,
    and `missing` names the shards of which there is no part.
    """

    header: Header
    chosen: tuple[int, ...]
    missing: tuple[str, ...]


def belonging(headers: Sequence[Header], ended: Sequence[bool]) -> Belonging:
    """Find out which shards are there; raises LinesError if the parts are not of one run.

    Of a shard that is there twice the part that came to its end is chosen.
    """
    first = headers[0]
    for other in headers[1:]:
        _require_same(first, other)
    places = sorted(range(len(headers)), key=lambda at: ended[at])
    by_shard = {headers[at].shard: at for at in places}
    count = int(first.shard.partition("/")[2])
    wanted = [f"{number}/{count}" for number in range(1, count + 1)]
    chosen = tuple(by_shard[name] for name in wanted if name in by_shard)
    header = msgspec.structs.replace(
        first,
        shard="1/1" if len(chosen) == count else first.shard,
        created=min(headers[at].created for at in chosen),
        items=[item for at in chosen for item in headers[at].items],
    )
    return Belonging(header, chosen, tuple(name for name in wanted if name not in by_shard))


def combine(parts: Sequence[Results]) -> Results:
    """Put the parts of one run together; raises LinesError if they are not of one run.

    A shard that is there twice counts once where both say the same.
    """
    joined = belonging([part.header for part in parts], [part.ended for part in parts])
    there = [parts[at] for at in joined.chosen]
    for other in there[1:]:
        _require_same_opened(there[0], other)
    return Results(
        joined.header,
        {subject: fact for part in there for subject, fact in part.facts.items()},
        {item: line for part in there for item, line in part.results.items()},
        joined.missing,
        tuple(shard for part in there for shard in part.stopped),
    )


def _require_same(first: Header, other: Header) -> None:
    """Raise LinesError with the first thing in which two headers differ, and what to do."""
    ours, theirs = _suite(first), _suite(other)
    if ours != theirs:
        _refuse(
            first,
            other,
            f"shard {first.shard} was run by {ours}, and shard {other.shard} by {theirs}; install "
            "the same one on every machine, and run the shards of the other one again",
        )
    pairs: dict[str, tuple[object, object]] = {
        "the command": (first.command, other.command),
        "the number of shards": (first.shard.partition("/")[2], other.shard.partition("/")[2]),
    }
    names = sorted({*first.request, *other.request})
    pairs |= {f"--{name}": (first.request.get(name), other.request.get(name)) for name in names}
    for what, (one, two) in pairs.items():
        if one != two:
            reason = f"{what} is {one!r} and {two!r}"
            _refuse(first, other, f"{reason}; run every shard with the same arguments")
    if first.depends and other.depends:
        shards = f"in shard {first.shard}", f"in shard {other.shard}"
        if differences := first.depends.differences(other.depends, *shards):
            _refuse(
                first,
                other,
                f"what results depend on differs: {'; '.join(differences)}; use the same code and "
                "packages in every shard, and run again those that had others",
            )
    if first.plan != other.plan:
        _refuse(
            first,
            other,
            f"the same request was planned as {first.plan} and as {other.plan}; install the same "
            "files of ckpt-conformance on every machine: its version and commit are the same",
        )


def _require_same_opened(first: Results, other: Results) -> None:
    """Raise LinesError for a file that both have opened, and that was another one in each.

    That is a file below the working directory: elsewhere each machine has its own.
    """
    for name in sorted(first.opened.keys() & other.opened.keys()):
        kind, _, path = name.partition(" ")
        if kind == "file" and path.startswith("./") and first.opened[name] != other.opened[name]:
            one, two = first.header.shard, other.header.shard
            _refuse(
                first.header,
                other.header,
                f"checks have read {path}, which is {first.opened[name][:12]} in shard {one} and "
                f"{other.opened[name][:12]} in shard {two}; use the same in every shard",
            )


def _refuse(first: Header, other: Header, reason: str) -> None:
    shards = f"results of shards {first.shard} and {other.shard} do not belong together"
    raise LinesError(f"{shards}: {reason}")


def _suite(header: Header) -> str:
    """Name the suite that wrote a file."""
    commit = f", commit {header.commit}" if header.commit else ""
    return f"ckpt-conformance {header.version}{commit}"
