"""How the state of an optimizer is named after its parameter (P025, P049)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container


class Owner(NamedTuple):
    """Whose state a tensor is.

    Attributes:
        parameter: its key.
        pattern: how the key of the state is made of that of the parameter, which stands for `{}`.
    """

    parameter: str
    pattern: str

    def of(self, parameter: str) -> str:
        """Give the key of the same state of another parameter."""
        return self.pattern.replace("{}", parameter)


@dataclass(frozen=True)
class StateNames:
    """The patterns by which states are named; `{}` stands for the parameter."""

    patterns: tuple[str, ...]

    def owner(self, key: str, keys: Container[str]) -> Owner | None:
        """Say whose state a tensor is; None if no parameter among the keys is named so."""
        for pattern in self.patterns:
            before, _, behind = pattern.partition("{}")
            if key.startswith(before) and key.endswith(behind):
                parameter = key[len(before) : len(key) - len(behind)]
                if parameter in keys and parameter != key:
                    return Owner(parameter, pattern)
        return None


STATE_NAMES = StateNames(
    (
        *("{}.w_0", "{}.moment1_0", "{}.moment2_0", "{}.beta1_pow_acc_0", "{}.beta2_pow_acc_0"),
        *("{}.exp_avg", "{}.exp_avg_sq", "{}.max_exp_avg_sq", "{}.momentum_buffer", "{}.step"),
        *("optimizer.state.{}.exp_avg", "optimizer.state.{}.exp_avg_sq"),
        *("optimizer.state.{}.max_exp_avg_sq", "optimizer.state.{}.momentum_buffer"),
        "optimizer.state.{}.step",
        *("optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq", "optim.state.{}.step"),
    )
)
"""Those of Paddle, of torch's AdamW and SGD behind a parameter, and of torch's state dicts."""
