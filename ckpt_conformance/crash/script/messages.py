"""What the explorer and its workers say to each other: one JSON object a line, checked by both.

The explorer sends `Hello` once, then requests; a worker answers each request with one answer.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from ckpt_conformance.crash.script.command import Script


class Hello(msgspec.Struct, frozen=True):
    """The first line: the folder in which a worker keeps what it needs, and the command."""

    folder: str
    script: Script


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


Answer = Done | Failed | Warmed | Begun | Recorded | Comparison | Run
A = TypeVar("A", Done, Warmed, Begun, Recorded, Comparison, Run)


# ---- requests ------------------------------------------------------------------------------------


class Request(msgspec.Struct, Generic[A], frozen=True):
    """Something that a worker is asked to do, with the type of its answer."""


class Warm(Request[Warmed], frozen=True, tag="warm"):
    """Import what runs need, so that they can be forked."""


class Record(Request[Recorded], frozen=True, tag="record"):
    """Record a run in a folder, and keep what it produced beside it."""

    folder: str


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


AnyRequest = Warm | Record | Begin | Expect | Recover | Compare
