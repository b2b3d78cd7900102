"""The two oracles: identity, and what an undamaged load of a legal step gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ckpt_conformance.contract.verdicts import Outcome
from ckpt_conformance.harness.messages import ExitKind, RunResult, whole

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ckpt_conformance.harness.client import Finished
    from ckpt_conformance.harness.messages import Leaves

    State = Mapping[str, Mapping[str, object]]  # component -> leaf -> digest

T = TypeVar("T")
OUTCOME_OF_DEATH = {
    ExitKind.HANG: Outcome.HANG,
    ExitKind.MEMORY: Outcome.OUT_OF_MEMORY,
    ExitKind.CRASHED: Outcome.CRASHED,
    ExitKind.KILLED: Outcome.CRASHED,
}
"""What a resume came to that did not live to answer."""


def held(state: Mapping[str, T], holds: Collection[str]) -> dict[str, T]:
    """Keep the components that the manager saves; `optimizer.second` belongs to `optimizer`."""
    return {name: leaves for name, leaves in state.items() if name.partition(".")[0] in holds}


def same(left: State, right: State, holds: Collection[str]) -> bool:
    """Return whether two states are equal on the held components."""
    return held(left, holds) == held(right, holds)


def differences(
    left: State,
    right: State,
    holds: Collection[str],
    limit: int = 8,
) -> list[str]:
    """Name the leaves that differ, component first."""
    a, b = held(left, holds), held(right, holds)
    flat_a = {f"{c}/{leaf}": value for c, leaves in a.items() for leaf, value in leaves.items()}
    flat_b = {f"{c}/{leaf}": value for c, leaves in b.items() for leaf, value in leaves.items()}
    return differing(flat_a, flat_b, limit)


def arrival(result: Finished) -> tuple[int | None, Leaves]:
    """Return step and state at a child's first training step; (None, {}) if it did not train."""
    ran = result.of(RunResult)
    if ran.arrived is None:
        return None, {}
    return ran.arrived.step, whole(ran.states.get(ran.arrived.step, {}))


def step_of(result: Finished) -> int | None:
    """Return the step of a resume that went well; None for any other."""
    return arrival(result)[0] if result.went_well else None


def classify(
    result: Finished,
    legal: Mapping[int, State],
    *,
    holds: Collection[str],
    newest: int,
    acknowledged: Collection[int],
) -> Outcome:
    """Classify a resume.

    `legal` maps each step that may be served to the state an undamaged load of it gives; `newest`
    is the newest step that was begun. LOST_ALL is for the caller: a refusal may be right.
    """
    if result.exit_kind in OUTCOME_OF_DEATH:
        return OUTCOME_OF_DEATH[result.exit_kind]
    if result.error is not None:
        return Outcome.REFUSED_TYPED if result.error.typed else Outcome.REFUSED_UNTYPED
    step, state = arrival(result)
    if not step:
        return Outcome.COLD_START
    if step not in legal or not same(state, legal[step], holds):
        return Outcome.SILENT_WRONG
    if step == newest:
        return Outcome.NEW
    return Outcome.PREVIOUS if step >= max(acknowledged, default=0) else Outcome.LOST_STEP


def differing(left: Mapping[str, object], right: Mapping[str, object], limit: int = 8) -> list[str]:
    """Name the leaves that differ, at most `limit`, then how many more."""
    names = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    more = [f"... and {len(names) - limit} more"] if len(names) > limit else []
    return [
        f"{name}: {str(left.get(name, 'absent'))[:8]} != {str(right.get(name, 'absent'))[:8]}"
        for name in names[:limit]
    ] + more
