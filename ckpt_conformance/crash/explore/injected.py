"""A save that meets a fault at a system call and goes on, explored for power losses after it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_conformance.crash.explore import engine, workloads
from ckpt_conformance.crash.explore.verdicts import MODELS

if TYPE_CHECKING:
    from ckpt_conformance.crash.explore.workloads import Spec
    from ckpt_conformance.subject.subject import Subject

NEWEST = 4  # the step that the workload `second` saves


def explore(subject: Subject, fault: Spec) -> str:
    """Explore the save of step 4 under a fault; gives the name under which `verdicts` knows it.

    Every state that the quick budget enumerates is recovered from: it is about the few in which the
    data of a failed sync is gone.
    """
    recorded = workloads.injected(subject, "second", fault, NEWEST)
    limits = replace(engine.FULL_CHECK, candidates=engine.QUICK.candidates, onward=0)
    explorer = engine.Explorer(subject, recorded, limits)
    engine.run(explorer, MODELS)
    subject.notes[f"explored {recorded.name}"] = explorer
    return recorded.name
