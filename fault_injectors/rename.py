"""New names: `os.replace`, `os.rename`, `os.link`, `os.symlink`, also through pathlib and shutil.

Models: a process killed just before or just after a name is published, and a rename that fails.
Does not model: a rename that a power cut takes back; renames by code in C++ or Rust.
Proof: `fired`, and an event in the journal before the process dies.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable


class Rename(Injector):
    """Hits at the N-th rename whose source or target lies below the directory."""

    name = "rename"

    def install(self) -> None:
        """Replace the four functions."""
        for name in ("replace", "rename", "link", "symlink"):
            original = getattr(os, name)
            self.patch_everywhere(original, name, partial(self._rename, name, original))

    def _rename(
        self, what: str, real: Callable[..., object], src: object, dst: object, **given: object
    ) -> object:
        name = self.below(dst) or self.below(src)
        call = partial(real, src, dst, **given)
        return self.around(f"os.{what}", name, call)
