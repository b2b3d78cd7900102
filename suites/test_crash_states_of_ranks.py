"""Wherever each rank of a save was stopped, and whichever node was lost, a whole step is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import NotApplicable, Violation
from ckpt_conformance.crash.explore import verdicts, workloads
from ckpt_conformance.crash.explore.verdicts import explored_of_ranks
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject


@check("CKC-RANK-002")
def test_ranks_that_are_killed_anywhere_leave_a_whole_step(subject: Subject) -> None:
    """After a kill of ranks, each at a point of its own in a save, a new world loads a whole step.

    Why: nobody stops all ranks at one moment; one shard is new, another is old, and the index is
    either's (N01, J12, A04).
    How: record the system calls of two ranks in one save, and their collectives; lay out what is
    left when each rank stopped anywhere that its collectives allow; resume in a new world of two.
    """
    subject.need("ranks")
    names = workloads.of_ranks(subject)
    verdicts.require_clean(subject, names, ("ranks",), explore=explored_of_ranks)


@check("CKC-RANK-011")
def test_a_lost_node_costs_no_acknowledged_step(subject: Subject) -> None:
    """After the loss of one node in or after a save no step is lost that all ranks acknowledged.

    Why: what a node had in its cache goes with it, and the others' files name it as if it were
    there (N01, O03, A05).
    How: as CKC-RANK-002, each rank a node on one file system; what one of them had not synced is
    gone, wholly or in part, and all that the others wrote is kept.
    """
    subject.need("ranks")
    names = workloads.of_ranks(subject)
    try:
        verdicts.require_clean(subject, names, ("ranks",), explore=explored_of_ranks)
    except Violation as error:
        reason = f"no node has to be lost for that (see CKC-RANK-002): {error}"
        raise NotApplicable(reason) from None
    verdicts.require_clean(subject, names, ("node-loss",), explore=explored_of_ranks)
