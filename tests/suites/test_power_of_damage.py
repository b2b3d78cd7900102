"""Each fault of CKC-CORR-001 has power: a manager that checks nothing serves what it damaged.

A fault that torch itself refuses, such as a generator's state of zeros, would pass every manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.verdicts import Outcome
from ckpt_conformance.suites.controls import test_damage as suite

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.subject.subject import Subject

# None of these looks at a checksum; safetensors holds no pickle, so no number of its own.
TRUSTING = ("torch-save-inplace", "dcp-per-step", "safetensors-per-step")
LEAST = {"swapped-blocks": 2, "changed-number": 3, "multi-bit": 1, "zeroed-block": 1, "bit-flip": 5}


@pytest.mark.parametrize("name", TRUSTING)
def test_damage_is_served_where_nothing_is_checked(
    name: str, new_subject: Callable[..., Subject]
) -> None:
    subject = new_subject(name, budget="quick")
    made = suite.damaged(subject, suite.of_payload(subject))
    resumed = suite.outcomes(subject, [case for _, case in made], {Outcome.SILENT_WRONG})
    told = [
        (damage.fault, damage.detail, outcome)
        for (damage, _), (outcome, _) in zip(made, resumed, strict=True)
    ]
    assert [one for one in told if one[2] is not Outcome.SILENT_WRONG] == []
    kinds = [fault for fault, _, _ in told]
    least = LEAST if name != "safetensors-per-step" else {**LEAST, "changed-number": 0}
    assert {fault: number for fault, number in least.items() if kinds.count(fault) < number} == {}
