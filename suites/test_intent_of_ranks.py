"""What several ranks ask for is honoured on every rank, or refused by all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.harness.messages import ExitKind
from ckpt_conformance.subject import oracle, worlds
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import Layout

TWO: Layout = {"fsdp": 2}
OLDER, NEWEST = 2, 4
CAST = "frozen.0"  # the entry that the variant `dtype` has in another dtype


@check("CKC-INTN-014")
def test_another_dtype_is_refused_on_ranks(subject: Subject) -> None:
    """On ranks too a destination of another dtype is refused, or takes the saved dtype.

    Why: shards are read into what is there; a bfloat16 template took float32 weights and rounded
    them, on every rank, without a word (J04).
    How: two ranks load into a model of which a sharded matrix has another dtype.
    """
    subject.need("ranks")
    gold = worlds.golden(subject, TWO)
    worlds.loaded(subject, gold, TWO, NEWEST)  # the control
    subject.materialize(gold)
    result = worlds.resume(subject, TWO, variant="dtype")
    step, state = oracle.arrival(result)
    if result.split or result.exit_kind is not ExitKind.ENDED:
        evidence = {"ranks": worlds.by_rank(subject, result)}
        raise Violation("the ranks do not refuse alike", evidence=evidence)
    if step and state["model"].get(CAST) != gold.at[NEWEST]["model"][CAST]:
        raise Violation(
            f"{CAST} was cast to the dtype of its destination, silently",
            evidence=subject.evidence(result),
        )


@check("CKC-INTN-015")
def test_an_explicit_step_is_honoured_on_every_rank(subject: Subject) -> None:
    """A step that is asked for is served to every rank, although a newer one is there.

    Why: one inner part follows the pointer, not the request: weights of one step beside optimizer
    shards of another (R09, N04).
    How: two ranks ask for step 2 where step 4 is there too; compare what arrives on each.
    """
    subject.need("ranks", "explicit_step")
    gold = worlds.golden(subject, TWO)
    wanted = worlds.loaded(subject, gold, TWO, OLDER)
    subject.materialize(gold)
    result = worlds.resume(subject, TWO, OLDER)
    step, state = oracle.arrival(result)
    if step != OLDER or not oracle.same(state, wanted, subject.holds):
        raise Violation(
            f"step {OLDER} was asked for: {subject.tell(result)}",
            evidence=subject.evidence(result, wanted),
        )
