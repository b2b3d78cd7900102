"""What stands in for a pytest item where an outcome is made without pytest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ckpt_conformance import plugin
from ckpt_conformance.plugin.options import OPTIONS, CheckOptions


def item_with(subject: Any, name: str = "test_x::test_y") -> Any:  # noqa: ANN401  what stands in for a pytest.Item
    """Make as much of a pytest item as an outcome reads."""
    needs = plugin.Needs(subject, None) if subject else None  # type: ignore[arg-type]
    return SimpleNamespace(
        stash={plugin.NEEDS: needs},
        config=SimpleNamespace(stash={OPTIONS: CheckOptions()}),
        path=SimpleNamespace(stem=name.partition("::")[0]),
        name=name.partition("::")[2],
    )
