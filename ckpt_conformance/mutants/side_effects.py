"""A save or a load that changes more than it says, or keeps too much (bugs G, J, O, D)."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.mutants.background import Backgrounds
from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointReference,
    LoadResult,
    encode,
    layout,
    resolve,
    saving,
    snapshot,
    torch_zip,
)
from ckpt_conformance.reference_impl.background import BackgroundSaves, SaveHandle
from ckpt_conformance.reference_impl.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.reference_impl.encode import StateDict, Tree
    from ckpt_conformance.reference_impl.layout import Refusal
    from ckpt_conformance.reference_impl.loading import Destinations, LoadPlan, OpenCheckpoint
    from ckpt_conformance.reference_impl.manifest import Manifest
    from ckpt_conformance.reference_impl.snapshot import Snapshot


# -- a save that changes the run -------------------------------------------------------------------


@mutant(
    "G02",
    url="pytorch/pytorch#164929",
    change="to read the state of an optimizer that has none, it is stepped on zero gradients",
    violates={"CKC-SIDE-009"},
)
class GetterSteps(CheckpointManager):
    """Makes state in order to read it, as torch's own getter does."""

    def capture_optimizers(self, optimizers: Mapping[str, Tree]) -> StateDict:
        """Step each optimizer without state, with learning rate 0; then read."""
        for optimizer in optimizers.values():
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            if not optimizer.state and all(one.grad is None for one in parameters):
                self.step_on_nothing(optimizer, parameters)
        return super().capture_optimizers(optimizers)

    def step_on_nothing(self, optimizer: Any, parameters: list[torch.Tensor]) -> None:  # noqa: ANN401
        """Step with zero gradients and learning rate 0."""
        rates = [group["lr"] for group in optimizer.param_groups]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


@mutant(
    "G02-gradients",
    url="pytorch/pytorch#140898",
    change="reading the state of the optimizers ends with zero_grad: held gradients are gone",
    violates={"CKC-SIDE-001", "CKC-RSUM-006", "CKC-COMP-013"},
)
class GetterClearsGradients(CheckpointManager):
    """Leaves the gradients as after a step."""

    def capture_optimizers(self, optimizers: Mapping[str, Tree]) -> StateDict:
        """Read, then clear."""
        state = super().capture_optimizers(optimizers)
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        return state


@mutant(
    "G02-named",
    url="pytorch/pytorch#164929",
    change="each save draws a name for what it writes from the global generator of `random`",
    violates={"CKC-SIDE-001"},
)
class DrawsANameEachTime(CheckpointManager):
    """Draws before anything is captured, as for the name of a temporary folder."""

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Draw, then save."""
        random.getrandbits(32)
        return super().save(step, **parts)


@mutant(
    "G02-replaced",
    url="pytorch/pytorch#164929",
    change="a save over a step draws a name for the older one from the global generator",
    violates={"CKC-SIDE-001"},
)
class DrawsAName(CheckpointManager):
    """Draws where a step is there already, and nowhere else."""

    def replace_flat(
        self, reference: CheckpointReference, manifest: Manifest, staged: Path
    ) -> None:
        """Draw, then replace."""
        random.getrandbits(32)
        super().replace_flat(reference, manifest, staged)


@mutant(
    "G02-frozen",
    url="pytorch/pytorch#140898",
    change="a save puts the model in evaluation mode, and then all of it in the mode of its root",
    violates={"CKC-SIDE-001"},
)
class OneModeForAll(CheckpointManager):
    """Wakes layers that the user had frozen by eval()."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:  # noqa: ANN401
        """Switch, read, switch back."""
        is_training = model.training
        model.eval()
        try:
            return super().capture_model(model)
        finally:
            model.train(is_training)


@mutant(
    "P02-ignored",
    url="Lightning-AI/pytorch-lightning#21406",
    change="a save ignores SIGTERM, so that nothing cuts it short, and leaves it so",
    violates={"CKC-SIDE-001", "CKC-EMRG-005"},
)
class IgnoresTheSignal(CheckpointManager):
    """Undoes nothing: the job gets no word of its preemption any more."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Ignore the signal, then save."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().save_snapshot(state)


@mutant(
    "G01-live",
    url="pytorch/pytorch#125708",
    change="a live optimizer is stepped on zero gradients, with weight decay, before it is loaded",
    violates={"CKC-SIDE-004", "CKC-RSUM-008", "CKC-RSUM-009"},
)
class StepsBeforeItLoads(CheckpointManager):
    """The weights that were just loaded shrink when a job rolls back."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:  # noqa: ANN401
        """Step if there is state, then load."""
        if optimizer.state:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        super().restore_optimizer(optimizer, state)


# -- a plan that is kept ---------------------------------------------------------------------------


@mutant(
    "J14",
    url="NVIDIA/Megatron-LM#4378",
    change="the list of entries is made at the first save of a manager and kept",
    violates={"CKC-SIDE-008"},
)
class PlanIsKept(CheckpointManager):
    """Writes the entries that were there at its first save."""

    plan_of_the_first: list[str] | None = None

    def capture_model(self, model: Any) -> Mapping[str, Tree]:  # noqa: ANN401
        """Take the planned entries."""
        state = super().capture_model(model)
        if self.plan_of_the_first is None:
            self.plan_of_the_first = list(state)
        return {key: state[key] for key in self.plan_of_the_first}


@mutant(
    "J14-groups",
    url="NVIDIA/Megatron-LM#4378",
    change="parameter groups that were added after the first save of a manager are left out",
    violates={"CKC-SIDE-008"},
)
class GroupsOfTheFirst(CheckpointManager):
    """Counts the groups of each optimizer once."""

    counts: dict[str, int] | None = None

    def capture_optimizers(self, optimizers: Mapping[str, Tree]) -> StateDict:
        """Take as many groups as there were."""
        states = super().capture_optimizers(optimizers)
        if self.counts is None:
            self.counts = {name: len(state["param_groups"]) for name, state in states.items()}
        return {
            name: {**state, "param_groups": state["param_groups"][: self.counts.get(name)]}
            for name, state in states.items()
        }


@mutant(
    "J14-extra",
    url="NVIDIA/Megatron-LM#4378",
    change="keys of the user's dict that came after the first save of a manager are left out",
    violates={"CKC-SIDE-008", "CKC-COMP-012"},
)
class KeysOfTheFirst(CheckpointManager):
    """Lists the keys once."""

    keys: list[str] | None = None

    def capture(self, step: int, **parts: Any) -> Snapshot:  # noqa: ANN401
        """Take the keys that were there."""
        extra: dict[str, Any] = parts.get("extra") or {}
        if self.keys is None:
            self.keys = list(extra)
        parts["extra"] = {key: value for key, value in extra.items() if key in self.keys}
        return super().capture(step, **parts)


@mutant(
    "J09",
    url="NVIDIA-NeMo/Automodel#3369",
    change="the tie groups of the first model are kept for every manager of the process",
    violates={"CKC-SIDE-007"},
)
class PlanOfTheProcess(CheckpointManager):
    """Keys its cache by its own class."""

    cache: ClassVar[dict[type, list[list[str]]]] = {}

    def find_ties(self, model_state: Mapping[str, Tree]) -> list[list[str]]:
        """Find them once."""
        return self.cache.setdefault(type(self), super().find_ties(model_state))


# -- files -----------------------------------------------------------------------------------------


class WholeStorages(encode.Encoder):
    """An encoder that takes a view for what it is, with the storage behind it."""

    def _tensor(self, value: torch.Tensor, path: encode.Path) -> torch.Tensor:
        """Keep a contiguous view as it is."""
        is_lazy = value.is_conj() or value.is_neg()
        if value.is_contiguous() and value.device.type == "cpu" and not is_lazy:
            return value.detach()
        return super()._tensor(value, path)


@mutant(
    "O05",
    url="deepspeedai/DeepSpeed#2389",
    change="views are saved without a copy: torch.save writes the whole storage of each",
    violates={"CKC-SIDE-005"},
)
class WritesWholeStorages(CheckpointManager):
    """Each file holds what its views were cut from."""

    def capture(self, step: int, **parts: Any) -> Snapshot:  # noqa: ANN401
        """Capture without copying."""
        with mock.patch.object(saving, "Encoder", WholeStorages):
            return super().capture(step, **parts)


@mutant(
    "O07",
    url="bghira/SimpleTuner#2714",
    change="after a save the model file of the step before is written anew under its own name",
    violates={"CKC-SIDE-003", "CKC-IOER-007"},
)
class RewritesTheStepBefore(CheckpointManager):
    """Post-processes what was already acknowledged."""

    def after_commit(self, reference: CheckpointReference) -> None:
        """Rewrite the model file of the newest older step, then go on."""
        older = [
            one.reference
            for one in resolve.scan(self.root)
            if one.complete and one.reference.step < reference.step
        ]
        if older and older[0].kind == "model" and self.mirror is None:
            self.rewrite(older[0])
        super().after_commit(reference)

    def rewrite(self, older: CheckpointReference) -> None:
        """Write the entries in another order, and a manifest that says so."""
        name = layout.model_name(older.step)
        tree = torch.load(older.directory / name, weights_only=True)
        staged = self.staged(name, layout.new_id())
        entry = self.write_file(staged, dict(reversed(tree.items())))
        manifest = read_manifest(older.manifest_path)
        with staged.open("rb") as file:
            index = snapshot.index_trees({"model": torch_zip.read_tree(file, name)})
        manifest.files[name] = entry  # type: ignore[index]
        manifest.tensors.update(index)  # type: ignore[attr-defined]
        self.rename(staged, older.directory / name)
        self.replace_small_file(older.manifest_path.name, manifest.to_bytes())


@mutant(
    "B17-above",
    url="google/orbax#647",
    change="the pointer is also written one directory above the root",
    violates={"CKC-SIDE-006"},
)
class PointerAboveTheRoot(CheckpointManager):
    """Saves and restores with different ideas of where the root is."""

    def set_latest(self, reference: CheckpointReference) -> None:
        """Point, here and above."""
        super().set_latest(reference)
        (self.root.parent / layout.LATEST).write_text(reference.commit_name)


@mutant(
    "O07-mode",
    url="safetensors/safetensors#782",
    change="files are made as tempfile makes them, of mode 0600, and renamed",
    violates={"CKC-SIDE-019"},
)
class ForTheOwnerAlone(CheckpointManager):
    """An evaluation of another user finds the step and cannot open it."""

    def rename(self, source: Path, target: Path) -> None:
        """Rename what only the owner may read."""
        source.chmod(0o700 if source.is_dir() else 0o600)
        super().rename(source, target)


@mutant(
    "O09-memory",
    url="pytorch/pytorch#170163",
    change="each snapshot stays in a list of the manager",
    violates={"CKC-SIDE-020"},
)
class KeepsSnapshots(CheckpointManager):
    """Takes more memory with each save, until the kernel ends the job."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save, and keep what was saved."""
        self.written = [*getattr(self, "written", []), state]
        return super().save_snapshot(state)


@mutant(
    "O06-shared",
    url="pytorch/rl#3966",
    change="a large parameter is a shared mapping of the file it was loaded from",
    violates={"CKC-SIDE-002", "CKC-RSUM-008", "CKC-RTRP-007", "CKC-RTRP-020"},
)
class SharedMapping(CheckpointManager):
    """The next optimizer step writes into the checkpoint."""

    def apply(self, plan: LoadPlan, job: Any) -> None:  # noqa: ANN401
        """Hand over; then map one parameter."""
        super().apply(plan, job)
        path, parameters = self.served, dict(job.model.named_parameters())
        for key, entry in read_manifest(path.manifest_path).tensors.items():
            live = parameters.get(key.partition(".")[2])
            if live is None or not key.startswith("model.") or entry.offset % 4:
                continue
            if live.dtype == torch.float32:
                with (path.directory / entry.file).open("r+b") as file:
                    view = mmap.mmap(file.fileno(), 0)
                data = torch.frombuffer(view, dtype=torch.uint8)[entry.offset :][: entry.nbytes]
                live.data = data.view(live.dtype).view(live.shape)
                return

    def fill(self, opened: OpenCheckpoint, plan: LoadPlan) -> None:
        """Remember where the state comes from."""
        self.served = opened.reference
        super().fill(opened, plan)


# -- what surrounds a load -------------------------------------------------------------------------


def _pass(*_: object) -> None:
    """Do nothing, as a hook or a handler."""


class ChangesSurroundings(CheckpointManager):
    """Loads, and leaves something of the process or of the model changed."""

    def apply(self, plan: LoadPlan, job: Any) -> None:  # noqa: ANN401
        """Hand over, then change."""
        super().apply(plan, job)
        self.change(job)

    def change(self, job: Any) -> None:  # noqa: ANN401
        """Change something that no component owns."""
        raise NotImplementedError


@mutant(
    "P02-handler",
    url="Lightning-AI/pytorch-lightning#21406",
    change="a load installs a handler of SIGTERM and drops the job's own",
    violates={"CKC-SIDE-010"},
)
class TakesTheSignal(ChangesSurroundings):
    """Means to save in time, and nobody knows of it."""

    def change(self, job: Any) -> None:  # noqa: ANN401
        """Replace the handler."""
        del job
        signal.signal(signal.SIGTERM, _pass)


@mutant(
    "B13-enter",
    url="mosaicml/composer#1037",
    change="a load leaves the process in the directory of the checkpoints",
    violates={"CKC-SIDE-010"},
)
class StaysInTheRoot(ChangesSurroundings):
    """Changes the working directory and does not come back."""

    def change(self, job: Any) -> None:  # noqa: ANN401
        """Enter."""
        del job
        os.chdir(self.root)


@mutant(
    "G02-hook",
    url="pytorch/pytorch#140898",
    change="each load leaves one more hook on the model",
    violates={"CKC-SIDE-010"},
)
class LeavesAHook(ChangesSurroundings):
    """Watches the first step after the load, and all others."""

    def change(self, job: Any) -> None:  # noqa: ANN401
        """Register."""
        job.model.register_forward_pre_hook(_pass)


@mutant(
    "O09-descriptor",
    url="lm-sys/FastChat#351",
    change="each save leaves a descriptor of the directory open",
    violates={"CKC-SIDE-011"},
)
class LeaksADescriptor(CheckpointManager):
    """Ends when no file can be opened any more."""

    def fsync_dir(self, path: Path) -> None:
        """Sync through a descriptor that nobody closes."""
        super().fsync_dir(path)
        if path == self.root:
            os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@mutant(
    "B13-refused",
    url="mosaicml/composer#1037",
    change="a load works in the directory of the checkpoints, and comes back if it succeeds",
    violates={"CKC-SIDE-010"},
)
class ReturnsIfItSucceeds(CheckpointManager):
    """Undoes nothing where it raises."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Enter, load, come back."""
        before = Path.cwd()
        if self.root.is_dir():
            os.chdir(self.root)
        result = super().load(*given, **named)
        os.chdir(before)
        return result


@mutant(
    "O09-refused",
    url="lm-sys/FastChat#351",
    change="each load that passes over a damaged step leaves a descriptor of its directory open",
    violates={"CKC-SIDE-011"},
)
class LeaksWhatItRefuses(CheckpointManager):
    """Closes what it serves."""

    def try_open(
        self,
        candidate: CheckpointReference,
        job: Destinations,
        allowed: set[str],
        refused: list[Refusal],
    ) -> tuple[OpenCheckpoint, LoadPlan] | None:
        """Open the directory too, and close it only beside a whole step."""
        directory = os.open(candidate.directory, os.O_RDONLY | os.O_CLOEXEC)
        opened = super().try_open(candidate, job, allowed, refused)
        if opened is not None:
            os.close(directory)
        return opened


class OneList(BackgroundSaves):
    """Keeps what was begun in one list of the process."""

    BEGUN: list[SaveHandle] = []  # noqa: RUF012  that is the bug

    def __init__(self, limit: int = 1) -> None:
        """Begin with what others have begun."""
        super().__init__(limit)
        self._begun = self.BEGUN


@mutant(
    "J09-errors",
    url="pytorch/pytorch#150347",
    change="saves that were begun are listed in an attribute of the class: of all managers",
    violates={"CKC-SIDE-007"},
)
class OneListForAll(Backgrounds):
    """Raises the error of another manager."""

    kind = OneList
