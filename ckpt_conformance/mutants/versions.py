"""What another release of torch wrote is lost, refused or mixed (bugs M)."""

# ruff: noqa: ANN401  the hooks of a manager take what a job brings: any type at all

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.mutants.resharding import parameters, roll
from ckpt_conformance.reference_impl import (
    CheckpointError,
    CheckpointManager,
    CheckpointMismatch,
)
from ckpt_conformance.reference_impl.manifest import Manifest, framework, read_manifest

if TYPE_CHECKING:
    from ckpt_conformance.reference_impl import CheckpointReference
    from ckpt_conformance.reference_impl.loading import Destinations, OpenCheckpoint
    from ckpt_conformance.reference_impl.ranks import Ranks
    from ckpt_conformance.reference_impl.ranks_loading import Planned


def is_foreign(manifest: Manifest) -> bool:
    """Return whether another release of torch wrote a checkpoint."""
    return manifest.framework != framework()


@mutant(
    "M10",
    url="NVIDIA-NeMo/Automodel#836",
    change="discovery and load pass over what another release of torch wrote",
    violates={"CKC-VERS-002"},
)
class PassesOver(CheckpointManager):
    """Pins the exact version, and says nothing."""

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:
        """Return what this release wrote."""
        every = super().candidates(*given, **named)
        return [candidate for candidate in every if not self._is_foreign(candidate)]

    def _is_foreign(self, candidate: CheckpointReference) -> bool:
        try:
            return is_foreign(read_manifest(candidate.manifest_path))
        except (OSError, CheckpointError):
            return False  # the load tells of it

    def steps(self) -> list[int]:
        """Return the steps that this release wrote."""
        foreign = {one.step for one in super().candidates() if self._is_foreign(one)}
        return [step for step in super().steps() if step not in foreign]


@mutant(
    "M07",
    url="pytorch/pytorch#146157",
    change="what another release of torch wrote is refused",
    violates={"CKC-VERS-004"},
)
class RefusesOthers(CheckpointManager):
    """Loads only what the installed release wrote, and says so."""

    def read_manifest(self, reference: CheckpointReference) -> Manifest:
        """Read the manifest; refuse that of another release."""
        manifest = super().read_manifest(reference)
        if is_foreign(manifest):
            raise CheckpointMismatch(f"{manifest.framework} wrote it, this is {framework()}")
        return manifest


@mutant(
    "M09",
    url="NVIDIA/Megatron-LM#694",
    change="the moments of what another release wrote go to the next parameter of that shape",
    violates={"CKC-VERS-003"},
)
class MomentsByNumber(CheckpointManager):
    """Takes the state of optimizers by number, although the numbers have changed."""

    _foreign = False

    def plan(self, opened: OpenCheckpoint, job: Destinations, allowed: set[str]) -> Any:
        """Plan; note whose checkpoint it is."""
        self._foreign = is_foreign(opened.manifest)
        return super().plan(opened, job, allowed)

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Restore, with the entries of parameters of one shape moved by one."""
        if self._foreign:
            by_shape: dict[tuple[int, ...], list[Any]] = {}
            for number, entry in state["state"].items():
                by_shape.setdefault(tuple(entry["exp_avg"].shape), []).append(number)
            entries = dict(state["state"])
            for numbers in by_shape.values():
                for at, number in enumerate(numbers):
                    entries[number] = state["state"][numbers[at - 1]]
            state = {**state, "state": entries}
        super().restore_optimizer(optimizer, state)


@mutant(
    "M11",
    url="sgl-project/sglang#28100",
    change="ranks take the rows of uneven matrices of another release in another order",
    violates={"CKC-VERS-005"},
    base="reference-dcp",
)
class RowsOfAnotherRelease(CheckpointManager):
    """Cuts out the rows as its own release lays them out."""

    def serve_together(self, ranks: Ranks, planned: Planned, job: Destinations) -> None:
        """Load, then move the rows."""
        super().serve_together(ranks, planned, job)
        if is_foreign(planned.opened.manifest):
            roll(parameters(job))
