"""Steps that are asked for by number or by path: what is whole is not lost where discovery fails.

A promise about files (nothing is deleted, nothing is destroyed) is kept as long as the checkpoint
loads when it is named. That a restart does not find it is a finding too, of another promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.subject import names, oracle

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Subject


def loads(
    subject: Subject, tree: Path, legal: Mapping[int, Leaves], steps: Collection[int]
) -> int | None:
    """Return the newest of some steps that loads whole from a tree when it is named; else None."""
    for step in sorted(steps, reverse=True):
        for request in _requests(subject, step):
            trees.materialize(tree, subject.root)
            arrived, state = oracle.arrival(subject.resume(request))
            if arrived == step and oracle.same(state, legal[step], subject.holds):
                return step
    return None


def _requests(subject: Subject, step: int) -> Iterator[int | str]:
    """Yield the ways in which an adapter lets a step be asked for."""
    if Capability.EXPLICIT_STEP in subject.info.capabilities:
        yield step
    if Capability.REFERENCE in subject.info.capabilities:
        golden = subject.golden()
        known = max(golden.saves)
        for name in names.of_step(golden, known):
            yield str(subject.root / name.of(step))
