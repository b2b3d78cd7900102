"""Deletions: `os.unlink`, `os.remove` and `os.rmdir`, also through pathlib and shutil.

Models: a process killed just before or just after a file is deleted, and a deletion that fails.
Does not model: a directory that another process fills while it is being removed.
Proof: `fired`, and an event in the journal before the process dies.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable


class Unlink(Injector):
    """Hits at the N-th deletion below the directory."""

    name = "unlink"

    def install(self) -> None:
        """Replace the three functions."""
        for name in ("unlink", "remove", "rmdir"):
            original = getattr(os, name)
            self.patch_everywhere(original, name, partial(self._unlink, name, original))

    def _unlink(
        self, what: str, real: Callable[..., object], path: object, **given: object
    ) -> object:
        where = self._where(path, given.get("dir_fd"))
        return self.around(f"os.{what}", where, partial(real, path, **given))

    def _where(self, path: Any, folder: object) -> str | None:  # noqa: ANN401  any path
        base = self.below(folder)
        if folder is None or base is None:
            return self.below(path)
        return os.path.normpath(os.path.join(base, os.fsdecode(path)))  # noqa: PTH118  relative names
