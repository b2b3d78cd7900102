"""The reference manager of this project, in both of its formats: every optional capability."""

from __future__ import annotations

import contextlib
import importlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ckpt_conformance import __version__
from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability
from ckpt_conformance.reference_impl import (
    CheckpointError,
    CheckpointManager,
    CheckpointReference,
    Retries,
    mirror_at,
    rehydrate,
)
from ckpt_conformance.reference_impl.durable import digest_bytes
from ckpt_conformance.reference_impl.manifest import canonical
from ckpt_conformance.reference_impl.snapshot import Snapshot
from ckpt_conformance.reference_impl.trainer import parts
from ckpt_conformance.subject import discovery_properties

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.contract import OpenOptions, TrainingJob
    from ckpt_conformance.reference_impl import SaveHandle
    from ckpt_conformance.reference_impl.layout import Kind

SOON = Retries(first_pause=0.02)
"""As many attempts as a job has, after short pauses: nothing gets better in the meantime."""


class ReferenceManager:
    """Drives one `CheckpointManager`."""

    def __init__(self, manager: CheckpointManager, root: Path) -> None:
        """Keep the manager."""
        self.manager, self.root = manager, root
        self.closing = ExitStack()

    def save(self, job: TrainingJob, step: int) -> None:
        """Save with the job's extra dict."""
        self.manager.save(step, **parts(job), extra=job.extra.state_dict())

    def save_async(self, job: TrainingJob, step: int) -> SaveHandle:
        """Save in the background, with the job's extra dict."""
        return self.manager.save_async(step, **parts(job), extra=job.extra.state_dict())

    def save_emergency(self, job: TrainingJob, step: int) -> None:
        """Dump, with the job's extra dict."""
        self.manager.save_emergency_checkpoint(step, **parts(job), extra=job.extra.state_dict())

    def stage(self, step: int, refresh: bool = False, kind: str | None = None) -> None:  # noqa: FBT001, FBT002
        """Bring a step from the mirror."""
        wanted = cast("Kind | None", kind)
        self.manager.stage_checkpoint_step(step, refresh=refresh, require_kind=wanted)

    def catch_sigterm(self) -> Callable[[], bool]:
        """Note SIGTERM until this is closed."""
        termination = self.closing.enter_context(self.manager.catch_sigterm())
        return lambda: termination.came

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Load and hand the extra dict back to the job."""
        result = self.manager.load(step=step, **parts(job))
        job.extra.load_state_dict(result.extra)
        return result.step

    def load_path(self, job: TrainingJob, path: Path) -> int:
        """Load what a path refers to."""
        result = self.manager.load(path, **parts(job))
        job.extra.load_state_dict(result.extra)
        return result.step

    def load_kind(self, job: TrainingJob, step: int, kind: str) -> int:
        """Load a step in one format: `model` or `dcp`."""
        wanted = cast("Kind", kind)
        result = self.manager.load(step=step, require_kind=wanted, **parts(job))
        job.extra.load_state_dict(result.extra)
        return result.step

    def save_kind(self, job: TrainingJob, step: int, kind: str) -> None:
        """Save a step in one format, whatever the manager's own is."""
        other = type(self.manager)(self.root, use_dcp=kind == "dcp", keep_last=0)
        ReferenceManager(other, self.root).save(job, step)
        other.close()

    def load_without(self, job: TrainingJob, step: int, component: str) -> int:
        """Load and leave one component cold, on request."""
        wanted = parts(job)
        if component in job.optimizers:
            others = {name: one for name, one in job.optimizers.items() if name != component}
            wanted["optimizers"], component = others, f"optimizer/{component}"
        result = self.manager.load(step=step, **wanted, allow_missing={component})
        job.extra.load_state_dict(result.extra)
        return result.step

    def export(self, step: int, destination: Path) -> Path:
        """Write the step as one per-rank model file and give its path."""
        folder = Path(destination)
        rehydrate(self.root / f"dcp_{step:06d}", folder, self.manager)
        return folder / f"model_{step:06d}.pt"

    def plant(self, step: int) -> None:
        """Commit a checkpoint that holds nothing: discovery shows it, Python alone wrote it."""
        manager, place = self.manager, self.place(step)
        place.directory.mkdir(parents=True, exist_ok=True)
        manifest = manager.make_manifest(Snapshot(step, 0, {}, {}, []), f"plant{step}", {}, {})
        manager.write_bytes(place.manifest_path, manifest.to_bytes())

    def rotate(self, step: int) -> None:
        """Run the rotation that follows a save of a step."""
        self.manager.retain(self.place(step))

    def reseal(self, step: int) -> None:
        """Renew the digests of a step's files in its manifest, and the manifest's own."""
        path = self.place(step).manifest_path
        body = json.loads(path.read_bytes())
        for name, entry in body["files"].items():
            file = path.parent / name
            if file.is_file():
                entry.update(size=file.stat().st_size, blake3=digest_bytes(file.read_bytes()))
        del body["manifest_digest"]
        body["manifest_digest"] = digest_bytes(canonical(body))
        path.write_bytes(canonical(body))

    def place(self, step: int) -> CheckpointReference:
        """Where a step lies in the manager's own format."""
        if self.manager.use_dcp:
            return CheckpointReference(self.root / f"dcp_{step:06d}", step, "dcp")
        return CheckpointReference(self.root, step, "model")

    def steps(self) -> list[int]:
        """Ask discovery."""
        return self.manager.steps()

    def close(self) -> None:
        """Wait for uploads and let go."""
        with self.closing:
            self.manager.close()


@dataclass(frozen=True)
class Reference(AdapterBase):
    """Adapter of the reference manager; mutants put their own class in `manager`."""

    manager: type[CheckpointManager] = CheckpointManager
    use_dcp: bool = False

    def preload(self) -> None:
        """Import what a check of the declared `plant` needs, and the client of stores."""
        discovery_properties.preload()
        with contextlib.suppress(ImportError):  # an extra; a mirror in a store asks for it then
            importlib.import_module("s3fs")

    def open(self, root: Path, options: OpenOptions) -> ReferenceManager:
        """Open on a directory, with the mirror and the retention that are asked for."""
        target, gate = options.mirror, options.upload_gate
        mirror = mirror_at(str(target), before_file=gate, retries=SOON) if target else None
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
