"""Saves with a mirror in a store of objects, recorded as requests: the model `object-store`.

What is explored is the mirror alone, as the folder that one gets who copies it: its node is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import Unknown, control_failed
from ckpt_conformance.crash.explore.engine import Recorded
from ckpt_conformance.crash.explore.stores import MIRRORED
from ckpt_conformance.fault_injectors.object_store import server
from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy
from ckpt_conformance.harness.messages import Close, Options, Run
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.trace.store_recording import Mark, as_recording

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.subject.subject import Subject

STEPS = (2, 4, 6)
KEEP = 2
PREFIX = "run"
URL = f"s3://{server.BUCKET}/{PREFIX}"
DEADLINE = 120.0  # seconds of a child, which imports a client of S3 first
RECORDED: Slot[Recorded] = Slot("the requests of saves with a mirror in a store")


def record(subject: Subject) -> Recorded:
    """Record three saves, each uploaded before the next one; once per adapter.

    Raises NotApplicable where the adapter does not mirror to URLs, Unknown where there is no store,
    or a save that nothing disturbs fails.
    """
    subject.need(Capability.STORE)
    return subject.once(RECORDED, lambda: _record(subject))


def _record(subject: Subject) -> Recorded:
    folder = subject.folder / "recorded" / MIRRORED
    trees.clear(folder)
    trees.clear(subject.root)
    with server.served() as store, StoreProxy(store, folder, knows_uploads=False) as proxy:
        server.make_bucket(store)
        marks = list(_saves(subject, proxy, STEPS))
    try:
        recording = as_recording(proxy.requests, folder, str(subject.root), f"{PREFIX}/", marks)
    except ValueError as error:
        raise Unknown(f"what was asked of the store can't be followed: {error}") from error
    trees.clear(subject.root)
    return Recorded(MIRRORED, recording)


def _saves(subject: Subject, proxy: StoreProxy, steps: Sequence[int]) -> Iterator[Mark]:
    """Save each step in a process of its own; yield the moments before and after each."""
    for step in steps:
        yield Mark(len(proxy.requests), "begun", step)
        result = saved(subject, proxy.endpoint, step)
        if not result.went_well:
            end = subject.tell(result)
            raise control_failed(f"a save with a mirror in a store of objects ends: {end}")
        if not any(one.changes and one.succeeded for one in proxy.requests):
            reason = f"nothing came to the store: {result.output[-500:]}"
            raise control_failed(reason, "CKC-MIRR-014")
        yield Mark(len(proxy.requests), "acknowledged", step)


def saved(subject: Subject, endpoint: str, step: int) -> ProcessResult:
    """Train on to a step, save it, and wait for its upload, in a process of its own."""
    run = Run(until=step, save_at=(step,), resume=step > STEPS[0])
    keep = KEEP if Capability.RETENTION in subject.info.capabilities else None
    return subject.execute(
        *(run, Close()),
        options=Options(keep_last=keep, mirror=URL),
        environment=server.environment(endpoint),
        deadline=DEADLINE,
    )
