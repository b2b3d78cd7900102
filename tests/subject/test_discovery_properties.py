"""Planted trees: how large they are, where they lie, and what is said where that is not memory."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from ckpt_conformance.subject import discovery_properties
from ckpt_conformance.subject.discovery_properties import BUDGETS, Explored, Size, Tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FEW = Size(2, 40, 5)


@dataclass(frozen=True)
class Manager:
    """Makes an empty file for each step."""

    root: Path

    def plant(self, step: int) -> None:
        (self.root / f"step-{step}").touch()


@pytest.fixture
def explored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Explored]:
    """Explore few trees with a check that agrees; nothing may be mounted in this process."""
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    monkeypatch.setattr(discovery_properties, "mount_place", lambda _: False)
    monkeypatch.setattr(discovery_properties, "ON_DISK", FEW.steps)
    monkeypatch.setitem(BUDGETS, "quick", FEW)
    adapter = SimpleNamespace(open=lambda root, _: Manager(root))
    child: Any = SimpleNamespace(root=root, adapter=adapter)

    def explore() -> Explored:
        found = discovery_properties.explore(child, lambda *_: None, 0, "quick")
        return msgspec.convert(found, Explored)

    return explore


def test_a_plant_that_raises_is_the_adapters_matter(
    explored: Callable[[], Explored], monkeypatch: pytest.MonkeyPatch
) -> None:
    def illegal(self: Manager, step: int) -> None:
        raise OSError(29, f"Illegal seek: {step} in {self.root.name}")

    monkeypatch.setattr(Manager, "plant", illegal)
    found = explored()
    assert found.unfit.startswith("plant(4) raises OSError: [Errno 29] Illegal seek: 4 in root (")
    assert (found.control, found.disagreement, found.names) == (None, None, 0)


@pytest.mark.parametrize("budget", BUDGETS)
def test_each_budget_plants_ten_thousand_names(budget: str) -> None:
    assert BUDGETS[budget].names >= 10_000


def test_what_was_seen_is_said_with_where_it_lay(explored: Callable[[], Explored]) -> None:
    pytest.importorskip("pyfakefs")
    remark = explored().remark
    assert remark.startswith("68 names, 13 of them steps, on the disk (this machine lets no ")
    assert remark.endswith("; 3 smaller trees in pyfakefs")


def test_without_pyfakefs_it_is_said_which_extra_has_it(
    explored: Callable[[], Explored], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyfakefs.fake_filesystem_unittest", None)
    assert "on the disk (pyfakefs is not installed: the extra `all` has it)" in explored().remark


def test_the_extra_that_is_named_has_pyfakefs(repository: Path) -> None:
    """`make certify` installs `all`."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (named,) = extras["all"]
    of_all = named.removeprefix("ckpt-conformance[").removesuffix("]").split(",")
    assert any(one.startswith("pyfakefs") for extra in of_all for one in extras[extra])


def test_the_large_tree_has_as_many_names_as_it_says(tmp_path: Path) -> None:
    seen: list[int] = []

    def check(child: Any, root: Path, tree: Tree) -> None:  # noqa: ANN401
        del child
        assert not tree.steps
        seen.append(len([*root.iterdir()]))

    exploring = discovery_properties.Exploring(None, check)
    exploring.on_tree(tmp_path, Tree([], [], crowd=9_000))
    assert seen == [9_000]
