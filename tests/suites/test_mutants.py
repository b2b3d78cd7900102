"""Each mutant violates all its ids in its own family, and checks spare the others.

The whole matrix (every mutant, every check) runs in `make test-all`: `ckpt-conformance mutants`.
Of the slow tests here each mutant meets one check that must kill it, each check one mutant that it
must kill, and `SPARED` of its family that it must not: a check that shoots at everything is seen at
once, one that is wrong about a single mutant in the matrix alone. `make test` has one pair for each
suite: that its checks can fail at all. Mutants of ranks are in no other run: a world costs as much
as ten children.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.catalogue import PROFILES
from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.mutants import all_mutants
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.plan import checks
from ckpt_conformance.plugin.session import run_session

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.harness.client import Server
    from ckpt_conformance.plugin.plan import Check

Pair = tuple[str, str]  # a mutant, and the id of an invariant
SPARED = 1  # mutants that each check must spare, of its family


def family_of(invariant: str) -> str:
    """Return the letters in the middle of an id."""
    return invariant.split("-")[1]


def killers() -> dict[str, set[Pair]]:
    """Map each family to pairs that must be violated: each mutant once, each invariant at least.

    A mutant meets that check of its own which fewest mutants violate.
    """
    mutants = [info for info in all_mutants().values() if not info.spans_ranks]
    counts = Counter(violated for info in mutants for violated in info.violates)
    pairs = {(info.id, min(info.violates, key=lambda one: (counts[one], one))) for info in mutants}
    for violated in counts.keys() - {violated for _, violated in pairs}:
        pairs.add((min(info.id for info in mutants if violated in info.violates), violated))
    found: dict[str, set[Pair]] = defaultdict(set)
    for name, violated in sorted(pairs):
        found[family_of(violated)].add((name, violated))
    return dict(sorted(found.items()))


def of_suites(pairs: set[Pair]) -> set[Pair]:
    """Choose a pair for each suite that a family's checks are in: always the same one."""
    suites = {check.invariant: check.module for check in checks()}
    chosen = {suites[invariant]: (name, invariant) for name, invariant in sorted(pairs)}
    return set(chosen.values())


@pytest.mark.parametrize("family", killers())
def test_a_check_of_each_suite_kills(family: str, server: Server) -> None:
    wanted = of_suites(killers()[family])
    assert violated_of(wanted, server) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("family", killers())
def test_the_mutants_of_a_family_violate_their_ids_alone(family: str, server: Server) -> None:
    wanted = killers()[family]
    names = sorted({name for name, _ in wanted})
    ids = {check.invariant for check in checks() if family_of(check.invariant) == family}
    spared = {(name, invariant) for invariant in ids for name in drawn(names, invariant)}
    assert violated_of(wanted | spared, server) == wanted


def drawn(names: list[str], invariant: str) -> list[str]:
    """Return mutants that keep an invariant: for each invariant others, always the same."""
    kept = [name for name in names if invariant not in all_mutants()[name].violates]
    return sorted(kept, key=lambda name: sha256(f"{invariant} {name}".encode()).digest())[:SPARED]


def may_meet(name: str, check: Check) -> bool:
    """Keep tensors of 64 MiB, which cost seconds, for the mutants that begin with size."""
    is_large = all_mutants()[name].broken.__module__.endswith(".large")
    return is_large or not check.key.startswith("test_large_tensors::")


def violated_of(pairs: set[Pair], server: Server) -> set[Pair]:
    """Run each pair of a mutant and an invariant; return those that are violated."""
    selection = {
        check.key: tuple(
            sorted(
                f"mutant:{name}"
                for name, id_ in pairs
                if id_ == check.invariant and may_meet(name, check)
            )
        )
        for check in checks()
    }
    options = SessionOptions(
        tuple(sorted({f"mutant:{name}" for name, _ in pairs})),
        claims=tuple(PROFILES),
        server=server.socket,
        selection=selection,
        pretends=True,
    )
    return {
        (outcome.adapter.removeprefix("mutant:"), outcome.invariant)
        for outcome in run_session(options)
        if outcome.verdict is Verdict.VIOLATION
    }


def test_the_readme_counts_the_mutants(repository: Path) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    assert f"on {len(all_mutants())} broken managers" in text
