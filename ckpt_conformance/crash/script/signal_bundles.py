"""A signal that violates, as a folder that replays alone: the signal and its moment are part of it.

`checkpoints/` is the directory as the job left it, `output.txt` what the job printed and then the
one that was started again, `operations.txt` what the job did, with the signal marked. A replay runs
the job from its beginning, sends it the signal at that moment, and starts it again.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Outcome, Unknown
from ckpt_conformance.crash.explore import bundles
from ckpt_conformance.crash.script.bundles import (
    Origin,
    Promise,
    ask,
    copy_expected,
    origin_of,
    placed,
    promise_of,
    rebuilt,
)
from ckpt_conformance.crash.script.messages import Interrupt, Issued
from ckpt_conformance.crash.script.preemption import Interruption, Interruptions
from ckpt_conformance.subject import bundle
from ckpt_conformance.trace.operations import Kind

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.crash.script.messages import Signalled
    from ckpt_conformance.crash.script.preemption import Kept

KIND = "script-signal"


class Usual(msgspec.Struct, frozen=True):
    """The last part of `violation.json`: what the job does that gets no signal."""

    usual: tuple[Issued, ...]


def write(folder: Path, interruptions: Interruptions, name: str, kept: Kept) -> Path:
    """Write a bundle below `folder` and return its path; an older one of that name is replaced."""
    explorer = interruptions.explorer
    rehearsal = explorer.rehearsal
    target = bundles.fresh(folder, bundle.safe(f"{rehearsal.script.name}-{name}"))
    facts = interruptions.facts(kept.interruption.signal, kept.job)
    content: dict[str, object] = {}
    for part in (
        origin_of(explorer, KIND),
        kept.interruption,
        promise_of(explorer, facts),
        Usual(interruptions.usual),
    ):
        content |= msgspec.to_builtins(part)
    (target / "violation.json").write_text(json.dumps(content, indent=2))
    trees.copy(kept.tree, target / "checkpoints")
    trees.copy(rehearsal.recording.folder, target / "recording")
    copy_expected(rehearsal, target)
    (target / "operations.txt").write_text(_listing(kept))
    (target / "output.txt").write_text(_outputs(rehearsal.script.filled(resume=True), kept.job))
    return target


def _listing(kept: Kept) -> str:
    """Write what the job did, one a line, with the moment of the signal."""
    lines = [f"# {kept.interruption.what}", f"# {kept.interruption.handled}"]
    for number, item in enumerate(kept.job.issued):
        if number == kept.job.at:
            lines.append("---- signal here ----")
        rank = f" rank {item.rank}" if item.rank >= 0 else ""
        what = item.line if item.kind == Kind.MARK else item.path
        size = f" {item.size} bytes" if item.size else ""
        lines.append(f"{number:>6}{rank} {item.kind:<9} {what}{size}")
    if kept.job.at >= len(kept.job.issued):
        lines.append("---- signal here ----")
    lines.append("---- its end ----")
    return "\n".join(lines) + "\n"


def _outputs(again: list[str], job: Signalled) -> str:
    return f"{job.output}\n---- $ {shlex.join(again)}\n{job.resumed.output}"


def replay(folder: Path, scratch: Path) -> bundles.Replayed:
    """Run the job of a bundle, send it the signal, and start it again.

    Raises Unknown where that does not work: then nothing can be said.
    """
    folder = folder.resolve()
    content = bundle.read(folder)
    origin, promise = bundles.part_of(content, Origin), bundles.part_of(content, Promise)
    then, usual = bundles.part_of(content, Interruption), bundles.part_of(content, Usual)
    with placed(origin, scratch) as script:
        job = ask(folder, origin, script, scratch, Interrupt(then.signal, origin.deadline))
    if not job.sent:
        raise Unknown(
            f"{then.what}: the moment did not come; is it the same script, and the same data?"
        )
    interruptions = Interruptions(rebuilt(folder, origin, promise, script), usual.usual)
    now = interruptions.judge(then.signal, job)
    summary = f"{now.what}; {now.handled}; started again: {now.summary}"
    return bundles.Replayed(Outcome(now.outcome), not now.violates, summary)
