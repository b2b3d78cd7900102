"""What is said of a checkpoint: its state, what is wrong where, and how much of it is protected."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.sums import Sums


class Malformed(Exception):  # noqa: N818  it describes bytes; for the program it is no error
    """Bytes that no save wrote. The one exception that the parsers of this package raise.

    It is no ValueError: who catches those of a library would take `OutOfTime` for one of them.

    Attributes:
        start, end: the bytes of the file that it is about, where that is known.
        tensors: names of those that it hits, where that is known.

    """

    def __init__(
        self,
        what: str,
        start: int | None = None,
        end: int | None = None,
        tensors: tuple[str, ...] = (),
    ) -> None:
        """Report what is wrong, and where."""
        super().__init__(what)
        self.tensors = tensors
        self.start = start
        self.end = end


class Unsafe(Malformed):
    """Bytes that may run code where they are loaded."""


class NotRead(Malformed):
    """Bytes that were not looked into: nothing is known to be wrong with them."""


class TooLarge(NotRead):
    """More bytes, values or levels than are read."""


class OutOfTime(NotRead):
    """What takes longer than the user gives it."""


class State(StrEnum):
    """What a checkpoint is, worst last. To load an unsafe one may run code that is in it."""

    WHOLE = "whole"
    UNKNOWN = "unknown"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    UNSAFE = "unsafe"


class Protection(StrEnum):
    """How much was compared with digests and CRCs; `Report.coverage` is the share."""

    VERIFIED = "verified"
    PARTLY = "partly verified"
    STRUCTURE = "structure only"


class Kind(StrEnum):
    """What a finding means for the checkpoint; a note changes nothing."""

    NOTE = "note"
    UNKNOWN = "unknown"
    MISSING = "missing"
    DAMAGED = "damaged"
    UNSAFE = "unsafe"


class Topic(StrEnum):
    """What sort of thing a finding is about; `fsck --explain TOPIC` says what to do."""

    CHECKSUM = "checksum"
    STRUCTURE = "structure"
    SIZE = "size"
    ANOTHER_SAVE = "another-save"
    ROLE = "role"
    ABSENT = "absent"
    COMMIT = "commit"
    RUNS_CODE = "runs-code"
    LINK = "link"
    TOO_LARGE = "too-large"
    OUT_OF_TIME = "out-of-time"
    UNREACHABLE = "unreachable"
    PERMISSION = "permission"
    GONE = "gone"
    CHANGING = "changing"
    NOT_JUDGED = "not-judged"
    NO_CHECKSUM = "no-checksum"
    FEWER_FILES = "fewer-files"
    WEIGHTS_ALONE = "weights-alone"
    OTHER_TENSORS = "other-tensors"
    REMARK = "remark"


STATES = {
    Kind.NOTE: State.WHOLE,
    Kind.UNKNOWN: State.UNKNOWN,
    Kind.MISSING: State.INCOMPLETE,
    Kind.DAMAGED: State.DAMAGED,
    Kind.UNSAFE: State.UNSAFE,
}
SEVERITY = list(State)
POORER = frozenset({Topic.FEWER_FILES, Topic.WEIGHTS_ALONE, Topic.OTHER_TENSORS})
"""What a whole one is told where others hold more, or else: `--newest-whole` passes over it."""


TOPICS = {
    Kind.NOTE: Topic.REMARK,
    Kind.UNKNOWN: Topic.NOT_JUDGED,
    Kind.MISSING: Topic.ABSENT,
    Kind.DAMAGED: Topic.STRUCTURE,
    Kind.UNSAFE: Topic.RUNS_CODE,
}
"""What a finding is about that says no more than its kind."""


def _paired(text: str) -> str:
    """Return a text in which two halves of a surrogate pair are one sign, as JSON reads them."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


class FindingJson(TypedDict):
    """A `Finding` in the output of `fsck --json`; results of earlier releases have no topic."""

    kind: str
    file: str
    what: str
    tensors: list[str]
    start: int | None
    end: int | None
    name: str
    topic: NotRequired[str]


class NotFiniteJson(TypedDict):
    """A `NotFinite` in the output of `fsck --json`."""

    tensor: str
    nan: int
    infinite: int
    elements: int


class BytesJson(TypedDict):
    """How many bytes of a checkpoint are protected by what."""

    total: int
    digest: int
    crc: int
    structure: int
    unread: int
    uncovered: int


class ReportJson(TypedDict):
    """A `Report` in the output of `fsck --json`."""

    path: str
    layout: str
    step: int | None
    state: str
    tensors: int
    bytes: BytesJson
    world_size: int | None
    ties: int
    not_finite: list[NotFiniteJson] | None
    findings: list[FindingJson]
    passed_over: list[str]
    protection: NotRequired[str]
    coverage: NotRequired[float]
    changed: NotRequired[float | None]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        kind: what it means for the checkpoint.
        file: the name relative to the checkpoint's folder.
        what: the value, the reason and the next step, in words.
        tensors: names of the tensors whose bytes it is about; empty where it is about none.
        start, end: the bytes of the file, end exclusive; None where it is about the whole file.
        name: what an unsafe pickle asks for, as `module.name`; `*` for several; empty elsewhere.
        own_topic: what it is about, where its kind does not say it all.

    """

    kind: Kind
    file: str
    what: str
    tensors: tuple[str, ...] = ()
    start: int | None = None
    end: int | None = None
    name: str = ""
    own_topic: Topic | None = None

    def __post_init__(self) -> None:
        """Leave out a topic that the kind has anyway: two findings that say the same are one."""
        if self.own_topic is TOPICS[self.kind]:
            object.__setattr__(self, "own_topic", None)

    @property
    def topic(self) -> Topic:
        """What it is about."""
        return self.own_topic or TOPICS[self.kind]

    def to_json(self) -> FindingJson:
        """Return plain types."""
        return {
            "kind": str(self.kind),
            "file": _paired(self.file),
            "what": _paired(self.what),
            "tensors": list(map(_paired, self.tensors)),
            "start": self.start,
            "end": self.end,
            "name": _paired(self.name),
            "topic": str(self.topic),
        }


@dataclass(frozen=True)
class NotFinite:
    """A tensor with NaNs or infinities: how many of how many elements."""

    tensor: str
    nan: int
    infinite: int
    elements: int

    def to_json(self) -> NotFiniteJson:
        """Return plain types."""
        return {
            "tensor": _paired(self.tensor),
            "nan": self.nan,
            "infinite": self.infinite,
            "elements": self.elements,
        }


class Role(StrEnum):
    """What a state is of, in the words of a finding."""

    MODEL = "a model"
    OPTIMIZER = "an optimizer"
    SCHEDULER = "a scheduler"
    GENERATORS = "generators"
    LOADER = "a sampler or loader"
    SCALER = "a scaler"
    ARGUMENTS = "arguments"


@dataclass(frozen=True)
class Held:
    """What a file of `torch.save` holds, by its structure.

    Attributes:
        roles: every role that was recognised in it.
        is_known: whether there is nothing else in it but plain values.
        counts: steps that an optimizer or a scheduler has counted, above 0.
        mark: the same for files whose records are the same; empty where a record has no CRC.

    """

    roles: frozenset[Role] = frozenset()
    is_known: bool = False
    counts: dict[Role, int] = field(default_factory=dict[Role, int])
    mark: str = ""


class Tensors(NamedTuple):
    """Which tensors a file holds: how many elements, and the same mark for like names and shapes.

    What they are saved in is no part of the mark: a last save may be in half precision.
    """

    elements: int
    mark: str


Plain = bool | int | float | str


@dataclass(frozen=True)
class Facts:
    """What the top of a file's structure says, for the rules of libraries.

    Attributes:
        values: by key; None for a value that is not plain.
        has_zero_optimizer: of DeepSpeed's model states: its optimizer is in files of its own.
        is_bf16: of DeepSpeed's model states: bf16 was on.
        held: of a file of `torch.save`: what it holds.
        tensors: of a file of `torch.save` or safetensors: which it holds.

    """

    values: dict[str, Plain | None] = field(default_factory=dict[str, Plain | None])
    has_zero_optimizer: bool = False
    is_bf16: bool = False
    held: Held | None = None
    tensors: Tensors | None = None

    def number(self, key: str) -> int | None:
        """Return a whole number; None for anything else, bool too."""
        value = self.values.get(key)
        return value if type(value) is int else None


NO_FACTS = Facts()


@dataclass
class Report:
    """All that is known about one checkpoint.

    Attributes:
        path: what a user would name: the folder or the file.
        layout: how it was recognised, as `dcp`.
        step: the training step that its manifest or its name says; None where neither does.
        tensors: how many it holds.
        size: bytes of its files.
        digest, crc: bytes that a digest, or else a CRC, covers and that were compared with it.
        structure: bytes of headers that are written twice and were compared with each other.
        unread: bytes with a digest or a CRC that a sample left out.
        world_size: how many ranks wrote it, where a manifest or names say so.
        ties: groups of tensors that share their bytes.
        not_finite: tensors with NaNs or infinities; None where they were not counted.
        facts: what is known of the top of a structure, by file.
        passed_over: files that no layout knows, and that run nothing.
        changed: when one of its files was written to last, in seconds since 1970; None where nobody
            says it.

    """

    path: Where
    layout: str
    step: int | None = None
    findings: list[Finding] = field(default_factory=list[Finding])
    tensors: int = 0
    size: int = 0
    digest: int = 0
    crc: int = 0
    structure: int = 0
    unread: int = 0
    world_size: int | None = None
    ties: int = 0
    not_finite: list[NotFinite] | None = None
    facts: dict[str, Facts] = field(default_factory=dict[str, Facts])
    passed_over: list[str] = field(default_factory=list[str])
    changed: float | None = None

    @property
    def state(self) -> State:
        """The worst of the findings."""
        states = (STATES[finding.kind] for finding in self.findings)
        return max(states, key=SEVERITY.index, default=State.WHOLE)

    @property
    def is_poorer(self) -> bool:
        """Whether others hold more: it may be a part of what was saved, or weights alone."""
        return any(one.topic in POORER for one in self.findings)

    @property
    def uncovered(self) -> int:
        """Bytes that nothing protects: a flipped bit there may be served."""
        return max(self.size - self.digest - self.crc - self.structure - self.unread, 0)

    @property
    def coverage(self) -> float:
        """The share of the bytes, 0 to 1, that were compared with a digest or a CRC.

        Headers that are written twice are no part of it: they are compared with each other.
        """
        verified, rest = self.digest + self.crc, self.size - self.structure
        return min(verified / rest, 1.0) if rest > 0 else 0.0

    @property
    def protection(self) -> Protection:
        """What was compared: all that is not written twice, some of it, or the structure alone."""
        if not self.digest + self.crc:
            return Protection.STRUCTURE
        return Protection.PARTLY if self.uncovered or self.unread else Protection.VERIFIED

    def take(self, part: Report) -> None:
        """Add the report of a part."""
        self.add(part)
        self.tensors += part.tensors
        self.ties += part.ties
        self.step = part.step
        self.facts |= part.facts
        self.passed_over += part.passed_over
        self.world_size = part.world_size if self.world_size is None else self.world_size

    def add(self, sums: Sums | Report) -> None:
        """Add the findings and the protected bytes of some work, or of a part."""
        self.findings += sums.findings
        self.digest += sums.digest
        self.crc += sums.crc
        self.structure += sums.structure

    def say(
        self,
        kind: Kind,
        file: str,
        what: str,
        tensors: Iterable[str] = (),
        topic: Topic | None = None,
    ) -> None:
        """Add a finding about a whole file or tensor."""
        self.findings.append(Finding(kind, file, what, tuple(tensors), own_topic=topic))

    def take_findings(self, findings: Iterable[Finding]) -> None:
        """Add findings that came when everything else was known."""
        known = {one.file for one in self.findings if one.kind is not Kind.NOTE}
        new = [one for one in findings if one.file not in known]
        self.findings = ordered([*self.findings, *new])

    def remark(self, notes: Iterable[tuple[str, str]]) -> None:
        """Add notes, each about a file, that came when everything else was known."""
        for file, what in notes:
            self.say(Kind.NOTE, file, what)
        self.findings = ordered(self.findings)

    def to_json(self) -> ReportJson:
        """Return plain types, with numbers of bytes."""
        not_finite = self.not_finite
        return {
            "path": str(self.path),
            "layout": self.layout,
            "step": self.step,
            "state": str(self.state),
            "tensors": self.tensors,
            "bytes": {
                "total": self.size,
                "digest": self.digest,
                "crc": self.crc,
                "structure": self.structure,
                "unread": self.unread,
                "uncovered": self.uncovered,
            },
            "world_size": self.world_size,
            "ties": self.ties,
            "not_finite": None if not_finite is None else [one.to_json() for one in not_finite],
            "findings": [finding.to_json() for finding in self.findings],
            "passed_over": self.passed_over,
            "protection": str(self.protection),
            "coverage": self.coverage,
            "changed": self.changed,
        }


def allowed(findings: Iterable[Finding], covers: Callable[[str], bool]) -> list[Finding]:
    """Turn findings about names that the user vouches for into notes."""
    return [
        replace(one, kind=Kind.NOTE, what=f"{one.what} (allowed)")
        if one.kind is Kind.UNSAFE and covers(one.name)
        else one
        for one in findings
    ]


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Order findings, worst first, then by place, then by words; each once.

    Threads find them in any order: what is told, and kept, is the same each time.
    """
    kinds = list(Kind)

    def place(one: Finding) -> tuple[object, ...]:
        where = (one.file, one.start or 0, one.end or 0)
        return (-kinds.index(one.kind), *where, one.what, one.tensors, one.name)

    return sorted(dict.fromkeys(findings), key=place)
