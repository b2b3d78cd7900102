"""Models and optimizers: which state belongs to which parameter, and how it comes back exactly.

Facts of `torch.optim.Optimizer.load_state_dict` that this module works around:

- it casts every state tensor but `step` to the dtype of its parameter: fp32 moments of a bf16
  parameter lose their precision, for ever (K01, K02, K06, G11);
- it maps state by position, so that a reordered group gives each moment to a neighbour (G05);
- a fresh optimizer has no state to fill, and a parameter that never got a gradient never will
  have (G03, G04): so state is created from what was saved, and never by a step (G01).

A model's state has the keys of the bare model, whatever it is wrapped in: `torch.compile`,
DataParallel, DistributedDataParallel and activation checkpointing put a name of their own into
every key, and a checkpoint that keeps it loads into nothing else (M04).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckpt_conformance.reference_impl.encode import is_dict, replace
from ckpt_conformance.reference_impl.errors import CheckpointMismatch
from ckpt_conformance.reference_impl.fill import byte_view, shape_for
from ckpt_conformance.reference_impl.shards import local_of
from ckpt_conformance.reference_impl.torch_zip import TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.reference_impl.encode import Path, StateDict, Tree
    from ckpt_conformance.reference_impl.fill import ReadPlan
    from ckpt_conformance.reference_impl.train_state import Stateful

_PARALLEL: Any = (DataParallel, DistributedDataParallel)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def bare(model: Stateful) -> Stateful:
    """The model inside its parallel wrapper, which gives all of its keys the prefix `module.`."""
    inner: Any = model
    while isinstance(inner, _PARALLEL):
        inner = inner.module
    found: Stateful = inner
    return found


def plain_key(key: str) -> str:
    """A key without the names of wrappers: `_orig_mod.body.weight` is `body.weight`."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def plain_state(state: Mapping[str, Tree]) -> Mapping[str, Tree]:
    """A state_dict under plain keys; the same object if it has them already."""
    if not any(wrapper in key for wrapper in _WRAPPERS for key in state):
        return state
    plain: OrderedDict[str, Tree] = OrderedDict(
        (plain_key(key), value) for key, value in state.items()
    )
    if len(plain) != len(state):
        raise CheckpointMismatch("two keys of the model are the same without its wrappers")
    versions: Mapping[str, Tree] = getattr(state, "_metadata", {})
    keep: Any = plain
    keep._metadata = OrderedDict(  # noqa: SLF001 - where torch keeps the versions of modules
        (plain_key(key), value) for key, value in versions.items()
    )
    return plain


def model_parameter_names(model: object) -> dict[int, str]:
    """The plain name of each parameter, by its identity; none for what is no nn.Module."""
    if not isinstance(model, torch.nn.Module):
        return {}
    named = model.named_parameters()
    return {id(parameter): plain_key(name) for name, parameter in named}


def check_tensor(key: str, saved: Tree, live: Tree) -> None:
    """A saved tensor and the live one have the same shape and dtype (J04, J05)."""
    if isinstance(live, torch.Tensor) != isinstance(saved, TensorRef):
        raise CheckpointMismatch(f"model: {key} is a tensor on one side only")
    if not isinstance(live, torch.Tensor):
        return
    if tuple(live.shape) != saved.shape:
        raise CheckpointMismatch(
            f"model: {key} has shape {saved.shape} in the checkpoint, {tuple(live.shape)} here",
        )
    if live.dtype != saved.dtype:
        raise CheckpointMismatch(
            f"model: {key} is {saved.dtype} in the checkpoint, {live.dtype} here: nothing is cast",
        )


def retie(model: dict[str, Tree], ties: list[list[str]]) -> None:
    """Let tied keys share one tensor again, where they hold the same bytes (S04)."""
    for first, *others in ties:
        for key in others:
            one, other = model[first], model[key]
            same = (one.dtype, one.shape) == (other.dtype, other.shape)
            if same and torch.equal(byte_view(one), byte_view(other)):
                model[key] = one


Names = list[list[str]]
"""Parameter names, one list per group, in the order of its `params`."""


def parameter_names(optimizer: object, model: object) -> Names | None:
    """Names of an optimizer's parameters: its own `param_names`, else the model's.

    A parameter that the model does not know has no name; its place stands for it.

    Returns:
        One list per group; None for an optimizer that is not torch's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    known = model_parameter_names(model)
    return [
        [
            plain_key(name) if name is not None else known.get(id(parameter), f"@{at}.{place}")
            for place, (parameter, name) in enumerate(
                zip(group["params"], _own_names(group), strict=True),
            )
        ]
        for at, group in enumerate(optimizer.param_groups)
    ]


def _own_names(group: Mapping[str, Any]) -> list[str | None]:
    """`param_names` of a group, or None for each parameter."""
    names: list[str | None] = list(group.get("param_names") or [])
    return names if len(names) == len(group["params"]) else [None] * len(group["params"])


def host_state(optimizer: object) -> list[list[int | str]]:
    """State that is kept on the CPU although its parameter is on a device: [place, key].

    `step` usually is, and offloaded moments are (G08): the load has to know.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        [place, str(key)]
        for place, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" != parameter.device.type
    ]


@dataclass(frozen=True)
class GroupMatch:
    """One group of the live optimizer and the saved group that fits it.

    Attributes:
        saved: the saved group, all of its keys.
        order: saved parameter ids, in the order of the live group's parameters.
        live: the live group.
    """

    saved: Mapping[str, Tree]
    order: list[Tree]
    live: StateDict


def match_groups(
    saved: list[Mapping[str, Tree]],
    names: Names | None,
    optimizer: torch.optim.Optimizer,
    live_names: Names,
) -> list[GroupMatch]:
    """Find for each live group the saved one with the same parameters, by name.

    Raises:
        CheckpointMismatch: another number of groups or of parameters, other names, or groups
            that were composed in another way. Nothing has been touched.
    """
    live = optimizer.param_groups
    sizes = [len(group["params"]) for group in live]
    if len(saved) != len(live):
        raise CheckpointMismatch(
            f"the optimizer has {len(live)} parameter groups, the checkpoint {len(saved)}",
        )
    if names is None or [len(group) for group in names] != [len(one["params"]) for one in saved]:
        if sizes != [len(one["params"]) for one in saved]:
            raise CheckpointMismatch("the optimizer's groups have other sizes than the saved ones")
        return [
            GroupMatch(one, list(one["params"]), group)
            for one, group in zip(saved, live, strict=True)
        ]
    by_names = list(zip(saved, names, strict=True))
    return [
        _match_by_name(wanted, group, [by_names[at], *by_names])
        for at, (wanted, group) in enumerate(zip(live_names, live, strict=True))
    ]


def _match_by_name(
    wanted: list[str],
    group: StateDict,
    saved: list[tuple[Mapping[str, Tree], list[str]]],
) -> GroupMatch:
    """The first saved group that holds exactly the wanted names (G05)."""
    for one, its_names in saved:
        if sorted(its_names) == sorted(wanted):
            ids = dict(zip(its_names, one["params"], strict=True))
            return GroupMatch(one, [ids[name] for name in wanted], group)
    known = {name for _, its_names in saved for name in its_names}
    missing = sorted(set(wanted) - known)
    raise CheckpointMismatch(
        f"no saved parameter group holds exactly {wanted[:4]} ({len(wanted)} parameters): "
        + (f"never saved: {missing[:4]}" if missing else "the groups were composed differently"),
    )


def plan_state(
    saved: Mapping[str, Tree],
    matches: list[GroupMatch],
    optimizer: torch.optim.Optimizer,
    host: set[tuple[int, str]],
    plan: ReadPlan,
) -> dict[str, Tree]:
    """The state_dict to hand to the live optimizer: tensors are memory that the plan will fill.

    Args:
        saved: the saved state_dict, with `TensorRef` leaves.
        matches: from `match_groups`.
        optimizer: the live one.
        host: (place of a saved parameter, key) of state that stays on the CPU.
        plan: gets one entry per tensor.

    Returns:
        `state` by the live order of parameters, and `param_groups` with every saved key.

    Raises:
        CheckpointMismatch: a state tensor has another shape than the live one of its name.
    """
    state: dict[Any, Tree] = dict(saved["state"])
    ids = [pid for group in saved["param_groups"] for pid in group["params"]]
    places = {pid: place for place, pid in enumerate(ids)}
    taken: set[int] = set()
    pairs = [
        (pid, parameter, match.live)
        for match in matches
        for pid, parameter in zip(match.order, match.live["params"], strict=True)
    ]
    numbers = {pid: number for number, (pid, _, _) in enumerate(pairs)}
    result: dict[Any, Tree] = {}
    for pid, values in state.items():
        if pid in numbers:
            _, parameter, group = pairs[numbers[pid]]
            target = _Target(optimizer, parameter, group, host, taken)
            result[numbers[pid]] = target.place(values, places[pid], plan)
        else:  # state of no parameter, kept as torch keeps it
            result[pid] = replace(values, TensorRef, lambda _, ref: plan.new(ref))
    groups = [_group(match, [numbers[pid] for pid in match.order], plan) for match in matches]
    return {**_other_keys(saved, plan), "state": result, "param_groups": groups}


def _other_keys(saved: Mapping[str, Tree], plan: ReadPlan) -> dict[str, Tree]:
    """Further keys of a state_dict, which some optimizers add."""
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    found: dict[str, Tree] = replace(rest, TensorRef, lambda _, ref: plan.new(ref))
    return found


def _group(match: GroupMatch, numbers: list[int], plan: ReadPlan) -> dict[str, Tree]:
    """A saved group with every key it had (F04), also those that a fresh optimizer lacks."""
    group: dict[str, Tree] = replace(dict(match.saved), TensorRef, lambda _, ref: plan.new(ref))
    group["params"] = numbers
    if "param_names" in match.live:
        group["param_names"] = list(match.live["param_names"])
    return group


@dataclass(frozen=True)
class _Target:
    """Where the state of one parameter goes."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    group: Mapping[str, Any]
    host: set[tuple[int, str]]
    taken: set[int]

    def place(self, saved: Mapping[str, Tree], place: int, plan: ReadPlan) -> Tree:
        """The parameter's state, with memory for each tensor."""
        live: Mapping[str, Any] = self.optimizer.state.get(self.parameter, {})

        def memory(path: Path, ref: TensorRef) -> torch.Tensor:
            key = str(path[0]) if path else ""
            old = live.get(key) if len(path) == 1 else None
            if isinstance(old, torch.Tensor):
                self._check(key, old, ref)
                if self._usable(old, ref):
                    plan.add(ref, old)
                    return old
            if key == "step":
                return plan.new(ref, self._device(place, key))
            return plan.new_like(ref, self.parameter, self._device(place, key))

        return replace(dict(saved), TensorRef, memory)

    def _check(self, key: str, old: torch.Tensor, ref: TensorRef) -> None:
        """State of another shape belongs to another parameter."""
        here = shape_for(ref, old)
        if here != ref.shape:
            raise CheckpointMismatch(
                f"optimizer state {key!r} has shape {ref.shape} in the checkpoint and "
                f"{here} in the job",
            )

    def _usable(self, old: torch.Tensor, ref: TensorRef) -> bool:
        """Whether live memory can take the bytes as they are, and no other tensor uses it."""
        memory = local_of(old)
        fits = old.dtype == ref.dtype and old.layout is torch.strided and memory.is_contiguous()
        if not fits or memory.data_ptr() in self.taken:
            return False
        self.taken.add(memory.data_ptr())
        return True

    def _device(self, place: int, key: str) -> torch.device:
        """Where new state goes: to its parameter, unless it was kept on the CPU.

        `step` is on the CPU unless the group is capturable or fused, as torch has it (G11).
        """
        on_device = self.group.get("capturable") or self.group.get("fused")
        if (place, key) in self.host or (key == "step" and not on_device):
            return torch.device("cpu")
        return self.parameter.device


def put_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Tree]) -> None:
    """Hand a filled state_dict to an optimizer, and undo the casts of torch.

    Torch makes a copy of each tensor that it casts. Where `load_state_dict` is torch's own, the
    tensors that it would cast are kept from it, so that the copies need no memory.
    """
    own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    exact: dict[Any, Tree] = dict(state_dict["state"])
    passed = {
        pid: _without_casts(values, parameters[pid])
        if own and _is_place(pid, parameters)
        else values
        for pid, values in exact.items()
    }
    optimizer.load_state_dict({**state_dict, "state": passed})
    for pid, values in exact.items():
        if _is_place(pid, parameters):
            parameter = parameters[pid]
            optimizer.state[parameter] = _exact(values, optimizer.state[parameter])


def _is_place(pid: object, parameters: list[torch.Tensor]) -> bool:
    """Whether a key of the state is the place of a parameter."""
    return type(pid) is int and 0 <= pid < len(parameters)


def _without_casts(values: Tree, parameter: torch.Tensor) -> Tree:
    """The state of a parameter without the tensors that torch would cast."""
    if not is_dict(values):
        return values
    return {
        key: value
        for key, value in values.items()
        if key == "step"
        or not isinstance(value, torch.Tensor)
        or (value.dtype == parameter.dtype and value.device == parameter.device)
    }


def _exact(values: Tree, loaded: Tree) -> Tree:
    """The saved tensors, in the saved order, over what `load_state_dict` made of them."""
    if not is_dict(values):
        return values
    kept = {
        key: value if isinstance(value, torch.Tensor) else loaded.get(key, value)
        for key, value in values.items()
    }
    return {**kept, **{key: value for key, value in loaded.items() if key not in kept}}
