"""The attributes `fused_qkv`, `fused_qkv_old`, `fused_ffn`: fused weights, apart and together.

Which piece stands where: `fused.py`. Without one of them a fused weight whose number of shards
changes is refused: each rank would get rows that belong to another one (P042).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.reference_impl.resharding import fused
from ckpt_conformance.reference_impl.resharding.errors import ReshardError
from ckpt_conformance.reference_impl.resharding.views import View, joined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.reference_impl.resharding.compiling import TensorInfo
    from ckpt_conformance.reference_impl.resharding.fused import Piece
    from ckpt_conformance.reference_impl.resharding.syntax import Statement

FUSED = re.compile(
    r"(^|[._])(\w*qkv\w*|query_key_value|c_attn|in_proj|gate_up\w*|up_gate\w*|gate_and_up\w*"
    r"|w1_?w3|w13|linear_fc1)([._]|$)",
    re.IGNORECASE,
)
"""Names that libraries give to fused weights: Paddle, Megatron, vLLM, GPT-2, GPT-NeoX, torch."""


class Tensors(NamedTuple):
    """What is known of the names of a statement; None for one that another statement made.

    Attributes:
        left: of those that are taken.
        right: of those that are made.
    """

    left: Sequence[TensorInfo | None]
    right: Sequence[TensorInfo | None]


def results(statement: Statement, views: Sequence[View], tensors: Tensors) -> list[View]:
    """Carry out a statement with one of the attributes.

    Raises:
        StatementError: numbers of names, heads or shards that do not fit.
    """
    if statement.attributes.fused == "not_fused":
        if len(views) == len(statement.right) == 1:
            return list(views)
        raise statement.error(statement.left[0], "not_fused takes one name on each side")
    names = ("GATE", "UP") if statement.attributes.fused == "fused_ffn" else ("Q", "K", "V")
    sides = len(views), len(statement.right)
    if sides not in {(1, 1), (1, len(names)), (len(names), 1)}:
        raise statement.error(
            statement.left[0],
            f"{statement.attributes.fused} is between one fused name and another, or the "
            f"{len(names)} names {', '.join(names)}; here are {sides[0]} and {sides[1]}",
        )
    axis = _axis(statement, views, tensors)
    layout = _Layout(statement, _shards(tensors.left, axis), _shards(tensors.right, axis))
    pieces = _cut(statement, views, axis, layout)
    return [
        joined([pieces[piece] for piece in order], axis)
        for order in layout.orders(len(statement.right), layout.on_right)
    ]


class _Layout:
    """Which pieces there are, and in which order on each side."""

    def __init__(self, statement: Statement, on_left: int, on_right: int) -> None:
        self._statement = statement
        self._kind = statement.attributes.fused
        self.on_left, self.on_right = on_left, on_right
        self.counts = self._counts()
        self._check_shards()

    def _counts(self) -> dict[str, int]:
        """How many pieces each component has."""
        if self._kind == "fused_ffn":
            each = fused.pieces_of_ffn(self.on_left, self.on_right)
            return {"GATE": each, "UP": each}
        attributes, left = self._statement.attributes, self._statement.left[0]
        heads, groups = attributes.num_heads, attributes.num_key_value_groups
        if heads < 1 or groups < 1:
            raise self._statement.error(
                left, f"{self._kind} needs num_heads and num_key_value_groups, both above 0"
            )
        if heads % groups:
            raise self._statement.error(
                left,
                f"num_heads must be divisible by num_key_value_groups: {heads} by {groups} leaves "
                f"{heads % groups}",
            )
        return {"Q": heads, "K": groups, "V": groups}

    def _check_shards(self) -> None:
        for shards in (self.on_left, self.on_right):
            if any(count % shards for count in self.counts.values()):
                raise self._statement.error(
                    self._statement.left[0],
                    f"{shards} shards would cut through heads: there are "
                    f"{self._statement.attributes.num_heads} of queries and "
                    f"{self._statement.attributes.num_key_value_groups} of keys",
                )

    def orders(self, names: int, shards: int) -> list[list[Piece]]:
        """Give the pieces of each name of a side, in their order."""
        if names > 1:
            return list(fused.components(self.counts).values())
        if self._kind == "fused_qkv":
            return [fused.grouped(self.counts["Q"], self.counts["K"])]
        return [fused.by_shard(self.counts, shards)]


def _cut(
    statement: Statement, views: Sequence[View], axis: int, layout: _Layout
) -> Mapping[Piece, View]:
    """Cut what is taken into its pieces."""
    pieces: dict[Piece, View] = {}
    orders = layout.orders(len(views), layout.on_left)
    for name, view, order in zip(statement.left, views, orders, strict=True):
        extent = view.shape[axis]
        if extent % len(order):
            raise statement.error(
                name, f"dimension {axis} has {extent}, which is no {len(order)} equal pieces"
            )
        parts = view.split(axis, [extent // len(order)] * len(order))
        pieces.update(zip(order, parts, strict=True))
    sizes = {view.shape for view in pieces.values()}
    if len(sizes) > 1:
        raise statement.error(
            statement.left[0], f"its pieces have different shapes: {sorted(sizes)}"
        )
    return pieces


def _shards(tensors: Sequence[TensorInfo | None], axis: int) -> int:
    """Into how many shards a fused tensor is cut; several tensors are no fused one."""
    only = tensors[0] if len(tensors) == 1 else None
    return only.cuts[axis] if only and axis < len(only.cuts) else 1


def _axis(statement: Statement, views: Sequence[View], tensors: Tensors) -> int:
    """The dimension that is fused: the one that is said, or the one that is cut into shards."""
    dimensions = len(views[0].shape)
    axis = statement.attributes.axis
    if axis is not None:
        if axis >= dimensions:
            raise statement.error(
                statement.left[0], f"axis={axis}, and its shape is {views[0].shape}"
            )
        return axis
    infos = [info for info in (*tensors.left, *tensors.right) if info]
    cut = {at for info in infos for at, count in enumerate(info.cuts) if count > 1}
    if len(cut) == 1:
        return cut.pop()
    if dimensions == 1 or (not cut and len(views) == len(statement.right) == 1):
        return 0
    raise statement.error(
        statement.left[0], f"say in which dimension {views[0].shape} is fused, as axis=0"
    )


def refuse_cut(key: str, source: TensorInfo, destination: TensorInfo) -> None:
    """Refuse a weight with the name of a fused one whose number of shards changes (P042).

    Raises:
        ReshardError: and no statement says how its parts lie.
    """
    if source.cuts == destination.cuts or not FUSED.search(key):
        return
    raise ReshardError(
        f"{key!r} has the name of a fused weight, and is cut into {source.cuts} shards in the "
        f"source and {destination.cuts} in the destination: each rank could get rows of another. "
        f"Say how it is fused, as `{key} -> {key}, fused_qkv_old, num_heads=..., "
        f"num_key_value_groups=...`, or `{key} -> {key}, not_fused`"
    )
