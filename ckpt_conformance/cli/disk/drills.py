"""The commands `corrupt` and `drill`: damage copies of a checkpoint, and see what fsck says."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypedDict

import typer

from ckpt_conformance.cli.disk.fsck import trust_of
from ckpt_conformance.cli.disk.options import AllowCode, AllowName, AsJson
from ckpt_conformance.cli.options import Names, Seed, whole
from ckpt_conformance.contract import requests, trees
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.fault_injectors.at_rest import Damage
    from ckpt_conformance.fsck.judge.judge import Judged, Options

SCHEMA = "ckpt-conformance/drill/v1"
IMPOSSIBLE = "impossible"
REMARK = "remark"
_COLUMNS = ("fault", "fsck says", "where, and why")
DamagedFile = Annotated[
    str | None, typer.Option(metavar="NAME", help="The file to damage, relative to DIR.")
]


def corrupt(  # noqa: PLR0913  one parameter for each option
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to copy.")],
    *,
    fault: Annotated[str, typer.Option(metavar="NAME", help="A fault at rest.")],
    out: Annotated[Path, typer.Option(metavar="COPY", help="Where the damaged copy goes.")],
    file: DamagedFile = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Damage a copy of a checkpoint, for drills; DIR stays as it is."""
    from ckpt_conformance.fault_injectors import drills

    _check_fault(fault)
    _check_inside(path, file)
    _check_copy(path, out)
    rng = random.Random(seed)  # noqa: S311  a drill
    try:
        with drills.copied(path, out) as copy:
            damage = drills.damage(copy, fault, rng, file)
    except (Unknown, ValueError, OSError) as error:  # shutil.Error is an OSError
        raise requests.RequestError(f"{path} cannot be damaged by {fault}: {error}") from error
    if as_json:
        typer.echo(json.dumps(damage.to_json() | {"seed": seed, "copy": str(out)}, indent=2))
        return
    from ckpt_conformance.report.terminal import one_line

    at = "" if damage.offset is None else f" at byte {damage.offset}"
    what = f"{damage.fault} in {damage.file}{at}: {damage.detail or damage.after}"
    terminal.say(one_line(f"{out}: {what}"))


def _check_fault(fault: str) -> None:
    from ckpt_conformance.fault_injectors import drills

    if fault not in drills.FAULTS:
        hint = requests.nearest(fault, drills.FAULTS)
        known = ", ".join(drills.FAULTS)
        raise requests.RequestError(f"unknown fault {fault!r}; {hint}faults at rest: {known}")


def _check_inside(path: Path, file: str | None) -> None:
    """Refuse what is no folder, and a file outside of it."""
    if not path.is_dir():
        raise requests.RequestError(
            f"{path} is no folder; give the folder that holds the checkpoint"
        )
    inside = file is None or (path / file).resolve().is_relative_to(path.resolve())
    if not inside:
        raise requests.RequestError(f"{file} leads out of {path}; name a file inside of it")


def _check_copy(path: Path, out: Path) -> None:
    """Refuse a place for a copy where something is, or that is part of the original."""
    from ckpt_conformance.fault_injectors import drills

    if out.exists() or out.is_symlink():
        raise requests.RequestError(f"{out} exists; name a folder that does not")
    if drills.draft_of(out).exists():
        left = f"{drills.draft_of(out)} is there, which a `corrupt` that was killed has left"
        raise requests.RequestError(f"{left}: remove it, or name another folder")
    if out.resolve().is_relative_to(path.resolve()):
        raise requests.RequestError(f"{out} is inside of {path}; name a folder beside it")


# -- drills ----------------------------------------------------------------------------------------


class DrilledJson(TypedDict):
    """A `Drilled` in the output of `drill --json`."""

    fault: str
    seed: int
    file: str | None
    offset: int | None
    says: str
    why: str


@dataclass(frozen=True)
class Drilled:
    """One fault, and what fsck says of the copy that has it.

    Attributes:
        damage: what was done; None where the fault is impossible here.
        says: the state of the copy, REMARK for one that is whole with a remark, or IMPOSSIBLE.
        why: the finding; for an impossible fault the reason.

    """

    fault: str
    seed: int
    damage: Damage | None
    says: str
    why: str

    @property
    def is_seen(self) -> bool:
        """Whether fsck said anything of it."""
        return self.says not in ("whole", IMPOSSIBLE)

    def to_json(self) -> DrilledJson:
        """Return plain types."""
        return {
            "fault": self.fault,
            "seed": self.seed,
            "file": self.damage.file if self.damage else None,
            "offset": self.damage.offset if self.damage else None,
            "says": self.says,
            "why": self.why,
        }


class Drill(NamedTuple):
    """A checkpoint to drill with: what fsck says of it as it is, and how fsck is asked."""

    path: Path
    before: Judged
    options: Options


def drill(  # noqa: PLR0913  one parameter for each option
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The folder; it stays as it is.")],
    *,
    fault: Annotated[
        Names, typer.Option(metavar="NAME", help="A fault at rest; again for more. Default: all.")
    ] = None,
    times: Annotated[
        int, typer.Option(parser=whole(1, 10_000), metavar="N", help="Draws of each fault.")
    ] = 1,  # each with a seed of its own
    file: DamagedFile = None,
    seed: Seed = 0,
    allow_name: AllowName = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Damage copies of a checkpoint by every fault, and print what fsck says of each.

    Exit status: 0, whatever fsck says; 2 usage error, or DIR is not whole to begin with.
    """
    from ckpt_conformance.fault_injectors import drills
    from ckpt_conformance.fsck.judge.judge import Options, judge

    for one in fault or ():
        _check_fault(one)
    _check_inside(path, file)
    options = Options(trust=trust_of(allow_name or [], is_all=allow_code))
    before = judge(path, options)
    if before.state != "whole":
        raise requests.RequestError(
            f"{path} is {before.state} as it is: `ckpt-conformance fsck {path}` says why; a drill "
            "begins with what is whole"
        )
    drawn = [(one, seed + more) for one in fault or drills.FAULTS for more in range(times)]
    done: list[Drilled] = []
    with tempfile.TemporaryDirectory(prefix="ckc-drill-") as folder:
        _check_room(path, Path(folder))
        for name, own in drawn:
            done.append(drilled(Drill(path, before, options), Path(folder), name, own, file))
    if as_json:
        rows = [one.to_json() for one in done]
        body = {"schema": SCHEMA, "path": str(path), "seed": seed, "drills": rows}
        typer.echo(json.dumps(body, indent=2))
        return
    for line in _table(done):
        terminal.say(line)


def _check_room(path: Path, folder: Path) -> None:
    size, free = (
        sum(one.stat().st_size for one in trees.files(path)),
        shutil.disk_usage(folder).free,
    )
    if size > free:
        why = f"a copy of {path} takes {size} bytes, and {folder.parent} has {free}"
        raise requests.RequestError(f"{why}: set TMPDIR to a folder with more room")


def drilled(drill: Drill, folder: Path, fault: str, seed: int, file: str | None = None) -> Drilled:
    """Damage a copy below a folder by a fault that a seed draws, judge it, and remove it."""
    from ckpt_conformance.fault_injectors import drills
    from ckpt_conformance.fsck.judge.judge import judge

    copy = folder / drill.path.resolve().name  # its name may say the step
    rng = random.Random(seed)  # noqa: S311  a drill
    try:
        with drills.copied(drill.path, copy) as draft:
            damage = drills.damage(draft, fault, rng, file)
    except (Unknown, ValueError, OSError) as error:
        return Drilled(
            fault,
            seed,
            None,
            IMPOSSIBLE,
            str(error).replace(str(drills.draft_of(copy)), str(drill.path)),
        )
    after = judge(copy, drill.options)
    shutil.rmtree(copy)
    return Drilled(fault, seed, damage, *_said(drill.before, after))


def _said(before: Judged, after: Judged) -> tuple[str, str]:
    """Return what fsck says of a copy that it did not say of the original, and why."""
    from ckpt_conformance.fsck.source.findings import STATES, State
    from ckpt_conformance.report.fsck_lines import describe

    known = {describe(one) for report in before.reports for one in report.findings}
    new = [one for report in after.reports for one in report.findings]
    new = [one for one in new if describe(one) not in known]
    if after.state is State.WHOLE:
        gone = len(before.reports) - len(after.reports)
        if gone or new:
            return REMARK, describe(new[0]) if new else f"{gone} checkpoints less than before"
        return str(after.state), "nothing tells it"
    worst = [one for one in new if STATES[one.kind] is after.state]
    return str(after.state), describe(worst[0]) if worst else "nothing here is a checkpoint"


def _table(done: Sequence[Drilled]) -> Iterator[str]:
    """Yield a line for each drill, and how many were seen."""
    from ckpt_conformance.report.terminal import one_line

    yield f"{_COLUMNS[0]:<17} {_COLUMNS[1]:<11} {_COLUMNS[2]}"
    for one in done:
        at = (
            ""
            if one.damage is None or one.damage.offset is None
            else f" at byte {one.damage.offset}"
        )
        where = f"{one.damage.file}{at}: " if one.damage else ""
        yield one_line(f"{one.fault:<17} {one.says:<11} {where}{one.why}")
    possible = [one for one in done if one.says != IMPOSSIBLE]
    missed = sorted({one.fault for one in possible if not one.is_seen})
    tail = f"; not all of: {', '.join(missed)}" if missed else ""
    yield f"fsck sees {sum(one.is_seen for one in possible)} of {len(possible)}{tail}"


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(corrupt)
    app.command()(drill)
