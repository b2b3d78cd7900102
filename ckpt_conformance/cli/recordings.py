"""`explore --record` and `--recording`: record once, explore as often and in as many parts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ckpt_conformance.cli.stopping import INTERRUPTED
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown
from ckpt_conformance.report import certificate, files
from ckpt_conformance.work.identity import SUITE, Identity

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from ckpt_conformance.crash.explore.engine import Recorded
    from ckpt_conformance.crash.explore.kept import Kept, KeptWorkload
    from ckpt_conformance.subject.subject import Subject

SCRIPT = "command"  # stands for the one workload of a command
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
    private: bool

    @classmethod
    def open(
        cls,
        folder: Path,
        explored: Sequence[str],
        options: Mapping[str, Any],
        workloads: Sequence[str],
        depends: Identity,
    ) -> Kit:
        """Read a folder of recordings; raises RequestError if it is not of what is explored.

        So it does where the code has changed since: what it recovers from is what other code wrote.
        """
        from ckpt_conformance.crash.explore import kept
        from ckpt_conformance.processes import memory

        content = kept.read(folder, explored, dict(options))
        _check_depends(folder, content, depends)
        for name in workloads:
            with contextlib.suppress(NotApplicable, Unknown):
                kept.load(folder, content, name)
        return cls(folder.resolve(), content, memory.has_private_memory())

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


def _check_depends(folder: Path, content: Kept, now: Identity) -> None:
    """Raise RequestError if a recording is of other code or packages; the suite may be another."""
    then = msgspec.json.decode(content.depends, type=Identity | None)
    if then is None:
        raise RequestError(f"--recording {folder} does not say of which code it is; record again")
    told = then.without(SUITE).differences(now.without(SUITE), "where it was recorded", "here")
    if told:
        raise RequestError(
            f"--recording {folder} depends on what differs now: {'; '.join(told)}; explore it with "
            "the same code and packages, or record again"
        )


def record(
    subject: Subject, adapter: str, workloads: Sequence[str], folder: Path, depends: Identity
) -> Kept:
    """Record workloads of an adapter, which is named as the user does; return what is kept."""
    from ckpt_conformance.crash.explore import kept
    from ckpt_conformance.crash.explore import workloads as recorder

    made: dict[str, KeptWorkload] = {}
    for name in workloads:
        try:
            recorded = recorder.record(subject, name)
        except (NotApplicable, Unknown) as error:
            made[name] = kept.reason(error)
            continue
        made[name] = kept.keep(recorded, folder / name)
    content = kept.Kept(kept.SCHEMA, (adapter,), {}, made, depends_of(depends))
    kept.write(folder, content)
    return content


def depends_of(identity: Identity) -> msgspec.Raw:
    """Write what a recording depends on, for `Kit.open` to compare."""
    return msgspec.Raw(msgspec.json.encode(identity))


def say_each(content: Kept) -> None:
    """Say how much was recorded of each workload, or why nothing was."""
    for name, workload in content.workloads.items():
        if workload.not_applicable or workload.failed:
            word = "not applicable" if workload.not_applicable else "? unknown"
            files.say(f"  {word}  {name}: {workload.not_applicable or workload.failed}")
        else:
            files.say(f"{name}: {files.count(workload.operations, 'operation')}")


@contextlib.contextmanager
def making(folder: Path) -> Generator[None]:
    """Make a folder for recordings; Ctrl-C ends the command, and the folder is not whole."""
    from ckpt_conformance.crash.explore import kept

    kept.prepare(folder)
    try:
        yield
    except KeyboardInterrupt:
        files.say(f"Stopped before the end: {folder} is not whole; remove it and record again.")
        raise typer.Exit(INTERRUPTED) from None


def say_recorded(folder: Path, *, failed: bool = False) -> int:
    """Say what to do with the recordings; return the exit status."""
    files.say(f"{folder}: explore with the same arguments and --recording {folder}")
    return certificate.UNDECIDED if failed else certificate.CERTIFIED


def check(  # noqa: PLR0913  one parameter for each option
    record: Path | None,
    recording: Path | None,
    *,
    keep: bool,
    results: Path | None,
    real: Sequence[str] | None,
    ranks: int,
    on: str | None = None,
    cache: Path | None = None,
) -> None:
    """Refuse what does not go with `--record` or `--recording`."""
    if record and recording:
        raise RequestError("--record makes recordings and --recording explores them: give one")
    others: dict[str, object] = {"--ranks": ranks > 1}
    if record:
        others |= {"--results": results, "--keep": keep, "--real": real}
        others |= {"--on": on, "--cache": cache}
    given = [name for name, value in others.items() if value]
    if (record or recording) and given:
        option = "--record" if record else "--recording"
        raise RequestError(f"{given[0]} does not go with {option}; leave it out")
