"""A mirror in a store of objects: what is there once it is closed, killed, or refused a request."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown, Violation
from ckpt_conformance.crash.explore import verdicts
from ckpt_conformance.crash.explore.stores import MIRRORED, store_saves
from ckpt_conformance.fault_injectors.object_store import faults, server
from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy
from ckpt_conformance.harness.messages import Call, Close, ExitKind, Options
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites import mirrors

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from ckpt_conformance.fault_injectors.object_store.faults import Seen, StoreFault
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Subject

MODELS = ("object-store",)
ROTATING = {"explicit_step", "retention"}
NEWEST, REFUSED, LATER = 4, 4, (6, 8, 10)  # steps
# What a store refuses while step 4 is uploaded: for good, or one request.
FOR_GOOD = faults.ExpiredToken()
ONCE = (faults.SlowDown(), faults.BadDigest(), faults.CutInBody(), faults.LostAnswer())
PAGED = faults.ShortPages()  # a bucket has more objects than a page of its listing


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
    the bucket; or it was compared with the first page of a listing, and never got done (D08, D04).
    How: save two steps, each in a process that closes its manager, with a mirror in a server of S3
    on loopback, whose listings have pages of two objects; load from a copy of the bucket, compare
    with the original. Then save three more, with two to keep: what rotation deletes here loads from
    a copy.
    """
    wanted = subject.loaded(subject.golden(), NEWEST)
    trees.clear(subject.root)
    with _paged_store(subject) as (store, proxy):
        for step in (2, NEWEST):
            _require_well(subject, store_saves.saved(subject, proxy.endpoint, step))
        copy = _copied(subject, store)
        message = "the bucket does not load like the original once close() has returned"
        mirrors.compare(subject, mirrors.as_original(subject), message, copy)
        if not set(subject.info.capabilities) >= ROTATING:
            return
        for step in LATER:
            _require_well(subject, store_saves.saved(subject, proxy.endpoint, step))
        if not _is_somewhere(subject, _copied(subject, store), wanted):
            raise Violation(f"rotation deletes step {NEWEST}, which is not in the bucket")


@check("CKC-STAG-001")
def test_a_step_is_staged_from_a_bucket_of_many_objects(subject: Subject) -> None:
    """A step that is staged from a bucket whose listing has pages loads like the original.

    Why: what the first page of a listing showed was fetched, and the rest of the step was not
    (D08).
    How: mirror steps 2 and 4 to a server of S3 on loopback whose listings have pages of two
    objects; stage step 2 in an empty directory; a new process must get that step, bit for bit.
    """
    subject.need("store", "stage", "explicit_step")
    wanted = subject.loaded(subject.golden(), 2)
    trees.clear(subject.root)
    with _paged_store(subject) as (_, proxy):
        for step in (2, NEWEST):
            _require_well(subject, store_saves.saved(subject, proxy.endpoint, step))
        trees.clear(subject.root)
        staged = subject.execute(
            *(Call(method="stage", args=(2, False, None)), Close()),
            options=Options(mirror=store_saves.URL),
            environment=server.environment(proxy.endpoint),
            deadline=store_saves.DEADLINE,
        )
    resumed = subject.resume(2)
    arrived, state = oracle.arrival(resumed)
    if not staged.went_well or arrived != 2 or not oracle.same(state, wanted, subject.holds):  # noqa: PLR2004
        controls.require(test_a_bucket_loads_like_the_original, subject)
        message = "step 2 of a bucket is staged, and does not load"
        evidence = subject.evidence(resumed, wanted, staging=subject.tell(staged))
        raise Violation(message, evidence=evidence)


@check("CKC-MIRR-015")
def test_a_refused_request_costs_no_step(subject: Subject) -> None:
    """A step of whose upload a request was refused is here or in the bucket, and later ones arrive.

    Why: the error of a request was logged in the upload's thread; the step had its receipt, or
    none and no second try, and rotation deleted it (D04).
    How: mirror step 2 to a server of S3 on loopback; save step 4 while a proxy refuses one request
    (503, a wrong digest, a cut connection, a lost answer), each of the largest object, each that
    puts parts together (200, with an error inside), or all of them; then save three more with two
    to keep, undisturbed. Step 4 loads from here or from a copy of the bucket, and the bucket alone
    serves the newest. That the save or `close()` raises is no violation.
    """
    wanted = subject.loaded(subject.golden(), REFUSED)
    seen = _refuse(subject, FOR_GOOD, wanted)
    for fault in (*faults.of_objects(seen), *subject.sample(ONCE, quick=1)):
        _refuse(subject, fault, wanted)


def _refuse(subject: Subject, fault: StoreFault, wanted: Leaves) -> Seen:
    """Let requests of step 4 meet a fault; raise Violation if that costs a step.

    Returns what step 2, which nothing disturbs, asked for.
    """
    trees.clear(subject.root)
    with _paged_store(subject) as (store, proxy):
        _require_well(subject, store_saves.saved(subject, proxy.endpoint, 2))
        seen = proxy.requests
        proxy.arm(fault)
        refused = store_saves.saved(subject, proxy.endpoint, REFUSED)
        if not any(one.fault == fault.name for one in proxy.requests) and fault.key != "*":
            return seen  # no object of another step has such a name
        proxy.require_fired()
        if refused.exit_kind is not ExitKind.ENDED:
            raise Unknown(f"a store refuses ({fault.name}): {subject.tell(refused)}")
        if refused.steps_of("acknowledged") != [REFUSED]:
            return seen  # the save itself has told
        *_, last = [store_saves.saved(subject, store, step) for step in LATER]
        copy = _copied(subject, store)
    evidence = {"fault": fault.name, "of": fault.key, "the last save": subject.tell(last)}
    if not _is_somewhere(subject, copy, wanted):
        message = f"a request is refused ({fault.name}), and step {REFUSED} is nowhere"
        controls.require(test_a_bucket_loads_like_the_original, subject)
        raise Violation(message, evidence=evidence)
    served = oracle.step_of(subject.resume(root=copy))
    if served != LATER[-1]:
        message = f"a request is refused ({fault.name}), and no later step comes to the bucket"
        controls.require(test_a_bucket_loads_like_the_original, subject)
        raise Violation(message, evidence={**evidence, "served": served, "newest": LATER[-1]})
    return seen


@check("CKC-MIRR-017")
def test_parts_of_a_dead_upload_go(subject: Subject) -> None:
    """Parts that a dead upload has left in a bucket are gone once a later step has arrived there.

    Why: parts of an upload that nobody completed are in no list of objects, and each killed job
    left some: they are paid for until somebody asks for them (D08).
    How: mirror step 2 to a server of S3 on loopback; begin an upload in parts of each object that
    it has written, send one part, and leave it so; mirror step 4. None of them is left. A manager
    that never asks for anything about parts has none, and is not judged.
    """
    trees.clear(subject.root)
    with _paged_store(subject) as (store, proxy):
        _require_well(subject, store_saves.saved(subject, proxy.endpoint, 2))
        begun = server.begin_uploads(store, server.contents(store))
        _require_well(subject, store_saves.saved(subject, proxy.endpoint, NEWEST))
        left = server.uploads(store) & begun
        asks_about_parts = proxy.was_asked_about_parts
    if not asks_about_parts:
        raise NotApplicable("no request about uploads in parts: objects of this size go as a whole")
    if left:
        evidence = {"left": sorted(left), "begun": sorted(begun)}
        raise Violation("parts of a dead upload stay in the bucket", evidence=evidence)


def _is_somewhere(subject: Subject, copy: Path, wanted: Leaves) -> bool:
    """Return whether step 4 loads from the manager's directory, or from a copy of the bucket."""
    return any(_loads(subject, root, wanted) for root in (subject.root, copy))


def _loads(subject: Subject, root: Path, wanted: Leaves) -> bool:
    arrived, state = oracle.arrival(subject.resume(REFUSED, root=root))
    return arrived == REFUSED and oracle.same(state, wanted, subject.holds)


@contextmanager
def _paged_store(subject: Subject) -> Generator[tuple[str, StoreProxy]]:
    """Run a store with an empty bucket, and a proxy that cuts its listings into pages.

    Yields the store's endpoint, and the proxy.
    """
    folder = subject.folder / "paged"
    with server.served() as store, StoreProxy(store, folder, PAGED, knows_uploads=False) as proxy:
        server.make_bucket(store)
        yield store, proxy


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
