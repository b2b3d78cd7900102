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

from ckpt_conformance.reference_impl.encode import is_dict, replace, walk
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
    unwrapped: Stateful = inner
    return unwrapped


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
    module_state: Any = plain
    module_state._metadata = OrderedDict(  # noqa: SLF001 - where torch keeps the versions of modules
        (plain_key(key), value) for key, value in versions.items()
    )
    return plain


def model_parameter_names(model: object) -> dict[int, str]:
    """The plain name of each parameter by `id(parameter)`; empty for what is no nn.Module."""
    if not isinstance(model, torch.nn.Module):
        return {}
    named = model.named_parameters()
    return {id(parameter): plain_key(name) for name, parameter in named}


def check_tensor(key: str, saved: Tree, live: Tree) -> None:
    """Check that a saved value fits the live one: a tensor has its shape and dtype (J04, J05).

    Raises:
        CheckpointMismatch: it does not.
    """
    if isinstance(live, torch.Tensor) != isinstance(saved, TensorRef):
        raise CheckpointMismatch(f"model: {key} is a tensor on one side only")
    if not isinstance(live, torch.Tensor):
        return
    here = shape_for(saved, live)
    if here != saved.shape:
        raise CheckpointMismatch(
            f"model: {key} has shape {saved.shape} in the checkpoint, {here} here",
        )
    if live.dtype != saved.dtype:
        raise CheckpointMismatch(
            f"model: {key} is {saved.dtype} in the checkpoint, {live.dtype} here: nothing is cast",
        )


def retie(model: dict[str, Tree], ties: list[list[str]]) -> None:
    """Let tied keys share one tensor again, where they hold the same bytes (S04)."""
    for first, *others in ties:
        for key in others:
            tensor, other = model[first], model[key]
            same = (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            if same and torch.equal(byte_view(tensor), byte_view(other)):
                model[key] = tensor


Names = list[list[str]]
"""Parameter names, one list per group, in the order of its `params`."""


def parameter_names(optimizer: object, model: object) -> Names | None:
    """Names of an optimizer's parameters: its own `param_names`, else the model's.

    A parameter that the model does not know has no name; `@group.position` stands for it.

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
                zip(group["params"], _param_names(group), strict=True),
            )
        ]
        for at, group in enumerate(optimizer.param_groups)
    ]


def _param_names(group: Mapping[str, Any]) -> list[str | None]:
    """`param_names` of a group, or None for each parameter."""
    names: list[str | None] = list(group.get("param_names") or [])
    return names if len(names) == len(group["params"]) else [None] * len(group["params"])


def host_state(optimizer: object) -> list[list[int | str]]:
    """State that is kept on the CPU although its parameter is on a device.

    `step` usually is, and offloaded moments are (G08): the load has to know.

    Returns:
        [place, key] for each: the parameter's position in all groups, and the key of the state.
        Nothing for an optimizer that is not torch's.
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
    """Find for each live group the saved one with the same parameters.

    By name; by position where the checkpoint has no names for them.

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
    saved_sizes = [len(group["params"]) for group in saved]
    if names is None or [len(group) for group in names] != saved_sizes:
        if sizes != saved_sizes:
            raise CheckpointMismatch("the optimizer's groups have other sizes than the saved ones")
        return [
            GroupMatch(saved_group, list(saved_group["params"]), group)
            for saved_group, group in zip(saved, live, strict=True)
        ]
    named_groups = list(zip(saved, names, strict=True))
    # The group at the same position comes first: groups may hold the same names.
    return [
        _match_by_name(wanted, group, [named_groups[at], *named_groups])
        for at, (wanted, group) in enumerate(zip(live_names, live, strict=True))
    ]


def _match_by_name(
    wanted: list[str],
    group: StateDict,
    saved: list[tuple[Mapping[str, Tree], list[str]]],
) -> GroupMatch:
    """The first saved group that holds exactly the wanted names (G05)."""
    for saved_group, names in saved:
        if sorted(names) == sorted(wanted):
            ids = dict(zip(names, saved_group["params"], strict=True))
            return GroupMatch(saved_group, [ids[name] for name in wanted], group)
    known = {name for _, names in saved for name in names}
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
    saved_ids = [saved_id for group in saved["param_groups"] for saved_id in group["params"]]
    places = {saved_id: place for place, saved_id in enumerate(saved_ids)}
    taken: set[int] = set()
    pairs = [
        (saved_id, parameter, match.live)
        for match in matches
        for saved_id, parameter in zip(match.order, match.live["params"], strict=True)
    ]
    numbers = {saved_id: number for number, (saved_id, _, _) in enumerate(pairs)}
    result: dict[Any, Tree] = {}
    for key, values in state.items():
        if key in numbers:
            _, parameter, group = pairs[numbers[key]]
            target = _Target(optimizer, parameter, group, host, taken)
            result[numbers[key]] = target.memory_for(values, places[key], plan)
        else:  # state of no parameter, kept as torch keeps it
            result[key] = _into_new_memory(values, plan)
    groups = [
        _plan_group(match, [numbers[saved_id] for saved_id in match.order], plan)
        for match in matches
    ]
    return {**_other_keys(saved, plan), "state": result, "param_groups": groups}


def _other_keys(saved: Mapping[str, Tree], plan: ReadPlan) -> dict[str, Tree]:
    """Further keys of a state_dict, which some optimizers add."""
    return {
        key: _into_new_memory(value, plan)
        for key, value in saved.items()
        if key not in ("state", "param_groups")
    }


def _into_new_memory(tree: Tree, plan: ReadPlan) -> Tree:
    """A copy of a tree in which each tensor is new memory that the plan will fill."""
    return replace(tree, TensorRef, lambda _, ref: plan.new(ref))


def _plan_group(match: GroupMatch, numbers: list[int], plan: ReadPlan) -> dict[str, Tree]:
    """A saved group with every key it had (F04), also those that a fresh optimizer lacks."""
    group: dict[str, Tree] = _into_new_memory(dict(match.saved), plan)
    group["params"] = numbers
    if "param_names" in match.live:
        group["param_names"] = list(match.live["param_names"])
    return group


@dataclass(frozen=True)
class _Target:
    """Where the state of one parameter goes.

    Attributes:
        optimizer: the live one.
        parameter: of it.
        group: the live group that the parameter is in.
        host: (place of a saved parameter, key) of state that stays on the CPU.
        taken: addresses of the live memory that the plan fills already.
    """

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    group: Mapping[str, Any]
    host: set[tuple[int, str]]
    taken: set[int]

    def memory_for(self, saved: Mapping[str, Tree], place: int, plan: ReadPlan) -> Tree:
        """The parameter's state with memory for each tensor: the live one's own, or new."""
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
        """Refuse state of another shape: it belongs to another parameter."""
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
        number: _without_casts(values, parameters[number])
        if own and _is_number(number, parameters)
        else values
        for number, values in exact.items()
    }
    optimizer.load_state_dict({**state_dict, "state": passed})
    for number, values in exact.items():
        if _is_number(number, parameters):
            parameter = parameters[number]
            optimizer.state[parameter] = _exact(values, optimizer.state[parameter])


def _is_number(key: object, parameters: list[torch.Tensor]) -> bool:
    """Whether a key of the state is the number of a parameter; some optimizers add others."""
    return type(key) is int and 0 <= key < len(parameters)


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
    """The state of a parameter after a load, with the saved tensors instead of torch's casts.

    Torch casts what lists and dicts in it hold, too.
    """
    if not is_dict(values):
        return values
    kept = {
        key: value if any(walk(value, torch.Tensor)) else loaded.get(key, value)
        for key, value in values.items()
    }
    return {**kept, **{key: value for key, value in loaded.items() if key not in kept}}
