"""Orders of saves that rotation has to stand: over a step, downwards, with alike digits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import Violation, control_failed
from ckpt_conformance.harness.messages import (
    Close,
    ExitKind,
    Load,
    LoadResult,
    Options,
    Run,
    Save,
    SaveResult,
    Steps,
    StepsResult,
)
from ckpt_conformance.harness.probes import probe

if TYPE_CHECKING:
    from ckpt_conformance.harness.messages import AnyOp
    from ckpt_conformance.subject.subject import Subject

ALIKE = (1, 10, 1_000_001, 1_000_010, 1_000_100)  # the text of one holds that of another
TOP, BELOW, ABOVE = 100, 10, 200  # the first of the steps that go down, by how much, the last
ASK = (Close(), Steps())  # a manager may still be deleting: to close it is to wait for that


def saved_as(step: int) -> tuple[AnyOp, ...]:
    """Return how a job of one step more is saved under a number."""
    return probe("reach", step=step), Save(go_on=True)


def require_no_loss_by_a_save_over(subject: Subject, keep: int) -> Violation | None:
    """Raise Violation if a step goes that is one of those to keep, when one is saved anew.

    Return one if a step goes that is among the largest, when steps are saved downwards, and then
    one above all of them. A manager that gives up what is above a step just saved is not judged.
    """
    trees.clear(subject.root)
    saves = tuple(range(1, keep + 1))
    downwards = [TOP - BELOW * number for number in range(keep)]
    again: list[AnyOp] = [Run(until=keep, save_at=saves), Save(step=keep, go_on=True), *ASK]
    down = [op for step in downwards for op in saved_as(step)]
    ops = [*again, *down, Steps(), *saved_as(ABOVE), *ASK]  # all by one manager
    result = subject.execute(*ops, options=Options(keep_last=keep))
    if result.exit_kind is not ExitKind.ENDED:
        raise control_failed(
            f"saves over a step, and downwards, do not end: {subject.tell(result)}"
        )
    listed = [set(one.steps or ()) for one in result.all_of(StepsResult)]
    first, *others = [one.error is None for one in result.all_of(SaveResult)] or [False]
    if first and listed and not set(saves) <= listed[0]:
        message = f"a save over step {keep}, one of the {keep} to keep, costs another one"
        raise Violation(message, evidence={"saved": [*saves, keep], "steps": sorted(listed[0])})
    if not all(others) or len(listed) < 3 or not set(downwards) <= listed[1]:  # noqa: PLR2004
        return None  # it refuses to, as it may
    due = {*downwards[: keep - 1], ABOVE}
    if due <= listed[2]:
        return None
    message = f"of steps saved downwards, and one above them, rotation does not keep {keep}"
    order = [*downwards, ABOVE]
    evidence = {"saved": order, "missing": sorted(due - listed[2]), "steps": sorted(listed[2])}
    return Violation(message, evidence=evidence)


def require_no_loss_by_digits(subject: Subject, keep: int) -> None:
    """Raise Violation if a step goes, or its files, because its digits hold those of an old one.

    Or because it holds the same as an old one: the job is another one only at the last save.
    """
    kept = list(ALIKE[-keep:])
    listed, loaded = _saved_alike(subject, kept, Options(keep_last=keep))
    if listed is None or (set(kept) <= set(listed) and loaded == kept):
        return
    if _saved_alike(subject, kept, Options()) == (list(ALIKE), kept):
        message = f"of steps {', '.join(map(str, ALIKE))} rotation does not leave the newest {keep}"
        told = {"steps": listed, "loads": loaded, "same content": list(ALIKE[:-1])}
        raise Violation(message, evidence=told)


def _saved_alike(
    subject: Subject, kept: list[int], options: Options
) -> tuple[list[int] | None, list[int]]:
    """Save the steps of `ALIKE`; list the steps, and load those of `kept` by their number.

    All but the last are of one job that has not trained meanwhile.
    """
    trees.clear(subject.root)
    first, *others, last = ALIKE
    same = [op for step in others for op in (probe("count", step=step), Save())]
    ops = [probe("reach", step=first), Save(), *same]
    ops += [probe("reach", step=last), Save()]
    listed = subject.execute(*ops, *ASK, options=options).of(StepsResult).steps
    if Capability.EXPLICIT_STEP not in subject.info.capabilities:
        return listed, kept
    loads = [Load(step=step, go_on=True) for step in kept]
    results = subject.execute(*loads).all_of(LoadResult)
    return listed, [result.step for result in results if result.step is not None]
