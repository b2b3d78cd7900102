"""The adapters of generated mutants: those of their base, which put the change in place first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.adapters import reference
from ckpt_conformance.adapters.reference import Reference, ReferenceManager
from ckpt_conformance.adapters.reference_trainer import ReferenceTrainer
from ckpt_conformance.adapters.reference_trainer import make as make_trainer
from ckpt_conformance.mutants import OF_RANKS, TRAINER, generated

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions


@dataclass(frozen=True)
class ChangedReference(Reference):
    """The adapter of the reference manager with one changed function."""

    change: str = generated.SAME

    def preload(self) -> None:
        """Import and read what every change needs: the server has it once, for all its children."""
        super().preload()
        generated.read_all()

    def open(self, root: Path, options: OpenOptions) -> ReferenceManager:
        """Put the change in place, and open the manager."""
        generated.put_in_place(self.change)
        return super().open(root, options)


@dataclass(frozen=True)
class ChangedTrainer(ReferenceTrainer):
    """The adapter of the reference trainer with one changed function."""

    change: str = generated.SAME

    def open(self, root: Path, options: OpenOptions) -> Any:  # noqa: ANN401  as its base
        """Put the change in place, and open the trainer."""
        generated.put_in_place(self.change)
        return super().open(root, options)


def make(change: str, base: str, name: str) -> Any:  # noqa: ANN401  an Adapter
    """Make the adapter of a base with a change; without ranks unless the base is named so."""
    if base == TRAINER:
        return ChangedTrainer(**vars(make_trainer(name)), change=change)
    plain = base.removesuffix(generated.WITH_RANKS)
    whole = reference.make(name, use_dcp=plain == "reference-dcp")
    made = ChangedReference(**vars(whole), change=change)
    return made if base != plain else replace(made, capabilities=made.capabilities - OF_RANKS)
