"""Ranks as children of one process, so that one recorder follows them all.

The child forks while it has one thread; then each rank joins the world and runs its program. They
share one journal, and each event says whose it is.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract.journal import ChildJournal
from ckpt_conformance.harness import messages
from ckpt_conformance.harness.messages import Program, Report
from ckpt_conformance.processes import lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable

    RunProgram = Callable[[Program], None]


def run(program: Program, run_program: RunProgram) -> None:
    """Fork a process for each program of the rank group, wait for all, and write their exit codes.

    A rank that does not start leaves the others without a peer: they give up in their rendezvous.
    """
    ranks: dict[int, int] = {}
    for rank, member in enumerate(program.rank_group):
        is_rank = program.turns is None
        pid = lifecycle.fork(partial(_child, member, run_program, is_rank=is_rank))
        ranks[pid] = rank
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        exited = lifecycle.reap()
        codes[ranks[exited.pid]] = exited.code
    Path(program.result).write_bytes(messages.encode(Report(codes=codes)))


def _child(program: Program, run_program: RunProgram, *, is_rank: bool) -> None:
    """Run one rank in this process: mark what ties it to the others, then run its program.

    A process that is no rank takes turns with the others, and says when it has done all.
    """
    lifecycle.die_with_parent()
    lifecycle.redirect_output(program.output)
    journal = ChildJournal(Path(program.journal), program.rank)
    journal.note("rank", process=os.getpid())
    if is_rank:
        marking: Any = importlib.import_module("ckpt_conformance.trace.marking")
        marking.mark(journal, Path(program.root))
    run_program(program)
    if not is_rank:
        journal.note("turn-over")
