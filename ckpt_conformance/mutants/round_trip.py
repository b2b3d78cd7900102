"""The model does not come back as it was saved (bugs A, H, J, M, O, S)."""

# ruff: noqa: ANN401  the hooks of a manager take what a job brings: any type at all

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    encode,
    layout,
    saving,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl import CheckpointReference, LoadResult
    from ckpt_conformance.reference_impl.encode import StateDict, Tree
    from ckpt_conformance.reference_impl.manifest import FileEntry
    from ckpt_conformance.reference_impl.snapshot import Snapshot


@mutant(
    "M05",
    url="MakazhanAlpamys/Soup#351",
    change="no saved key fits the model's, strict is off, and the result of the load is dropped",
    violates={
        "CKC-RTRP-001",
        "CKC-RTRP-002",
        "CKC-RTRP-003",
        "CKC-RSUM-001",
        "CKC-INTN-006",
        "CKC-INTN-007",
    },
)
class NothingFits(CheckpointManager):
    """The model keeps what it was built with."""

    def plan_model(self, opened: Any, model: Any, reads: Any) -> StateDict:
        """Plan to read nothing."""
        del opened, reads
        live: StateDict = model.state_dict()
        return live


@mutant(
    "M05-frozen",
    url="MakazhanAlpamys/Soup#351",
    change="frozen parameters are neither saved nor missed",
    violates={"CKC-RTRP-003", "CKC-RSUM-001"},
)
class FrozenIsLeftOut(CheckpointManager):
    """Frozen parameters keep what the model was built with."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Leave some parameters out."""
        return self.kept(model, super().capture_model(model))

    def plan_model(self, opened: Any, model: Any, reads: Any) -> StateDict:
        """Plan to read all but these."""
        live = model.state_dict()
        part = Part(self.kept(model, live))
        return {**live, **super().plan_model(opened, part, reads)}

    def kept(self, model: Any, state: Mapping[str, Tree]) -> StateDict:
        """Return the entries but those of parameters that are left out."""
        left_out = {name for name, one in model.named_parameters() if self.is_left_out(one)}
        return {key: entry for key, entry in state.items() if key not in left_out}

    def is_left_out(self, parameter: torch.nn.Parameter) -> bool:
        """Whether it requires no gradient."""
        return not parameter.requires_grad


@mutant(
    "G04-none",
    url="verl-project/verl#7283",
    change="an optimizer that was trained and has no state counts as one whose state was lost",
    violates={"CKC-RTRP-001"},
)
class NoStateIsDamage(CheckpointManager):
    """Knows optimizers with moments."""

    def plan_optimizer(
        self, opened: Any, component: str, optimizer: Any, model: Any, reads: Any
    ) -> Any:
        """Look for state, if a schedule says that the optimizer has made a step."""
        schedules = opened.documents["extra"].get("scheduler", {}).values()
        is_trained = any(schedule.get("last_epoch") for schedule in schedules)
        if is_trained and not opened.documents["optim"][component]["state"]:
            raise CheckpointDamaged(f"the state of {component} is gone")
        return super().plan_optimizer(opened, component, optimizer, model, reads)


@mutant(
    "G04-unused",
    url="verl-project/verl#7283",
    change="parameters that an optimizer lists and has no state for are not restored",
    violates={"CKC-RTRP-010", "CKC-RSUM-010"},
)
class UnusedIsLeftCold(CheckpointManager):
    """A load that goes by the optimizer's state."""

    def plan_model(self, opened: Any, model: Any, reads: Any) -> StateDict:
        """Plan to read what has state, and what no optimizer lists."""
        live, saved = model.state_dict(), opened.documents["model"]
        cold = {name for key in opened.documents["optim"] for name in self.idle(opened, key)}
        opened.documents["model"] = {name: saved[name] for name in saved if name not in cold}
        part = Part({name: live[name] for name in live if name not in cold})
        return {**live, **super().plan_model(opened, part, reads)}

    def idle(self, opened: Any, optimizer: str) -> set[str]:
        """Return the names of the parameters of an optimizer that have no state, if any has."""
        state = opened.documents["optim"][optimizer]["state"]
        names: list[list[str]] = opened.manifest.components[optimizer]["param_names"] or []
        flat = [name for group in names for name in group]
        return {name for number, name in enumerate(flat) if state and number not in state}


@mutant(
    "Q01-empty",
    url="deepspeedai/DeepSpeed#3033",
    change="the save knows tensors by address, and leaves out those without; the load misses them",
    violates={"CKC-RTRP-011"},
)
class EmptyIsLeftOut(CheckpointManager):
    """A saver that goes by addresses."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Leave out what has no elements."""
        state = super().capture_model(model)
        empty = {name for name, one in model.named_parameters() if not one.numel()}
        return {key: entry for key, entry in state.items() if key not in empty}


@mutant(
    "I08-scalar",
    url="pytorch/pytorch#131976",
    change="parameters without dimensions, which nothing can slice, are neither saved nor missed",
    violates={"CKC-RTRP-012", "CKC-RSUM-010"},
)
class ScalarIsLeftOut(FrozenIsLeftOut):
    """A saver that goes by slices of the first dimension."""

    def is_left_out(self, parameter: torch.nn.Parameter) -> bool:
        """Whether it has no dimension."""
        return not parameter.ndim


@mutant(
    "K04-points",
    url="huggingface/safetensors#258",
    change="a tensor without dimensions is kept as a number, and made a tensor again by its value",
    violates={"CKC-RTRP-012"},
)
class PointsAreNumbers(CheckpointManager):
    """Of a number only Python's type is known: float32, int64 or bool come of it."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Make each anew from its value."""
        return {key: _by_value(entry) for key, entry in super().capture_model(model).items()}

    def plan_model(self, opened: Any, model: Any, reads: Any) -> StateDict:
        """Read them as what they were made to, and cast."""
        live = model.state_dict()
        planned = super().plan_model(
            opened, Part({k: _by_value(v) for k, v in live.items()}), reads
        )
        return {key: planned.get(key, entry) for key, entry in live.items()}


def _by_value(entry: Any) -> Any:
    is_point = isinstance(entry, torch.Tensor) and not entry.ndim and entry.dtype != torch.int64
    return torch.tensor(entry.item()) if is_point else entry


class RenamesKeys(CheckpointManager):
    """Writes the model under other names; of two entries with one name the last one wins."""

    def new_name(self, key: str) -> str:
        """Return the name that an entry is saved under."""
        raise NotImplementedError

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Save under the new names."""
        return {self.new_name(key): entry for key, entry in super().capture_model(model).items()}

    def plan_model(self, opened: Any, model: Any, reads: Any) -> StateDict:
        """Plan to read from there."""
        live = model.state_dict()
        part = Part({self.new_name(key): entry for key, entry in live.items()})
        plan = super().plan_model(opened, part, reads)
        return {key: plan[self.new_name(key)] for key in live}


@mutant(
    "M05-module",
    url="MakazhanAlpamys/Soup#351",
    change="`module.` is taken out of each key, wherever it stands, as if DDP had put it there",
    violates={"CKC-RTRP-001"},
)
class TakesModuleOut(RenamesKeys):
    """Replaces text in a key where it means a prefix."""

    def new_name(self, key: str) -> str:
        """Take it out."""
        return key.replace("module.", "")


@mutant(
    "M05-separator",
    url="MakazhanAlpamys/Soup#351",
    change="entries are named after keys in which a dot is an underscore",
    violates={"CKC-RTRP-001"},
)
class DotsAreUnderscores(RenamesKeys):
    """Makes a name of a file out of a key."""

    def new_name(self, key: str) -> str:
        """Rename a key."""
        return key.replace(".", "_")


@mutant(
    "M05-case",
    url="MakazhanAlpamys/Soup#351",
    change="entries are found again by their names in lower case",
    violates={"CKC-RTRP-001"},
)
class LowerCase(RenamesKeys):
    """Makes a name of a file out of a key, for a disk that knows one case."""

    def new_name(self, key: str) -> str:
        """Rename a key."""
        return key.lower()


class Part:
    """Some entries of a model's state, as a model to be loaded into."""

    def __init__(self, entries: StateDict) -> None:
        """Keep the entries."""
        self.entries = entries

    def state_dict(self) -> StateDict:
        """Return the entries."""
        return self.entries

    def load_state_dict(self, state_dict: StateDict, /) -> None:
        """Take no entries; what is planned is filled in place."""


@mutant(
    "O05-memory-order",
    url="deepspeedai/DeepSpeed#2389",
    change="a tensor in channels_last is written in the order of its memory, under its own shape",
    violates={"CKC-RTRP-004"},
)
class AsItLies(CheckpointManager):
    """Takes a tensor without gaps for one that lies row by row, and saves the copy."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Read such tensors as they lie."""
        state = super().capture_model(model)
        return {key: in_memory(one) if is_of_images(one) else one for key, one in state.items()}


def is_of_images(value: Tree) -> bool:
    """Tell a tensor of four dimensions in channels_last."""
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return False
    return value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004


def in_memory(value: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of their memory, in the shape of the tensor."""
    return value.detach().permute(0, 2, 3, 1).reshape(value.shape)


class ByAddress(encode.Encoder):
    """An encoder that knows a tensor again by where it begins, its dtype and its shape."""

    def _tensor(self, value: torch.Tensor, path: encode.Path) -> torch.Tensor:
        """Encode the first tensor of such a place for all."""
        place = (value.data_ptr(), value.dtype, value.shape)
        if value.data_ptr() and place in self._seen:
            return self._seen[place][1]
        encoded = super()._tensor(value, path)
        self._seen[place] = (value, encoded)
        return encoded


@mutant(
    "O05-strides",
    url="deepspeedai/DeepSpeed#2389",
    change="two tensors of one address, dtype and shape are saved as one, whatever their strides",
    violates={"CKC-RTRP-004"},
)
class OneOfAnAddress(CheckpointManager):
    """Saves what is tied once, and takes a matrix and the same one turned for tied."""

    def capture(self, step: int, **parts: Any) -> Snapshot:
        """Capture with an encoder that does so."""
        with mock.patch.object(saving, "Encoder", ByAddress):
            return super().capture(step, **parts)


@mutant(
    "M06",
    url="huggingface/lerobot#3459",
    change="after the load a part of the model is initialised anew",
    violates={"CKC-RTRP-001", "CKC-RSUM-001"},
)
class InitialisedAfterLoad(CheckpointManager):
    """The adapter's wrapper is applied once more, after the load."""

    def restore_model(self, model: Any, state: StateDict) -> None:
        """Load, then initialise the first linear layer."""
        super().restore_model(model, state)
        first = next(one for one in model.modules() if isinstance(one, torch.nn.Linear))
        first.reset_parameters()


@mutant(
    "M03",
    url="pytorch/pytorch#8430",
    change="counters among the buffers, such as num_batches_tracked, are not restored",
    violates={"CKC-RTRP-002", "CKC-RSUM-001"},
)
class CountersAreOptional(CheckpointManager):
    """An integer buffer that older checkpoints lack is treated as optional, always."""

    def plan_model(self, opened: Any, model: Any, reads: Any) -> StateDict:
        """Plan to read floating-point tensors only."""
        live = super().plan_model(opened, model, reads)
        places = list(reads.wanted.items())
        reads.wanted = {at: goals for at, goals in places if goals[0].is_floating_point()}
        return live


@mutant(
    "M03-norm",
    url="pytorch/pytorch#8430",
    change="num_batches_tracked of a batch norm is not restored",
    violates={"CKC-RTRP-002", "CKC-RSUM-010"},
)
class BatchCountIsOptional(CheckpointManager):
    """A cumulative average that forgets how many batches it has seen."""

    def plan_model(self, opened: Any, model: Any, reads: Any) -> StateDict:
        """Plan to read all but the count."""
        live = super().plan_model(opened, model, reads)
        counts = {one.data_ptr() for key, one in live.items() if key.endswith("_batches_tracked")}
        places = list(reads.wanted.items())
        reads.wanted = {at: goals for at, goals in places if goals[0].data_ptr() not in counts}
        return live


@mutant(
    "I01-fused",
    url="ROCm/Megatron-LM#63",
    change="the parts of a fused projection are put together in another order",
    violates={"CKC-RSUM-010"},
)
class FusedInAnotherOrder(CheckpointManager):
    """Queries, keys and values come back as queries, values and keys."""

    def restore_model(self, model: Any, state: StateDict) -> None:
        """Swap two thirds, then load."""
        for key, value in state.items():
            if key.endswith("in_proj_weight"):
                queries, keys, values = value.clone().chunk(3)
                value.copy_(torch.cat([queries, values, keys]))
        super().restore_model(model, state)


@mutant(
    "J02-extra-state",
    url="pytorch/pytorch#125528",
    change="the load copies tensors in place and drops what is no tensor of the model",
    violates={"CKC-RTRP-006", "CKC-RSUM-010"},
    base="reference-dcp",
)
class TensorsOnly(CheckpointManager):
    """What a module gives by get_extra_state stays what it was in the destination."""

    def restore_model(self, model: Any, state: StateDict) -> None:
        """Load the tensors."""
        tensors = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
        model.load_state_dict(tensors, strict=False)


@mutant(
    "O06",
    url="pytorch/rl#3966",
    change="after the load the parameters are a mapping of the checkpoint file",
    violates={"CKC-RTRP-007"},
)
class Mapped(CheckpointManager):
    """Parameters are taken from `torch.load(mmap=True)` without a copy."""

    mapped = False

    def serve(self, opened: Any, plan: Any, job: Any, refused: Any) -> LoadResult:
        """Load, then let each parameter map the file."""
        result = super().serve(opened, plan, job, refused)
        if result.reference.kind != "model":
            return result
        self.mapped = True
        names = (name for name in opened.files if layout.final_name(name).startswith("model"))
        path = result.reference.directory / next(names)
        mapped = torch.load(path, mmap=True, weights_only=True)
        for name, parameter in job.model.named_parameters():
            parameter.data = mapped[name]
        return result


@mutant(
    "O08",
    url="meta-pytorch/torchtune#1018",
    change="parameters map the file they were loaded from, and a save of that step rewrites it",
    violates={"CKC-RTRP-007", "CKC-RTRP-008"},
)
class MappedAndRewritten(Mapped):
    """The first save after a resume truncates the file that the live tensors map."""

    def write_file(self, path: Path, tree: Any) -> FileEntry:
        """Write an existing file in place, after a load."""
        final = self.root / layout.final_name(path.name)
        if self.mapped and final.exists():
            torch.save(tree, final)
        return super().write_file(path, tree)


@mutant(
    "A12-resave",
    url="NVIDIA-NeMo/Automodel#3254",
    change="a save of a step that is there already raises FileExistsError",
    violates={"CKC-RTRP-008", "CKC-IOER-003"},
)
class ExistsAlready(CheckpointManager):
    """The save after a resume collides with what it resumed from."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Refuse a step that exists."""
        named = layout.directory_name if self.use_dcp else layout.flat_manifest_name
        if (self.root / named(state.step)).exists():
            raise FileExistsError(f"{named(state.step)} exists in {self.root}")
        return super().save_snapshot(state)


@mutant(
    "H13",
    url="pytorch/torchtitan#571",
    change="after a resume the train state that is saved keeps the step of that resume",
    violates={"CKC-RTRP-009", "CKC-RSUM-002", "CKC-DISC-012"},
)
class FrozenStep(CheckpointManager):
    """A load replaces the train state; the manager goes on saving the old object."""

    frozen: int | None = None

    def capture_train_state(self, step: int, *parts: Any, **named: Any) -> StateDict:
        """Save the step that the manager's own object holds."""
        kept = step if self.frozen is None else self.frozen
        return super().capture_train_state(kept, *parts, **named)

    def serve(self, opened: Any, plan: Any, job: Any, refused: Any) -> LoadResult:
        """Take the step from the train state."""
        result = super().serve(opened, plan, job, refused)
        self.frozen = int(plan.extra["step"])
        return dataclasses.replace(result, step=self.frozen)


@mutant(
    "S01",
    url="huggingface/transformers#38870",
    change="a tied tensor is stored under its last name, looked for under its first, not missed",
    violates={"CKC-RTRP-001", "CKC-RSUM-001", "CKC-INTN-016"},
)
class OtherNameIsStored(CheckpointManager):
    """Tied weights keep what the model was built with; the tie itself is there."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Keep the last name of each group."""
        state = super().capture_model(model)
        dropped = {name for group in self.find_ties(state) for name in group[:-1]}
        return {key: one for key, one in state.items() if key not in dropped}

    def plan_model(self, opened: Any, model: Any, reads: Any) -> StateDict:
        """Plan to read what is not tied: of a tie only the first name is looked for."""
        live = model.state_dict()
        tied = {name for group in self.find_ties(live) for name in group}
        for name in tied & set(opened.documents["model"]):
            del opened.documents["model"][name]
        part = Part({key: one for key, one in live.items() if key not in tied})
        return {**live, **super().plan_model(opened, part, reads)}


@mutant(
    "J07-left-out",
    url="pytorch/pytorch#133256",
    change="a tensor that is not an array in memory is left out of the save, and not missed",
    violates={"CKC-RTRP-013"},
)
class LeavesOutWhatHasNoBytes(CheckpointManager):
    """Keeps arrays alone, and looks for no more than it has kept."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Keep what is an array."""
        state = super().capture_model(model)
        return {key: one for key, one in state.items() if not has_no_bytes(one)}

    def plan_model(self, opened: Any, model: Any, reads: Any) -> StateDict:
        """Plan to read the rest."""
        live = model.state_dict()
        left = {key: one for key, one in live.items() if has_no_bytes(one)}
        part = Part({key: one for key, one in live.items() if key not in left})
        return {**left, **super().plan_model(opened, part, reads)}


def has_no_bytes(value: Tree) -> bool:
    """Tell a tensor that is sparse, quantized or on meta."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.is_sparse or value.is_quantized or value.is_meta


@mutant(
    "K04-lazy",
    url="safetensors/safetensors#831",
    change="the memory of a tensor is written as it lies, also where torch has yet to conjugate it",
    violates={"CKC-RTRP-013"},
)
class WritesMemoryAsItLies(CheckpointManager):
    """Knows dtype, shape and address of a tensor, and not that it is a lazy view."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Keep the memory of each tensor."""
        state = super().capture_model(model)
        return {key: memory_of(one) for key, one in state.items()}


def memory_of(value: Tree) -> Tree:
    """Return a tensor as its memory says, whatever is still to be done to it."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.conj() if value.is_conj() else value
    return torch.neg(value) if value.is_neg() else value


@mutant(
    "S02",
    url="huggingface/accelerate#2875",
    change="the save drops all names but one of a tied tensor; the load wants each of them",
    violates={"CKC-SMOK-001"},
)
class AliasIsDropped(CheckpointManager):
    """The writer drops, the reader requires: a manager that cannot load its own save."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Keep one name of each group."""
        state = dict(super().capture_model(model))
        for group in self.find_ties(state):
            for alias in group[1:]:
                del state[alias]
        return state


@mutant(
    "S04",
    url="EvolvingLMMs-Lab/lmms-engine#157",
    change="every key is loaded as a tensor of its own, assigned instead of copied",
    violates={"CKC-RTRP-005", "CKC-RSUM-001"},
)
class TieIsLost(CheckpointManager):
    """Tied parameters are two tensors after the load, and the optimizer knows neither."""

    def restore_model(self, model: Any, state: StateDict) -> None:
        """Assign copies."""
        copies = {
            key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in state.items()
        }
        model.load_state_dict(copies, assign=True)
