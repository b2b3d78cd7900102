"""TMPDIR on another file system: a rename that crosses the edge of the directory fails with EXDEV.

Models: what the kernel says where a manager stages in TMPDIR and its directory is another mount.
`shutil.move` then copies over the final name, in place. A condition, not a hit: every such call
fails, as long as it is installed.
Does not model: a rename by code in C++ or Rust; two mounts inside the manager's own directory.
Proof: `fired`, and an event in the journal for each rename that was refused.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors.injector import Injector, path_of

if TYPE_CHECKING:
    from collections.abc import Callable


OPEN_FILE = re.compile(r"(/proc/(self|thread-self|\d+)|/dev)/fd/\d+")


class CrossDevice(Injector):
    """Refuses each rename and link between the directory and any other place."""

    name = "cross-device"

    def install(self) -> None:
        """Replace the three functions; what hits at a rename is to be installed later."""
        self.patch_functions(os, ("replace", "rename", "link"), self._rename)

    def _rename(
        self, name: str, real: Callable[..., object], src: object, dst: object, **options: object
    ) -> object:
        source, target = self._place(src), self.below(dst)
        if (source is None) == (target is None):
            return real(src, dst, **options)
        path = str(source if target is None else target)
        self.count(f"os.{name}", path)
        self.note(f"os.{name}", path)
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(src), None, str(dst))

    def _place(self, path: object) -> str | None:
        """Return what `below` does; of an open file by its descriptor's link, where that leads."""
        text = path_of(path)
        is_open = text is not None and OPEN_FILE.fullmatch(os.path.abspath(text))  # noqa: PTH100
        return self.below(str(Path(text).readlink()) if text is not None and is_open else path)
