"""What a child fails at that no manager was asked for is the harness's: never a violation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.verdicts import Cause, Unknown
from ckpt_conformance.subject import resumption

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.subject.subject import Subject


def test_a_job_that_cannot_be_built_is_no_violation(new_subject: Callable[..., Subject]) -> None:
    subject = new_subject("torch-save-inplace")
    with pytest.raises(Unknown, match=r"the job could not be built.*no such kind") as raised:
        subject.execute(kind="no such kind")
    assert raised.value.cause is Cause.HARNESS


def test_nor_for_the_check_that_owns_the_kind(new_subject: Callable[..., Subject]) -> None:
    subject = new_subject("torch-save-inplace")
    with pytest.raises(Unknown, match="could not be built"):
        resumption.arrive(subject, "no such kind", owner=True)
