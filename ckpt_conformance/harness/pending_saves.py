"""Saves that go on in the background after `save` has returned."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt_conformance.contract import Manager, PendingSave, TrainingJob

GLANCE = 0.001  # seconds between two looks at a save


def pending_save(returned: object) -> PendingSave | None:
    """Return what `save` returned if it is a save that goes on; None if the save has ended.

    Raises TypeError for a future, which would be taken for an ended save.
    """
    if all(hasattr(returned, name) for name in ("wait", "done", "exception")):
        return cast("PendingSave", returned)
    if hasattr(returned, "done"):
        msg = (
            f"save returned {returned!r}, which has done() but not wait() and exception(); "
            "return ckpt_conformance.contract.FutureSave(future), or None once the save has ended"
        )
        raise TypeError(msg)
    return None


def wait_for(pending: PendingSave) -> None:
    """Wait until a save in the background has ended; raises what made it fail."""
    pending.wait()
    error = pending.exception()
    if error is not None:
        raise error


def wait_until_done(pending: Iterable[PendingSave | None]) -> None:
    """Wait until saves have ended without asking how; None is one that ended at once."""
    for one in pending:
        while one is not None and not one.done():
            threading.Event().wait(GLANCE)


def save(manager: Manager, job: TrainingJob, step: int) -> None:
    """Save, and wait until the save has ended; raises what made it fail."""
    pending = pending_save(manager.save(job, step))
    if pending:
        wait_for(pending)
