"""The reference trainer: the shape in which a framework owns the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance import __version__
from ckpt_conformance.adapters.reference import per_rank
from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability
from ckpt_conformance.reference_impl import CheckpointError
from ckpt_conformance.reference_impl.trainer import Trainer

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions


@dataclass(frozen=True)
class ReferenceTrainer(AdapterBase):
    """Adapter of the reference trainer; mutants put their own class in `trainer`."""

    trainer: type[Trainer] = Trainer

    def open(self, root: Path, options: OpenOptions) -> Any:  # noqa: ANN401  Trainer, with steps()
        """Open a trainer on a directory."""
        manager = per_rank.open(root, options).manager
        trainer = self.trainer(manager)
        trainer.steps, trainer.close = manager.steps, manager.close  # type: ignore[attr-defined]
        return trainer


def make(name: str = "reference-trainer", trainer: type[Trainer] = Trainer) -> ReferenceTrainer:
    """Make the adapter."""
    return ReferenceTrainer(
        name=name,
        version=__version__,
        shape="trainer",
        capabilities=frozenset(
            {Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION, Capability.MIRROR}
        ),
        holds=EVERYTHING | {"gradients"},
        refusals=(CheckpointError,),
        library="ckpt-conformance reference_impl",
        trainer=trainer,
    )
