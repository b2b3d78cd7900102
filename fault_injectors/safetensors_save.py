"""`safetensors.torch.save_file`, whose writer is in Rust.

Models: a process killed, or a disk full, at the beginning, in the middle or at the last byte.
Does not model: single writes inside the Rust writer, and the name that newer versions write to
before they rename: the final name is what is cut.
Proof: `fired`, and an event in the journal before the process dies.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors.whole_file import WholeFile

if TYPE_CHECKING:
    from collections.abc import Callable


class SafetensorsSave(WholeFile):
    """Hits at the N-th `save_file` below the directory; idle where safetensors is not loaded."""

    name = "safetensors-save"

    def install(self) -> None:
        """Replace it in `safetensors.torch` and wherever it was imported by name."""
        module = sys.modules.get("safetensors.torch")
        if module is not None:
            original = module.save_file
            self.patch_everywhere(original, "save_file", partial(self._save, original))

    def _save(
        self,
        real: Callable[..., object],
        tensors: object,
        filename: object,
        *more: object,
        **given: object,
    ) -> object:
        return self.write(
            "safetensors.save_file", filename, lambda target: real(tensors, target, *more, **given)
        )
