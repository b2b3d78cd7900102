"""`explore --record` and `--recording`: record once, explore as often and in as many parts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown
from ckpt_conformance.report import certificate, files

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from ckpt_conformance.crash.explore.engine import Recorded
    from ckpt_conformance.crash.explore.kept import Kept, KeptWorkload
    from ckpt_conformance.subject.subject import Subject

Record = Annotated[
    Path | None,
    typer.Option("--record", metavar="DIR", help="Record only, into this folder."),
]
Recording = Annotated[
    Path | None,
    typer.Option("--recording", metavar="DIR", help="Explore what --record has kept there."),
]


@dataclass
class Kit:
    """A folder of recordings that is explored, and whether memory can be private here."""

    folder: Path
    kept: Kept
    private: bool = field(default=False)

    @classmethod
    def open(cls, folder: Path, explored: Sequence[str], options: Mapping[str, Any]) -> Kit:
        """Read a folder of recordings; raises RequestError if it is not of what is explored."""
        from ckpt_conformance.crash.explore import kept
        from ckpt_conformance.processes import memory

        content = kept.read(folder, explored, dict(options))
        return cls(folder.resolve(), content, memory.has_private_memory())

    def check(self, workloads: Sequence[str]) -> None:
        """Raise RequestError for a workload that was not asked for when it was recorded."""
        from ckpt_conformance.crash.explore import kept

        for name in workloads:
            with contextlib.suppress(NotApplicable, Unknown):
                kept.load(self.folder, self.kept, name)

    @contextlib.contextmanager
    def workload(self, name: str) -> Generator[Recorded]:
        """Yield the recording of a workload, while its directory is there.

        Raises NotApplicable or Unknown for what could not be recorded.
        """
        from ckpt_conformance.crash.explore import kept

        recorded = kept.load(self.folder, self.kept, name)
        with self.directory(recorded.recording.root):
            yield recorded

    @contextlib.contextmanager
    def directory(self, root: str) -> Generator[None]:
        """Make the recorded directory for a while."""
        from ckpt_conformance.crash.explore import kept

        with kept.hold(Path(root), alone=not self.private):
            yield


def record(subject: Subject, workloads: Sequence[str], folder: Path) -> int:
    """Record workloads of an adapter; return the exit status."""
    from ckpt_conformance.crash.explore import kept
    from ckpt_conformance.crash.explore import workloads as recorder

    made: dict[str, KeptWorkload] = {}
    for name in workloads:
        try:
            recorded = recorder.record(subject, name)
        except (NotApplicable, Unknown) as error:
            made[name] = kept.reason(error)
            word = "not applicable" if isinstance(error, NotApplicable) else "? unknown"
            files.say(f"  {word}  {name}: {error}")
            continue
        made[name] = kept.keep(recorded, folder / name)
        files.say(f"{name}: {files.count(len(recorded.recording.operations), 'operation')}")
    kept.write(folder, kept.Kept(kept.SCHEMA, (subject.info.name,), {}, made))
    return say_recorded(folder, failed=any(workload.failed for workload in made.values()))


def say_recorded(folder: Path, *, failed: bool = False) -> int:
    """Say what to do with the recordings; return the exit status."""
    files.say(f"{folder}: explore with the same arguments and --recording {folder}")
    return certificate.UNDECIDED if failed else certificate.CERTIFIED


def check(record: Path | None, recording: Path | None, others: Mapping[str, object]) -> None:
    """Refuse what does not go with `--record` or `--recording`; `others` are options by name."""
    if record and recording:
        raise RequestError("--record makes recordings and --recording explores them: give one")
    given = [name for name, value in others.items() if value]
    if (record or recording) and given:
        option = "--record" if record else "--recording"
        raise RequestError(f"{given[0]} does not go with {option}; leave it out")
