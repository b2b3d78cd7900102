"""`torch.save`, to a path or to an open file.

Models: a process killed, or a disk full, at the beginning, in the middle or at the last byte of the
file that torch's C++ writer makes.
Does not model: single writes inside the C++ writer; a save into memory, which is no I/O.
Proof: `fired`, and an event in the journal before the process dies.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors.whole_file import WholeFile

if TYPE_CHECKING:
    from collections.abc import Callable


class TorchSave(WholeFile):
    """Hits at the N-th `torch.save` below the directory."""

    name = "torch-save"

    def install(self) -> None:
        """Replace it in torch and wherever it was imported by name."""
        import torch

        original = torch.save
        self.patch_everywhere(original, "save", partial(self._save, original))

    def _save(
        self, real: Callable[..., object], obj: object, f: object, *args: object, **given: object
    ) -> object:
        return self.write("torch.save", f, lambda target: real(obj, target, *args, **given))
