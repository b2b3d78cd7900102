"""The state of a job at one step, taken apart into the documents that are written.

model   the model's state_dict
optim   component id -> the optimizer's state_dict
extra   the train state, and every further component
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch

from ckpt_conformance.reference_impl.encode import replace, show, walk
from ckpt_conformance.reference_impl.errors import SaveRefused
from ckpt_conformance.reference_impl.manifest import ComponentFacts, TensorEntry
from ckpt_conformance.reference_impl.torch_zip import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.reference_impl.encode import Path, Tree
    from ckpt_conformance.reference_impl.shards import Shard

T = TypeVar("T")

ALWAYS_SAVED = ("model", "rng", "extra")
"""Ids of the components that every checkpoint has."""


@dataclass(frozen=True)
class Snapshot:
    """What a save writes; fixed when the save begins (B02).

    Attributes:
        step: optimizer steps done.
        tokens_seen: cumulative, over all data-parallel ranks.
        documents: `model`, `optim` (if any optimizer) and `extra`, encoded: plain types and dense
            CPU tensors.
        components: what was saved, by id, with facts that the load needs.
        ties: groups of model keys whose tensors share memory.
        shards: by the identity of a tensor of the documents, the part of a distributed one that
            it is; a tensor without one is whole.
    """

    step: int
    tokens_seen: int
    documents: Mapping[str, Tree]
    components: Mapping[str, ComponentFacts]
    ties: list[list[str]]
    shards: Mapping[int, Shard] = field(default_factory=dict[int, "Shard"])

    def refuse_parts(self) -> None:
        """Refuse a tensor of which other ranks hold parts: one process alone cannot save it."""
        for shard in self.shards.values():
            if shard.box.volume != math.prod(shard.shape):
                raise SaveRefused(
                    f"a tensor of shape {shard.shape} is distributed ({shard.layout}) and this "
                    f"manager saves for one process alone: give it the group of these ranks",
                )


def by_id(component: T | Mapping[str, T] | None, family: str) -> dict[str, T]:
    """Components by id: `optimizer` for a single one, `optimizer/adam` for one of several.

    What can save itself is one component, even if it is a mapping too.
    """
    if component is None:
        return {}
    if is_several(component):
        return {f"{family}/{name}": part for name, part in component.items()}
    return {family: cast("T", component)}


def is_several(component: T | Mapping[str, T]) -> TypeGuard[Mapping[str, T]]:
    """Whether it is a mapping of components, and no component itself."""
    return getattr(component, "state_dict", None) is None and isinstance(component, Mapping)


def is_allowed(component: str, allowed: set[str]) -> bool:
    """Whether a component's id, its family or its own name is in a set of names."""
    family, _, name = component.partition("/")
    return bool({component, family, name} & allowed)


def tensor_keys(documents: Mapping[str, Tree], wanted: type[T]) -> dict[str, T]:
    """Every tensor of the documents under a key of its own, in their order.

    Keys are the paths with dots, as DCP flattens them: `model.0.weight`,
    `optimizer.state.0.exp_avg`. Where hostile names make two paths look the same, a prime is
    added, so that no tensor replaces another.
    """
    leaves: dict[str, T] = {}
    for document, tree in documents.items():
        for path, leaf in walk(tree, wanted):
            leaves[unique_key(key_of(document, path), leaves)] = leaf
    return leaves


def key_of(document: str, path: Path) -> str:
    """The key of a tensor from its document and path."""
    if document == "optim":
        return show((str(path[0]).replace("/", "."), *path[1:]))
    return show((document, *path))


def unique_key(key: str, taken: Mapping[str, object]) -> str:
    """The key, with a prime for each time that it is taken already."""
    while key in taken:
        key += "'"
    return key


def replace_tensors(
    documents: Mapping[str, Tree],
    new: Callable[[str, Any], Tree],
    wanted: type[Any] = torch.Tensor,
) -> dict[str, Tree]:
    """Copy the documents, with each tensor replaced.

    Args:
        documents: by name.
        new: gets a tensor's key, as `tensor_keys` gives it, and the tensor; returns what stands
            in its place.
        wanted: the class of the tensors: `torch.Tensor`, or `TensorRef` in what was read.
    """
    taken: dict[str, None] = {}
    result: dict[str, Tree] = {}
    for document, tree in documents.items():

        def leaf(path: Path, tensor: Tree, document: str = document) -> Tree:
            key = unique_key(key_of(document, path), taken)
            taken[key] = None
            return new(key, tensor)

        result[document] = replace(tree, wanted, leaf)
    return result


def index_trees(trees: Mapping[str, Tree]) -> dict[str, TensorEntry]:
    """Where each tensor of some documents lies, by key; leaves are `TensorRef`."""
    return {
        key: TensorEntry(
            ref.file,
            ref.offset,
            ref.nbytes,
            str(ref.dtype).removeprefix("torch."),
            ref.shape,
        )
        for key, ref in tensor_keys(trees, TensorRef).items()
    }
