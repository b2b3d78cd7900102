"""What is larger than a manager's chunks and buffers is saved, checked and read to its last byte.

Other suites use tensors of some kilobytes, which fit into every buffer. Here one has 64 MiB: loops
over chunks have many turns, threads take part, and what is written or verified only in part shows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import (
    REFUSALS,
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import at_rest, large_save, payload, system_call
from ckpt_conformance.fault_injectors.large_save import KIND, MIB, told
from ckpt_conformance.harness.messages import (
    Close,
    ExitKind,
    LeavesResult,
    Load,
    ReadLeaves,
    Save,
    Train,
    whole,
)
from ckpt_conformance.subject import controls, oracle, resumption
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED, SAVES, Slot
from ckpt_conformance.subject.undisturbed import unless_saves_alone_do_it
from ckpt_conformance.suites.controls import test_rng_scheduler as rng_scheduler
from ckpt_conformance.suites.controls import test_undisturbed_run as undisturbed

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.at_rest import Damage
    from ckpt_conformance.fault_injectors.payload import Place
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Leaves, Probe
    from ckpt_conformance.subject.subject import Golden, Subject

LEAF = "large"  # the large tensor of the model
OLDER, NEWEST = SAVES
PLACE: Slot[Place] = Slot("where the large tensor lies in the files of the older step")


@check("CKC-RTRP-001")
def test_a_large_tensor_is_the_saved_one(subject: Subject) -> None:
    """A tensor of 64 MiB arrives with every bit that was saved.

    Why: from some size on a file is written, hashed and read by other code: in chunks, by threads,
    by calls that take a part only (A07). Tensors of some kilobytes never enter it.
    How: resume a job with such a tensor, in which no element is like another; compare. At the full
    budget also a tensor of more than 4 GiB, and 66,000 tensors, beyond what one call writes and
    what a plain zip archive counts; that needs 14 GiB of memory and 10 GiB of disk.
    """
    resumption.arrive(subject, "large", owner=True)
    message = "a tensor of 64 MiB is not what was saved"
    resumption.identity(subject, "model", message, lambda path: path == LEAF, KIND)
    if subject.budget == "full":
        large_save.require_room(subject)
        for kind in ("many", "huge"):
            comes_back(subject, kind)


@check("CKC-COMP-003")
def test_large_moments_keep_their_bits(subject: Subject) -> None:
    """Moments of more than 2**20 elements arrive with the dtype and the bits that were saved.

    Why: where half of the bytes of a moment is worth saving, it is rounded on its way (K03); a rule
    that asks for a size leaves small ones as they are.
    How: the same job, whose optimizer holds such moments; compare those of every parameter.
    """
    controls.require(rng_scheduler.test_moments_reach_a_fresh_optimizer, subject)
    message = "moments of more than 2**20 elements lost their dtype or their bits"
    resumption.identity(subject, "optimizer", message, rng_scheduler.is_moment, KIND)


def comes_back(subject: Subject, kind: str) -> None:
    """Raise Violation unless a job of a kind that takes minutes loads as it was saved, once."""
    saved = large_save.state_saved(subject, kind)
    result = large_save.ended(subject.resume(kind=kind, **large_save.ROOMY))
    step, arrived = oracle.arrival(result)
    wrong = oracle.differences(arrived, saved, {"model"}) if step == OLDER else ["everything"]
    if wrong or not saved.get("model"):
        evidence = subject.evidence(result, kind=kind, differs=wrong)
        raise Violation(f"a job of kind {kind} is not what was saved", evidence=evidence)


@check("CKC-DISC-008")
def test_a_smaller_tensor_takes_the_place_of_a_large_one(subject: Subject) -> None:
    """A step that is saved again with a tensor of 1 MiB in the place of 64 MiB is what is loaded.

    Why: what is written in chunks, each under a name or in a row of its own, leaves those of the
    older save that the newer one has no part for, and a load puts all of them together (R01, A10).
    How: save step 2 with a buffer of 64 MiB, make it one of 1 MiB, save step 2 again; load into a
    job with such a buffer. The control saves the smaller one alone.
    """
    if not subject.info.saves_over:
        raise NotApplicable("it saves no step a second time, as declared")
    large, small = (undisturbed.probe("hold", mib=size) for size in (64, 1))
    saving: list[AnyOp] = [small, ReadLeaves(), Save(step=OLDER), Close()]
    over = saved_and_given(subject, small, [large, Save(step=OLDER), *saving])
    if over.given and over.given == over.saved:
        return
    resumption.arrive(subject, KIND)  # else CKC-RTRP-001 says that such a size is not saved
    alone = saved_and_given(subject, small, saving)
    if not alone.given:
        raise control_failed("a job with a buffer of 1 MiB does not come back", "CKC-SIDE-008")
    if over.given != alone.given:
        differs = oracle.differences(over.given, over.saved, subject.holds)
        what = "with a buffer of 1 MiB in the place of one of 64 MiB"
        message = f"a step that is saved again, {what}, is not what is loaded"
        with unless_saves_alone_do_it(subject):
            raise Violation(message, evidence=subject.evidence(over.last, differs=differs))


class SavedAndGiven(NamedTuple):
    """The held components of a job as it saves, and as a job like it has loaded them.

    `given` is empty where the save or the load fails; `last` is the child that tells of it.
    """

    saved: Leaves
    given: Leaves
    last: ProcessResult


def saved_and_given(subject: Subject, small: Probe, saving: Sequence[AnyOp]) -> SavedAndGiven:
    """Save into an empty directory, and load into a job that was changed alike."""
    trees.clear(subject.root)
    saves = subject.execute(Train(n=OLDER), *saving)
    loads = subject.execute(small, Load(), ReadLeaves(), seed=OTHER_SEED)
    states = [whole(result.of(LeavesResult).leaves or {}) for result in (saves, loads)]
    saved, given = (oracle.held(state, subject.holds) for state in states)
    return (
        SavedAndGiven(saved, given, loads) if saves.went_well else SavedAndGiven(saved, {}, saves)
    )


@check("CKC-CORR-001")
def test_damage_deep_in_a_large_tensor_is_never_served(subject: Subject) -> None:
    """No bit of a tensor of 64 MiB can change on disk and be served.

    Why: a checksum of a file's head is cheap, and says nothing of what follows (O01, O02).
    How: flip one bit in its last byte, and at two places of which each digest of every other block
    leaves one out; at the full budget also one in each fifth MiB; resume.
    """
    place = place_of(subject)
    every = range(MIB - 1, place.length, 5 * MIB) if subject.budget == "full" else ()
    deep = (place.length - 1, *opposites(place, subject.rng), *every)
    bytes_ = [replace(place, offset=place.offset + at, length=1) for at in deep]
    flip = partial(at_rest.flip_bits, rng=subject.rng)
    never_served(subject, [partial(flip, place=byte) for byte in bytes_])


def opposites(place: Place, rng: random.Random) -> tuple[int, int]:
    """Return two offsets in a tensor whose places in the file differ in each bit.

    So they are in neighbouring blocks of a pair, whatever power of two the size of a block is.
    """
    bits = (1 << (place.length - 1).bit_length()) - 1
    inside = range(place.offset, place.offset + place.length)
    drawn = (rng.choice(inside) for _ in range(64))
    one = next((at for at in drawn if at ^ bits in inside), None)
    if one is None:  # it begins in the middle of such a pair of blocks
        return 0, place.length // 2
    return one - place.offset, (one ^ bits) - place.offset


@check("CKC-CORR-002")
def test_a_large_file_cut_short_is_never_served(subject: Subject) -> None:
    """No file with a tensor of 64 MiB can be cut short, and the rest be served as whole.

    Why: what stops to read at the end of the file keeps what was in memory for the rest (O04).
    How: cut it after the first MiB of the tensor; at the full budget also later, and by its last
    byte; resume.
    """
    place = place_of(subject)
    size = (subject.golden(kind=KIND).snapshot(OLDER) / place.file).stat().st_size
    more = (4, 16, 32, 63) if subject.budget == "full" else ()
    lengths = [place.offset + MIB * at for at in (1, *more)]
    lengths += [size - 1] if more else []
    cuts = [at for at in lengths if at < size]
    never_served(subject, [partial(at_rest.cut_at, file=place.file, length=at) for at in cuts])


@check("CKC-ATOM-001")
def test_a_kill_in_the_middle_of_a_large_tensor_costs_at_most_that_step(subject: Subject) -> None:
    """After a kill inside a tensor of 64 MiB the next load gives that step or the one before.

    Why: what is large is streamed to its final place to save a copy, and takes so long to write
    that a kill most often hits it there (A01).
    How: die by SIGKILL in its middle, at the full budget also before its last write; resume in a
    new process.
    """
    legal = subject.legal(subject.golden(kind=KIND))
    for call, moment in large_save.in_the_middle(subject):
        died = large_save.save(subject, [system_call.kill(call.call, moment)])
        if died.exit_kind is not ExitKind.KILLED or not died.has_fired:
            raise Unknown(f"the kill in {told(call)} did not fire: {subject.tell(died)}")
        subject.judge(
            subject.resume(kind=KIND),
            legal,
            {Outcome.NEW, Outcome.PREVIOUS},
            f"killed {moment} {told(call)} of a tensor of 64 MiB",
            newest=NEWEST,
            acknowledged=(OLDER, *died.steps_of("acknowledged")),
        )


@check("CKC-IOER-006")
def test_a_short_write_of_a_large_tensor_costs_nothing(subject: Subject) -> None:
    """A save of a tensor of 64 MiB whose write is short raises, or has written it whole.

    Why: the kernel takes a part of a large write on a healthy disk, at most 2 GiB of it at once;
    who does not look at the count leaves a file with a hole and reports success (A07).
    How: let the last large write to its file really take half, at the full budget each; if the save
    reports success, load it.
    """
    legal = subject.legal(subject.golden(kind=KIND))
    for call, fault in large_save.shortened(subject):
        result = large_save.save(subject, [fault])
        if not result.has_fired:
            raise Unknown(f"the short {told(call)} did not happen: {subject.tell(result)}")
        if result.exit_kind is not ExitKind.ENDED:
            evidence = subject.evidence(result)
            raise Violation(f"the process does not survive a short {told(call)}", evidence=evidence)
        if result.error is None:
            message = f"a short {told(call)} is not noticed"
            resumed, known = subject.resume(kind=KIND), (OLDER, NEWEST)
            subject.judge(resumed, legal, {Outcome.NEW}, message, newest=NEWEST, acknowledged=known)


# ---- damage ----------------------------------------------------------------------------------


def place_of(subject: Subject) -> Place:
    """Find the large tensor in the files of the older step; raises NotApplicable if it cannot."""
    resumption.arrive(subject, KIND)
    return subject.once(PLACE, lambda: _place_of(subject.golden(kind=KIND)))


def _place_of(golden: Golden) -> Place:
    samples = [one for one in golden.payload_samples[OLDER] if one.name == f"model/{LEAF}"]
    found = payload.find(golden.snapshot(OLDER), samples)
    if not found:
        raise NotApplicable("the bytes of the large tensor are not in the files as they are")
    return found[0]


def never_served(subject: Subject, damages: Sequence[Callable[[Path], Damage]]) -> None:
    """Do damage to the older step alone, one at a time; none may be served."""
    golden = subject.golden(kind=KIND)
    legal = {OLDER: subject.loaded(golden, OLDER)}
    for do in damages:
        subject.materialize(golden, OLDER)
        damage = do(subject.root)
        subject.judge(
            subject.resume(kind=KIND),
            legal,
            {Outcome.NEW, Outcome.COLD_START, *REFUSALS},  # who begins anew: CKC-CORR-005
            f"{damage.fault} of {damage.file} ({damage.detail}), which holds a tensor of 64 MiB",
            newest=OLDER,
            acknowledged=(OLDER,),
            damage=damage.to_json(),
        )
