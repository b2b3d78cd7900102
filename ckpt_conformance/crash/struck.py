"""A save that meets a fault at a system call and goes on, explored for power losses after it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance import trees
from ckpt_conformance.crash import explore as engine
from ckpt_conformance.crash.operations import Recording
from ckpt_conformance.crash.verdicts import MODELS
from ckpt_conformance.verdicts import Unknown

if TYPE_CHECKING:
    from ckpt_conformance.subject import Subject

OLDER, NEWEST = 2, 4
NAME = "second-struck"  # as the workload `second`


def explore(subject: Subject, fault: dict[str, Any]) -> str:
    """Explore the save of step 4 under a fault; gives the name under which `verdicts` knows it.

    Every state is visited that the quick budget enumerates: the few in which the data of a failed
    sync is gone are what it is about.
    """
    recorded = record(subject, fault)
    limits = replace(engine.FULL_CHECK, candidates=engine.QUICK.candidates, onward=0)
    explorer = engine.Explorer(subject, recorded, limits)
    engine.run(explorer, MODELS)
    subject.notes[f"explored {NAME}"] = explorer
    return NAME


def record(subject: Subject, fault: dict[str, Any]) -> engine.Recorded:
    """Record the save; raises Unknown if it fails, for then there is nothing to explore."""
    folder, golden = subject.folder / "recorded" / NAME, subject.golden()
    trees.clear(folder)
    subject.lay_out(golden, OLDER)
    given: dict[str, Any] = {"faults": [fault], "fault_step": NEWEST, "record": str(folder)}
    ending = subject.run(NEWEST, (NEWEST,), then=[{"op": "close"}], **given)
    if ending.how != "ended" or ending.error:
        told = subject.tell(ending)
        raise Unknown(f"a save that went on after a fault fails when it is recorded: {told}")
    final = subject.folder / "recorded" / f"{NAME}-final"
    trees.lay_out(subject.root, final)
    before = [(OLDER, golden.snapshot(OLDER))]
    return engine.Recorded(NAME, Recording.read(folder), before, {}, final)
