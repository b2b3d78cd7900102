"""Managers that change the reference manager in one way each; importing them changes nothing."""

# ruff: noqa: ANN401, D107, D105  the hooks of a manager take what a job brings

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator


class Method(CheckpointManager):
    def restore_rng(self, state: Any) -> None:
        """Restore nothing."""


class Below(Method):
    def steps(self) -> list[int]:
        return []


class NewMethod(CheckpointManager):
    def restore_rng(self, state: Any) -> None:
        self.forget(state)

    def forget(self, state: Any) -> None:
        """Be called by what is overridden."""


class Constant(CheckpointManager):
    limit = 3


class Constructor(CheckpointManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class AttributeHook(CheckpointManager):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class AsProperty(CheckpointManager):
    @property
    def steps(self) -> Any:
        return list


class Partial(CheckpointManager):
    steps = partial(list)  # type: ignore[assignment]  # no function


class Generator(Trainer):
    def batches(self, *args: Any) -> Iterator[Any]:
        yield from super().batches(*args)
