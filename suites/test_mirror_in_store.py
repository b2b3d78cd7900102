"""A mirror in a store of objects: what is there once it is closed, killed, or refused a request."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Unknown, Violation
from ckpt_conformance.crash.explore import verdicts
from ckpt_conformance.crash.explore.stores import MIRRORED, store_saves
from ckpt_conformance.fault_injectors.object_store import faults, server
from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy
from ckpt_conformance.harness.messages import ExitKind
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites import mirrors

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from ckpt_conformance.fault_injectors.object_store.faults import StoreFault
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Subject

MODELS = ("object-store",)
ROTATING = {"explicit_step", "retention"}
NEWEST, REFUSED, LATER = 4, 4, (6, 8, 10)  # steps
# What a store refuses while step 4 is uploaded: for good, or one request.
FOR_GOOD = faults.ExpiredToken()
ONCE = (faults.SlowDown(), faults.BadDigest(), faults.CutInBody(), faults.LostAnswer())


@check("CKC-MIRR-012")
def test_a_kill_at_a_request_costs_no_step_of_a_bucket(subject: Subject) -> None:
    """At whatever request an upload ends a bucket serves the last step mirrored, or the next one.

    Why: the pointer or the manifest arrived before the data, and who resumed from the bucket alone
    found half a step, or nothing (D06).
    How: record the requests of three saves that are mirrored to a server of S3 on loopback; of what
    the bucket may hold after a kill, where any of the requests in flight took effect, load from a
    copy.
    """
    verdicts.require_clean(subject, (MIRRORED,), MODELS, explore=verdicts.explored_in_store)


@check("CKC-MIRR-014")
def test_a_bucket_loads_like_the_original(subject: Subject) -> None:
    """Once `close()` has returned a bucket alone serves what was saved last, bit for bit.

    Why: an upload that sent nothing, or a part, counted as done, and nobody had ever loaded from
    the bucket (D08, D04).
    How: save two steps, each in a process that closes its manager, with a mirror in a server of S3
    on loopback; load from a copy of the bucket, compare with the original. Then save three more,
    with two to keep: what rotation deletes here loads from a copy.
    """
    wanted = subject.loaded(subject.golden(), NEWEST)
    trees.clear(subject.root)
    with _store() as store:
        for step in (2, NEWEST):
            _require_well(subject, store_saves.saved(subject, store, step))
        copy = _copied(subject, store)
        message = "the bucket does not load like the original once close() has returned"
        mirrors.compare(subject, mirrors.as_original(subject), message, copy)
        if not set(subject.info.capabilities) >= ROTATING:
            return
        for step in LATER:
            _require_well(subject, store_saves.saved(subject, store, step))
        if not _is_somewhere(subject, _copied(subject, store), wanted):
            raise Violation(f"rotation deletes step {NEWEST}, which is not in the bucket")


@check("CKC-MIRR-015")
def test_a_refused_request_costs_no_step(subject: Subject) -> None:
    """A step of whose upload a request was refused is here or in the bucket, and later ones arrive.

    Why: the error of a request was logged in the upload's thread; the step had its receipt, or
    none and no second try, and rotation deleted it (D04).
    How: mirror step 2 to a server of S3 on loopback; save step 4 while a proxy refuses one request
    (503, a wrong digest, a cut connection, a lost answer) or all of them; then save three more
    with two to keep, undisturbed. Step 4 loads from here or from a copy of the bucket, and the
    bucket alone serves the newest. That the save or `close()` raises is no violation.
    """
    wanted = subject.loaded(subject.golden(), REFUSED)
    for fault in (FOR_GOOD, *subject.sample(ONCE, quick=1)):
        _refuse(subject, fault, wanted)


def _refuse(subject: Subject, fault: StoreFault, wanted: Leaves) -> None:
    """Let requests of step 4 meet a fault; raise Violation if that costs a step."""
    trees.clear(subject.root)
    with _store() as store:
        _require_well(subject, store_saves.saved(subject, store, 2))
        with StoreProxy(store, subject.folder / "refused", knows_uploads=False) as proxy:
            proxy.arm(fault)
            refused = store_saves.saved(subject, proxy.endpoint, REFUSED)
            proxy.require_fired()
        if refused.exit_kind is not ExitKind.ENDED:
            raise Unknown(f"a store refuses ({fault.name}): {subject.tell(refused)}")
        if refused.steps_of("acknowledged") != [REFUSED]:
            return  # the save itself has told
        *_, last = [store_saves.saved(subject, store, step) for step in LATER]
        copy = _copied(subject, store)
    evidence = {"fault": fault.name, "the last save": subject.tell(last)}
    if not _is_somewhere(subject, copy, wanted):
        message = f"a request is refused ({fault.name}), and step {REFUSED} is nowhere"
        controls.require(test_a_bucket_loads_like_the_original, subject)
        raise Violation(message, evidence=evidence)
    served = oracle.step_of(subject.resume(root=copy))
    if served != LATER[-1]:
        message = f"a request is refused ({fault.name}), and no later step comes to the bucket"
        controls.require(test_a_bucket_loads_like_the_original, subject)
        raise Violation(message, evidence={**evidence, "served": served, "newest": LATER[-1]})


def _is_somewhere(subject: Subject, copy: Path, wanted: Leaves) -> bool:
    """Return whether step 4 loads from the manager's directory, or from a copy of the bucket."""
    return any(_loads(subject, root, wanted) for root in (subject.root, copy))


def _loads(subject: Subject, root: Path, wanted: Leaves) -> bool:
    arrived, state = oracle.arrival(subject.resume(REFUSED, root=root))
    return arrived == REFUSED and oracle.same(state, wanted, subject.holds)


@contextmanager
def _store() -> Generator[str]:
    """Run a store with an empty bucket; yields its endpoint."""
    with server.served() as store:
        server.make_bucket(store)
        yield store


def _copied(subject: Subject, store: str) -> Path:
    """Return a new folder with what the bucket holds below the mirror's prefix."""
    folder = subject.scratch / "bucket"
    trees.clear(folder)
    for key, content in server.contents(store).items():
        path = folder / key.removeprefix(f"{store_saves.PREFIX}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def _require_well(subject: Subject, result: ProcessResult) -> None:
    if not result.went_well:
        raise mirrors.trouble(subject, result)
