"""Digests of state, bit for bit: dtype, shape and bytes; strides and NaN payloads do not lie.

Containers keep their type (a tuple is not a list), mappings ignore order, floats keep their bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from ckpt_conformance.workload.hashing import hash_bytes


def tensor_view(tensor: torch.Tensor) -> memoryview:
    """Show the bytes of the elements in row-major order, whatever the strides and the device.

    They are copied only where they do not lie so already.
    """
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # Torch calls one element contiguous whatever its stride, and then does not see it as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements in row-major order, whatever the strides and the device."""
    return bytes(tensor_view(tensor))


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Tell whether the elements of a tensor lie in memory, each at its place, and say all."""
    is_array = tensor.layout is torch.strided and not tensor.is_quantized
    return is_array and not tensor.is_meta


def hash_tensor(tensor: torch.Tensor) -> str:
    """Hash dtype, shape and bytes; what a sparse or quantized tensor adds; on meta no bytes."""
    head = f"{tensor.dtype}{list(tensor.shape)}".encode()
    if tensor.is_meta:
        return hash_bytes(head, b"meta")
    if tensor.is_quantized:
        scale = struct.pack("<dq", tensor.q_scale(), tensor.q_zero_point())
        return hash_bytes(head, scale, tensor_view(tensor.int_repr()))
    if tensor.is_sparse:
        listed = tensor.detach().coalesce()
        return hash_bytes(head, tensor_view(listed.indices()), tensor_view(listed.values()))
    return hash_bytes(head, tensor_view(tensor))


def hash_leaf(value: object) -> str:
    """Hash one value that is no container."""
    kind = type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        return hash_tensor(value)
    if isinstance(value, np.ndarray):
        return hash_bytes(b"ndarray", f"{value.dtype}{value.shape}".encode(), value.tobytes())
    if isinstance(value, np.generic):  # np.float64 is a float, and is not what a float is
        return hash_bytes(kind, value.dtype.str.encode(), value.tobytes())
    if isinstance(value, float):
        return hash_bytes(b"float", struct.pack("<d", value))
    return hash_bytes(kind, repr(value).encode())


def leaves(state: object, path: str = "") -> dict[str, str]:
    """Map the path of each leaf to its digest, for evidence that names what differs.

    An empty container is a leaf of its own, so that losing one shows.
    """
    items = _children(state)
    if items is None:
        return {path: hash_leaf(state)}
    digests = {f"{path}()": "map" if isinstance(state, Mapping) else type(state).__name__}
    for key, value in items:
        digests |= leaves(value, f"{path}.{key}" if path else key)
    return digests


def tensors(state: object, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """List the tensors of a state tree with their paths."""
    if isinstance(state, torch.Tensor):
        return [(path, state)]
    pairs: list[tuple[str, torch.Tensor]] = []
    for key, value in _children(state) or []:
        pairs += tensors(value, f"{path}.{key}" if path else key)
    return pairs


def overlapping(named: Sequence[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Group the names of tensors that have bytes in common; of one that is not dense the first."""
    groups: list[list[str]] = []
    end = 0
    for start, stop, name in sorted(_span(tensor, name) for name, tensor in named):
        if start < min(stop, end):
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, stop)
    return [sorted(names) for names in groups if len(names) > 1]


def _span(tensor: torch.Tensor, name: str) -> tuple[int, int, str]:
    if not has_plain_memory(tensor) or not tensor.numel():
        return 0, 0, name
    count = tensor.numel() if tensor.is_contiguous() else 1
    return tensor.data_ptr(), tensor.data_ptr() + count * tensor.element_size(), name


def _children(state: Any) -> list[tuple[str, Any]] | None:  # noqa: ANN401  any state tree
    if isinstance(state, Mapping):
        pairs = ((_key(key), value) for key, value in cast("Mapping[object, Any]", state).items())
        return sorted(pairs, key=lambda pair: pair[0])
    if isinstance(state, list | tuple):
        return [(str(index), value) for index, value in enumerate(cast("list[Any]", state))]
    return None


def _key(key: object) -> str:
    return key if isinstance(key, str) else f"<{type(key).__name__} {key!r}>"


def combine(digests: Mapping[str, str]) -> str:
    """Digest of a component from the digests of its leaves; their order does not matter."""
    return hash_bytes(*(part.encode() for pair in sorted(digests.items()) for part in pair))


def digest(state: object) -> str:
    """Digest of a whole state tree."""
    return combine(leaves(state))
