"""Orbax as it is by default: `save` returns once the arrays are copied, and a thread writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import Capability

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


synchronous: Any = beside("orbax")


class Pending:
    """A save that goes on: the manager is asked, and what it raised is kept."""

    def __init__(self, manager: Any) -> None:
        """Keep the CheckpointManager."""
        self.manager = manager
        self.error: Exception | None = None

    def wait(self) -> None:
        """Wait as its documentation does; raise what made the save fail."""
        if self.error is None:
            try:
                self.manager.wait_until_finished()
            except Exception as error:
                self.error = error
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        """Return whether no save goes on."""
        return not self.manager.is_saving_in_progress()

    def exception(self) -> BaseException | None:
        """Return what made it fail."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None


class Steps(synchronous.Steps):  # type: ignore[misc]  # known at run time only
    """The same manager with `enable_async_checkpointing`."""

    in_background = True

    def save(self, job: TrainingJob, step: int) -> Pending:
        """Begin to save every component."""
        super().save(job, step)
        return Pending(self.manager)


class Orbax(synchronous.Orbax):  # type: ignore[misc]  # as above
    """Adapter of it."""

    def open(self, root: Path, options: OpenOptions) -> Steps:
        """Open on a directory."""
        return Steps(root, options.keep_last)


def make() -> Orbax:
    """Make the adapter."""
    fields = vars(synchronous.make())
    more = fields["capabilities"] | {Capability.ASYNC}
    return Orbax(**fields | {"name": "orbax-async", "capabilities": more})
