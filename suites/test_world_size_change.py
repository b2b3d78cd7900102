"""What several ranks saved comes back: on the same ranks, in another world size, in another layout.

The training job gives the same global run in every layout, bit for bit, so one that resumes with
other ranks is held to the run that never stopped, as any other is.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import NotApplicable, Violation, control_failed
from ckpt_conformance.harness.messages import ExitKind
from ckpt_conformance.subject import controls, oracle, worlds
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.resumption import other_fields
from ckpt_conformance.suites import drawn_layouts
from ckpt_conformance.suites.layouts import (
    NEWEST,
    SAME,
    TWO,
    arrived,
    demand_none,
    differs,
    is_moment,
    is_tensor,
    name,
    optimizers,
    pair,
    pairs,
    weights_arrive,
)

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.suites.drawn_layouts import Drawn

FIRST = 2
SHARED = ("loss", "learning_rates")  # of a record, what does not depend on the number of ranks


# -- the same ranks ---------------------------------------------------------------------------


@check("CKC-SHRD-004")
def test_each_rank_gets_its_shards_back(subject: Subject) -> None:
    """In the same layout every rank gets back the parameters and buffers that were saved.

    Why: a shard of another rank fits wherever shards have one shape; an empty one is not recorded;
    a tied or replicated tensor is joined instead of kept once (I02, I08, I10, J10).
    How: FSDP2 on two and three ranks, with tensor parallel, with replicas: save, start anew, load,
    join what the ranks hold at the first training step, compare bit for bit.
    """
    subject.need("ranks")
    for layout in subject.sample(SAME, 3):
        weights_arrive(subject, layout, layout)


@check("CKC-SHRD-005")
def test_each_rank_gets_its_own_generators_back(subject: Subject) -> None:
    """Each rank gets back its own generators, not another rank's.

    Why: state of every rank under one name is saved once: 252 of 256 ranks went on with the random
    numbers of another, and ranks that drew apart drew alike (E07, KX2).
    How: two and three ranks, each with a stream of its own: save, start anew, load, compare each.
    """
    subject.need("ranks", holds=["rng"])
    for layout in SAME[:2]:
        saved, state = pair(subject, layout, layout)
        wrong = differs(saved, state, ["rng"], is_tensor)
        demand_none(wrong, f"{name(layout)}: a rank goes on with other random numbers")


@check("CKC-SHRD-006")
def test_each_rank_gets_its_own_data_position_back(subject: Subject) -> None:
    """Each rank gets back its own place in the data.

    Why: a loader that takes another rank's place reads what that rank reads, and no rank reads the
    rest: the loss goes on to fall, on half of the data (E07, H01).
    How: two and three ranks, each with a part of every batch: save, start anew, load, compare each.
    """
    subject.need("ranks", holds=["loader"])
    for layout in SAME[:2]:
        saved, state = pair(subject, layout, layout)
        wrong = differs(saved, state, ["loader"], is_tensor)
        demand_none(wrong, f"{name(layout)}: a rank goes on at another place of the data")


@check("CKC-SHRD-013")
def test_optimizer_state_comes_back_on_its_ranks(subject: Subject) -> None:
    """In the same layout every rank gets back the optimizer's moments and step counters.

    Why: moments are sharded as their parameters are, and counters are not: what treats both alike
    joins one of them wrongly, or drops what is empty on this rank (I02, I08, J01).
    How: as for parameters, on all that the optimizer keeps of each parameter.
    """
    subject.need("ranks", holds=["optimizer"])
    for layout in subject.sample(SAME, 3):
        parts = optimizers(subject, worlds.golden(subject, layout).at[NEWEST])
        saved, state = pair(subject, layout, layout)
        wrong = differs(saved, state, parts, is_moment)
        demand_none(wrong, f"{name(layout)}: optimizer state is not what was saved")


# -- other ranks ------------------------------------------------------------------------------


@check("CKC-SHRD-007")
def test_another_world_size_gets_the_saved_weights(subject: Subject) -> None:
    """Another number of ranks gets the saved parameters, bit for bit.

    Why: shards joined in the wrong order, offsets counted twice, padding taken for data: the loss
    jumped from 2 to 10 and nothing was said (I01, I10, J10, M035).
    How: save with N ranks, load with M, join what they hold; every pair of 1 to 4 ranks at the full
    budget, and from and to 8 where memory allows. Shapes that no number of ranks shares out
    evenly, a matrix of one row, tied weights.
    """
    subject.need("ranks", "reshard")
    for old, new in pairs(subject, 3):
        weights_arrive(subject, old, new)


@check("CKC-SHRD-022")
def test_a_process_without_ranks_gets_the_saved_weights(subject: Subject) -> None:
    """A process without a process group gets the parameters that ranks saved, or is refused.

    Why: evaluation and export load what ranks have saved into whole tensors, which other code fills
    than shards; offsets that are right for one are wrong for the other (I10).
    How: save with two ranks; load into the same model in one process that never heard of ranks.
    """
    subject.need("ranks", "reshard")
    controls.require(test_another_world_size_gets_the_saved_weights, subject)
    gold = worlds.golden(subject, TWO)
    subject.materialize(gold)
    result = subject.resume(kind="sharded")
    step, state = oracle.arrival(result)
    if step is None and result.exit_kind is ExitKind.ENDED:
        return
    if step != NEWEST:
        message = f"saved by {name(TWO)}: a process without ranks ends as {subject.tell(result)}"
        raise Violation(message, evidence=subject.evidence(result))
    wrong = differs(gold.at[NEWEST], state, ["model"], is_tensor)
    demand_none(wrong, f"saved by {name(TWO)}: a process without ranks gets other weights")


@check("CKC-SHRD-008")
def test_another_world_size_gets_the_saved_optimizer_state(subject: Subject) -> None:
    """Another number of ranks gets the saved moments and step counters, bit for bit.

    Why: an optimizer that begins cold after a change of ranks costs nothing but the run (I03, J01).
    How: as for parameters, on all that the optimizer keeps of each parameter.
    """
    subject.need("ranks", "reshard", holds=["optimizer"])
    for old, new in pairs(subject, 3):
        saved, state = pair(subject, old, new)
        wrong = differs(saved, state, optimizers(subject, saved), is_moment)
        demand_none(wrong, f"saved by {name(old)}: {name(new)} gets other optimizer state")


@check("CKC-SHRD-009")
def test_another_layout_gets_the_saved_state(subject: Subject) -> None:
    """Another mesh or another placement gets the saved parameters and moments, bit for bit.

    Why: two levels of sharding have two offsets, and the wrong axis' rank gives a box that fits:
    chunks were joined in the order 0, 2, 1, 3 (I01, J10).
    How: draw pairs of layouts (FSDP2 on either dimension, tensor parallel, replicas, and what can
    be made of them) and a model (uneven sizes, dtypes); save in one, load in the other; shrink the
    first pair that differs.
    """
    subject.need("ranks", "reshard")
    drawn_layouts.each(subject, worlds.most(subject), partial(_state_arrives, subject))


def _state_arrives(subject: Subject, drawn: Drawn) -> None:
    """Raise Violation unless ranks in one layout get the state that another one saved."""
    gold = worlds.golden(subject, drawn.old, (FIRST,), tensors=drawn.tensors)
    subject.materialize(gold, FIRST)
    result = worlds.resume(subject, drawn.new, tensors=drawn.tensors)
    who = f"saved by {name(drawn.old)}: {name(drawn.new)}"
    step, state = oracle.arrival(result)
    if step != FIRST:
        message = f"{who} gives {subject.tell(result)}; the model: {drawn.model}"
        raise control_failed(message, "CKC-SHRD-007")
    saved = gold.at[FIRST]
    wrong = differs(saved, state, ["model"], is_tensor)
    if "optimizer" in subject.holds:
        wrong += differs(saved, state, optimizers(subject, saved), is_moment)
    demand_none(wrong, f"{who} gets another state; the model: {drawn.model}")


@check("CKC-SHRD-012")
def test_ranks_that_cannot_load_are_told(subject: Subject) -> None:
    """A checkpoint of another number of ranks is served right, or refused by every rank.

    Why: files of eight ranks opened by four load half of the state, and by sixteen leave eight
    ranks cold; whoever can't convert must say so before anything is touched (I03, M034, M036).
    How: save with two ranks, load with three, with four and with one. NOT_APPLICABLE where
    `reshard` is declared: CKC-SHRD-007 asks for more.
    """
    subject.need("ranks")
    if "reshard" in subject.info.capabilities:
        raise NotApplicable("the adapter declares reshard: see CKC-SHRD-007")
    gold = worlds.golden(subject, TWO)
    for new in ({"fsdp": 3}, {"fsdp": 4}, {"fsdp": 1}):
        result = arrived(subject, gold, new)
        if result.split:
            message = f"saved by {name(TWO)}: of {name(new)} some load and some do not"
            ranks = [subject.tell(process) for process in result.ranks]
            raise Violation(message, evidence={"ranks": ranks})
        step, state = oracle.arrival(result)
        if step is None and result.exit_kind is ExitKind.ENDED:
            continue
        if step != NEWEST:
            message = f"saved by {name(TWO)}: a load by {name(new)} ends as {subject.tell(result)}"
            raise Violation(message, evidence=subject.evidence(result))
        wrong = differs(gold.at[NEWEST], state, ["model"], is_tensor)
        if "optimizer" in subject.holds:
            wrong += differs(gold.at[NEWEST], state, optimizers(subject, state), is_moment)
        demand_none(wrong, f"saved by {name(TWO)}: {name(new)} gets another state, and is not told")


@check("CKC-RSUM-013")
def test_ranks_go_on_as_if_unbroken(subject: Subject) -> None:
    """A run of several ranks that resumes is the run that never stopped, on every rank.

    Why: what differs between ranks shows in no digest of rank 0: other ranks' learning rate, data
    and random numbers were wrong while its own were right (E07, N04).
    How: two ranks, and four in a 2-D mesh: resume, train four steps, compare every rank's records.
    """
    subject.need("ranks", holds=["model", "optimizer", "scheduler", "loader", "rng"])
    for layout in (TWO, SAME[2]):
        gold = worlds.golden(subject, layout)
        pair(subject, layout, layout)
        wanted = {(known.rank, known.record.step): known.record for known in gold.records}
        wrong = [
            f"rank {now.rank}, step {now.record.step}: {', '.join(fields)}"
            for now in arrived(subject, gold, layout).records
            if (fields := other_fields(now.record, wanted.get((now.rank, now.record.step))))
        ]
        demand_none(wrong, f"{name(layout)}: the resumed run is another")


@check("CKC-RSUM-014")
def test_other_ranks_go_on_as_if_unbroken(subject: Subject) -> None:
    """A run that resumes with another number of ranks has the losses of the run that never stopped.

    Why: resharding is believed when the loss "looks right"; here it is the same, bit for bit, so
    that a moment, a step counter or a rate that is slightly wrong shows within four steps (I01).
    How: resume two ranks' checkpoint on one, on three and on two by two; compare losses and rates.
    """
    subject.need("ranks", "reshard", holds=["model", "optimizer", "scheduler", "loader"])
    gold = worlds.golden(subject, TWO)
    wanted = {known.record.step: known.record for known in gold.records if known.rank == 0}
    for new in ({"fsdp": 1}, {"fsdp": 3}, SAME[3]):
        pair(subject, TWO, new)
        wrong = [
            f"rank {now.rank}, step {now.record.step}: {field}"
            for now in arrived(subject, gold, new).records
            for field in other_fields(now.record, wanted[now.record.step])
            if field in SHARED
        ]
        demand_none(wrong, f"from {name(TWO)} to {name(new)}: the resumed run is another")
