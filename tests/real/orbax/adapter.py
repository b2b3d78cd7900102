"""orbax-checkpoint: `CheckpointManager`, each step an item of arrays and an item of JSON."""

from __future__ import annotations

from collections import Counter
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob


def to_array(tensor: Any) -> Any:
    """Return a copy as numpy array; dtypes that numpy lacks are those of ml_dtypes, as jax has."""
    import ml_dtypes
    import torch

    held = tensor.detach().contiguous().clone()
    if held.dtype in {torch.bfloat16, torch.float8_e4m3fn}:
        bits = torch.int16 if held.dtype == torch.bfloat16 else torch.int8
        return held.view(bits).numpy().view(getattr(ml_dtypes, str(held.dtype).split(".")[-1]))
    return held.numpy()


def to_tensor(array: Any) -> Any:
    """Return the tensor of an array, with its dtype."""
    import numpy as np
    import torch

    held = np.array(array)  # a copy that may be written
    name = held.dtype.name
    if name in {"bfloat16", "float8_e4m3fn"}:
        bits = np.int16 if name == "bfloat16" else np.int8
        return torch.from_numpy(held.view(bits)).view(getattr(torch, name))
    return torch.from_numpy(held)


def split(value: Any, arrays: dict[str, Any]) -> Any:
    """Put the tensors of a state into `arrays`; return the rest so that JSON keeps its types."""
    import torch

    if isinstance(value, torch.Tensor):
        arrays[name := f"tensor{len(arrays)}"] = to_array(value)
        return {"tensor": name}
    if isinstance(value, dict):
        pairs = [[split(key, arrays), split(item, arrays)] for key, item in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [split(item, arrays) for item in value]
        return {"list" if isinstance(value, list) else "tuple": items}
    return value


def join(value: Any, arrays: dict[str, Any]) -> Any:
    """Return what `split` took apart."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return to_tensor(arrays[content])
    if kind in {"dict", "counter"}:
        made = {join(key, arrays): join(item, arrays) for key, item in content}
        return Counter(made) if kind == "counter" else made
    items = [join(item, arrays) for item in content]
    return items if kind == "list" else tuple(items)


class Steps:
    """One CheckpointManager, which saves before `save` returns."""

    in_background = False

    def __init__(self, root: Path, keep: int | None) -> None:
        """Open; `keep` is how many of the latest are preserved."""
        import orbax.checkpoint as ocp

        policies = ocp.checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.LatestN(keep) if keep else None,
            enable_async_checkpointing=self.in_background,
        )
        names = ("arrays", "rest")
        self.args, self.manager = (
            ocp.args,
            ocp.CheckpointManager(root, None, options, item_names=names),
        )

    def save(self, job: TrainingJob, step: int) -> None:
        """Save every component; `save` gives False where it did not save."""
        arrays: dict[str, Any] = {}
        rest = split({name: part.state_dict() for name, part in job.components.items()}, arrays)
        items = self.args.Composite(
            arrays=self.args.StandardSave(arrays), rest=self.args.JsonSave(rest)
        )
        if not self.manager.save(step, args=items):
            msg = f"CheckpointManager.save({step}) gave False: no save operation was performed"
            raise RuntimeError(msg)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Restore a step, or what `latest_step` names."""
        step = self.manager.latest_step() if step is None else step
        if step is None:
            msg = "latest_step() gave None: there is no checkpoint"
            raise FileNotFoundError(msg)
        items = self.args.Composite(
            arrays=self.args.StandardRestore(), rest=self.args.JsonRestore()
        )
        content = self.manager.restore(step, args=items)
        state = join(content["rest"], content["arrays"])
        for name, part in job.components.items():
            part.load_state_dict(state[name])
        return int(step)

    def steps(self) -> list[int]:
        """Return what `all_steps` names."""
        return sorted(self.manager.all_steps())

    def close(self) -> None:
        """Close the manager."""
        self.manager.close()


class Orbax(AdapterBase):
    """Adapter of the manager that Orbax's guides use."""

    def preload(self) -> None:
        """Import once, in the server."""
        import orbax.checkpoint  # noqa: F401

    def open(self, root: Path, options: OpenOptions) -> Steps:
        """Open on a directory."""
        return Steps(root, options.keep_last)


def make() -> Orbax:
    """Make the adapter."""
    version = metadata.version("orbax-checkpoint")
    return Orbax(
        name="orbax",
        version=version,
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}),
        holds=EVERYTHING | {"gradients"},
        library=f"orbax-checkpoint {version}",
        owner="library: orbax-checkpoint",
        # CheckpointManager.save documents that force=True 'will not overwrite existing checkpoints'
        saves_over=False,
    )
