"""Whatever system call of a load fails: a whole step is served, or the load refuses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import Outcome
from ckpt_conformance.fault_injectors import injected_calls
from ckpt_conformance.fault_injectors.advancing import HARMLESS, digest_of
from ckpt_conformance.subject.batched_recovery import steps_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import Slot

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fault_injectors.injected_calls import Trial
    from ckpt_conformance.harness.messages import Error
    from ckpt_conformance.subject.subject import Subject

NEWEST = 4
_VARIES = re.compile(r"/\S+|\d+")  # paths and numbers
LISTED: Slot[set[int]] = Slot("steps that a manager finds in a directory")


@check("CKC-IOER-005")
def test_an_error_of_any_system_call_of_a_load_is_no_empty_directory(subject: Subject) -> None:
    """A load that meets an error at a system call serves a whole step or refuses, and takes none.

    Why: an unreadable file was logged as 'checkpoint not found'; the run began again at step 0 and
    wrote over the old ones (B08). What removes damaged steps removed one that could be read again.
    How: EIO, and interrupted calls, at the N-th open, read or listing of a load, once and from
    there on; look at what the job got. What is raised are not the words of a load where nothing
    was ever saved, on which a script begins anew; a load that ends the process raises nothing.
    Where an error that ended was met, and the load changed the directory, load once more without
    it, and list the steps: the directory serves what it did.
    """
    states = subject.legal(subject.golden())
    held = sorted(subject.holds)
    known = {step: digest_of(state, held) for step, state in states.items()}

    nothing = what_nothing_says(subject)

    def is_wrong(_: str, trial: Trial) -> str:
        if trial.died:
            return f"a load dies ({trial.death}) instead of raising, of {trial.name}"
        if cost := what_it_cost(subject, trial):
            return cost
        step, state = trial.observed.step, trial.observed.state
        if trial.error:
            return _as_nothing(trial.name, trial.error, nothing)
        if not step:
            return f"{Outcome.COLD_START} after {trial.name}"
        return "" if known.get(step) == state else f"{Outcome.SILENT_WRONG} after {trial.name}"

    injected_calls.require(subject, ("load",), is_wrong, is_stood_in_for=True)


def what_nothing_says(subject: Subject) -> str:
    """Return the words of a load of an empty directory; none where it begins a new run."""
    trees.clear(subject.root)
    error = subject.resume().error
    return _said(error) if error else ""


def _as_nothing(name: str, error: Error, nothing: str) -> str:
    """Say that an error has the words of an empty directory; empty if it has others."""
    return (
        f"{name} is told as if nothing was ever saved: {nothing}" if _said(error) == nothing else ""
    )


def _said(error: Error) -> str:
    """Return the type and the words of an error, without paths and numbers."""
    return f"{error.type}: {_VARIES.sub('*', error.message)}"


def what_it_cost(subject: Subject, trial: Trial) -> str:
    """Say what a load that met an error took from the loads after it; empty if nothing.

    An error that lasts is not asked about: what can't be read for long may be set aside.
    """
    lasts = trial.fault.persistent and trial.kind not in HARMLESS
    if lasts or trial.folder is None or trial.result is None:
        return ""
    found = injected_calls.outcome(subject, "load", trial)
    if found is not Outcome.NEW:
        return f"{found} at the next load, without any fault, after {trial.name}"
    gone = listed(subject, subject.golden().snapshot(NEWEST)) - listed(subject, trial.folder)
    return f"step {max(gone)} is not listed after {trial.name}" if gone else ""


def listed(subject: Subject, folder: Path) -> set[int]:
    """Return the steps that a manager finds in a directory; none if it does not list them."""
    if Capability.STEPS not in subject.info.capabilities:
        return set()
    return subject.once(LISTED, lambda: _list(subject, folder), str(folder))


def _list(subject: Subject, folder: Path) -> set[int]:
    (answer,) = steps_each(subject, [folder])
    return set(answer.steps or ())


@check("CKC-IOER-008")
def test_an_error_of_a_load_says_that_it_is_one_of_the_disk(subject: Subject) -> None:
    """An error of the disk in a load is raised as an OSError, from one, or as a documented type.

    Why: who can't tell a dying disk from a damaged checkpoint deletes the checkpoint.
    How: look at the types and causes of the exceptions of CKC-IOER-005.
    """
    injected_calls.require(subject, ("load",), injected_calls.untyped)
