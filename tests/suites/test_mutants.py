"""Each mutant violates exactly its ids, in its own family.

The whole matrix (every mutant, every check) runs in `make test-all`: `ckpt-conformance mutants`.
Mutants of ranks are in no other run: a world costs as much as ten children.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.catalogue import PROFILES, load_catalogue
from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.mutants import all_mutants
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.session import run_session

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.harness.client import Server

Pair = tuple[str, str]  # an adapter, and the id of an invariant


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
def test_the_mutants_of_a_family_violate_exactly_their_ids(family: str, server: Server) -> None:
    names = families()[family]
    ids = [name for name in load_catalogue().invariants if name.split("-")[1] == family]
    wanted = {
        (f"mutant:{name}", violated)
        for name in names
        for violated in all_mutants()[name].violates.intersection(ids)
    }
    assert killed(names, ids, server) == wanted


def killed(names: list[str], ids: list[str], server: Server) -> set[Pair]:
    """Run the checks of some ids on some mutants; return each mutant with what it violates."""
    adapters, claims = tuple(f"mutant:{name}" for name in names), tuple(PROFILES)
    options = SessionOptions(
        adapters, only=tuple(ids), claims=claims, server=server.socket, pretends=True
    )
    return {
        (outcome.adapter, outcome.invariant)
        for outcome in run_session(options)
        if outcome.verdict is Verdict.VIOLATION
    }


def test_the_readme_counts_the_mutants(repository: Path) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    assert f"on {len(all_mutants())} broken managers" in text
