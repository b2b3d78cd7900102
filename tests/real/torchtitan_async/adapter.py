"""torchtitan with `async_mode="async"`: a thread writes the checkpoint while the job trains on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import Capability, FutureSave

if TYPE_CHECKING:
    from types import ModuleType

    from ckpt_conformance.contract import OpenOptions, TrainingJob


def beside(folder: str) -> ModuleType:
    """Import the adapter of a folder beside this one."""
    path = Path(__file__).resolve().parent.parent / folder / "adapter.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_adapter", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no adapter at {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


synchronous: Any = beside("torchtitan")


class Titan(synchronous.Titan):  # type: ignore[misc]  # known at run time only
    """The same manager, whose `save` returns once the state is staged."""

    mode = "async"

    def save(self, job: TrainingJob, step: int) -> FutureSave:
        """Save; 'save_future' is what `maybe_wait_for_saving` waits for."""
        super().save(job, step)
        return FutureSave(self.manager.save_future)


class TorchTitan(synchronous.TorchTitan):  # type: ignore[misc]  # as above
    """Adapter of it."""

    def open(self, root: Path, options: OpenOptions) -> Titan:
        """Open on a folder."""
        return Titan(root, options.keep_last)


def make() -> TorchTitan:
    """Make the adapter."""
    fields = vars(synchronous.make())
    more = fields["capabilities"] | {Capability.ASYNC}
    return TorchTitan(**fields | {"name": "torchtitan-async", "capabilities": more})
