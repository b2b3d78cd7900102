"""`torch.distributed.checkpoint.save` and `load` as whole calls.

Models: a process killed just before or just after the call, and a call that fails as a whole.
Does not model: what happens inside (see dcp_writer and file_write); `async_save`.
Proof: `fired`, and an event in the journal before the process dies.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable


class _Call(Injector):
    """Hits at the N-th call of one of the two functions."""

    function = ""

    def install(self) -> None:
        """Replace it in torch and wherever it was imported by name."""
        from torch.distributed import checkpoint

        original = getattr(checkpoint, self.function)
        self.patch_everywhere(original, self.function, partial(self._run, original))

    def _run(self, real: Callable[..., object], *args: object, **given: object) -> object:
        name = self.below(_directory(args, given))
        return self.around(f"dcp.{self.function}", name, partial(real, *args, **given))


def _directory(args: tuple[object, ...], given: dict[str, object]) -> object:
    """Find the directory that a call is about: its id, or the path of its reader or writer."""
    if given.get("checkpoint_id") is not None:
        return given["checkpoint_id"]
    storage = [given.get("storage_writer"), given.get("storage_reader"), *args[1:2]]
    paths = (getattr(each, "path", None) for each in storage)
    return next((path for path in paths if path is not None), None)


class DcpSave(_Call):
    """Hits at the N-th `dcp.save` below the directory."""

    name, function = "dcp-save", "save"


class DcpLoad(_Call):
    """Hits at the N-th `dcp.load` below the directory."""

    name, function = "dcp-load", "load"
