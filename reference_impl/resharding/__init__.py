"""Checkpoints for another layout of ranks and other keys, element for element.

`statements` say how keys and tensors change (docs/key-mapping.md); a plan says which elements of
which shard go where, before anything is read.
"""

from ckpt_conformance.reference_impl.resharding.compiling import (
    KeyMapping,
    TensorInfo,
    compile_mapping,
)
from ckpt_conformance.reference_impl.resharding.descriptors import (
    Overlap,
    ShardDescriptor,
    ShardedTensor,
    assign_sharded_slice,
    build_shard_desc,
    build_sharded_state_dict,
    get_overlap_region,
    is_sharded_state_dict,
    merge_shard_info_list,
    shard_weight,
)
from ckpt_conformance.reference_impl.resharding.errors import (
    InvalidShard,
    MissingShard,
    NotInvertible,
    ReshardError,
    StatementError,
)
from ckpt_conformance.reference_impl.resharding.flat_ranges import (
    flat_range_in_min_slice,
    minimal_nd_slice,
    ravel_index,
    unravel_index,
)
from ckpt_conformance.reference_impl.resharding.in_memory import reshard_worlds
from ckpt_conformance.reference_impl.resharding.planning import Copy, Located, Reshard, plan
from ckpt_conformance.reference_impl.resharding.states import STATE_NAMES, StateNames

__all__ = [
    "STATE_NAMES",
    "Copy",
    "InvalidShard",
    "KeyMapping",
    "Located",
    "MissingShard",
    "NotInvertible",
    "Overlap",
    "Reshard",
    "ReshardError",
    "ShardDescriptor",
    "ShardedTensor",
    "StateNames",
    "StatementError",
    "TensorInfo",
    "assign_sharded_slice",
    "build_shard_desc",
    "build_sharded_state_dict",
    "compile_mapping",
    "flat_range_in_min_slice",
    "get_overlap_region",
    "is_sharded_state_dict",
    "merge_shard_info_list",
    "minimal_nd_slice",
    "plan",
    "ravel_index",
    "reshard_worlds",
    "shard_weight",
    "unravel_index",
]
