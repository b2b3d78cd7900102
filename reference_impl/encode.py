"""Trees of plain values: what may stand in a checkpoint, checked before anything is written.

`torch.load(weights_only=True)` rebuilds a fixed set of types. A state that holds any other is
refused at save, by key and type: found at load it would cost the checkpoint (M01, E06, K017).
NumPy scalars, which schedulers and loaders often hold, are kept bit for bit in a tagged dict.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ckpt_conformance.reference_impl.errors import CheckpointDamaged, SaveRefused
from ckpt_conformance.reference_impl.shards import Shard, local_of, shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Tree: TypeAlias = Any
"""A value of the types below: the shape of a state is the caller's, so it has no static type."""

StateDict: TypeAlias = dict[str, Tree]
"""A tree with names at its top: what a `state_dict()` gives, or documents by name."""

Path = tuple[object, ...]
Types = type | tuple[type, ...]

TAG = "__ckpt__"
MAX_DEPTH = 100
MAX_INT_BITS = 2000  # the safe unpickler reads integers of at most 255 bytes

_ATOMS = (type(None), bool, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
_KEYS = (type(None), bool, int, float, str, bytes)
_SEQUENCES: dict[type, Callable[[list[Tree]], Tree]] = {
    list: list,
    tuple: tuple,
    torch.Size: torch.Size,
}
_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SCALAR_KINDS = "biufcmM"
_DTYPE_NAMES = (
    "float32 float64 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128"
)
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)
}
"""The element types that are kept: whole bytes, and rebuilt by every torch that has them."""


def is_dict(value: object) -> TypeGuard[dict[Any, Tree]]:
    """Whether a value of a tree is a dict of any class."""
    return isinstance(value, dict)


def is_scalar(value: object) -> TypeGuard[np.generic[Any]]:
    """Whether a value is a scalar of NumPy."""
    return isinstance(value, np.generic)


def type_of(value: object) -> type[object]:
    """The exact class of a value: a subclass of a plain type is not plain."""
    return type(value)


def is_list(value: object) -> TypeGuard[list[Tree] | tuple[Tree, ...]]:
    """Whether a value of a tree is a list or a plain tuple."""
    return type(value) in (list, tuple)


def show(path: Path) -> str:
    """A path as people read it: `optimizer.state.0.exp_avg`."""
    return ".".join(str(part) for part in path)


def refuse(path: Path, value: object, why: str) -> SaveRefused:
    """The error for a value that cannot be saved: it names the key and the type."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return SaveRefused(
        f"{show(path)} is a {kind}: {why}. Nothing was written. Convert it to numbers, strings, "
        f"lists, dicts or tensors in its state_dict().",
    )


class Encoder:
    """Copies states into the types that a safe load accepts.

    One encoder serves one save: a tensor that stands under several keys is encoded once, so that
    the file keeps tied weights tied (S01).

    Attributes:
        shards: by the identity of an encoded tensor, the part of a distributed one that it is.
    """

    def __init__(self, *, copies: bool = False, pinned: bool = False) -> None:
        """Begin with no tensor seen.

        Args:
            copies: every tensor is copied, so that the job may change its own while the copy is
                written. Call `finish` before it does.
            pinned: copies of a GPU's tensors lie in page-locked memory, and are made while the
                next ones are encoded.
        """
        self.shards: dict[int, Shard] = {}
        self._seen: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._copies, self._pinned = copies, pinned
        self._copying: set[torch.device] = set()

    def finish(self) -> None:
        """Wait for the copies that a GPU still makes."""
        while self._copying:
            torch.cuda.synchronize(self._copying.pop())

    def encode(self, value: Tree, path: Path = ()) -> Tree:
        """Copy a state; tensors become dense, contiguous CPU tensors with the same bits.

        Args:
            value: any state.
            path: where it stands, for messages.

        Returns:
            New containers of the same types. Without `copies` a tensor that needs no change is not
            copied: a synchronous save has written it before it returns.

        Raises:
            SaveRefused: a type that `weights_only=True` does not rebuild, a tensor that is not
                dense, an integer over 2000 bits, or more than 100 levels (a state that holds
                itself has no end).
        """
        if len(path) > MAX_DEPTH:
            raise refuse(path[:4], value, "it is nested too deep, or holds itself")
        kind = type_of(value)
        if kind in _TENSORS:
            return self._tensor(value, path)
        if kind in _MAPPINGS:
            return self._mapping(value, path)
        if kind in _SEQUENCES:
            items = [self.encode(item, (*path, index)) for index, item in enumerate(value)]
            return _SEQUENCES[kind](items)
        if kind is set:
            return {_encode_key(item, path) for item in value}
        if isinstance(value, DTensor):
            return self._sharded(value, path)
        return _encode_leaf(value, path)

    def _sharded(self, value: DTensor, path: Path) -> torch.Tensor:
        """Encode the local part of a distributed tensor, and note which part it is."""
        try:
            shard = shard_of(value)
        except ValueError as error:
            raise refuse(path, value, str(error)) from error
        local = value.to_local()
        _check_tensor(local, path)
        key = (shard, local.device, local.data_ptr(), local.stride(), local.dtype)
        if key not in self._seen or local.data_ptr() == 0:
            self._seen[key] = (local, self._dense(local))
        encoded = self._seen[key][1]
        self.shards[id(encoded)] = shard
        return encoded

    def _mapping(self, value: Mapping[object, Tree], path: Path) -> Tree:
        """Copy a dict and keep its class; a dict that looks like one of our tags is wrapped."""
        items = {
            _encode_key(key, path): self.encode(item, (*path, key)) for key, item in value.items()
        }
        if TAG in items:
            return {TAG: "dict", "value": list(items.items())}
        return _mapping_like(value, items)

    def _tensor(self, value: torch.Tensor, path: Path) -> torch.Tensor:
        """Encode a tensor, once for all the keys that hold the same memory."""
        _check_tensor(value, path)
        key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.data_ptr() == 0:  # an empty tensor has no address: it is tied to nothing (Q01)
            return dense(value)
        if key not in self._seen:
            self._seen[key] = (value, self._dense(value))
        return self._seen[key][1]

    def _dense(self, value: torch.Tensor) -> torch.Tensor:
        """Like `dense`; with `copies` in memory that the job does not have."""
        if self._pinned and value.is_cuda:
            return self._begin_copy(value)
        tensor = dense(value)
        is_the_jobs = tensor.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        return tensor.clone() if self._copies and is_the_jobs else tensor

    def _begin_copy(self, value: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor of a GPU into page-locked memory; `finish` waits for it."""
        whole = value.detach().resolve_conj().resolve_neg().contiguous()
        self._copying.add(value.device)
        copy = torch.empty_like(whole, device="cpu", pin_memory=True)
        return copy.copy_(whole, non_blocking=True)


def encode(value: Tree, path: Path = ()) -> Tree:
    """`Encoder.encode` for a single value."""
    return Encoder().encode(value, path)


def _encode_leaf(value: Tree, path: Path) -> Tree:
    """Encode a value that holds no others; NumPy's scalars and empty bytes get a tag."""
    kind = type_of(value)
    if kind is bytearray:  # the job may change it while it is written
        return bytearray(value)
    if kind is bytes and not value:  # pickled by a name that a safe load does not know
        return {TAG: "bytes", "value": []}
    if kind in _ATOMS or (kind is int and value.bit_length() <= MAX_INT_BITS):
        return value
    if is_scalar(value) and value.dtype.kind in _SCALAR_KINDS:
        return {TAG: "numpy", "dtype": value.dtype.str, "value": value.tobytes()}
    raise refuse(path, value, "a safe load would refuse it")


def _encode_key(key: Tree, path: Path) -> object:
    """Check a key of a dict or a member of a set: hashable, and not of a class of its own."""
    if type_of(key) is tuple:
        return tuple([_encode_key(item, path) for item in key])
    if type_of(key) in _KEYS and key != b"":
        return _encode_leaf(key, path)
    raise refuse((*path, key), key, "it is a key, and a safe load would refuse it")


def _check_tensor(value: torch.Tensor, path: Path) -> None:
    """Refuse what is not a plain array of bytes in memory."""
    known = value.dtype in DTYPES.values()
    if value.layout is not torch.strided or value.device.type == "meta" or not known:
        kind = f"{value.layout} {value.dtype} tensor on {value.device}"
        raise refuse(path, value, f"a {kind} is not supported")


def dense(value: torch.Tensor) -> torch.Tensor:
    """The same bits on the CPU, contiguous, in a storage that holds nothing else.

    `torch.save` writes the whole storage of a view (O05), so a view is copied out of it. Lazy
    conjugation and negation are resolved, or the bytes would be those of another number.
    """
    tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _mapping_like(source: Mapping[Any, Tree], items: dict[Any, Tree]) -> Tree:
    """A dict of the class of `source`.

    `_metadata` of a module's state_dict goes along: load_state_dict reads module versions there.
    """
    kind = type_of(source)
    if kind is Counter:
        return Counter(items)
    if kind is not OrderedDict:
        return items
    ordered: Any = OrderedDict(items)
    versions = getattr(source, "_metadata", None)
    if versions is not None:
        ordered._metadata = encode(versions, ("_metadata",))  # noqa: SLF001 - torch keeps it there
    return ordered


def walk(tree: Tree, wanted: Types, path: Path = ()) -> Iterator[tuple[Path, Tree]]:
    """Every leaf of the wanted types with its path, in the order of the tree."""
    if isinstance(tree, wanted):
        yield path, tree
        return
    for key, item in children(tree):
        yield from walk(item, wanted, (*path, key))


def children(tree: Tree) -> Iterable[tuple[object, Tree]]:
    """What a container holds, by key or by index; nothing for a leaf."""
    if is_dict(tree):
        return tree.items()
    return enumerate(tree) if is_list(tree) else ()


def replace(
    tree: Tree,
    wanted: Types,
    new: Callable[[Path, Any], Tree],
    path: Path = (),
) -> Tree:
    """A copy of a tree in which every leaf of the wanted types is replaced."""
    if isinstance(tree, wanted):
        return new(path, tree)
    if is_dict(tree):
        return _mapping_like(
            tree,
            {key: replace(item, wanted, new, (*path, key)) for key, item in tree.items()},
        )
    if is_list(tree):
        return type(tree)(
            [replace(item, wanted, new, (*path, index)) for index, item in enumerate(tree)],
        )
    return tree


def decode(tree: Tree, tensor_of: Callable[[str], Tree] | None = None) -> Tree:
    """Undo the tags of `Encoder.encode`.

    Args:
        tree: what was read.
        tensor_of: what stands for a tensor that is kept elsewhere, by its key (DCP format).

    Raises:
        CheckpointDamaged: a tag that this version does not know, or with the wrong contents.
    """
    if is_dict(tree):
        if TAG in tree:
            return _decode_tagged(tree, tensor_of)
        return _mapping_like(tree, {key: decode(item, tensor_of) for key, item in tree.items()})
    if is_list(tree):
        return type(tree)([decode(item, tensor_of) for item in tree])
    return tree


def _decode_tagged(tree: dict[object, Tree], tensor_of: Callable[[str], Tree] | None) -> Tree:
    """The value behind a tag."""
    tag = tree[TAG]
    try:
        value = tree["value"]
        if tag == "numpy":
            return np.frombuffer(value, dtype=np.dtype(tree["dtype"]))[0]
        if tag == "bytes":
            return b""
        if tag == "dict":
            return {key: decode(item, tensor_of) for key, item in value}
        if tag == "tensor" and tensor_of is not None:
            return tensor_of(value)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointDamaged(f"an encoded value is malformed: {error!r}") from error
    raise CheckpointDamaged(f"an encoded value has the unknown tag {tag!r}")


def memory_groups(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Groups of keys whose tensors overlap in memory; each sorted, the groups too.

    By address range, not by storage: parameters that are cut from one flat buffer share a storage
    and are not tied. Empty tensors have no address and are tied to nothing (Q01). Of a distributed
    tensor the local part counts.
    """
    tensors = {key: local_of(value) for key, value in tensors.items()}
    spans = sorted(
        (str(value.device), value.data_ptr(), value.data_ptr() + _extent(value), key)
        for key, value in tensors.items()
        if value.numel() and value.data_ptr()
    )
    groups: list[list[str]] = []
    place, end = "", -1
    for device, start, stop, key in spans:
        if device == place and start < end:
            groups[-1].append(key)
            end = max(end, stop)
        else:
            groups.append([key])
            place, end = device, stop
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _extent(value: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return (last + 1) * value.element_size()
