"""Bit-exact resume: the model comes back (RTRP), and the resumed run is the unbroken one (RSUM).

Every check loads into a job of another seed, whose every tensor, generator and counter differs, and
looks at the first training step after the load: what is set up after the load must not undo it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import DEFAULT_KIND, Capability, Feature, trees
from ckpt_conformance.contract.verdicts import (
    Cause,
    NotApplicable,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.harness.messages import (
    Close,
    ExitKind,
    LeavesResult,
    Load,
    LoadResult,
    ProbeResult,
    ReadLeaves,
    RunResult,
    Save,
    Train,
    TrainResult,
    whole,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import controls, features, oracle, resumption, undisturbed
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import AFTER, OTHER_SEED, SAVES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Leaves
    from ckpt_conformance.subject.subject import Subject

NEWEST = SAVES[-1]
BUFFERS = {"constant", "seen", "average"}  # of the default kind of job
LOUD = {"loud16", "loudb16", "loud32"}  # signalling NaNs: buffers of the kind `bits`
BITS = {"nan32", "nan64", "signed", "tiny", "thirds", "wide"} | LOUD  # all of that kind
IMAGES = {"filters", "pixels", "voxels", "row", "entry"}  # of the kind `layouts`
SLIGHT = {"zeros", "ring", "many", "endless", "unknown", "table", "teacher"}  # of the kind `slight`
FROZEN = "frozen"
EXTRA_STATE = "_extra_state"
DTYPES = (Feature.BFLOAT16, Feature.FLOAT8, Feature.COMPLEX64, Feature.BOOL, Feature.INT8)
MAKES = (
    *("rare-dtypes", "masters", "two-optimizers", "conv", "transformer", "extra-state"),
    *("unused", "empty", "scalar", "alike-optimizers"),
)
OPTIMIZER_CAST = "torch-optimizer-cast"  # an origin in the catalogue


# -- RTRP: the model ---------------------------------------------------------------------------


@check("CKC-RTRP-001")
def test_trained_parameters_are_the_saved_ones(subject: Subject) -> None:
    """Trained parameters arrive at the first training step with the bits that were saved.

    Why: adapters were loaded and then initialised anew; a prefix on every key made a resume load
    nothing, without a word (M06, M05, M021).
    How: resume into a job of another seed; compare each parameter bit for bit.
    """
    resumption.identity(
        subject,
        "model",
        "a trained parameter is not what was saved",
        leaf=lambda path: path not in {*BUFFERS, FROZEN},
    )


@check("CKC-RTRP-001")
def test_names_that_are_alike_stay_apart(subject: Subject) -> None:
    """Parameters whose names are alike arrive each with its own bits.

    Why: a loader that takes a wrapper's prefix off a key takes it off the middle of a name, too;
    where a file is named after a key, `a.b_c` and `a_b.c` are one file. The last one wins (M05).
    How: a model with parameters of one shape whose names become one without `module`, with other
    separators, without separators, or in lower case; compare each bit for bit.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    resumption.arrive(subject, "names", owner=True)
    message = "a parameter is not what was saved; another one has a similar name"
    resumption.identity(subject, "model", message, _is_alike, "names")


@check("CKC-RTRP-001")
def test_the_only_parameter_of_a_job_is_the_saved_one(subject: Subject) -> None:
    """The only tensor of a model and of an optimizer without state arrives as it was saved.

    Why: an optimizer that keeps no state is taken for one that was lost, and the load refuses
    (G04); what indexes all tensors but one indexes none.
    How: a job of one parameter, trained by SGD without momentum; compare it bit for bit.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    try:
        controls.require(test_parameters_that_are_never_updated_are_the_saved_ones, subject)
    except Unknown as doubt:
        if doubt.cause is not Cause.CONTROL:  # nobody knows what it holds
            raise
        raise NotApplicable("it holds no parameter without state: CKC-RTRP-010") from doubt
    resumption.arrive(subject, "least", owner=True)
    message = "the only parameter of a job is not what was saved"
    resumption.identity(subject, "model", message, kind="least")


@check("CKC-RTRP-001")
def test_tensors_of_whole_blocks_and_a_byte_are_the_saved_ones(subject: Subject) -> None:
    """Tensors whose bytes fill whole blocks, or are one more or less, arrive to their last byte.

    Why: what is written, hashed or read in blocks ends with a loop whose bound is off by one for
    some sizes only (M06).
    How: a job with tensors of 2**n - 1, 2**n and 2**n + 1 bytes, and of some blocks and a byte,
    whose model has a MiB and one byte in all; compare each bit for bit.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    controls.require(test_buffers_are_the_saved_ones, subject)
    resumption.arrive(subject, "sizes", owner=True)
    message = "a tensor is not what was saved; its bytes fill blocks, or are one more or less"
    resumption.identity(subject, "model", message, kind="sizes")


def _is_alike(path: str) -> bool:
    return path.rpartition(".")[2] in {"gain", "date", "to_date", "side", "ide", "lift"}


@check("CKC-RTRP-002")
def test_buffers_are_the_saved_ones(subject: Subject) -> None:
    """Buffers, with the statistics and the counter of batch norm, arrive as they were saved.

    Why: what is no parameter is easily left out: the counter of a batch norm, the scale of an fp8
    layer (M03, K05). The loss then changes only where the buffer matters.
    How: compare the buffers of the plain job and the whole state of a convolution with batch norm.
    """
    message = "a buffer is not what was saved"
    resumption.identity(subject, "model", message, leaf=lambda path: path in BUFFERS)
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    resumption.arrive(subject, "conv", owner=True)
    resumption.identity(subject, "model", message, kind="conv")


@check("CKC-RTRP-003")
def test_frozen_parameters_are_the_saved_ones(subject: Subject) -> None:
    """Frozen parameters arrive as they were saved.

    Why: a saver that keeps what requires a gradient drops them.
    How: compare a frozen parameter bit for bit.
    """
    message = "a frozen parameter is not what was saved"
    resumption.identity(subject, "model", message, leaf=lambda path: path == FROZEN)


@check("CKC-RTRP-004")
def test_every_dtype_and_layout_comes_back(subject: Subject) -> None:
    """Tensors of every dtype and memory layout arrive with dtype, shape and bits.

    Why: a format that knows four dtypes casts the fifth; what is quantised again on load is not
    what was saved (K04, J04); a view is more than its storage (O05).
    How: a model with bf16, fp8, complex, bool and int8 tensors, two views of one storage and a
    transposed tensor. What the adapter declares in `cannot_hold`, a dtype or the views, must be
    refused in words; the rest comes back.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    controls.require(test_buffers_are_the_saved_ones, subject)
    for feature in (*DTYPES, Feature.VIEWS):
        features.refusal(subject, feature, "rare-dtypes")
    features.arrive(subject, "rare-dtypes")
    resumption.identity(
        subject,
        "model",
        "a tensor of a rarer dtype or layout is not what was saved",
        kind="rare-dtypes",
    )


@check("CKC-RTRP-004")
def test_tensors_of_images_come_back(subject: Subject) -> None:
    """Tensors whose channels lie side by side in memory arrive with shape and bits.

    Why: such a tensor has no gaps, and is still not in the order of its shape. Who writes its bytes
    as they lie, and the shape beside them, gives other numbers back at each place (O05).
    How: a model with a parameter and a buffer of four dimensions in channels_last, and a buffer of
    five in channels_last_3d, which the destination has, too; a column of one element a row that was
    turned, and one element of a column: their strides are not those of C order, though torch calls
    both contiguous.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    controls.require(test_buffers_are_the_saved_ones, subject)
    message = "a tensor in channels_last is not what was saved"
    images = IMAGES.__contains__
    features.comes_back(subject, Feature.CHANNELS_LAST, "layouts", images, message)


@check("CKC-RTRP-004")
def test_every_bit_pattern_comes_back(subject: Subject) -> None:
    """Tensors with NaNs, signed zeros, subnormal numbers and wide integers arrive bit for bit.

    Why: a detour over another dtype, or over text, rounds them or gives every NaN the same bits,
    and a comparison by value does not see it (K04, J04). Two bytes each were looked at as four.
    How: a model with float32, float64 and int64 buffers of such values, and signalling NaNs in
    float32, and an odd number of them in float16 and in bfloat16.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    controls.require(test_buffers_are_the_saved_ones, subject)
    resumption.arrive(subject, "bits", owner=True)
    message = "a tensor of unusual bits is not what was saved"
    resumption.identity(subject, "model", message, lambda path: path in BITS, "bits")


@check("CKC-RTRP-004")
def test_a_change_that_no_comparison_of_values_sees_is_saved(subject: Subject) -> None:
    """A tensor that changed since the save before arrives as it is now, however little it changed.

    Why: who writes only what has changed asks for it by `torch.equal`, by the largest difference,
    by a sum, by the ends of a tensor or by its `_version`, and serves the bits of the save before
    (K04).
    How: between two saves of one manager the sign of zeros, the order of elements, the last bit of
    one element of a thousand, one in the middle of half a MiB, what stands beside an infinity and a
    NaN, and a parameter that is written by its `.data`. The second is loaded.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    controls.require(test_buffers_are_the_saved_ones, subject)
    controls.require(test_frozen_parameters_are_the_saved_ones, subject)
    resumption.arrive(subject, "slight", owner=True)
    message = "a tensor is as it was at the save before"
    resumption.identity(subject, "model", message, SLIGHT.__contains__, "slight")


@check("CKC-RTRP-004")
def test_dtypes_that_few_formats_know_come_back_or_are_refused(subject: Subject) -> None:
    """Tensors of the rarest dtypes come back with dtype and bits, or the save refuses in words.

    Why: a table of dtypes ends somewhere; what lies beyond was saved as bytes, as the dtype next to
    it, or by way of a wider one, and the save succeeded (K04).
    How: save a model with the four further dtypes of 8-bit floats, and one with unsigned integers
    of 16, 32 and 64 bits. Who refuses in words is right; who saves them loads them into a fresh
    job, bit for bit. Controls: plain parameters and buffers come back.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    controls.require(test_buffers_are_the_saved_ones, subject)
    controls.require(test_frozen_parameters_are_the_saved_ones, subject)
    _comes_back_or_is_refused(subject, "eighths", "a float of 8 bits, of a rare dtype,")
    _comes_back_or_is_refused(subject, "unsigned", "an unsigned integer of 16, 32 or 64 bits")


@check("CKC-RTRP-005")
def test_tied_parameters_are_still_tied(subject: Subject) -> None:
    """Parameters that shared storage before the save share it after the load.

    Why: a tie that is lost on load gives two tensors which drift apart from the first step on, and
    the loss says nothing (S01, S04); a writer that drops one name must not have a reader that
    requires it (S02).
    How: list the groups of parameters with one address, before the save and after the resume.
    """
    if words := features.refusal(subject, Feature.TIED, DEFAULT_KIND):
        raise NotApplicable(words)
    resumption.arrive(subject)
    golden = subject.golden()
    arrived = resumption.resumed(subject, golden).of(RunResult).arrived
    ties = arrived.ties if arrived else []
    if ties != golden.ties:
        raise Violation("ties are lost", evidence={"before": golden.ties, "after": ties})


@check("CKC-RTRP-014")
def test_what_was_apart_is_apart_after_the_load(subject: Subject) -> None:
    """Tensors that had memory of their own before the save have it after the load.

    Why: who stores equal tensors once, by their content, hands one tensor out for all of them. Step
    counters of an optimizer are equal: one is then counted up once for each parameter (O06).
    How: list the tensors of all components whose bytes overlap, at the end of the run that never
    stopped, and of one that resumed.
    """
    resumption.arrive(subject)
    resumption.apart(subject)


@check("CKC-RTRP-006")
def test_extra_state_of_modules_comes_back(subject: Subject) -> None:
    """What a module gives by get_extra_state comes back.

    Why: fp8 recipes keep their amax history there; a loader that passes over what is no tensor
    restarts the history, and the scales with it (K05, M046).
    How: a model that keeps an amax history, in a dict, compared at the first training step. Torch
    takes any object there that can be pickled. Where the adapter declares that its manager holds
    no dict there, the dict must be refused in words, and a tensor come back.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    features.refusal(subject, Feature.EXTRA_STATE, "extra-state")
    features.arrive(subject, "extra-state")
    resumption.identity(
        subject,
        "model",
        "the extra state of a module is not what was saved",
        kind="extra-state",
        leaf=lambda path: path.startswith(EXTRA_STATE),
    )


@check("CKC-RTRP-013")
def test_what_has_no_plain_memory_comes_back_or_is_refused(subject: Subject) -> None:
    """Tensors that are sparse, quantized, lazy or on meta come back, or the save refuses.

    Why: a writer that asks for the bytes of what has none writes what happens to be there, or no
    entry at all, and the save succeeds (J07, K04). Where torch has yet to conjugate a tensor, or to
    negate it, its memory holds other numbers, and every writer of memory writes those.
    How: save a model with such a buffer. Who refuses in words is right; who saves it loads it into
    a fresh job, bit for bit. Controls: plain parameters and buffers come back.
    """
    controls.require(test_buffers_are_the_saved_ones, subject)
    controls.require(test_frozen_parameters_are_the_saved_ones, subject)
    for kind in ("sparse", "quantized", "meta", "lazy"):
        _comes_back_or_is_refused(subject, kind, f"a {kind} tensor")


def _comes_back_or_is_refused(subject: Subject, kind: str, what: str) -> None:
    """Raise Violation unless a job of a kind is refused in words, or its model comes back.

    Who refuses at the load has said nothing while the job could still be saved in another way.
    """
    subject.reset()
    saved = subject.run(SAVES[-1] + 1, SAVES, watch=True, then=[Close()], kind=kind)
    if saved.error and saved.error.message.strip():
        return
    if not saved.went_well:
        message = f"a job with {what} is neither saved nor refused in words"
        raise Violation(message, evidence=subject.evidence(saved))
    wanted = whole(saved.of(RunResult).states[SAVES[-1]])
    result = subject.resume(kind=kind)
    step, state = oracle.arrival(result)
    if step != SAVES[-1] or state["model"] != wanted["model"]:
        message = f"{what} is saved in silence, and the step does not come back"
        raise Violation(message, evidence=subject.evidence(result, wanted))


@check("CKC-RTRP-010")
def test_parameters_that_are_never_updated_are_the_saved_ones(subject: Subject) -> None:
    """Parameters that the optimizer lists and never updates arrive as they were saved.

    Why: a saver that goes by the optimizer's state, which such a parameter never gets, drops them,
    or fails at the load (G04).
    How: a job with a parameter that no forward pass uses, and a frozen one, in the optimizer.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    controls.require(test_frozen_parameters_are_the_saved_ones, subject)
    message = "a parameter that is never updated is not what was saved"
    unused = {FROZEN, "lazy"}
    features.comes_back(subject, Feature.UNUSED, "unused", lambda path: path in unused, message)


@check("CKC-RTRP-011")
def test_empty_parameters_are_the_saved_ones(subject: Subject) -> None:
    """Parameters without elements arrive as they were saved.

    Why: empty tensors have no address: a saver that tells tensors apart by it drops them, and the
    load misses them (Q01).
    How: a job with a parameter of shape [0, 8]: the load must not fail, and give its shape.
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    message = "a parameter without elements is not what was saved"
    features.comes_back(subject, Feature.EMPTY, "empty", lambda path: path == "empty", message)


@check("CKC-RTRP-012")
def test_scalar_parameters_are_the_saved_ones(subject: Subject) -> None:
    """Parameters without dimensions arrive as they were saved.

    Why: a learned temperature or scale is one. What shards or slices along the first dimension has
    none there, and what writes arrays may make shape [1] of it (I08).
    How: a job with a trained parameter of shape [].
    """
    controls.require(test_trained_parameters_are_the_saved_ones, subject)
    message = "a parameter without dimensions is not what was saved"
    features.comes_back(subject, Feature.SCALAR, "scalar", lambda path: path == "scale", message)


@check("CKC-RTRP-012")
def test_tensors_without_dimensions_keep_their_dtype(subject: Subject) -> None:
    """Buffers without dimensions arrive with the dtype and the bits that were saved.

    Why: who stores a number and makes a tensor of it again gets float32 or int64, whatever it was;
    of a float64 bits are lost (K04).
    How: a model with such buffers of float64, float16, bfloat16, int32 and bool.
    """
    controls.require(test_buffers_are_the_saved_ones, subject)
    message = "a tensor without dimensions is not what was saved"
    features.comes_back(
        subject, Feature.SCALAR, "points", lambda path: path.startswith("point_"), message
    )


@check("CKC-RTRP-007")
def test_live_state_does_not_alias_the_file(subject: Subject) -> None:
    """After the load, a change of the files changes nothing in the job.

    Why: tensors that map the checkpoint file change when the file is overwritten, by the next save
    or by a copy job (O06).
    How: load, invert every byte of every file in place, digest the job before and after.
    """
    resumption.arrive(subject)
    subject.materialize(subject.golden())
    ops = (Load(), ReadLeaves(), probe("scribble"), ReadLeaves())
    result = subject.execute(*ops, seed=OTHER_SEED)
    before, after = (result.of(LeavesResult, index).leaves for index in (0, 1))
    if not result.of(ProbeResult).value:
        raise Unknown(f"no byte was overwritten: {subject.tell(result)}")
    if not before or before != after:
        differs = oracle.differences(after or {}, before or {}, subject.holds)
        raise Violation(
            "the job changes with the file it was loaded from",
            evidence=subject.evidence(result, differs=differs),
        )


@check("CKC-RTRP-008")
def test_what_was_loaded_can_be_saved_again(subject: Subject) -> None:
    """A job saves over the step that it has just loaded, and that save loads equal.

    Why: the first save after a resume rewrote the file which the live tensors mapped: a bus error,
    or a checkpoint of zeros (O07, O08). A directory that exists already is no reason to fail (A12).
    How: load the newest step, save the same step, load it in a new process. An adapter that
    declares `saves_over=False` may refuse in words; the step must load as before then, too.
    """
    controls.require(test_tied_parameters_are_still_tied, subject)
    _, wanted = resumption.arrive(subject)
    subject.materialize(subject.golden())
    saving = subject.execute(Load(), Save(), Close(), seed=OTHER_SEED)
    is_refused = saving.exit_kind is ExitKind.ENDED and bool(saving.steps_of("failed"))
    may_refuse = is_refused and not subject.info.saves_over
    if not saving.went_well and not may_refuse:
        hint = "; if it documents that, declare saves_over=False" if is_refused else ""
        raise Violation(
            f"a job cannot save over the step it has just loaded{hint}",
            evidence=subject.evidence(saving),
        )
    result = subject.resume()
    step, arrived = oracle.arrival(result)
    if step != NEWEST or not oracle.same(arrived, wanted, subject.holds):
        what = "a refused save over" if may_refuse else "what was saved over"
        message = f"after {what} the loaded step that step does not load equal"
        with undisturbed.unless_saves_alone_do_it(subject):
            raise Violation(message, evidence=subject.evidence(result, wanted))
    if may_refuse:
        told = f"it refuses to save over a step, as declared: {subject.tell(saving)}"
        raise NotApplicable(told)


@check("CKC-RTRP-009")
def test_the_step_is_the_step_of_the_content(subject: Subject) -> None:
    """The step that a load returns is the step of the state that it gives, also after a resume.

    Why: a closure read the step when it ran, so the tracker named a later one (B02); a counter
    that a resume froze went into every later checkpoint (H13, M022).
    How: resume, train on, save; resume again; compare the state with that at the save, then the
    step.
    """
    resumption.arrive(subject)
    subject.materialize(subject.golden(), SAVES[0])
    saving = subject.run(NEWEST, (NEWEST,), resume=True, final=True, seed=OTHER_SEED)
    if saving.error:
        about = (test_a_run_resumed_again_and_again_goes_on_as_if_unbroken,)
        raise controls.blame(
            subject, subject.tell(saving), *about, test_what_was_loaded_can_be_saved_again
        )
    result = subject.resume()
    step, arrived = oracle.arrival(result)
    wanted = saving.of(RunResult).final or {}
    if not arrived or not oracle.same(arrived, wanted, {"model"}):
        raise model_trouble(subject)
    if step != NEWEST:
        raise Violation(f"the load says step {step}, and gives the state of step {NEWEST}")


def model_trouble(subject: Subject) -> Unknown:
    """Make the Unknown of a check that needs a model that comes back, and has none."""
    checks = (
        test_trained_parameters_are_the_saved_ones,
        test_buffers_are_the_saved_ones,
        test_frozen_parameters_are_the_saved_ones,
        test_what_was_loaded_can_be_saved_again,
    )
    return controls.blame(subject, "the model does not come back", *checks)


# -- RSUM: the run that follows ------------------------------------------------------------------


@check("CKC-RSUM-001")
def test_a_run_resumed_in_mid_epoch_goes_on_as_if_unbroken(subject: Subject) -> None:
    """A run that resumes in the middle of an epoch makes the records of the run that never stopped.

    Why: a save between the optimizer's step and the scheduler's or the counter's, a data loader
    that begins anew, a generator that is seeded after the load: all load without an error and train
    another model (E01, F01, H04, H05).
    How: resume into a job of another seed, train past the end of the epoch; compare loss, learning
    rates, batches, draws and a digest of the parameters at every step.
    """
    resumption.mid_epoch(subject)


@check("CKC-RSUM-001")
def test_a_run_resumed_with_another_hash_seed_goes_on_as_if_unbroken(subject: Subject) -> None:
    """What is saved does not depend on how Python hashes text, which differs by the process.

    Why: what is ordered by a set, or stored under a hash, goes elsewhere in the next process; the
    moments of one parameter went to another one (G19).
    How: resume in an interpreter of its own with another hash seed; compare records as above.
    The same with the hash seed of the process that saved is the control.
    """
    resumption.needs_mid_epoch(subject)
    resumption.with_hash_seed(subject, 1 + subject.seed)


@check("CKC-RSUM-002")
def test_a_run_resumed_again_and_again_goes_on_as_if_unbroken(subject: Subject) -> None:
    """The second and the third generation of checkpoints resume as the first does.

    Why: a load that replaces an object leaves the manager with the old one, a counter that starts
    at the last resume counts from there: right once, wrong from the second resume on (H02, H13,
    H14, J03).
    How: save at 2, resume and save at 3, resume and save at 4, resume and train on, each in a child
    of its own and from another seed; all breaks lie in one epoch.
    """
    resumption.needs_mid_epoch(subject)
    golden = subject.golden()
    subject.materialize(golden, SAVES[0])
    for generation, until in enumerate((3, 4, 8)):
        begin = (2, 3, 4)[generation]
        result = subject.run(until, (until,), resume=True, seed=OTHER_SEED + generation)
        message = f"the run of generation {generation + 1} leaves the unbroken one"
        resumption.follow(subject, golden, result, until - begin, message)


@check("CKC-RSUM-007")
def test_a_run_with_any_schedule_goes_on_as_if_unbroken(subject: Subject) -> None:
    """Whatever the schedule, the learning rates of the resumed run are those of the unbroken one.

    Why: a scheduler that is rebuilt from the current rate, bound to another optimizer, or restored
    by its last epoch alone is right for one schedule and wrong for the next (F01, F02, F09).
    How: sequential warm-up, stable and decay, multi-step, cosine, linear, REX and constant
    schedules; a resume inside each. Then one that a phase of the training scales, resumed inside
    that phase.
    """
    resumption.needs_mid_epoch(subject)
    for kind in ("wsd", "steps", "cosine", "linear", "rex", "constant"):
        # One save, at step 2: a sequence of schedules is in its warm-up there.
        message = f"with schedule {kind} the resumed run leaves the unbroken one"
        resumption.follow_kind(subject, kind, message, SAVES[:1])
    message = "with a rate that a phase scales the resumed run leaves the unbroken one"
    resumption.follow_kind(subject, "phases", message)


@check("CKC-RSUM-008")
def test_a_live_job_that_rolls_back_goes_on_as_if_unbroken(subject: Subject) -> None:
    """A job that trained past a save and loads it in the same process repeats its own records.

    Why: in a live job the optimizer has state, the iterator is under way and objects are shared: a
    load that was only tried on fresh ones leaves part of them as they are (H01, G03). A step that
    is served from memory, or whose memory the job goes on with, is changed by the job (D03).
    How: save at 4, train to 6, load, train on, load once more, train on, all in one child. Then
    save before the first step, where optimizers have no state yet, and load that into the job that
    has trained; who refuses to save or to load that has nothing to clear.
    """
    resumption.needs_mid_epoch(subject)
    back: list[AnyOp] = [Load(), Train(n=AFTER)]
    result = subject.run(6, (NEWEST,), then=[*back, *back])
    once = replace(result, results=result.results[: 1 + len(back)])
    _follow_ops(subject, once, "a job that rolled back leaves the unbroken run")
    message = "a step that was loaded, trained on from and loaded again is another one by then"
    _follow_ops(subject, result, message)
    trees.clear(subject.root)
    train = Train(n=AFTER)
    result = subject.execute(Save(step=0), train, Load(), train)
    if result.exit_kind is ExitKind.ENDED and result.error:
        return
    first, again = (result.of(TrainResult, at).records for at in (0, 1))
    if first != again or not first:
        pairs = zip(again, first, strict=False)
        differs = next((resumption.other_fields(*pair) for pair in pairs if pair[0] != pair[1]), [])
        message = "a job that went back to its beginning does not repeat its own records"
        raise Violation(message, evidence=subject.evidence(result, differs=differs))


@check("CKC-RSUM-008")
def test_a_live_job_that_rolls_back_has_nothing_of_what_came_after(subject: Subject) -> None:
    """Every component of a job that goes back to a save is as in a new job that loads it.

    Why: what is loaded was merged into what the job had: keys that came after the save stayed, and
    no record of a step shows it (G03).
    How: a job whose own dict gets a key between the saves of steps 2 and 6. After the second one
    load step 2 into it: each leaf must be what a load of step 2 gives a new job, where that gives
    what was saved. Where no step can be asked for only step 2 is saved. Who refuses to load it into
    such a job has said so.
    """
    resumption.needs_mid_epoch(subject)
    resumption.arrive(subject, "phases")
    subject.reset()
    back, named = SAVES[0], Capability.EXPLICIT_STEP in subject.info.capabilities
    load = Load(step=back if named else None, go_on=True)
    saves = (back, SAVES[-1] + 2) if named else (back,)
    gone_back = subject.run(saves[0] + 4, saves, then=[load, ReadLeaves()], kind="phases")
    if gone_back.reached(LoadResult) and gone_back.of(LoadResult).error:
        return
    fresh = subject.execute(load, ReadLeaves(), kind="phases", seed=OTHER_SEED)
    if not (gone_back.went_well and fresh.went_well) or fresh.of(LoadResult).error:
        told = "; ".join(subject.tell(one) for one in (gone_back, fresh))
        raise control_failed(f"step {back} of a job of kind phases does not load: {told}")
    after, wanted = (whole(one.of(LeavesResult).leaves or {}) for one in (gone_back, fresh))
    saved = subject.golden(kind="phases").at[back]
    lost = {
        (part, path) for part, at in saved.items() for path in _unlike(at, wanted.get(part, {}))
    }
    if differs := oracle.differences(_less(after, lost), _less(wanted, lost), subject.holds):
        message = "a job that went back to a save has something of what came after it"
        raise Violation(message, evidence=subject.evidence(gone_back, differs=differs))


def _unlike(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    """Return the leaves that two states of a component do not share."""
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def _less(state: Leaves, lost: Collection[tuple[str, str]]) -> Leaves:
    """Leave out what a load into a new job does not give back, either."""
    return {
        part: {path: bits for path, bits in leaves.items() if (part, path) not in lost}
        for part, leaves in state.items()
    }


@check("CKC-RSUM-009")
def test_loading_twice_is_loading_once(subject: Subject) -> None:
    """A second load of the same step changes nothing more.

    Why: a position that is added to what is there, instead of being set, doubles with each resume
    (F08).
    How: load twice with one manager, train on.
    """
    resumption.needs_mid_epoch(subject)
    subject.materialize(subject.golden())
    result = subject.execute(Load(), Load(), Train(n=4), seed=OTHER_SEED)
    _follow_ops(subject, result, "a job that was loaded twice leaves the unbroken run")


def _follow_ops(subject: Subject, result: ProcessResult, message: str) -> None:
    resumption.follow(subject, subject.golden(), result, AFTER, message)


@check("CKC-RSUM-010")
def test_a_job_of_any_make_goes_on_as_if_unbroken(subject: Subject) -> None:
    """Whatever a job is made of, its resumed run makes the records of the unbroken one.

    Why: state that only some models and optimizers have, such as fp32 masters of bf16 parameters,
    a second optimizer or extra state, shows in the steps that follow (K01, K03, M043). Two that
    were kept by the name of their class became one.
    How: jobs with fp32 masters, two optimizers, also of one class and shape, batch norm, attention,
    extra state, and parameters that are never updated, empty or 0-dim; a resume in each. Where one
    is violated, resume once more with a torch that does not cast, as CKC-COMP-003 does. What the
    manager does itself is told before what torch does.
    """
    resumption.needs_mid_epoch(subject)
    resumption.arrive(subject, "transformer", owner=True)
    resumption.arrive(subject, "masters", owner=True)
    suspect = resumption.Suspect(OPTIMIZER_CAST, (fault_injectors.spec("torch-cast"),))
    of_torch: Violation | None = None
    for kind in _that_come_back(subject):
        message = f"a job of kind {kind} leaves the unbroken run when it resumes"
        try:
            resumption.trajectory(subject, subject.golden(kind=kind), NEWEST, message, suspect)
        except Violation as violation:
            if not violation.origin:
                raise
            of_torch = of_torch or violation
    if of_torch:
        raise of_torch


def _that_come_back(subject: Subject) -> Iterator[str]:
    """Yield the kinds of job that arrive; of another one the check that owns it tells."""
    for kind in MAKES:
        with contextlib.suppress(Unknown):
            resumption.arrive(subject, kind)
            yield kind
