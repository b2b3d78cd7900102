"""What Orbax writes beside arrays: whether a step was committed, its items, the tree of an item."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import zarr
from ckpt_conformance.fsck.formats.ocdbt import MANIFEST
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.untrusted import (
    clip,
    is_dict,
    is_list,
    object_or_empty,
    parse_json,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

STEP = "_CHECKPOINT_METADATA"
TREE = "_METADATA"
STRINGS = "_strings.json"
SHARDING = "_sharding"
COMMITTED = "commit_success.txt"
OF_JSON = "metadata"  # the file of an item that is JSON
TEMPORARY = ".orbax-checkpoint-tmp"
OF_PROCESS = re.compile(r"ocdbt\.process_\d+")
OF_DATABASE = re.compile(r"(?:ocdbt\.process_\d+/)?(?:d/[0-9a-f]{32}|manifest\.ocdbt)")
"""What OCDBT writes below the folder of an item: its manifests, and files with names at random."""
OF_ARRAYS = re.compile(r"array_metadatas/process_\d+")
_IN_ARRAYS = {"jax.Array", "np.ndarray", "scalar"}
_STRING, _OF_JAX = "string", "jax.Array"
_SHARDINGS = (*("NamedSharding", "SingleDeviceSharding", "PositionalSharding", "GSPMDSharding"),)
_KEY_TYPES = (1, 2)  # of a sequence, of a dict
_OF_TREES = ("StandardCheckpointHandler", "PyTreeCheckpointHandler", "ArrayCheckpointHandler")
_OF_JSON = ("JsonCheckpointHandler", "RandomKeyCheckpointHandler")


@dataclass(frozen=True)
class Step:
    """What the metadata of a step says.

    Attributes:
        is_committed: whether the time of the commit stands there, beside that of the beginning.
        handlers: what wrote each item, by the name of its folder; empty where the step is one item.
        handler: what wrote the step where it is one item.

    """

    is_committed: bool
    handlers: dict[str, str] = field(default_factory=dict[str, str])
    handler: str = ""


@dataclass(frozen=True)
class Tree:
    """What the metadata of an item says.

    Attributes:
        arrays: names of the leaves that are arrays of Zarr.
        other_types: types of leaves that are not Orbax's own.
        has_strings: whether a leaf is a text.
        has_jax: whether an array is one of JAX, which has a place on devices.
        uses_ocdbt: whether the arrays are in a database; None where it does not say.
        uses_zarr3: whether the arrays are of version 3 of Zarr.
        stores_all: whether chunks that are all fill value were written, too.
        leaves: of which type each leaf is, also one that is an empty container.

    """

    arrays: tuple[str, ...]
    other_types: tuple[str, ...]
    has_strings: bool
    has_jax: bool
    uses_ocdbt: bool | None
    uses_zarr3: bool
    stores_all: bool
    leaves: Mapping[str, str]


def is_checkpoint(names: Collection[str]) -> bool:
    """Return whether a folder is a step, or an item of one, by the names in it."""
    return STEP in names or TREE in names or MANIFEST in names


def trees(files: Collection[str]) -> list[str]:
    """Return the folders that hold arrays, each with a slash at its end, or nothing for the top."""
    roots: set[str] = set()
    arrays: set[str] = set()
    for name in files:
        folder, _, last = name.rpartition("/")
        is_inner = OF_PROCESS.fullmatch(folder.rpartition("/")[2])
        if last == TREE or (last == MANIFEST and not is_inner):
            roots.add(f"{folder}/" if folder else "")
        elif last in zarr.METADATA and folder:
            arrays.add(folder.rpartition("/")[0])
    heads = {f"{folder}/" if folder else "" for folder in arrays}
    return sorted(roots | {head for head in heads if not head.startswith(tuple(roots))})


def is_bookkeeping(name: str, *, has_database: bool) -> bool:
    """Return whether a file beside arrays holds nothing that a user has saved."""
    top = name.partition("/")[0]
    if has_database and (top == "d" or name == MANIFEST or OF_PROCESS.fullmatch(top)):
        return True
    return name == SHARDING or OF_ARRAYS.fullmatch(name) is not None


def below(files: Collection[str], root: str, roots: Collection[str]) -> set[str]:
    """Return the files of a folder but those of a folder of arrays in it, relative to it."""
    inner = tuple(one for one in roots if one != root and one.startswith(root))
    return {
        name.removeprefix(root)
        for name in files
        if name.startswith(root) and not name.startswith(inner)
    }


def read_step(data: bytes) -> Step:
    """Read the metadata of a step; raises Malformed."""
    values = parse_json(data)
    begun, committed = values.get("init_timestamp_nsecs"), values.get("commit_timestamp_nsecs")
    handlers = values.get("item_handlers")
    is_committed = begun is None or committed is not None
    if is_dict(handlers):
        known = {plain(name): str(one)[:400] for name, one in handlers.items()}
        return Step(is_committed, known)
    return Step(is_committed, handler=handlers[:400] if isinstance(handlers, str) else "")


def has_tree(handler: str) -> bool:
    """Return whether a handler writes a tree of arrays with metadata."""
    return handler.endswith(_OF_TREES)


def is_json(handler: str) -> bool:
    """Return whether what a handler writes beside arrays is JSON."""
    return handler.endswith(_OF_JSON)


def read_tree(data: bytes) -> Tree:
    """Read the metadata of an item; raises Malformed where Orbax could not read it either."""
    values = parse_json(data)
    leaves = values.get("tree_metadata")
    if not is_dict(leaves):
        raise Malformed(f"its tree_metadata is {clip(leaves)}")
    kinds: dict[str, set[str]] = {}
    types: dict[str, str] = {}
    for path, leaf in leaves.items():
        known = object_or_empty(object_or_empty(leaf).get("value_metadata"))
        kind, skips = known.get("value_type"), known.get("skip_deserialize")
        if not isinstance(kind, str) or not isinstance(skips, bool):
            raise Malformed(f"the leaf {clip(path)} does not say of which type it is")
        name = _name(path, object_or_empty(leaf).get("key_metadata"))
        kinds.setdefault("" if skips else kind, set()).add(name)
        types[name] = kind
    uses_ocdbt = values.get("use_ocdbt")
    return Tree(
        tuple(sorted({name for kind in _IN_ARRAYS for name in kinds.get(kind, ())})),
        tuple(sorted(set(kinds) - _IN_ARRAYS - {_STRING, ""})),
        _STRING in kinds,
        _OF_JAX in kinds,
        uses_ocdbt if isinstance(uses_ocdbt, bool) else None,
        values.get("use_zarr3") is True,
        values.get("store_array_data_equal_to_fill_value") is True,
        types,
    )


def _name(path: str, keys: object) -> str:
    """Return the name of a leaf: its keys, joined by dots. They stand there twice."""
    levels = [object_or_empty(key) for key in keys] if is_list(keys) else []
    parts = [level.get("key") for level in levels]
    if any(level.get("key_type") not in _KEY_TYPES for level in levels):
        raise Malformed(f"a key of the leaf {clip(path)} is of no type")
    if not all(isinstance(part, str) for part in parts) or str(tuple(parts)) != path:
        raise Malformed(f"the keys of the leaf {clip(path)} are others where they stand again")
    return ".".join(map(str, parts))


def read_shardings(data: bytes) -> set[str]:
    """Return the names of the arrays whose place on devices a file says; raises Malformed."""
    names: set[str] = set()
    for name, text in parse_json(data).items():
        try:
            names.add(base64.b64decode(name, validate=True).decode("utf-8"))
        except ValueError:
            raise Malformed(f"{clip(name)} is the name of no array in base 64") from None
        kind = parse_json(str(text).encode(errors="surrogatepass")).get("sharding_type")
        if kind not in _SHARDINGS:
            raise TooLarge(f"an array is placed by {clip(kind)}, of which nothing is known here")
    return names


def read_array_metadatas(data: bytes) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield the name of each array of a process with the shape of its chunks; raises Malformed."""
    listed = parse_json(data).get("array_metadatas")
    for one in listed if is_list(listed) else ():
        values = object_or_empty(object_or_empty(one).get("array_metadata"))
        name, chunk = values.get("param_name"), values.get("chunk_shape")
        if (
            not isinstance(name, str)
            or not is_list(chunk)
            or not is_list(values.get("write_shape"))
        ):
            raise Malformed(f"an array has no name or no shape: {clip(name)}")
        yield name, tuple(chunk)
