"""Each mutant violates all its ids in its own family, and checks spare the others.

The whole matrix (every mutant, every check) runs in `make test-all`: `ckpt-conformance mutants`.
Here each check meets all mutants of its family that it must kill, and `SPARED` of those that it
must not: a check that shoots at everything is seen at once, one that is wrong about a single mutant
in the matrix alone. Mutants of ranks are in no other run: a world costs as much as ten children.
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

Pair = tuple[str, str]  # a mutant, and the id of an invariant
SPARED = 6  # mutants that each check must spare, of its family


def families() -> dict[str, list[str]]:
    """Map each family to the mutants at home there: where they violate the fewest invariants."""
    found: dict[str, list[str]] = defaultdict(list)
    for info in all_mutants().values():
        if info.spans_ranks:
            continue
        counts = Counter(violated.split("-")[1] for violated in info.violates)
        found[min(counts, key=lambda family: (counts[family], family))].append(info.id)
    return dict(sorted(found.items()))


@pytest.mark.parametrize("family", families())
def test_the_mutants_of_a_family_violate_their_ids_alone(family: str, server: Server) -> None:
    names = families()[family]
    ids = {check.invariant for check in checks() if check.invariant.split("-")[1] == family}
    killers = {
        (name, violated) for name in names for violated in all_mutants()[name].violates & ids
    }
    spared = {(name, id_) for id_ in ids for name in drawn(names, id_)}
    assert violated_of(killers | spared, server) == killers


def drawn(names: list[str], invariant: str) -> list[str]:
    """Return mutants that keep an invariant: for each invariant others, always the same."""
    kept = [name for name in names if invariant not in all_mutants()[name].violates]
    return sorted(kept, key=lambda name: sha256(f"{invariant} {name}".encode()).digest())[:SPARED]


def violated_of(pairs: set[Pair], server: Server) -> set[Pair]:
    """Run each pair of a mutant and an invariant; return those that are violated."""
    selection = {
        check.key: tuple(sorted(f"mutant:{name}" for name, id_ in pairs if id_ == check.invariant))
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
