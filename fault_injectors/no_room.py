"""A file system that says it has no room: what `os.statvfs` gives has no free block.

Models: a disk that is full for who asks before it writes, by os.statvfs or shutil.disk_usage.
Does not model: a write that fails (see system-call); code of C++ or Rust that asks by itself.
Proof: `fired`, the number of answers that said so.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable

FREE = (3, 4)  # f_bfree and f_bavail, in the order of that tuple


class NoRoom(Injector):
    """Leaves no block free, in any answer."""

    name = "no-room"

    def install(self) -> None:
        """Replace the functions that ask."""
        self.patch_functions(os, ("statvfs", "fstatvfs"), self._ask)

    def _ask(
        self, name: str, real: Callable[..., os.statvfs_result], path: object
    ) -> os.statvfs_result:
        answer = real(path)
        self.calls += 1
        self.note(f"os.{name}", str(path))
        values = [*answer, answer.f_fsid]
        for place in FREE:
            values[place] = 0
        return os.statvfs_result(values)
