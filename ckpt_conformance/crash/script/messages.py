"""What the explorer and its workers say to each other: one JSON object a line, checked by both.

The explorer sends `Hello` once, then requests; a worker answers each request with one answer.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from ckpt_conformance.crash.script.command import Script


class Hello(msgspec.Struct, frozen=True):
    """The first line: the folder in which a worker keeps what it needs, and the command.

    `notes` is the folder in which it notes what runs open, empty for none.
    """

    folder: str
    script: Script
    notes: str = ""


# ---- answers -------------------------------------------------------------------------------------


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The harness failed, or the machine lacks something: the verdict is UNKNOWN."""

    why: str


class Warmed(msgspec.Struct, frozen=True, tag="warmed"):
    """Runs can be forked from now on; or, if `why` is not empty, why they can't."""

    why: str


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """Whether the directory is memory that no other process sees."""

    private: bool


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """How the recorded run ended, and where its result is kept.

    `result_code` is the exit status of --result-cmd; `absent` names a result that is not there.
    """

    code: int
    output: str
    seconds: float
    result_file: str
    expected: str
    result_code: int = 0
    absent: str = ""


class Comparison(msgspec.Struct, frozen=True, tag="comparison"):
    """Whether a run's result is the expected one, its digest, and what differs."""

    same: bool
    digest: str
    differs: tuple[str, ...] = ()


class Run(msgspec.Struct, frozen=True, tag="run"):
    """How one run went. `files` are the names that got a new content below the directory."""

    exit_kind: str  # ended, killed, hang
    code: int
    output: str
    seconds: float
    files: tuple[str, ...]
    comparison: Comparison

    @property
    def is_good(self) -> bool:
        """Whether it ended by itself with the exit status 0."""
        return self.exit_kind == "ended" and self.code == 0


class Signal(msgspec.Struct, frozen=True):
    """A signal to a job, and its moment: a count of what the job has done, never a time.

    SIGTERM goes to the process of the command, as a scheduler sends it, and SIGKILL to all of the
    job when the grace is over; with a `rank` that one alone gets SIGKILL, and no grace follows. It
    is sent at the call or line after so many `operations` below the directory and so many `lines`
    that name a step. With `own` operations of that rank alone count.
    """

    operations: int = 0
    lines: int = 0
    rank: int = -1  # -1: none, the command gets SIGTERM
    own: bool = False
    grace: float = 0.0  # seconds
    # The grace ends after so many operations since the signal, or when it is over, if that is
    # sooner; -1: when it is over.
    ends_after: int = -1
    half: bool = False  # whoever is killed at a write has done half of it
    never: bool = False  # it is not sent at all: a run that shows what there is to hit


class Issued(msgspec.Struct, frozen=True):
    """An operation below the directory, or a line that named a step, in the order of the run."""

    kind: str
    path: str
    size: int  # bytes of a write
    rank: int  # -1: of no rank
    line: str = ""  # of kind mark: what was printed


class Signalled(msgspec.Struct, frozen=True, tag="signalled"):
    """What a job did that got a signal, and what its command came to when it was started again.

    `disposition` is what the command had made of SIGTERM: caught, ignored, default. `forced`: it
    had not ended by itself when the grace, or the deadline, was over. `left` are digests of the
    files that were there then. `resumed` is the second run; without a signal the first one.
    """

    sent: bool
    disposition: str
    code: int
    forced: bool
    seconds: float  # from the signal to its end
    output: str
    issued: tuple[Issued, ...]
    at: int  # how many of `issued` there were when it was sent
    ranks: tuple[int, ...]  # that were seen
    left: dict[str, str]
    resumed: Run


Answer = Done | Failed | Warmed | Begun | Recorded | Comparison | Run | Signalled
A = TypeVar("A", Done, Warmed, Begun, Recorded, Comparison, Run, Signalled)


# ---- requests ------------------------------------------------------------------------------------


class Request(msgspec.Struct, Generic[A], frozen=True):
    """Something that a worker is asked to do, with the type of its answer."""


class Warm(Request[Warmed], frozen=True, tag="warm"):
    """Import what runs need, so that they can be forked."""


class Record(Request[Recorded], frozen=True, tag="record"):
    """Record a run in a folder, and keep what it produced beside it.

    With `closing` also when files were closed.
    """

    folder: str
    closing: bool = False


class Begin(Request[Begun], frozen=True, tag="begin"):
    """Mount private memory at the directory."""


class Expect(Request[Done], frozen=True, tag="expect"):
    """Learn what was recorded and what it produced."""

    recording: str
    expected: str
    result_file: str


class Recover(Request[Run], frozen=True, tag="recover"):
    """Lay a state or a tree out, run the command there, and compare what it produces.

    `state` is one state as `crash.explore.messages.pack` writes it, `tree` the path of a tree;
    without both the directory is empty. `first` runs the command as given, not the one that
    resumes. `seeded` names generators (random, numpy, torch) that get a fixed seed.
    """

    deadline: float  # seconds
    tree: str = ""
    state: bytes = b""
    first: bool = False
    fork: bool = True
    seeded: tuple[str, ...] = ()


class Compare(Request[Comparison], frozen=True, tag="compare"):
    """Compare what the last run left with what is expected."""


class Interrupt(Request[Signalled], frozen=True, tag="interrupt"):
    """Run the command in an empty directory, send it a signal, and start it again there.

    `keep` is a new folder that takes the directory as the first run left it.
    """

    signal: Signal
    deadline: float  # seconds, of either run
    keep: str = ""


AnyRequest = Warm | Record | Begin | Expect | Recover | Compare | Interrupt
