"""`torch.load`, from a path or from an open file.

Models: an I/O error of the medium or the network while a checkpoint is read.
Does not model: bytes that are wrong (see at_rest), or a load from memory.
Proof: `fired`, and an event in the journal.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable


class TorchLoad(Injector):
    """Hits at the N-th `torch.load` below the directory."""

    name = "torch-load"

    def install(self) -> None:
        """Replace it in torch and wherever it was imported by name."""
        import torch

        original = torch.load
        self.patch_everywhere(original, "load", partial(self._load, original))

    def _load(
        self, real: Callable[..., object], f: object, *args: object, **given: object
    ) -> object:
        return self.around("torch.load", self.below(f), partial(real, f, *args, **given))
