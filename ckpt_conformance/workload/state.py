"""Parts of a job that torch does not bring: EMA, extra, held gradients, fp32 masters."""

from __future__ import annotations

import copy
import math
import struct
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from ckpt_conformance.contract import Feature
from ckpt_conformance.workload.rng import RngState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

StateDict = dict[str, Any]
"""What `state_dict` gives, as torch's own classes declare it. Its values are of any type."""

ParameterGroup = dict[str, Any]
"""A group of an optimizer, as torch declares it: `params`, and settings of these parameters."""


class EmaState(TypedDict):
    """The averages by name of the parameter, the number of updates, the decay of each update."""

    shadow: dict[str, torch.Tensor]
    updates: int
    decay: float


class Phase(TypedDict):
    """Where in a run the user believes to be: the last two steps, and the one under way."""

    index: int
    history: list[int]
    span: tuple[int, int]


class ExtraState(TypedDict):
    """The keys of the user's own dict."""

    tokens: int
    phase: Phase
    best: float
    by_id: dict[int, str | float]
    note: str
    flag: None
    unusual: NotRequired[dict[str, Any]]  # of `Unusual` and `Scalars`
    phase_idx: NotRequired[int]  # of `Phases`, once there is one
    run_id: NotRequired[str]  # at a tracker, of `Phases` from the second one on


class GradientsState(TypedDict):
    """The micro-batches that are accumulated so far, and the gradients by name of the parameter."""

    micro: int
    held: dict[str, torch.Tensor]


class Ema:
    """Exponential moving average of the trainable parameters, by name."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        """Start at the model's values."""
        self.model, self.decay, self.updates = model, decay, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Move toward the model."""
        self.updates += 1
        for name, parameter in self.model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 1 - self.decay)

    def state_dict(self) -> StateDict:
        """Return the averages, not copies of them, and the count, as `EmaState`."""
        return {"shadow": dict(self.shadow), "updates": self.updates, "decay": self.decay}

    def load_state_dict(self, state_dict: EmaState) -> None:
        """Copy into the shadow's own memory."""
        for name, value in state_dict["shadow"].items():
            self.shadow[name].copy_(value)
        self.updates, self.decay = state_dict["updates"], state_dict["decay"]


class Extra:
    """The user's own nested dict: counters, history, a best score, keys that are not strings.

    From the second step on its size does not change: then the next save of the same step has each
    byte where this one has it, and a mixture of the two parses.
    """

    def __init__(self, seed: int, without: Collection[str] = ()) -> None:
        """Differ by seed, so that a value that is not restored shows."""
        del without
        self.value: ExtraState = {
            "tokens": seed,
            "phase": {"index": 0, "history": [], "span": (0, seed)},
            "best": float("inf"),
            "by_id": {7: "seven", 11: float(seed)},
            "note": f"läuft {seed} ✓",
            "flag": None,
        }

    def update(self, step: int, loss: float) -> None:
        """Count one step."""
        self.value["tokens"] += 4
        self.value["phase"]["history"] = [*self.value["phase"]["history"], step][-2:]
        self.value["phase"]["span"] = (step, step + 1)
        self.value["best"] = min(self.value["best"], loss)

    def state_dict(self) -> StateDict:
        """Return a copy, as `ExtraState`: later steps must not change it."""
        return dict(copy.deepcopy(self.value))

    def load_state_dict(self, state_dict: ExtraState) -> None:
        """Take a copy."""
        self.value = cast("ExtraState", copy.deepcopy(dict(state_dict)))


class Live(Extra):
    """Gives its own dicts and lists, as schedulers do, and goes on to fill them at each step."""

    def __init__(self, seed: int, without: Collection[str] = ()) -> None:
        """Differ by seed; no keys but texts, which each format has in a dict that is filled."""
        super().__init__(seed, without)
        self.value["by_id"] = {}

    def update(self, step: int, loss: float) -> None:
        """Count one step, in place."""
        self.value["tokens"] += 4
        phase = self.value["phase"]
        phase["history"].append(step)
        del phase["history"][:-2]
        phase["span"] = (step, step + 1)
        self.value["best"] = min(self.value["best"], loss)

    def state_dict(self) -> StateDict:
        """Return a dict of what is inside, and no copy of it."""
        return dict(self.value)


class Unusual(Extra):
    """Beside the usual, values and names that a careless format rounds, merges or renames."""

    def __init__(self, seed: int, without: Collection[str] = ()) -> None:
        """Differ by seed, so that a value that is not restored shows."""
        super().__init__(seed, without)
        # These three have one name, whatever joins the names of a tree by dots.
        dotted = {"a.b": {"c": seed}, "a": {"b.c": seed + 1, "b": {"c": seed + 2}}}
        self.value["unusual"] = {
            "beyond 53 bits": 2**53 + 1 + 2 * seed,
            "beyond 60 bits": -(2**62) - 1 - 2 * seed,
            "64 bits": 2**64 - 1 - 2 * seed,  # as a seed of torch's generators
            "true": True,
            "one": 1,
            "double": 1 / 3 + seed,
            "pair": (seed, (2.0, "x")),
            "empty": [(), [], {}],
            "not a number": math.nan,
            "another one": struct.unpack("<d", struct.pack("<Q", (0xFFF8 << 48) + 1 + seed))[0],
            "digits": {"7": seed, "007": seed + 1},
            "minus zero": -0.0,
            "smallest": 5e-324,
            "names": names_of_everywhere(seed),
            "long": f"{'x' * (1 << 16)}{seed}",  # a length of two bytes is too short for it
            "ends in a zero byte": f"{seed}\0",
            "mixed": [True, 2, 0.5],
            "nothing in them": {"list": [], "dict": {}, "tuple": (), "text": ""},
            "no name": {"": seed},
            "two spellings": {"\u00e9": seed, "e\u0301": seed + 1},  # one name, as Unicode has it
            **({} if Feature.DOTTED in without else dotted),
        }


class Scalars(Extra):
    """Beside the usual, scalars of NumPy: what a mean, a count or a comparison of arrays gives."""

    def __init__(self, seed: int, without: Collection[str] = ()) -> None:
        """Differ by seed, so that a value that is not restored shows."""
        super().__init__(seed, without)
        self.value["unusual"] = {
            "mean": np.float64(1 / 3 + seed),
            "narrow": np.float32(1 / 3 + seed),
            "count": np.int64(2**53 + 1 + 2 * seed),
            "whether": np.bool_(seed % 2),
        }


class Scalar(Extra):
    """Beside the usual, the one scalar of NumPy that is a kind of Python's own number."""

    def __init__(self, seed: int, without: Collection[str] = ()) -> None:
        """Differ by seed, so that a value that is not restored shows."""
        super().__init__(seed, without)
        self.value["unusual"] = {"mean": np.float64(1 / 3 + seed)}


PHASES = (1, 3)
"""The steps after which phases of a training begin: before the first save, and before the next."""
LR_SCALE = 0.5  # of each phase, on top of those before it


def phase_at(step: int) -> int:
    """Return how many phases have begun."""
    return sum(step >= begin for begin in PHASES)


class Phases(Extra):
    """Beside the usual, the phase of the training, once there is one: a new job has no such key."""

    def update(self, step: int, loss: float) -> None:
        """Count one step; tell the phase."""
        super().update(step, loss)
        if phase_at(step):
            self.value["phase_idx"] = phase_at(step)
        if phase_at(step) > 1:
            self.value["run_id"] = f"run of phase {phase_at(step)}"


def names_of_everywhere(seed: int) -> dict[str, str]:
    """Return names as people of some countries write them, as keys and as values."""
    from faker import Faker

    fake = Faker(["ja_JP", "ar_SA", "de_DE", "hi_IN", "el_GR"])
    fake.seed_instance(seed)
    return {f"{fake.name()} {number}": fake.company() for number in range(5)}


def let_draw(part: object) -> None:
    """Let a part of a job draw from every generator while it takes its state.

    Its class gets a child that does so: what it is, and what its state_dict gives, stay the same.
    """
    kind: Any = type(part)

    def load_state_dict(self: Any, state_dict: StateDict, *more: Any, **named: Any) -> Any:  # noqa: ANN401
        RngState.draw(normal=True)
        return kind.load_state_dict(self, state_dict, *more, **named)

    given = {"load_state_dict": load_state_dict, "__module__": kind.__module__}
    part.__class__ = type(kind.__name__, (kind,), given)


class FreshEma(Ema):
    """An average whose state is computed when it is asked for, as one that lies elsewhere is."""

    def state_dict(self) -> StateDict:
        """Return copies: who keeps nothing but their addresses has nothing."""
        shadow = {name: value.clone() for name, value in self.shadow.items()}
        return {**super().state_dict(), "shadow": shadow}


class Gradients:
    """Gradients held between micro-batches: state when a save falls inside an accumulation."""

    def __init__(self, model: nn.Module) -> None:
        """Watch the model's parameters."""
        self.model, self.micro = model, 0

    def state_dict(self) -> StateDict:
        """Return the gradients by name and the count of micro-batches, as `GradientsState`."""
        held = {
            n: p.grad.detach().clone()
            for n, p in self.model.named_parameters()
            if p.grad is not None
        }
        return {"micro": self.micro, "held": held}

    def load_state_dict(self, state_dict: GradientsState) -> None:
        """Set the gradients; a parameter that has none here gets none."""
        self.micro = state_dict["micro"]
        for name, parameter in self.model.named_parameters():
            held = state_dict["held"].get(name)
            parameter.grad = None if held is None else held.clone()


def _loss(closure: Callable[[], Any] | None) -> Any:  # noqa: ANN401  whatever it returns
    """Call what computes the gradients, where a trainer leaves that to the optimizer's step."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class OneByOne(optim.Optimizer):
    """An optimizer that updates each parameter by itself; a closure gives the gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Update each parameter that has a gradient."""
        loss = _loss(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, group: ParameterGroup) -> None:
        raise NotImplementedError


class MasterSgd(OneByOne):
    """SGD with fp32 master weights; momentum is fp32 for bf16 parameters, bf16 for fp32 ones.

    torch's own `load_state_dict` casts such state to the parameter's dtype: what is wider loses its
    low bits, and what is narrower takes twice the memory and rounds no more, unless the manager
    minds. `narrow` is another dtype for bf16.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.1, narrow: torch.dtype = torch.bfloat16
    ) -> None:
        """Keep state lazily, as torch's optimizers do."""
        super().__init__(params, {"lr": lr, "momentum": 0.9, "weight_decay": 0.01})
        self.narrow = narrow

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, group: ParameterGroup) -> None:
        """Update the master in fp32, then round it into the parameter."""
        state = self.state[p]
        if not state:
            state["master"] = p.detach().float().clone()
            narrow = self.narrow if p.dtype == torch.float32 else torch.float32
            state["momentum"] = torch.zeros_like(state["master"], dtype=narrow)
            state["step"] = torch.tensor(100_001.0)  # beyond what bf16 can count
        decayed = gradient.float() + group["weight_decay"] * state["master"]
        state["momentum"].mul_(group["momentum"]).add_(decayed)
        state["master"].add_(state["momentum"], alpha=-group["lr"])
        state["step"] += 1
        p.copy_(state["master"].to(p.dtype))


class ViewingSgd(MasterSgd):
    """`MasterSgd` that also keeps a copy of each parameter, and of a matrix this copy turned.

    Both begin at one address and have one dtype, as many bytes and often one shape; which is which
    is told by their strides alone. None is expanded: torch refuses to fill such a tensor in place.
    """

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, group: ParameterGroup) -> None:
        """Update as the parent does, then look at the result in both ways."""
        super()._update(p, gradient, group)
        rows = p.detach().clone()
        self.state[p]["rows"] = rows
        if rows.ndim > 1:
            self.state[p]["turned"] = rows.transpose(0, 1)


class Scaling(optim.AdamW):
    """Keeps in its groups what torch does not know: a name, and a factor that follows the steps.

    Fine-tuning keeps the factor of a layer's rate there (`lr_scale`), and schedules read it.
    """

    def __init__(self, groups: list[ParameterGroup], rate: float) -> None:
        """Name the groups by their numbers."""
        named = [{**one, "group_name": f"{at}"} for at, one in enumerate(groups)]
        super().__init__([{**one, "lr_scale": 1.0} for one in named], rate)

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401  as torch has it
        """Step as AdamW does, with scaled rates."""
        rates = [group["lr"] for group in self.param_groups]
        for at, group in enumerate(self.param_groups):
            group["lr_scale"] *= 0.75 - at / 4
            group["lr"] *= group["lr_scale"]
        result = cast("Any", super()).step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        return result


class CountingSgd(OneByOne):
    """SGD with corrected momentum, whose state is not all tensors, and whose factor is one.

    Of each parameter it keeps a count, the last sizes of its gradient and what was last skipped, as
    numbers, a list and None: as optimizers do that are older than tensors of steps, and LBFGS.
    Compiled and captured steps ask for settings that are tensors. Here it is not the rate: that one
    would stand in the scheduler's state, too.
    """

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        """Keep state lazily, as torch's optimizers do."""
        super().__init__(params, {"lr": lr, "momentum": torch.tensor(0.9), "weight_decay": 0.01})

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, group: ParameterGroup) -> None:
        """Update the momentum, and step by the size that its own history gives."""
        state, momentum = self.state[p], float(group["momentum"])
        mean = state.setdefault("mean", torch.zeros_like(p))
        mean.lerp_(gradient + group["weight_decay"] * p, 1 - momentum)
        state["step"] = state.get("step", 0) + 1
        size = cast("torch.Tensor", gradient.float().norm())  # torch declares no type
        state["sizes"] = [*state.get("sizes", [])[-1:], float(size)]
        state["skipped"] = state.get("skipped")
        rate = group["lr"] / (1 - momentum ** state["step"]) / (1 + sum(state["sizes"]))
        p.add_(mean, alpha=-rate)


class NestingSgd(OneByOne):
    """SGD whose state is nested, in fp32, and has an entry that is no parameter's.

    Of each parameter it keeps a list and a dict of tensors, as preconditioners of matrices do;
    torch casts these to the parameter's dtype, too. What it counts and measures for all of them
    stands in `state` under a name: torch's own `load_state_dict` keeps such an entry as it is.
    """

    ALL = "all"

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        """Keep state lazily, as torch's optimizers do."""
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Count, and update each parameter that has a gradient."""
        shared: Any = cast("Any", self.state)[self.ALL]
        shared["step"] = shared.get("step", 0) + 1
        shared.setdefault("mean", torch.zeros(()))
        return super().step(closure)

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, group: ParameterGroup) -> None:
        """Update the sums, and step by the size that the gradients of all parameters give."""
        state, shared = self.state[p], cast("Any", self.state)[self.ALL]
        wide = gradient.float()
        if not state:
            state["sums"] = [torch.zeros_like(wide), torch.zeros_like(wide)]
            state["bounds"] = {"largest": torch.zeros(())}
        first, second = state["sums"]
        first.mul_(group["momentum"]).add_(wide)
        second.mul_(group["momentum"]).addcmul_(wide, wide)
        largest = state["bounds"]["largest"]
        torch.maximum(largest, wide.abs().max(), out=largest)
        shared["mean"].lerp_(wide.norm(), 0.1)
        rate = group["lr"] / (1 - group["momentum"] ** shared["step"]) / (1 + float(shared["mean"]))
        p.add_((first / (second.sqrt() + largest + 0.1)).to(p.dtype), alpha=-rate)


class SharingSgd(OneByOne):
    """SGD that divides by the sum of a parameter's gradient norms, which begin as one tensor.

    What is zero for all parameters of a dtype is made once, when the optimizer is. An update makes
    a new tensor, so after the first one each parameter has its own. A load that fills the memory
    which is there writes all sums into one place.
    """

    def __init__(self, params: Iterable[Any], lr: float, *, is_apart: bool = False) -> None:
        """Begin at zero; `is_apart` gives each parameter a zero of its own."""
        super().__init__(params, {"lr": lr})
        zeros: dict[torch.dtype, torch.Tensor] = {}
        for group in self.param_groups:
            for p in group["params"]:
                zero = zeros.setdefault(p.dtype, torch.zeros((), dtype=p.dtype))
                self.state[p]["norms"] = zero.clone() if is_apart else zero

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, group: ParameterGroup) -> None:
        """Add the norm, out of place, and step by the size that the sum gives."""
        state = self.state[p]
        state["norms"] = state["norms"] + gradient.norm()
        p.add_(gradient, alpha=-group["lr"] / (1 + float(state["norms"])))


class SteadySgd(optim.SGD):
    """SGD whose rate follows the mean size of all gradients: state that is no parameter's.

    It stands beside `state` and `param_groups` in the state_dict, as scalers and masters of whole
    groups do elsewhere. A dict that lacks it is taken, as those do: it begins anew.
    """

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        """Have seen no gradient yet."""
        super().__init__(params, lr, momentum=0.9)
        self.seen, self.mean = 0, torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Take the gradients into the mean, and step by the rate that it gives."""
        loss, groups = _loss(closure), self.param_groups
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.float().norm() for gradient in gradients]).mean()
        self.seen += 1
        self.mean.lerp_(norm, 1 / min(self.seen, 4))
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] /= 1 + float(self.mean)
        super().step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return loss

    def state_dict(self) -> StateDict:
        """Return what SGD has, and the mean."""
        return {**super().state_dict(), "seen": self.seen, "mean": self.mean.clone()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Set what is there."""
        own = dict(state_dict)
        self.seen, self.mean = own.pop("seen", 0), own.pop("mean", torch.zeros(())).clone()
        super().load_state_dict(own)


class Rex:
    """The REX schedule as a callable object, smoothed: what it gave before is a part of its state.

    LambdaLR saves the attributes of such an object, and nothing of a plain function.
    """

    def __init__(self, horizon: int) -> None:
        """Start at the full rate."""
        self.horizon, self.at, self.value = horizon, 0, 1.0

    def __call__(self, step: int) -> float:
        """Return the factor of the learning rate at a step; several groups ask for the same."""
        if step != self.at:
            left = 1 - step / self.horizon
            self.at, self.value = step, 0.5 * self.value + 0.5 * left / (0.5 + 0.5 * left)
        return self.value


class Phased(lr_scheduler.LambdaLR):
    """A schedule whose rates a phase of the training scales.

    The scale is applied again after each step of the schedule and is no part of any state (K011).
    So a parameter group has a rate that the schedule itself does not know of.
    """

    def step(self, epoch: int | None = None) -> None:
        """Do what the schedule says, then scale."""
        super().step(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] *= LR_SCALE ** phase_at(self.last_epoch)
