"""Several ranks rotate: each old step goes once, and every rank knows the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Violation, control_failed
from ckpt_conformance.harness.messages import (
    Close,
    Load,
    LoadResult,
    Options,
    Steps,
    StepsResult,
)
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.rank_saves import TWO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.harness.messages import AnyOp
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import WorldResult

SAVED = (2, 4, 6)  # steps
NEWEST = SAVED[-1]


@check("CKC-RANK-014")
def test_ranks_rotate_without_meeting_each_other(subject: Subject) -> None:
    """With several ranks rotation leaves the newest steps, and fails no save of any rank.

    Why: each rank deleted the oldest step; who came second found it gone, and the job ended by an
    error of a deletion (C09). Or none of them did, and the disk filled.
    How: save three steps on two ranks with two to keep, or as few as the manager can; every rank
    has to save all of them, and discovery names the newest. The control keeps all.
    """
    subject.need("ranks", "retention", "steps")
    keep = max(2, subject.info.min_keep)
    steps = tuple(2 * at for at in range(1, keep + 2))
    result = _saved(subject, steps, Options(keep_last=keep))
    told = [process.steps_of("acknowledged") for process in result.ranks]
    if not result.went_well or any(list(steps) != one for one in told):
        _require_well(subject, _saved(subject, steps, Options()))
        message = "two ranks rotate, and a save fails on one of them"
        raise Violation(message, evidence={"ranks": worlds.by_rank(subject, result)})
    left = sorted(result.of(StepsResult).steps or ())
    if left != list(steps[1:]):
        message = f"two ranks rotate with {keep} to keep"
        raise Violation(message, evidence={"steps": left, "saved": list(steps)})


@check("CKC-RANK-015")
def test_every_rank_names_what_was_saved(subject: Subject) -> None:
    """Once a save has returned every rank names the same steps, and loads the one just saved.

    Why: each rank looked whether the name was there; the second one saw what the first had just
    written, took another name, and recorded a checkpoint that never was (C15).
    How: save three steps on two ranks; ask each rank for the steps, and let all of them load the
    last one, in the same processes.
    """
    subject.need("ranks", "steps")
    result = _saved(subject, SAVED, Options(), then=[Steps(), Load()])
    if not result.reached(StepsResult):
        raise control_failed(f"two ranks do not save: {subject.tell(result)}")
    named = [sorted(process.of(StepsResult).steps or ()) for process in result.ranks]
    if any(one != named[0] for one in named) or NEWEST not in named[0]:
        message = "after a save ranks name different steps, or not the one that was saved"
        raise Violation(message, evidence={"by rank": named, "saved": list(SAVED)})
    arrived = [process.of(LoadResult).step for process in result.ranks]
    if arrived != [NEWEST] * len(arrived):
        _require_well(subject, worlds.resume(subject, TWO))
        message = "a rank does not load what all of them have just saved"
        evidence = {"by rank": arrived, "ranks": worlds.by_rank(subject, result)}
        raise Violation(message, evidence=evidence)


def _saved(
    subject: Subject, steps: tuple[int, ...], options: Options, then: Sequence[AnyOp] = (Steps(),)
) -> WorldResult:
    """Save steps on two ranks in an empty place, and do what comes `then`.

    The ranks train on by a step: none is asked while another one is still in the last save.
    """

    def run(**more: Any) -> WorldResult:  # noqa: ANN401  fields of a program
        trees.clear(subject.root)
        more |= {"then": [*then, Close()], "options": options}
        return worlds.run(subject, TWO, steps[-1] + 1, steps, **more)

    return worlds.patiently(run)


def _require_well(subject: Subject, result: WorldResult) -> None:
    """Raise Unknown where ranks do not do well what nothing disturbs."""
    if not result.went_well:
        raise control_failed(f"two ranks do not do well: {subject.tell(result)}")
