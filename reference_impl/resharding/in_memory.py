"""Carrying a plan out in one process, a source shard at a time."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ckpt_conformance.reference_impl.resharding.descriptors import merge_shard_info_list
from ckpt_conformance.reference_impl.resharding.errors import ReshardError
from ckpt_conformance.reference_impl.resharding.planning import Located, plan
from ckpt_conformance.reference_impl.resharding.states import STATE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from ckpt_conformance.reference_impl.resharding.descriptors import (
        ShardDescriptor,
        ShardedTensor,
    )
    from ckpt_conformance.reference_impl.resharding.planning import Copy, Reshard
    from ckpt_conformance.reference_impl.resharding.states import StateNames

    Read = Callable[[Located], torch.Tensor]


def virtual_file(rank: int) -> str:
    """Name the place of what a rank has in memory (P005)."""
    return f"vfile_{rank}"


def located(of_places: Mapping[str, Iterable[ShardDescriptor]]) -> dict[str, list[Located]]:
    """Give the shards of all places by their key."""
    found: dict[str, list[Located]] = {}
    for place, shards in of_places.items():
        for shard in shards:
            found.setdefault(shard.key, []).append(Located(place, shard))
    return found


def reshard_worlds(
    source: Sequence[Mapping[str, ShardedTensor]],
    destination: Sequence[Mapping[str, ShardedTensor]],
    statements: Iterable[str] = (),
    states: StateNames = STATE_NAMES,
    *,
    backwards: bool = False,
) -> None:
    """Fill the shards of one world of ranks from those of another one, in one process.

    Args:
        source: by rank, its shards by key.
        destination: the same; their memory is written, and nothing of it if this raises.
        statements: how keys and tensors change.
        states: how the state of an optimizer is named.
        backwards: whether the statements lead from the destination to the source, and are undone.

    Raises:
        ReshardError: as `plan`.
    """
    files = {virtual_file(rank): shards for rank, shards in enumerate(source)}
    described = [
        {key: [shard.descriptor] for key, shard in shards.items()} for shards in destination
    ]
    places = {
        place: [shard.descriptor for shard in shards.values()] for place, shards in files.items()
    }
    wanted = merge_shard_info_list(described)
    planned = plan(located(places), wanted, statements, states, backwards=backwards)

    def read(where: Located) -> torch.Tensor:
        return files[where.place][where.shard.key].local_tensor

    check_equal(planned, read)
    fill(planned, [shard for shards in destination for shard in shards.values()], read)


def fill(planned: Reshard, destination: Iterable[ShardedTensor], read: Read) -> None:
    """Fill shards; each source shard that is needed is read once, and let go before the next.

    Args:
        planned: what goes where.
        destination: the shards whose memory is written.
        read: gives the memory of a source shard.
    """
    copies: dict[Located, list[tuple[Copy, torch.Tensor]]] = defaultdict(list)
    for shard in destination:
        for copy in planned.copies(shard.descriptor):
            copies[copy.source].append((copy, shard.local_tensor))
    for where in sorted(copies, key=lambda one: (one.place, one.shard.key)):
        memory = read(where)
        for copy, target in copies[where]:
            copy.carry_out(memory, target)


def check_equal(planned: Reshard, read: Read) -> None:
    """Hold against one another what statements make one, such as the step counts of two parameters.

    Raises:
        ReshardError: they differ.
    """
    for key, view in planned.mapping.views.items():
        if not view.equal:
            continue
        first = view.keys[0]
        values = {name: _whole(planned, name, read) for name in (first, *view.equal)}
        for name, value in values.items():
            if value.numpy().tobytes() != values[first].numpy().tobytes():
                raise ReshardError(
                    f"{key!r} of the destination is one for {first!r} = {values[first].tolist()} "
                    f"and {name!r} = {value.tolist()} of the source: they differ. Leave one out, "
                    f"as `{name} -> _`, and say which is taken, as `{first} -> {key}`"
                )


def _whole(planned: Reshard, key: str, read: Read) -> torch.Tensor:
    """Read a small tensor that is in one shard."""
    entries = planned.sources.of_key(key)
    (where, _), *more = [entry for _, entry in entries]
    if more:
        raise ReshardError(f"{key!r} is cut into shards, and must be compared as a whole")
    return read(where)
