"""Each mutant is killed in its own family by every invariant that it was built to break.

That it violates nothing else is what the kill matrix says, with every mutant and every check; that
runs in `make test-all`. Mutants of ranks run there alone: a world costs as much as ten children.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
def test_the_mutants_of_a_family_are_killed_there(family: str, server: Server) -> None:
    wanted = {
        (f"mutant:{name}", violated)
        for name in families()[family]
        for violated in all_mutants()[name].violates
        if violated.split("-")[1] == family
    }
    assert killed(wanted, server) == wanted


def killed(pairs: set[Pair], server: Server) -> set[Pair]:
    """Run each pair of an adapter and an invariant; return those that are violated."""
    selection = {
        check.key: tuple(sorted(name for name, violated in pairs if violated == check.invariant))
        for check in checks()
    }
    adapters = tuple(sorted({name for name, _ in pairs}))
    claims = tuple(PROFILES)
    options = SessionOptions(
        adapters, claims=claims, server=server.socket, selection=selection, pretends=True
    )
    return {
        (outcome.adapter, outcome.invariant)
        for outcome in run_session(options)
        if outcome.verdict is Verdict.VIOLATION
    }


def test_the_readme_counts_the_mutants(repository: Path) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    assert f"on {len(all_mutants())} broken managers" in text
