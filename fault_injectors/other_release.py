"""A save under another release of torch, as far as the manager can tell: by the version's name.

Models: the name of the release that a manager notes in its checkpoints, so that what it makes of
that name later shows with one torch installed.
Does not model: anything that really differs between two releases; what a manager noted when it was
imported. What another release wrote is given by `--written-by`.
Proof: `fired`; and the check finds the name in what the save left, or says that it is not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract.journal import ChildJournal


class OtherRelease(Injector):
    """Gives torch another version as long as it is installed."""

    name = "other-release"

    def __init__(self, root: Path, journal: ChildJournal, **given: Any) -> None:  # noqa: ANN401
        """Take the `version`, such as "2.7.0"."""
        self.version = str(given.pop("version"))
        super().__init__(root, journal, **given)

    def install(self) -> None:
        """Replace the name in both modules that have it."""
        import torch
        from torch.torch_version import TorchVersion

        for module in (torch, torch.version):
            self.patch(module, "__version__", TorchVersion(self.version))
        self.calls += 1
        self.note("torch.__version__", self.version)
