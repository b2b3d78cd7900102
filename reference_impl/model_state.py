"""A model's state under the keys of the bare model, whatever it is wrapped in (M04).

`torch.compile`, DataParallel, DistributedDataParallel and activation checkpointing put a name of
their own into every key. A checkpoint that keeps it loads into nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckpt_conformance.reference_impl.errors import CheckpointMismatch
from ckpt_conformance.reference_impl.fill import byte_view
from ckpt_conformance.reference_impl.torch_zip import TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.reference_impl.encode import Tree
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


def parameter_names(model: object) -> dict[int, str]:
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
