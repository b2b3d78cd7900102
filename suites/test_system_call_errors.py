"""Whatever system call of a save, a load or a rotation fails: nothing is lost, all is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance import oracle, trees
from ckpt_conformance.checks import check
from ckpt_conformance.fault_injectors import struck_calls
from ckpt_conformance.fault_injectors.advancing import HARMLESS, digest_of
from ckpt_conformance.screening import Case, resume_each
from ckpt_conformance.verdicts import NotApplicable, Outcome, Unknown, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.client import Ending
    from ckpt_conformance.fault_injectors.struck_calls import Trial
    from ckpt_conformance.subject import Subject

WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
LATER = 3  # loads of a kept step, and of a later save, at the quick budget


@check("CKC-IOER-001")
def test_an_error_of_any_system_call_reaches_the_caller(subject: Subject) -> None:
    """A save that meets an error at a system call raises, or has written the checkpoint whole.

    Why: a writer in C++ or Rust, or one that ignores what a bare os.write or fsync says, goes on
    where no patched Python call looks (O03, D04).
    How: ENOSPC, EDQUOT and EIO at the N-th system call of a save and of one that rotates, once and
    from there on, and at its syncs alone; if it reports success, load what it saved.
    """

    def is_wrong(what: str, trial: Trial) -> str:
        if trial.kind in HARMLESS:
            return ""
        if trial.died:
            return f"the process does not survive {trial.name}"
        if trial.error:
            return ""
        if what == "save" and trial.is_sync and not trial.line.get("renewed"):
            return f"{trial.name} does not reach the caller"
        return not_new(subject, what, trial)

    require(subject, struck_calls.SAVES, is_wrong)


@check("CKC-IOER-002")
def test_an_error_of_any_system_call_destroys_nothing(subject: Subject) -> None:
    """After a save that failed at a system call what was there before loads, and no half of it.

    Why: a full disk left a torn file under the final name, or the failure came after the old file
    was truncated or removed (M018, M019, A14, O03).
    How: as CKC-IOER-001, with interrupted calls and short writes; resume from what is left.
    """

    def is_wrong(what: str, trial: Trial) -> str:
        found = struck_calls.outcome(subject, what, trial) if trial.error else Outcome.NEW
        return "" if found in WHOLE else f"{found} after {trial.name}, and the save raised"

    require(subject, ("save",), is_wrong)


@check("CKC-IOER-003")
def test_the_save_after_an_error_of_any_system_call_succeeds(subject: Subject) -> None:
    """Once the disk is well again the same process saves that step, and it loads.

    Why: what a failed save left behind, a name or a flag, blocked every later save until someone
    cleaned up by hand (O03, A12).
    How: as CKC-IOER-002; save the same step again without the fault, resume in a new process.
    """

    def is_wrong(_: str, trial: Trial) -> str:
        error = (trial.line.get("again") or {}).get("error")
        told = f"{error['type']}: {error['message'][:200]}" if error else ""
        return f"the save after {trial.name} fails too: {told}" if error else ""

    for what in require(subject, struck_calls.SAVES, is_wrong):
        folder = subject.folder / "struck" / what / "left"
        found = struck_calls.trials(subject, what)
        left = {one.line["again"]["left"]: one for one in found if one.line.get("again")}
        chosen = subject.sample(sorted(left), LATER)
        newest, state = max(struck_calls.legal(subject, what).items())

        def is_new(ending: Ending, newest: int = newest, state: Any = state) -> bool:  # noqa: ANN401
            step, served = oracle.arrival(ending)
            return step == newest and oracle.same(served, state, subject.holds)

        endings = resume_each(subject, [Case(folder / name) for name in chosen], is_new)
        for name, ending in zip(chosen, endings, strict=True):
            if not is_new(ending):
                message = f"the save after {left[name].name} does not load"
                raise Violation(message, evidence=subject.evidence(ending, state))


@check("CKC-IOER-005")
def test_an_error_of_any_system_call_of_a_load_is_no_empty_directory(subject: Subject) -> None:
    """A load that meets an error at a system call serves a whole step or refuses.

    Why: an unreadable file was logged as 'checkpoint not found'; the run began again at step 0 and
    wrote over the old ones (B08).
    How: EIO, and interrupted calls, at the N-th open, read or listing of a load, once and from
    there on; look at what the job got.
    """
    states = subject.legal(subject.golden())
    held = sorted(subject.holds)
    known = {step: digest_of(state, held) for step, state in states.items()}

    def is_wrong(_: str, trial: Trial) -> str:
        if trial.died:
            return f"the process does not survive {trial.name}"
        step, state = trial.line["step"], trial.line["state"]
        if trial.error:
            return ""
        if not step:
            return f"{Outcome.COLD_START} after {trial.name}"
        return "" if known.get(step) == state else f"{Outcome.SILENT_WRONG} after {trial.name}"

    require(subject, ("load",), is_wrong)


@check("CKC-IOER-006")
def test_short_writes_and_interrupted_calls_cost_nothing(subject: Subject) -> None:
    """A save whose writes are short or interrupted raises, or has written the checkpoint whole.

    Why: a write may take a part of the bytes on a healthy disk; who does not look at the count
    leaves a file with a hole and reports success (A07).
    How: let the N-th write of a save really write half, or interrupt the N-th call, once and from
    there on; if the save reports success, load it.
    """

    def is_wrong(what: str, trial: Trial) -> str:
        if trial.kind not in HARMLESS or (trial.error and not trial.died):
            return ""
        if trial.died:
            return f"the process does not survive {trial.name}"
        return not_new(subject, what, trial)

    require(subject, struck_calls.SAVES, is_wrong)


@check("CKC-IOER-007")
def test_an_error_while_rotation_runs_costs_no_kept_step(subject: Subject) -> None:
    """A full disk or any other error in a save that rotates costs none of the steps to keep.

    Why: to make room for the new checkpoint the old ones were deleted; then the save failed all the
    same (C01).
    How: two steps are there and two may stay; fail the N-th system call of the next save, once and
    from there on; load the newest, and by its number the one before it.
    """

    def is_wrong(what: str, trial: Trial) -> str:
        found = struck_calls.outcome(subject, what, trial) if trial.error else Outcome.NEW
        return "" if found in WHOLE else f"{found} after {trial.name}, and the save raised"

    if not require(subject, ("rotation",), is_wrong):
        raise NotApplicable("the adapter does not declare retention")
    if "explicit_step" in subject.info.capabilities:
        require_kept(subject)


def require_kept(subject: Subject) -> None:
    """Raise Violation if the step before the newest, which is to be kept, does not load."""
    kept = struck_calls.OPERATIONS["rotation"].before[-1]
    found = struck_calls.trials(subject, "rotation")
    alike = {one.folder: one for one in found if one.folder}
    chosen = subject.sample(sorted(alike), LATER)
    state = struck_calls.legal(subject, "rotation")[kept]

    def is_kept(ending: Ending) -> bool:
        step, served = oracle.arrival(ending)
        return step == kept and oracle.same(served, state, subject.holds)

    cases = [Case(folder, {"step": kept}) for folder in chosen]
    for folder, ending in zip(chosen, resume_each(subject, cases, is_kept), strict=True):
        if not is_kept(ending):
            message = f"step {kept} is not kept after {alike[folder].name}"
            raise Violation(message, evidence=subject.evidence(ending, state))


@check("CKC-IOER-008")
def test_an_error_says_that_it_is_one_of_the_disk(subject: Subject) -> None:
    """An error of the disk is raised as an OSError, from one, or as a type that is documented.

    Why: a caller that is to wait for room, or to try another disk, has nothing but the type of the
    exception to go by.
    How: the exceptions of CKC-IOER-001 and CKC-IOER-005; look at their types and causes.
    """

    def is_wrong(_: str, trial: Trial) -> str:
        error = trial.error
        if not error or trial.died or error["typed"] or error["disk"]:
            return ""
        return f"{trial.name} is raised as {error['type']}: {error['message'][:200]}"

    require(subject, (*struck_calls.SAVES, "load"), is_wrong)


# -- judging -------------------------------------------------------------------------------------


def not_new(subject: Subject, what: str, trial: Trial) -> str:
    """Say what is wrong with a save that reported success; empty if it is whole."""
    found = struck_calls.outcome(subject, what, trial)
    told = f"{trial.name}, and the save reports success"
    return "" if found is Outcome.NEW else f"{found} after {told}"


def require(
    subject: Subject, whats: Sequence[str], is_wrong: Callable[[str, Trial], str]
) -> list[str]:
    """Raise Violation for a trial that is wrong, made again alone; give what was judged."""
    applicable = struck_calls.applicable(subject, whats)
    for what in applicable:
        found = struck_calls.trials(subject, what)
        wrong = [trial for trial in found if is_wrong(what, trial)]
        if not wrong:
            continue
        trial = struck_calls.again(subject, what, wrong[0])
        message = is_wrong(what, trial)
        if not message:
            told = f"{wrong[0].name} does harm among other trials, and none alone"
            raise Unknown(f"order dependence: {told}")
        evidence: dict[str, Any] = {"call": trial.call, "error": trial.error}
        evidence["where else"] = struck_calls.tally(wrong)
        if trial.ending is not None:
            evidence |= subject.evidence(trial.ending)
        if trial.folder is not None:
            trees.lay_out(trial.folder, subject.root)  # where a bundle takes it from
        raise Violation(message, evidence=evidence, rate=(len(wrong), len(found)))
    return applicable
