"""Pairs of layouts and models, drawn by Hypothesis: which there are, and what a failure becomes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract.verdicts import Unknown, Violation
from ckpt_conformance.subject import worlds
from ckpt_conformance.suites import drawn_layouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.suites.drawn_layouts import Drawn


def subject(budget: str = "full", seed: int = 0) -> Any:  # noqa: ANN401  as much of it as is read
    return SimpleNamespace(budget=budget, seed=seed)


def tried(given: Any, check: Callable[[Drawn], None] = lambda _: None) -> list[Drawn]:  # noqa: ANN401
    found: list[Drawn] = []

    def once(drawn: Drawn) -> None:
        found.append(drawn)
        check(drawn)

    drawn_layouts.each(given, 4, once)
    return found


@pytest.mark.parametrize("most", [4, 8])
def test_layouts_fit_and_differ(most: int) -> None:
    found = drawn_layouts.layouts(most)
    assert {worlds.size_of(one) for one in found} <= {1, 2, 3, 4, 6, 8}
    assert max(map(worlds.size_of, found)) == most
    assert len({repr(sorted(one.items())) for one in found}) == len(found)
    for old, new in drawn_layouts.pairs(most):
        assert old != new
        assert not set(old) == set(new) == {"fsdp"}


def test_the_same_seed_draws_the_same() -> None:
    assert tried(subject()) == tried(subject())
    assert tried(subject(seed=1)) != tried(subject())
    assert len(tried(subject("quick"))) == drawn_layouts.EXAMPLES["quick"]


def test_of_models_everything_is_drawn() -> None:
    found = tried(subject())
    for name, values in drawn_layouts.TENSORS.items():
        assert {one.tensors[name] for one in found} == set(values)


def test_what_fails_is_shrunk() -> None:
    """A bug of tensor parallel with a model not trained in float32 needs no more than these."""

    def check(drawn: Drawn) -> None:
        if "tp" in drawn.new and drawn.tensors["trained"] != "float32":
            raise Violation(f"{drawn.old} {drawn.new} {drawn.model}")

    seen: list[Drawn] = []

    def once(drawn: Drawn) -> None:
        seen.append(drawn)
        check(drawn)

    with pytest.raises(Violation) as found:
        drawn_layouts.each(subject(), 4, once)
    first = next(at for at, one in enumerate(seen) if fails(check, one))
    assert len(seen) <= first + 1 + drawn_layouts.SHORTEN
    simplest = min((one for one in seen if fails(check, one)), key=simplicity)
    assert str(found.value) == f"{simplest.old} {simplest.new} {simplest.model}"
    assert simplest.tensors["frozen"] == "bfloat16"


def fails(check: Callable[[Drawn], None], drawn: Drawn) -> bool:
    try:
        check(drawn)
    except Violation:
        return True
    return False


def simplicity(drawn: Drawn) -> tuple[int, ...]:
    """Order as Hypothesis does: by the places of what was drawn."""
    places = [values.index(drawn.tensors[name]) for name, values in drawn_layouts.TENSORS.items()]
    return drawn_layouts.pairs(4).index((drawn.old, drawn.new)), *places


def test_a_control_that_fails_is_no_violation() -> None:
    def check(_: Drawn) -> None:
        raise Unknown("two ranks do not train")

    with pytest.raises(Unknown, match="do not train"):
        drawn_layouts.each(subject(), 4, check)
