"""What belongs to a rank follows a declared policy where another number of ranks resumes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ckpt_conformance.contract import POLICIES
from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.layouts import (
    SAME,
    TWO,
    arrived,
    demand_none,
    differs,
    name,
    pair,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import RankRecord, Subject
    from ckpt_conformance.subject.worlds import Layout

    Streams = list[dict[str, str]]  # by rank: the leaves of its generators


@check("CKC-SHRD-010")
def test_generators_follow_the_declared_policy(subject: Subject) -> None:
    """Where another number of ranks resumes, generators follow the policy that is declared.

    Why: ranks beyond the saved ones have nothing to load; whoever gives them rank 0's stream makes
    them drop the same neurons and see the same noise, and nobody is told (KX2, KX3).
    How: resume two ranks' checkpoint on three, and three ranks' on two; compare every stream.
    """
    subject.need("ranks", "reshard", holds=["rng"])
    policy = declared(subject, "rng")
    for old, new in ((TWO, SAME[1]), (SAME[1], TWO)):
        saved, state = pair(subject, old, new)
        streams = [_streams(saved, old), _streams(state, new)]
        demand_none(
            RNG[policy](*streams), f"from {name(old)} to {name(new)}: rng is not {policy!r}"
        )


@check("CKC-SHRD-011")
def test_the_data_position_follows_the_declared_policy(subject: Subject) -> None:
    """Where another number of ranks resumes, the data position follows the policy that is declared.

    Why: a position that counts a rank's own batches means another place for other ranks: samples
    are repeated or skipped, unseen (H01, M033).
    How: resume two ranks' checkpoint on three, and three ranks' on two; compare the global place
    and that the parts of all ranks together are the whole batch.
    """
    subject.need("ranks", "reshard", holds=["loader"])
    declared(subject, "loader")
    for old, new in ((TWO, SAME[1]), (SAME[1], TWO)):
        saved, state = pair(subject, old, new)
        wrong = differs(saved, state, ["loader"], lambda path: path.startswith("global."))
        demand_none(wrong, f"from {name(old)} to {name(new)}: the global position is another")
        result = arrived(subject, worlds.golden(subject, old), new)
        wanted, got = batches(worlds.golden(subject, old).records), batches(result.records)
        wrong = [f"step {step}: {got[step]}" for step in got if got[step] != wanted.get(step)]
        demand_none(wrong, f"from {name(old)} to {name(new)}: the ranks read other samples")


# -- what they share --------------------------------------------------------------------------


def declared(subject: Subject, part: str) -> str:
    """Return the policy that the adapter declares; to declare none is a violation."""
    policy = subject.info.resharding.get(part)
    if policy is None:
        ways = "; ".join(f"{way}: {what}" for way, what in POLICIES[part].items())
        raise Violation(
            f"no policy for {part} is declared", evidence={"resharding": f"may say: {ways}"}
        )
    return policy


def batches(records: Sequence[RankRecord]) -> dict[int, list[int]]:
    """Return the samples of each step over all ranks; replicas of one part count once."""
    steps: dict[int, set[int]] = {}
    for of_rank in records:
        steps.setdefault(of_rank.record.step, set()).update(of_rank.record.batch)
    return {step: sorted(ids) for step, ids in steps.items()}


def _streams(state: Leaves, layout: Layout) -> Streams:
    return [worlds.of_rank(state["rng"], rank) for rank in range(worlds.size_of(layout))]


def _by_rank(saved: Streams, now: Streams) -> list[str]:
    wrong = [
        f"rank {r} has not its own" for r in range(min(len(saved), len(now))) if saved[r] != now[r]
    ]
    return wrong + _apart(saved, now)


def _rank0(saved: Streams, now: Streams) -> list[str]:
    return [f"rank {r} has not rank 0's" for r, mine in enumerate(now) if mine != saved[0]]


def _apart(_saved: Streams, now: Streams) -> list[str]:
    two = itertools.combinations(range(len(now)), 2)
    return [f"ranks {a} and {b} draw the same" for a, b in two if now[a] == now[b]]


RNG: dict[str, Callable[[Streams, Streams], list[str]]] = {
    "by-rank": _by_rank,
    "rank0": _rank0,
    "reseeded": _apart,
}
