"""Kills at system calls of an operation: at which of them, and where a process was seen to die."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.fault_injectors import system_call
from ckpt_conformance.harness.messages import ExitKind
from ckpt_conformance.harness.strata import TAKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Fault, SeenCall
    from ckpt_conformance.subject.subject import Subject

MOMENTS = ("before", "after")


@dataclass(frozen=True)
class Kill:
    """A kill at a call of an operation, by its number, before or after it is made."""

    at: int
    moment: str
    operation: str  # in words, such as "a dump"

    @property
    def fault(self) -> Fault:
        """What does it."""
        return system_call.kill(self.at, self.moment)

    def seen(self, subject: Subject, result: ProcessResult) -> str:
        """Say where a process was seen to die; raises Unknown where it was not by this.

        Of two runs of an operation the second one may make another call under that number.
        """
        if result.exit_kind is not ExitKind.KILLED or not result.hits:
            told = f"the kill at call {self.at} of {self.operation} did not fire"
            raise Unknown(f"{told}: {subject.tell(result)}")
        call = result.hits[-1]
        return f"killed {self.moment} {call.what} of {call.path or '.'} in {self.operation}"


def kills(
    subject: Subject, calls: Sequence[SeenCall], operation: str, *, taking: int, quick: int
) -> list[Kill]:
    """Choose kills of an operation; at the quick budget at so many calls, both before and after.

    So many of them as `taking` says may take away a name that was there, where there are as many.
    """
    return [
        Kill(call.call, moment, operation)
        for call in _chosen(subject, calls, taking, quick)
        for moment in MOMENTS
    ]


def _chosen(
    subject: Subject, calls: Sequence[SeenCall], taking: int, quick: int
) -> Sequence[SeenCall]:
    if subject.budget == "full":
        return calls
    some = subject.sample([call for call in calls if call.what in TAKING], taking)
    rest = [call for call in calls if call.what not in TAKING]
    return [*some, *subject.sample(rest, quick - len(some))]
