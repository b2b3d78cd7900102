"""The persistence models: what they yield, what their predicates refuse, and the measured facts."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from operation_lists import PAGE, Disk, operation_lists

from ckpt_conformance.crash import budget as spread
from ckpt_conformance.crash.enumerate import Rules, Walk
from ckpt_conformance.crash.layout import Layout, Source, whole_bytes
from ckpt_conformance.crash.models import MODELS
from ckpt_conformance.crash.states import ZEROS, Content, Extent, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.crash.operations import Recording

BUDGET = 300
SLOW = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
DISK = ("ext4", "xfs", "btrfs")


def states(model: str, recording: Recording, seed: int = 0, budget: int = BUDGET) -> list[State]:
    return list(MODELS[model].states(recording, random.Random(seed), budget))


def told(recording: Recording, state: State) -> str:
    return f"point {state.point}, {state.why}: {dict(state.names)} {dict(state.contents)}\n" + "\n".join(
        f"{one.index} {one.kind} {one.object} {one.path} {one.target} {one.offset}+{one.size}"
        f"{' sync' * one.sync}{' failed' * bool(one.error)}"
        for one in recording.operations
    )


@pytest.mark.parametrize("model", MODELS)
@SLOW
@given(disk=operation_lists())
def test_what_a_model_yields_is_legal_by_its_predicate_and_under_posix(
    model: str, disk: Disk
) -> None:
    for state in states(model, disk.recording):
        for judge in (model, "posix"):
            wrong = MODELS[judge].illegal(disk.recording, state)
            assert not wrong, f"{judge}: {wrong}\n{told(disk.recording, state)}"


@SLOW
@given(disk=operation_lists())
def test_what_a_kill_leaves_is_legal_under_every_model(disk: Disk) -> None:
    for state in states("kill", disk.recording):
        for judge, model in MODELS.items():
            wrong = model.illegal(disk.recording, state)
            assert not wrong, f"{judge}: {wrong}\n{told(disk.recording, state)}"
