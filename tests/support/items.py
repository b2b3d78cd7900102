"""What stands in for a pytest item where an outcome is made without pytest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ckpt_conformance import plugin


def item_with(subject: Any, name: str = "test_x::test_y") -> Any:  # noqa: ANN401  what stands in for a pytest.Item
    """Make as much of a pytest item as an outcome reads."""
    option = SimpleNamespace(ckpt_seed=0, ckpt_claim=[], ckpt_catalogue=None)
    return SimpleNamespace(
        stash={plugin.NEEDS: (subject, None)},
        config=SimpleNamespace(option=option),
        path=SimpleNamespace(stem=name.partition("::")[0]),
        name=name.partition("::")[2],
    )
