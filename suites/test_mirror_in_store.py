"""A mirror in a store of objects: what is there when its client is killed at a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.crash.explore import verdicts
from ckpt_conformance.crash.explore.stores import MIRRORED
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject

MODELS = ("object-store",)


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
