"""Ranks as children of one process, so that one recorder follows them all.

The child forks while it has one thread; then each rank joins the world and runs its program. They
share one journal, and each event says whose it is.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_conformance.contract.journal import ChildJournal
from ckpt_conformance.harness import messages
from ckpt_conformance.harness.messages import Program, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    RunProgram = Callable[[Program], None]

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def run(program: Program, run_program: RunProgram) -> None:
    """Fork a process for each program of the rank group, wait for all, and write their exit codes.

    A rank that does not start leaves the others without a peer: they give up in their rendezvous.
    """
    ranks: dict[int, int] = {}
    for rank, one in enumerate(program.rank_group):
        pid = os.fork()
        if pid == 0:
            _child(one, run_program)
        ranks[pid] = rank
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        pid, status = os.wait()
        codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
    Path(program.result).write_bytes(messages.encode(Report(codes=codes)))


def _child(program: Program, run_program: RunProgram) -> NoReturn:
    code = 70
    try:
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
        out = os.open(program.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        journal = ChildJournal(Path(program.journal), program.rank)
        journal.note("rank", process=os.getpid())
        marking: Any = importlib.import_module("ckpt_conformance.trace.marking")
        marking.mark(journal, Path(program.root))
        run_program(program)
        code = 0
    except BaseException:  # noqa: BLE001  a child must never return into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
