"""Whatever system call of a load fails: a whole step is served, or the load refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Outcome
from ckpt_conformance.fault_injectors import injected_calls
from ckpt_conformance.fault_injectors.advancing import digest_of
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from ckpt_conformance.fault_injectors.injected_calls import Trial
    from ckpt_conformance.subject.subject import Subject


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
        step, state = trial.observed.step, trial.observed.state
        if trial.error:
            return ""
        if not step:
            return f"{Outcome.COLD_START} after {trial.name}"
        return "" if known.get(step) == state else f"{Outcome.SILENT_WRONG} after {trial.name}"

    injected_calls.require(subject, ("load",), is_wrong, is_stood_in_for=True)


@check("CKC-IOER-008")
def test_an_error_of_a_load_says_that_it_is_one_of_the_disk(subject: Subject) -> None:
    """An error of the disk in a load is raised as an OSError, from one, or as a documented type.

    Why: who can't tell a dying disk from a damaged checkpoint deletes the checkpoint.
    How: look at the types and causes of the exceptions of CKC-IOER-005.
    """
    injected_calls.require(subject, ("load",), injected_calls.untyped)
