"""Judge what Orbax wrote: the commit of a step, its items, and the arrays of each.

A chunk of an array has no checksum. What can be held against something is its length once it is
unpacked, and of OCDBT the manifest and the nodes, which have a CRC-32C each.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.code import any_file
from ckpt_conformance.fsck.formats import ocdbt, orbax, zarr, zstd
from ckpt_conformance.fsck.judge.looks import look, other_part
from ckpt_conformance.fsck.judge.parts import json_part
from ckpt_conformance.fsck.judge.reference import look_at_files
from ckpt_conformance.fsck.source.findings import (
    Finding,
    Kind,
    Malformed,
    TooLarge,
    Topic,
)
from ckpt_conformance.fsck.source.source import Absent, EntryKind, chunks
from ckpt_conformance.fsck.source.sums import Sums, Work, unreadable
from ckpt_conformance.fsck.source.untrusted import MOST_JSON, clip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ckpt_conformance.fsck.judge.context import Context
    from ckpt_conformance.fsck.source.source import Folder

_GCS = "gs://"
_NO_TREE = "the tree of the arrays is missing"


class _Chunk(NamedTuple):
    """A chunk that is to be looked into."""

    name: str
    array: zarr.Array
    value: ocdbt.Value


@dataclass
class _Item:
    """One tree of arrays: a folder of a step, or the step itself.

    Attributes:
        base: its folder, relative to the checkpoint.
        files: its files, relative to the folder.
        values: where the value of each key is, as `params.w/0.0`.
        known: files that belong to it.
        lost: by file: the arrays that are in it, and cannot be read from there.

    """

    context: Context
    base: str
    files: set[str]
    values: dict[str, ocdbt.Value] = field(default_factory=dict[str, ocdbt.Value])
    known: set[str] = field(default_factory=set[str])
    lost: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def say(
        self,
        kind: Kind,
        name: str,
        what: str,
        tensors: Collection[str] = (),
        topic: Topic | None = None,
    ) -> None:
        """Report something about a file of the folder."""
        self.context.report.say(kind, self.base + name, what, tensors, topic)


# -- a step ----------------------------------------------------------------------------------------


def orbax_part(context: Context, base: str, names: Collection[str]) -> list[Work]:
    """Judge a step of Orbax, or an item that was saved alone; `names` are all of its files."""
    files = {name.removeprefix(base) for name in names if name.startswith(base)}
    trees = orbax.trees(files)
    handlers = _step(context, base, files, trees)
    can_read = _can_read(context, base, files)
    works: list[Work] = []
    taken: set[str] = set()
    for root in trees:
        item = _Item(context, base + root, orbax.below(files, root, trees))
        works += _tree(item, can_read=can_read)
        taken |= {root + name for name in item.known}
    for name in sorted(files - taken):
        _other(context, base, name, handlers)
    return works


def _step(
    context: Context, base: str, files: Collection[str], trees: Collection[str]
) -> dict[str, str]:
    """Judge whether a step was committed, and has its items; give what wrote each of these."""
    folder = context.folder.inner(base).root.resolve().name
    if orbax.TEMPORARY in folder:
        what = "the folder has the name of a save that did not end: Orbax removes it"
        context.report.say(Kind.MISSING, base + orbax.COMMITTED, what, topic=Topic.COMMIT)
    _marker(context, base, files)
    if orbax.STEP not in files:
        if trees:
            what = "it is not there: older releases wrote none, and it says whether the save ended"
            is_alone = {name.partition("/")[0] for name in files} & {orbax.TREE, ocdbt.MANIFEST}
            if not is_alone:
                context.report.say(Kind.NOTE, base + orbax.STEP, what)
        else:
            what = (
                "a folder with the name of a step, and nothing in it that was saved: the save did "
                "not end, and Orbax may take the folder for the newest step: remove it"
            )
            context.report.say(Kind.MISSING, base + orbax.STEP, what)
        return {}
    try:
        step = orbax.read_step(context.folder.read(base + orbax.STEP, MOST_JSON))
    except (OSError, Malformed) as error:
        context.refuse(base + orbax.STEP, error)
        return {}
    if not step.is_committed:
        what = "it has no time of a commit: the save did not end"
        context.report.say(Kind.MISSING, base + orbax.COMMITTED, what, topic=Topic.COMMIT)
    for item, handler in step.handlers.items():
        _presence(context, base, f"{item}/", files, handler)
    if step.handler and orbax.has_tree(step.handler) and orbax.TREE not in files:
        context.report.say(Kind.MISSING, base + orbax.TREE, _NO_TREE)
    return step.handlers


def _marker(context: Context, base: str, files: Collection[str]) -> None:
    """Report that the marker of the commit is missing, where anything says that there was one."""
    if orbax.COMMITTED in files:
        return
    others = [name for name in files if name.endswith(f"/{orbax.COMMITTED}")]
    if others or str(context.folder.root).startswith(_GCS):
        why = f"{others[0]} is there" if others else "Orbax writes it last in a bucket"
        what = f"the marker of the commit is missing, and {why}: the save did not end"
        context.report.say(Kind.MISSING, base + orbax.COMMITTED, what, topic=Topic.COMMIT)


def _presence(context: Context, base: str, item: str, files: Collection[str], handler: str) -> None:
    """Report an item of which nothing is there, or not the file that its handler always writes."""
    own = {name.removeprefix(item) for name in files if name.startswith(item)}
    if not own - {orbax.COMMITTED}:
        what = f"the item is missing, which {clip(handler.rpartition('.')[2])} wrote"
        context.report.say(Kind.MISSING, (base + item).rstrip("/"), what)
    elif orbax.has_tree(handler) and orbax.TREE not in own:
        context.report.say(
            Kind.MISSING, base + item + orbax.TREE, "the tree of the arrays is missing"
        )


def _can_read(context: Context, base: str, files: Collection[str]) -> bool:
    """Return whether arrays can be looked into; what is not installed for it is a finding."""
    try:
        zstd.check_installed()
    except zstd.NotInstalled as error:
        sign = next((name for name in (orbax.STEP, orbax.TREE) if name in files), ocdbt.MANIFEST)
        context.report.say(Kind.UNKNOWN, base + sign, f"{error}: no array was looked into")
        return False
    return True


def _other(context: Context, base: str, name: str, handlers: Mapping[str, str]) -> None:
    """Judge a file that is none of the arrays."""
    item = name.partition("/")[0]
    if name == orbax.STEP:
        return
    if name == orbax.COMMITTED or name.endswith(f"/{orbax.COMMITTED}"):
        look(context, base + name)
        return
    is_json = name.endswith(f"/{orbax.OF_JSON}") and orbax.is_json(handlers.get(item, ""))
    if name.endswith(".json") or is_json:
        json_part(context, base + name)
    else:
        other_part(context, base + name)


# -- the arrays of an item -------------------------------------------------------------------------


def _tree(item: _Item, *, can_read: bool) -> list[Work]:
    """Judge a tree of arrays."""
    tree = _read_tree(item)
    item.known |= {orbax.TREE} | {name for name in item.files if orbax.OF_DATABASE.fullmatch(name)}
    if tree is not None and tree.has_strings and orbax.STRINGS not in item.files:
        item.say(Kind.MISSING, orbax.STRINGS, "the file is missing: texts of the tree are in it")
    if ocdbt.MANIFEST in item.files or (tree is not None and tree.uses_ocdbt):
        item.known.add(ocdbt.MANIFEST)
        is_read = can_read and _database(item)
        _unread(item)
        if not is_read:
            return []
    else:
        names = sorted(item.files - item.known)
        sizes = item.context.folder.sizes([item.base + name for name in names])
        pairs = zip(names, sizes, strict=True)
        item.values = {name: ocdbt.Value(name, 0, size) for name, size in pairs}
    return _arrays(item, tree, can_read=can_read)


def _read_tree(item: _Item) -> orbax.Tree | None:
    """Read the metadata of a tree; None, and mostly a finding, where that fails."""
    name = item.base + orbax.TREE
    if orbax.TREE not in item.files:
        return None  # older releases wrote none for an array alone
    try:
        return orbax.read_tree(item.context.folder.read(name, MOST_JSON))
    except (OSError, Malformed) as error:
        item.context.refuse(name, error)
        return None


def _database(item: _Item) -> bool:
    """Read the keys of a database; False, and a finding, where that fails."""
    folder, report, read = item.context.folder, item.context.report, ocdbt.Read()
    try:
        root = ocdbt.read_root(folder, item.base, read)
        item.values = dict(ocdbt.entries(folder, item.base, root, read))
    except ocdbt.BadFile as bad:
        report.findings.append(unreadable(bad.file, bad.error))
        return False
    except Absent:
        what = "the manifest of the database is missing: what the processes wrote was not joined"
        item.say(Kind.MISSING, ocdbt.MANIFEST, what)
        return False
    except (OSError, Malformed) as error:
        item.context.refuse(item.base + ocdbt.MANIFEST, error)
        return False
    finally:
        report.crc += read.summed
    _manifests_of_processes(item)
    return True


def _unread(item: _Item) -> None:
    """Report files of a database to which no key leads, and that are code for whoever loads them.

    They are nodes, and values of older versions; a load of the database looks at no other.
    """
    folder = item.context.folder
    read = {value.file for value in item.values.values()}
    for name in sorted(item.known - read - {orbax.TREE, ocdbt.MANIFEST}):
        with contextlib.suppress(OSError, Malformed), folder.open(item.base + name) as file:
            if any_file.is_unsafe(file, folder.size(item.base + name), name):
                look(item.context, item.base + name)


def _manifests_of_processes(item: _Item) -> None:
    """Check the manifests that were joined: no load reads them."""
    for name in sorted(item.files):
        folder, _, last = name.rpartition("/")
        if last != ocdbt.MANIFEST or not orbax.OF_PROCESS.fullmatch(folder):
            continue
        try:
            data = item.context.folder.read(item.base + name, ocdbt.MOST_NODE)
            ocdbt.check_manifest(data)
            item.context.report.crc += len(data)
        except (OSError, Malformed) as error:
            item.context.refuse(item.base + name, error)


def _beside(item: _Item, tree: orbax.Tree | None, found: Mapping[str, zarr.Array]) -> None:
    """Judge the files beside the arrays, which name them: places on devices, shapes of chunks."""
    names = set(found) | set(tree.arrays if tree else ())
    for name in sorted(item.files):
        is_sharding = name == orbax.SHARDING
        if not is_sharding and not orbax.OF_ARRAYS.fullmatch(name):
            continue
        item.known.add(name)
        try:
            data = item.context.folder.read(item.base + name, MOST_JSON)
            if is_sharding:
                strange = orbax.read_shardings(data) - names
            else:
                strange = set(_other_shapes(data, found, names))
            if strange:
                what = f"it is of {clip(min(strange))}, which no array of the tree is like"
                raise Malformed(what)  # noqa: TRY301  as the others
        except (OSError, Malformed) as error:
            item.context.refuse(item.base + name, error)
    if tree and tree.has_jax and orbax.SHARDING not in item.files:
        what = "it is not there: a load that is not told where arrays go on devices may be refused"
        item.say(Kind.NOTE, orbax.SHARDING, what)


def _other_shapes(
    data: bytes, found: Mapping[str, zarr.Array], names: Collection[str]
) -> Iterator[str]:
    """Yield arrays that a process describes, and that have other chunks, or are in no tree."""
    for name, chunk in orbax.read_array_metadatas(data):
        array = found.get(name)
        is_other = array is not None and chunk not in (array.chunk, array.packing.inner)
        if is_other or name not in names:
            yield name


def _arrays(item: _Item, tree: orbax.Tree | None, *, can_read: bool) -> list[Work]:
    """Judge the arrays by their metadata; give the work that their chunks are."""
    found: dict[str, tuple[str, zarr.Array]] = {}
    for key in item.values:
        name, _, last = key.rpartition("/")
        if last in zarr.METADATA and name:
            item.known.add(key)
            array = _metadata(item, name, key)
            if array is not None:
                _packer(item, name, key, array)
                found[name] = key, array
    item.context.report.tensors += len(found)
    if tree is not None:
        _absent(item, tree)
        _unlike(item, tree, found)
    _beside(item, tree, {name: array for name, (_, array) in found.items()})
    good: list[_Chunk] = []
    for name, (key, array) in found.items():
        stores_all = tree is not None and tree.stores_all
        try:
            good += _chunks(item, name, key, array, stores_all=stores_all)
        except TooLarge as error:
            item.say(Kind.UNKNOWN, item.values[key].file, f"{key}: {error}", (name,))
    for file, tensors in item.lost.items():
        names = tuple(dict.fromkeys(tensors))
        try:
            size = item.context.folder.size(item.base + file)
            what = f"it has {size} bytes, and arrays are behind its end: cut short?"
            item.say(Kind.DAMAGED, file, what, names, Topic.SIZE)
        except (OSError, Malformed) as error:
            bad = unreadable(item.base + file, error)
            item.context.report.findings.append(replace(bad, tensors=names))
    if not can_read:
        return []
    works = _works(item, good) if item.context.sizes.reads_payload else []
    return works if item.context.sizes.is_whole else [*works, _looks(item, good)]


def _looks(item: _Item, good: list[_Chunk]) -> Work:
    """Look for code in the files of chunks that are not all unpacked: none of it is a chunk."""
    files = sorted({chunk.value.file for chunk in good})
    return Work(0, partial(look_at_files, item.context, item.base, files), is_look=True)


def _absent(item: _Item, tree: orbax.Tree) -> None:
    """Report arrays of the tree of which there is no metadata."""
    seen = {
        key.rpartition("/")[0] for key in item.values if key.rpartition("/")[2] in zarr.METADATA
    }
    names = [name for name in tree.arrays if name not in seen]
    if names:
        what = f"{len(names)} of {len(tree.arrays)} arrays of the tree are not there"
        is_database = ocdbt.MANIFEST in item.files
        file = ocdbt.MANIFEST if is_database else f"{names[0]}/{zarr.METADATA[0]}"
        item.say(Kind.MISSING, file, what, names)


def _unlike(item: _Item, tree: orbax.Tree, found: Mapping[str, tuple[str, zarr.Array]]) -> None:
    """Report what the tree says of all arrays, and is not so."""
    suffix = zarr.METADATA[tree.uses_zarr3]
    names = [name for name in tree.arrays if name in found and not found[name][0].endswith(suffix)]
    if names:
        version = 3 if tree.uses_zarr3 else 2
        what = f"it says that arrays are of version {version} of Zarr, and {len(names)} are not"
        item.say(Kind.DAMAGED, orbax.TREE, what, names)
    if tree.other_types:
        what = f"leaves are of the type {clip(tree.other_types[0])}, which is none of Orbax itself"
        item.say(Kind.NOTE, orbax.TREE, what)


def _packer(item: _Item, name: str, key: str, array: zarr.Array) -> None:
    """Report chunks that are packed in a way that is not looked into."""
    packer = array.packing.unknown
    if packer:
        is_known = packer in zarr.OTHER_PACKERS
        what = f"{key}: chunks are packed by {clip(packer)}, which is not looked into"
        item.say(Kind.NOTE if is_known else Kind.UNKNOWN, item.values[key].file, what, (name,))


def _metadata(item: _Item, name: str, key: str) -> zarr.Array | None:
    """Read the metadata of an array; None, and a finding, where that fails."""
    value = item.values[key]
    try:
        if value.size > zarr.MOST_METADATA:
            raise Malformed(f"its metadata has {value.size} bytes")  # noqa: TRY301  as the others
        whole = memoryview(bytearray(value.size))
        pieces = _bytes(item.context.folder, item.base + value.file, value, whole)(0, value.size)
        data = b"".join(map(bytes, pieces))
        return zarr.read(key, data)
    except Absent:
        item.lost[value.file].append(name)
    except (OSError, Malformed) as error:
        bad = unreadable(item.base + value.file, error)
        item.context.report.findings.append(
            replace(bad, what=f"{key}: {bad.what}", tensors=(name,))
        )
    return None


def _chunks(
    item: _Item, name: str, key: str, array: zarr.Array, *, stores_all: bool
) -> Iterator[_Chunk]:
    """Yield the chunks of an array that are where they should be; report the others."""
    gone, first = 0, ""
    for short in array.keys():  # noqa: SIM118  no dict
        value = item.values.get(f"{name}/{short}")
        if value is None:
            gone, first = gone + 1, first or f"{name}/{short}"
            continue
        item.known.add(f"{name}/{short}")
        if value.data is None and value.end > _size(item, value.file):
            item.lost[value.file].append(name)
        elif not zarr.is_size_right(array, value.size):
            what = f"{name}/{short} has {value.size} bytes, which no chunk of it has"
            place = (value.start, value.end)
            item.context.report.findings.append(
                Finding(Kind.DAMAGED, item.base + value.file, what, (name,), *place)
            )
        else:
            yield _Chunk(name, array, value)
    if gone:
        _gone(item, name, key, (gone, array.chunks(), first), stores_all=stores_all)


def _gone(
    item: _Item, name: str, key: str, gone: tuple[int, int, str], *, stores_all: bool
) -> None:
    """Report chunks that are not there, which is right where a chunk of zeros is not written."""
    number, total, first = gone
    is_database = ocdbt.MANIFEST in item.files
    file = ocdbt.MANIFEST if is_database else first
    what = f"{number} of {total} chunks of {clip(name)} are not there, as {clip(first)}"
    if stores_all:
        item.say(Kind.MISSING, file, what, (name,))
    else:
        why = (
            "chunks that are all fill value may be left out, so nobody can tell whether it is right"
        )
        item.say(Kind.NOTE, file if is_database else key, f"{what}: {why}", (name,))


def _size(item: _Item, file: str) -> int:
    """Return the size of a file; 0 where it is not there."""
    entry = item.context.folder.entry(item.base + file)
    if entry is not None and entry.kind is EntryKind.FILE:
        return entry.size
    try:
        return item.context.folder.size(item.base + file)
    except (OSError, Malformed):
        return 0


def _works(item: _Item, good: list[_Chunk]) -> list[Work]:
    """Divide chunks into works of about one batch."""
    works: list[Work] = []
    group: list[_Chunk] = []
    size = 0
    for at, chunk in enumerate(good):
        group.append(chunk)
        size += chunk.value.size
        if size >= item.context.sizes.batch or at == len(good) - 1:
            check = partial(_check, item.context.folder, item.base, tuple(group))
            works.append(Work(size, check))
            group, size = [], 0
    return works


def _check(folder: Folder, base: str, group: tuple[_Chunk, ...], buffer: memoryview) -> Sums:
    """Look into chunks: each has the length that its array says, once it is unpacked."""
    sums = Sums()
    for name, array, value in group:
        try:
            read_at = _bytes(folder, base + value.file, value, buffer)
            sums.crc += zarr.check(array, value.size, read_at)
        except (OSError, Malformed) as error:
            bad = unreadable(base + value.file, error)
            place = (value.start, value.end) if value.data is None else (None, None)
            what = f"{clip(name)}: {bad.what}"
            sums.findings.append(Finding(bad.kind, base + value.file, what, (name,), *place))
    return sums


def _bytes(folder: Folder, name: str, value: ocdbt.Value, buffer: memoryview) -> zarr.Reader:
    """Return what reads bytes [start, end) of a value through a buffer."""
    data = value.data

    def read(start: int, end: int) -> Iterator[memoryview]:
        if data is not None:
            yield memoryview(data)[start:end]
            return
        with folder.open(name) as file:
            yield from chunks(file, value.start + start, value.start + end, buffer)

    return read
