"""torchsnapshot: `Snapshot.take` into a directory for each step, `Snapshot(path).restore`."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob


class Pending:
    """`PendingSnapshot`, whose `done` and `wait` are documented, as a handle."""

    def __init__(self, snapshot: Any) -> None:
        """Keep it."""
        self.snapshot = snapshot

    def wait(self) -> None:
        """Wait; raises RuntimeError where it failed."""
        self.snapshot.wait()

    def done(self) -> bool:
        """Return whether it has ended."""
        return bool(self.snapshot.done())

    def exception(self) -> BaseException | None:
        """Return what `wait` raises."""
        try:
            self.wait()
        except RuntimeError as error:
            return error
        return None


class Snapshots:
    """One snapshot a step, in `step-N` of one folder."""

    def __init__(self, root: Path) -> None:
        """Keep the folder."""
        self.root = root
        self.pending: list[Pending] = []

    def path(self, step: int) -> Path:
        """Return where the snapshot of a step is."""
        return self.root / f"step-{step}"

    def save(self, job: TrainingJob, step: int) -> None:
        """Take a snapshot of every component and the step.

        Of `take` is documented: '`path` must not point to an existing snapshot'. To heed it is up
        to the caller.
        """
        from torchsnapshot import Snapshot

        Snapshot.take(**self.asked(job, step))

    def save_async(self, job: TrainingJob, step: int) -> Pending:
        """Take a snapshot 'asynchronously'; it 'returns early'."""
        from torchsnapshot import Snapshot

        self.pending.append(Pending(Snapshot.async_take(**self.asked(job, step))))
        return self.pending[-1]

    def asked(self, job: TrainingJob, step: int) -> dict[str, Any]:
        """Return the arguments of a snapshot of a job."""
        from torchsnapshot import StateDict

        if step in self.steps():
            msg = f"{self.path(step)} is an existing snapshot: take() must not be pointed to it"
            raise FileExistsError(msg)
        state: dict[str, Any] = {**job.components, "progress": StateDict(step=step)}
        return {"path": str(self.path(step)), "app_state": state}

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Restore a step, or the one with the largest number."""
        from torchsnapshot import Snapshot, StateDict

        if step is None:
            step = max(self.steps(), default=None)
        if step is None:
            msg = f"no snapshot in {self.root}"
            raise FileNotFoundError(msg)
        progress = StateDict(step=-1)
        Snapshot(path=str(self.path(step))).restore({**job.components, "progress": progress})
        return int(progress["step"])

    def steps(self) -> list[int]:
        """Return the steps at whose paths there is a snapshot: one whose manifest can be read.

        torchsnapshot has no discovery; `get_manifest` is what it offers to look into a snapshot.
        """
        names = (path.name[len("step-") :] for path in self.root.glob("step-*"))
        steps = sorted(int(name) for name in names if name.isdecimal())
        return [step for step in steps if self.is_snapshot(self.path(step))]

    def is_snapshot(self, path: Path) -> bool:
        """Return whether a path has a snapshot."""
        from torchsnapshot import Snapshot

        try:
            Snapshot(path=str(path)).get_manifest()
        except Exception:  # none is documented
            return False
        return True

    def close(self) -> None:
        """Wait for what was begun, which a script has to do: there is no manager to close."""
        for each in self.pending:
            each.wait()


class TorchSnapshot(AdapterBase):
    """Adapter of the two calls that the documentation begins with."""

    def preload(self) -> None:
        """Import once, in the server."""
        import torchsnapshot  # noqa: F401

    def open(self, root: Path, options: OpenOptions) -> Snapshots:
        """Open on a folder; there are no options."""
        del options
        return Snapshots(root)


def make() -> TorchSnapshot:
    """Make the adapter."""
    version = metadata.version("torchsnapshot")
    return TorchSnapshot(
        name="torchsnapshot",
        version=version,
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP, Capability.ASYNC}),
        holds=EVERYTHING | {"gradients"},
        library=f"torchsnapshot {version}",
        owner="library: torchsnapshot",
        # https://pytorch.org/torchsnapshot/stable/api_reference.html, Snapshot.take:
        # 'path must not point to an existing snapshot.'
        saves_over=False,
    )
