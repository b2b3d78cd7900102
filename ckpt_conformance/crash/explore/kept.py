"""Recordings that are kept, so that several explorations share one: `--record`, `--recording`.

A folder holds `recorded.json` and a folder for each workload: `recording/`, and `before/` with the
trees of the steps that were there. A recording holds the path of the manager's directory, and a
manager may have written that path down. So states are laid out at the recorded path on every
machine: `hold` makes it, and removes it when nobody on the machine needs it any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown
from ckpt_conformance.crash.explore.engine import Recorded
from ckpt_conformance.trace.operations import Kind, Recording

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path
    from typing import IO

SCHEMA = "ckpt-conformance/recorded/v1"
NOTHING = msgspec.Raw(b"null")
FILE = "recorded.json"
MARKER = ".ckpt-conformance"  # in a folder that `hold` made: who holds it, holds a lock on this
PREFIX = "ckc-explore-"  # of the temporary folders that recordings are made in


class Step(msgspec.Struct, frozen=True):
    """A step that was there before the recording, and the folder of its tree."""

    step: int
    tree: str


class KeptWorkload(msgspec.Struct, frozen=True, omit_defaults=True):
    """One workload that was recorded, or why it was not."""

    options: dict[str, int] = {}
    before: tuple[Step, ...] = ()
    not_applicable: str = ""
    failed: str = ""
    operations: int = 0  # how many were recorded


class Kept(msgspec.Struct, frozen=True):
    """What `recorded.json` says. `explored` is an adapter, or the words of a command.

    `options` are those of a command that its recording depends on; `depends` is what it depends on
    besides, as the command that recorded writes it.
    """

    schema: str
    explored: tuple[str, ...]
    options: dict[str, Any] = {}
    workloads: dict[str, KeptWorkload] = {}
    depends: msgspec.Raw = NOTHING


def prepare(folder: Path) -> None:
    """Make an empty folder for recordings; raises RequestError where there is something."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = next(folder.iterdir(), None)
    except OSError as error:
        reason = f"--record {folder} cannot be written: {error.strerror}"
        raise RequestError(f"{reason}; name another folder") from error
    if there is not None:
        raise RequestError(
            f"--record {folder}: the folder holds {there.name!r}; name an empty one, or one that "
            "is not there yet"
        )


def write(folder: Path, kept: Kept) -> None:
    """Write `recorded.json`: from then on the folder is whole."""
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(kept)))


def read(folder: Path, explored: Sequence[str], options: dict[str, Any]) -> Kept:
    """Read what a folder keeps; raises RequestError if it is not of what is to be explored."""
    try:
        kept = msgspec.json.decode((folder / FILE).read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError) as error:
        reason = f"--recording {folder} holds no recordings that were made to the end ({error})"
        raise RequestError(f"{reason}; make them with explore --record DIR") from error
    if kept.schema != SCHEMA:
        raise RequestError(
            f"--recording {folder}: schema is {kept.schema!r}, this version reads {SCHEMA!r}"
        )
    pairs: dict[str, tuple[object, object]] = {
        "what is explored": (list(kept.explored), list(explored))
    }
    pairs |= {f"--{name}": (kept.options.get(name), value) for name, value in options.items()}
    for name, (then, now) in pairs.items():
        if then != now:
            raise RequestError(
                f"--recording {folder} is of something else: {name} was {then!r} and is {now!r}; "
                "explore with the same arguments, or record again"
            )
    return kept


def keep(recorded: Recorded, folder: Path) -> KeptWorkload:
    """Copy a recording, and what it began with, into a new folder."""
    folder.mkdir()
    trees.copy(recorded.recording.folder, folder / "recording")
    before: list[Step] = []
    for number, (step, tree) in enumerate(recorded.before):
        name = f"before/{number}-step-{step}"
        trees.copy(tree, folder / name)
        before.append(Step(step, name))
    count = len(recorded.recording.operations)
    return KeptWorkload(recorded.options, tuple(before), operations=count)


def reason(error: NotApplicable | Unknown) -> KeptWorkload:
    """Return what is kept of a workload that can't be recorded."""
    if isinstance(error, NotApplicable):
        return KeptWorkload(not_applicable=str(error))
    return KeptWorkload(failed=str(error))


def load(folder: Path, kept: Kept, name: str) -> Recorded:
    """Return the recording of a workload.

    Raises NotApplicable or Unknown for the reason that there was when it was recorded,
    RequestError for a workload that was not asked for then.
    """
    workload = kept.workloads.get(name)
    if workload is None:
        known = ", ".join(kept.workloads)
        raise RequestError(
            f"--recording {folder} has no workload {name!r}, it has {known}; record it, too"
        )
    if workload.not_applicable:
        raise NotApplicable(workload.not_applicable)
    if workload.failed:
        raise Unknown(workload.failed)
    place = folder / name
    before = [(step.step, place / step.tree) for step in workload.before]
    return Recorded(name, recording_of(place / "recording"), before, workload.options)


def recording_of(folder: Path) -> Recording:
    """Read a recording that was kept; raises RequestError if it does not read."""
    try:
        recording = Recording.read(folder)
    except (OSError, ValueError) as error:
        raise RequestError(f"{folder} holds no recording ({error}); record again") from error
    paths = [entry.path for entry in recording.initial]
    paths += [op.path for op in recording.operations]
    paths += [op.target for op in recording.operations if op.kind is not Kind.SYMLINK]
    out = [path for path in paths if path.startswith("/") or ".." in path.split("/")]
    if out:
        raise RequestError(f"{folder}: {out[0]!r} leads out of the recorded directory")
    return recording


@contextlib.contextmanager
def hold(root: Path, *, alone: bool) -> Generator[None]:
    """Make the recorded directory, for as long as states are laid out there.

    `alone`: nobody else on this machine may hold it, since there is no private memory. Raises
    RequestError where it can't be made, or is somebody's.
    """
    base = root.parents[1] if len(root.parents) > 1 else root
    if not base.name.startswith(PREFIX) or not base.parent.is_dir():
        raise RequestError(
            f"the recording was made in {root}, and {base.parent} is not here; managers may write "
            "paths down, so record with a TMPDIR that every machine has"
        )
    # Who shares it waits for one that removes it, which is short.
    file = _lock(base, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(base, ignore_errors=True)
        file.close()


def _lock(base: Path, how: int) -> IO[bytes]:
    """Return the locked marker of a folder that is empty or ours; make the folder if need be."""
    while True:
        base.mkdir(exist_ok=True)
        try:
            file = _open_marker(base)
        except FileNotFoundError:  # removed in between
            continue
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            file.close()
            raise RequestError(f"{base} is held by another run on this machine: {_WAIT}") from None
        if _is_at(file, base / MARKER):
            return file
        file.close()


def _open_marker(base: Path) -> IO[bytes]:
    marker = base / MARKER
    if not marker.exists() and any(path.name != MARKER for path in base.iterdir()):
        raise RequestError(f"{base} is there, and is not of a run with --recording: {_WAIT}")
    return marker.open("ab")


_WAIT = "wait for its end; one run uses all cores with --jobs"


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
