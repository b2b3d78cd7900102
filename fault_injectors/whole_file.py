"""What the injectors of native writers share: a function that writes one whole file.

Such a writer calls the kernel itself, so nothing in Python sees its single writes. The real
function runs, and its real bytes are then cut to the prefix: the disk holds what a writer that was
stopped there would have left, because these writers write from front to back.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector, length_of, path_of

if TYPE_CHECKING:
    from collections.abc import Callable


class WholeFile(Injector):
    """Hits at the N-th call of a function that writes a file, or writes to an open one."""

    def write(self, what: str, target: object, call: Callable[[object], object]) -> object:
        """Run `call(target)`, hit before, after a prefix, or after it."""
        name = self.below(target)
        due = self.count(what, name)
        if not due or name is None:
            return call(target)
        if self.moment == "before":
            self.inject(what, name)
        if self.moment == "after":
            call(target)
        elif isinstance(target, str | bytes | os.PathLike):
            self._cut_file(target, call)
        else:
            self._cut_stream(target, call)
        self.inject(what, name)
        return None

    def _cut_file(self, target: Any, call: Callable[[object], Any]) -> None:  # noqa: ANN401  a path
        call(target)
        path = str(path_of(target))
        os.truncate(path, length_of(self.prefix, os.stat(path).st_size))  # noqa: PTH116  str

    def _cut_stream(self, target: Any, call: Callable[[object], Any]) -> None:  # noqa: ANN401  a file
        buffer = io.BytesIO()
        call(buffer)
        data = buffer.getvalue()
        target.write(data[: length_of(self.prefix, len(data))])
        target.flush()
