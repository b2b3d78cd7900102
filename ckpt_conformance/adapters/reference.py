"""The reference manager of this project, in both of its formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance import __version__
from ckpt_conformance.adapters.reference_manager import ReferenceManager
from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability
from ckpt_conformance.reference_impl import CheckpointError, CheckpointManager, DirectoryMirror
from ckpt_conformance.subject import discovery_properties

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions


@dataclass(frozen=True)
class Reference(AdapterBase):
    """Adapter of the reference manager; mutants put their own class in `manager`."""

    manager: type[CheckpointManager] = CheckpointManager
    use_dcp: bool = False

    def preload(self) -> None:
        """Import what a check of the declared `plant` needs."""
        discovery_properties.preload()

    def open(self, root: Path, options: OpenOptions) -> ReferenceManager:
        """Open on a directory, with the mirror and the retention that are asked for."""
        target, gate = options.mirror, options.upload_gate
        mirror = DirectoryMirror(target, before_file=gate) if target else None
        use_dcp = self.use_dcp if options.kind is None else options.kind == "dcp"
        keep = 0 if options.keep_last is None else options.keep_last
        return ReferenceManager(
            self.manager(root, use_dcp=use_dcp, keep_last=keep, mirror=mirror), root
        )


# Per-rank files load only into the world and the layout that saved them.
OF_DIRECTORIES = (Capability.EXPORT, Capability.RESHARD)


def make(
    name: str, *, use_dcp: bool, manager: type[CheckpointManager] = CheckpointManager
) -> Reference:
    """Make the adapter of one format."""
    capabilities = {c for c in Capability if use_dcp or c not in OF_DIRECTORIES}
    return Reference(
        name=name,
        version=__version__,
        capabilities=frozenset(capabilities),
        holds=EVERYTHING | {"gradients"},
        refusals=(CheckpointError,),
        library="ckpt-conformance reference_impl",
        recipe="",
        resharding={"rng": "by-rank", "loader": "global"},
        manager=manager,
        use_dcp=use_dcp,
    )


per_rank = make("reference", use_dcp=False)
dcp_directory = make("reference-dcp", use_dcp=True)
