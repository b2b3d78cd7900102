"""The plan of a session is what pytest would run, known without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract.catalogue import PROFILES, load_catalogue
from ckpt_conformance.plugin import plan, session
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.work.items import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.plugin.plan import CheckItem

REQUESTS = {
    "quick": SessionOptions(("reference", "dcp-per-step")),
    "claims": SessionOptions(("reference",), claims=tuple(PROFILES)),
    "full": SessionOptions(("reference",), budget="full"),
    "profile": SessionOptions(("reference",), profiles=("crash", "damage")),
    "only": SessionOptions(("a:b", "c:d"), only=("CKC-ATOM-001", "CKC-RETN-002")),
    "old": SessionOptions(("reference",), catalogue=1),
}


class Collected(session.Collector):
    """Lets pytest collect, and run nothing."""

    ids: tuple[str, ...] = ()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Note what would run, and say that it is done."""
        parts = ((item.name, item) for item in session.items)
        named = (
            f"{name.partition('[')[2].rstrip(']')} {item.path.stem}::{name.partition('[')[0]}"
            for name, item in parts
        )
        type(self).ids = tuple(sorted(named))
        return True


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a session that stops where the checks would begin; return what it would have run."""
    monkeypatch.setattr(session, "Collector", Collected)
    monkeypatch.setattr("ckpt_conformance.plugin.State.socket", lambda _: "")

    def collect(options: SessionOptions) -> tuple[str, ...]:
        session.run_session(options)
        return Collected.ids

    return collect


@pytest.mark.parametrize("name", REQUESTS)
def test_the_plan_is_what_pytest_collects(name: str, collected: Any) -> None:  # noqa: ANN401
    made = plan.plan_of(REQUESTS[name])
    assert tuple(sorted(item.id for item in made.items)) == collected(REQUESTS[name])


def test_a_selection_runs_what_it_names_and_nothing_else(collected: Any) -> None:  # noqa: ANN401
    options = REQUESTS["quick"]
    part = plan.plan_of(options).shard(Shard(2, 5))
    chosen = SessionOptions(options.adapters, selection=plan.selection(part.items))
    assert 0 < len(part.items) < len(plan.plan_of(options).items)
    assert tuple(sorted(item.id for item in part.items)) == collected(chosen)


def test_an_empty_selection_runs_nothing(collected: Any) -> None:  # noqa: ANN401
    assert collected(SessionOptions(("reference",), selection={})) == ()


def test_every_invariant_is_planned() -> None:
    items: Any = plan.plan_of(REQUESTS["full"]).items
    planned: list[CheckItem] = list(items)
    assert {item.check.invariant for item in planned} == set(load_catalogue().invariants)
    assert {item.group for item in planned} == {f"reference {item.check.suite}" for item in planned}
    assert all(item.cost > 0 for item in planned)
