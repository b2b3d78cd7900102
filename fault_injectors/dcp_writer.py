"""The file-system writer of torch.distributed.checkpoint: `write_data` and `finish`.

Models: a process killed between the shards and the metadata that commits them, or an error there.
Does not model: single writes inside a shard (see file_write), several ranks.
Proof: `fired`, and an event in the journal before the process dies.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable


class DcpWriter(Injector):
    """Hits at the N-th stage of a DCP save below the directory."""

    name = "dcp-writer"

    def install(self) -> None:
        """Replace the two methods, in the class that defines them."""
        from torch.distributed.checkpoint import filesystem

        owner = next(c for c in filesystem.FileSystemWriter.__mro__ if "write_data" in vars(c))
        for name in ("write_data", "finish"):
            original = vars(owner)[name]
            self.patch(owner, name, self._method(name, original))

    def _method(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def method(writer: Any, *args: object, **given: object) -> object:  # noqa: ANN401
            call = partial(real, writer, *args, **given)
            return self.around(f"dcp.{what}", self.below(writer.path), call)

        return method
