"""What a checkpoint holds, by name, whatever its layout: tensors as pieces, other values as data.

Names are the keys joined by dots. Where a checkpoint has several files of data, the name of the
file comes first (`optimizer.state.0.exp_avg` of `optimizer.bin`), less the step in it. The per-rank
and the DCP format of the reference manager give the same names. A file that no reader knows is
compared byte by byte, under its own name.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.contents import arrays, leaves, others, ranks, snapshots
from ckpt_conformance.fsck.contents.entries import (
    BYTES,
    Content,
    Tensor,
    add_item,
    entry_of,
    tree_entries,
)
from ckpt_conformance.fsck.contents.leaves import Value, joined
from ckpt_conformance.fsck.contents.tiles import Packed, Piece, dense_piece
from ckpt_conformance.fsck.formats import (
    dcp,
    dcp_packed,
    foreign,
    hf_shards,
    manifest,
    safetensors_file,
    torch_file,
    zstd,
)
from ckpt_conformance.fsck.formats.dtypes import FROM_SAFETENSORS, ITEM_SIZE
from ckpt_conformance.fsck.layouts import layouts
from ckpt_conformance.fsck.layouts.layouts import Format
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.untrusted import MOST_JSON, is_dict, is_json_lines, parse_any_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpt_conformance.fsck.contents.entries import Entry
    from ckpt_conformance.fsck.formats.cover import Box
    from ckpt_conformance.fsck.layouts.layouts import Candidate, Part
    from ckpt_conformance.fsck.source.source import Folder, Readable

_TAG = "__ckpt__"
_REFERENCE_FILE = re.compile(r"(model|optim|extra)_\d+(?:_rank(\d+))?\.pt")
_OF_RANK = re.compile(r"rank\d+\.")
_DCP_RANK = re.compile(r"extra_state_(rank\d+)\.pt")
_DATA = (
    *(Format.TORCH, Format.SAFETENSORS, Format.INDEX, Format.DCP, Format.HF_SHARDS),
    *(Format.GGUF, Format.NPZ, Format.FLAX, Format.ONNX, Format.EXPORT),
    *(Format.KERAS, Format.SB3),
)


def read(folder: Folder, candidate: Candidate) -> Content:
    """Read all of a checkpoint but its payload.

    Raises:
        Malformed, OSError: a file that cannot be read; the text names it.

    """
    content = Content(folder)
    taken: set[str] = set()
    several = sum(part.form in _DATA for part in candidate.parts) > 1
    for part in candidate.parts:
        is_named = part.form is not Format.HF_SHARDS and (several or part.form is Format.JSON)
        stem = _stem(part.name, candidate.step) if is_named else ""
        taken.update(_part(content, part, joined(_dotted(part.base), stem), candidate))
    beside = {*_beside(folder, candidate)}
    foreign = {part.base + part.name for part in candidate.parts if part.form in layouts.FOREIGN}
    content.by_bytes += sorted((foreign | beside) - taken)
    files = {*candidate.files} | beside
    for name in sorted(files - taken):
        size = folder.size(name)
        box = ((0,), (size,))
        content.add(name, Tensor(BYTES, (size,), (Piece(box, name, 0, (1,)),), 1))
    return content


def _beside(folder: Folder, candidate: Candidate) -> Iterator[str]:
    """Yield the files in which a model of ONNX keeps its tensors; nothing of one that is damaged.

    A name that leads out of the folder was refused before.
    """
    for part in candidate.parts:
        if part.form is Format.ONNX:
            name = part.base + part.name
            with folder.open(name) as file:
                external = foreign.read_onnx(file, folder.size(name)).external
            yield from (str(PurePosixPath(name).parent / one.file) for one in external)


def _dotted(base: str) -> str:
    return base.strip("/").replace("/", ".")


def _stem(name: str, step: int | None) -> str:
    """Return the name of a file without its ending and without the step in it."""
    stem = name
    for ending in (".index.json", ".safetensors", ".json", ".bin"):
        stem = stem.removesuffix(ending)
    stem = PurePosixPath(stem).stem if stem == name else stem
    if step is None or name == dcp.METADATA:
        return "" if name == dcp.METADATA else stem
    return re.sub(rf"[-_=.]?0*{step}(?=\D|$)", "", stem, count=1) or stem


def _part(content: Content, part: Part, top: str, candidate: Candidate) -> Iterator[str]:
    """Read one part; give the files that it consists of."""
    form, base, name = part
    try:
        match form:
            case Format.REFERENCE:
                yield from _reference(content, base, name)
            case Format.DUMP:
                yield from _dump(content, base)
            case Format.DCP:
                yield from _dcp(content, base, _dotted(base))
            case Format.INDEX:
                yield from _index(content, base, name, top)
            case Format.HF_SHARDS:
                yield from _hf_shards(content, base, _dotted(base))
            case Format.SAFETENSORS:
                yield from _safetensors(content, base + name, top)
            case Format.TORCH:
                yield from _torch(content, base + name, top)
            case Format.JSON:
                yield from _json(content, base + name, top)
            case _:
                yield from _of_others(content, part, top, candidate)
    except Malformed as error:
        error.args = (f"{base}{name}: {error}",)  # its sort and its place stay
        raise


def _of_others(content: Content, part: Part, top: str, candidate: Candidate) -> Iterator[str]:
    """Read what libraries beside torch and Hugging Face write, as far as it is read."""
    form, base, name = part
    match form:
        case Format.ORBAX:
            yield from arrays.add(content, base, _dotted(base), candidate.files)
        case Format.SNAPSHOT:
            yield from snapshots.add(content, base, _dotted(base))
        case _:
            yield from others.add(content, form, base + name, top)


def _torch(content: Content, name: str, top: str) -> Iterator[str]:
    """Read a file of `torch.save`."""
    with content.folder.open(name) as file:
        archive = torch_file.read(file, 0, content.folder.size(name))
        _check_order(file, archive)
    if archive.tree is None:
        raise Malformed("the structure cannot be read")
    for key, entry in tree_entries(archive, name, top, content.keys):
        content.add(key, entry)
    yield name


def _check_order(file: Readable, archive: torch_file.Archive) -> None:
    """Refuse bytes of a big-endian machine: their numbers would be read wrong."""
    record = archive.records.get("byteorder")
    if record is not None:
        length = min(record.end - record.start, len("little"))
        if exactly(file, record.start, length) not in (b"little", b""):
            raise Malformed("it was written on a big-endian machine, which is not supported")


def _safetensors(content: Content, name: str, top: str) -> Iterator[str]:
    """Read the header of a safetensors file; elements below a byte are compared as bytes."""
    with content.folder.open(name) as file:
        stored = safetensors_file.read(file)
    for tensor in stored:
        dtype = FROM_SAFETENSORS.get(tensor.dtype)
        shape = tensor.shape if dtype else (tensor.end - tensor.start,)
        item = ITEM_SIZE[dtype] if dtype else 1
        piece = dense_piece(name, tensor.start, ((0,) * len(shape), shape), item)
        content.add(joined(top, tensor.name), Tensor(dtype or tensor.dtype, shape, (piece,), item))
    yield name


def _hf_shards(content: Content, base: str, top: str) -> Iterator[str]:
    """Read the shards of a folder; the parts of a tensor are put together."""
    chunks: list[hf_shards.Chunk] = []
    for name in filter(hf_shards.is_shard, content.folder.listing(base)):
        with content.folder.open(base + name) as file:
            chunks += hf_shards.read(file, base + name)
        yield base + name
    for name, own in hf_shards.by_name(chunks).items():
        whole = hf_shards.join(own)
        dtype = FROM_SAFETENSORS.get(whole.dtype)
        if dtype is None:
            raise Malformed(f"{name} is {whole.dtype}, whose parts cannot be put together here")
        item = ITEM_SIZE[dtype]
        pieces = [dense_piece(one.file, one.stored.start, one.box, item) for one in own]
        content.add(joined(top, name), Tensor(dtype, whole.shape, tuple(pieces), item))


def _index(content: Content, base: str, name: str, top: str) -> Iterator[str]:
    """Read the files of an index of Hugging Face as one."""
    files = safetensors_file.read_index(content.folder.read(base + name, MOST_JSON)).files
    yield base + name
    for file in sorted(files):
        read_file = _safetensors if file.endswith(".safetensors") else _torch
        yield from read_file(content, base + file, top)


def _json(content: Content, name: str, top: str) -> Iterator[str]:
    """Read a JSON file as values."""
    data = content.folder.read(name, MOST_JSON)
    value = None if is_json_lines(data) else parse_any_json(data)
    if not is_dict(value):
        return  # compared by its bytes
    for key, leaf in leaves.of_tree(value, {}, top):
        content.add(key, leaf if isinstance(leaf, Value) else Value(None))
    yield name


def _dcp(content: Content, base: str, top: str) -> Iterator[str]:
    """Read a directory of DCP: tensors as chunks, other items as data."""
    names = dcp.metadata_of_ranks(content.folder.listing(base))
    if len(names) > 1:
        yield from _dcp_of_ranks(content, base, top, names)
        return
    name = next(iter(names.values()), dcp.METADATA)
    metadata = dcp.read_metadata(content.folder.read(base + name, MOST_JSON))
    yield base + name
    for shard in sorted(metadata.items):
        yield base + shard
    pieces = _pieces(content, base, top, metadata)
    for key, tensor in metadata.tensors.items():
        _add_chunks(content, joined(top, key), tensor, pieces.get(key, []))


def _dcp_of_ranks(content: Content, base: str, top: str, names: dict[int, str]) -> Iterator[str]:
    """Read what each rank saved alone; tensors that they divided are put together.

    Of parts that several ranks have the first is taken.
    """
    read = {
        rank: dcp.read_metadata(content.folder.read(base + name, MOST_JSON))
        for rank, name in names.items()
    }
    yield from (base + name for name in names.values())
    both = dcp.divided(read.values())
    together: dict[str, dict[Box, Piece]] = {}
    for rank, metadata in read.items():
        own = joined(top, f"rank{rank}")
        yield from (base + shard for shard in sorted(metadata.items))
        pieces = _pieces(content, base, own, metadata)
        for key, tensor in metadata.tensors.items():
            if key not in both:
                _add_chunks(content, joined(own, key), tensor, pieces.get(key, []))
            for piece in pieces.get(key, []) if key in both else ():
                together.setdefault(key, {}).setdefault(piece.box, piece)
    for key, tensors in both.items():
        if dcp.joined_chunks(tensors) is None:
            raise Malformed(f"the ranks do not agree on {key}: their parts fit no one tensor")
        _add_chunks(content, joined(top, key), tensors[0], together.get(key, {}).values())


def _add_chunks(content: Content, name: str, tensor: dcp.Stored, pieces: Iterable[Piece]) -> None:
    item = ITEM_SIZE[tensor.dtype]
    grad = tensor.requires_grad
    content.add(name, Tensor(tensor.dtype, tensor.shape, tuple(pieces), item, requires_grad=grad))


def _pieces(
    content: Content, base: str, top: str, metadata: dcp.Metadata
) -> dict[str, list[Piece]]:
    """Return the chunks of each tensor; other items are added at once."""
    pieces: dict[str, list[Piece]] = {}
    for shard, items in sorted(metadata.items.items()):
        bare = dcp.bare_tensors(items)
        others = [item for item in items if not item.dtype] if bare else items
        for key, piece in _bare(content.folder, base + shard, bare):
            pieces.setdefault(key, []).append(piece)
        for stored in others:
            place, length = stored.place.start, stored.place.end - stored.place.start
            if stored.place.packed:
                for piece in _packed(content, base + shard, top, stored):
                    pieces.setdefault(stored.key, []).append(piece)
            elif stored.dtype:
                piece = Piece((stored.at, stored.shape), base + shard, place, None, length)
                pieces.setdefault(stored.key, []).append(piece)
            else:
                add_item(content, base + shard, joined(top, stored.key), place, length)
    return pieces


def _packed(content: Content, shard: str, top: str, stored: dcp.Item) -> Iterator[Piece]:
    """Yield the part of a tensor that an extension of DCP has packed; add what is no tensor."""
    with content.folder.open(shard) as file:
        archive, length = dcp_packed.structure(file, stored)
    start, end = stored.place.start, stored.place.end
    packed = Packed(shard, start, end, length, zstd.unpacked)
    if not stored.dtype:
        for name, entry in tree_entries(archive, shard, joined(top, stored.key), content.keys):
            content.add(name, entry_of(entry, packed))
        return
    if [(one.dtype, one.shape) for one in archive.tensors] != [(stored.dtype, stored.shape)]:
        raise Malformed(f"{stored.key} should be {stored.dtype} {stored.shape}, and is not")
    (tensor,) = archive.tensors
    box = (stored.at, stored.shape)
    yield Piece(box, shard, tensor.start, tensor.stride, packed=packed)


def _bare(folder: Folder, shard: str, items: list[dcp.Item]) -> Iterator[tuple[str, Piece]]:
    """Yield the tensors of a shard that are a safetensors file."""
    if not items:
        return
    with folder.open(shard) as file:
        stored = dcp.read_bare(file, items)
    for item in items:
        start, box = stored[item.key].start, (item.at, item.shape)
        yield item.key, dense_piece(shard, start, box, ITEM_SIZE[item.dtype])


def _dump(content: Content, base: str) -> Iterator[str]:
    """Read an emergency dump: what each rank has, under the names of per-rank files."""
    for name in sorted(content.folder.listing(base)):
        if manifest.rank_of_marker(name) is not None:
            yield from _reference(content, base, name)


def _reference(content: Content, base: str, name: str) -> Iterator[str]:
    """Read a checkpoint of the reference manager, under the same names in both formats."""
    before = {*content.entries}
    yield from _reference_files(content, base, name)
    for key in content.entries.keys() - before:
        if _OF_RANK.match(key):
            content.own[key] = _OF_RANK.sub("", key, count=1)


def _reference_files(content: Content, base: str, name: str) -> Iterator[str]:
    """Read the files that its manifest lists."""
    listed = manifest.read(content.folder.read(base + name, manifest.MOST_BYTES))
    yield base + name
    if listed.kind == "dcp":
        inner = Content(content.folder)
        yield from _dcp(inner, base, "")
        yield from _torch(inner, base + layouts.DCP_EXTRA, "")
        for file_name in sorted(listed.files):
            if match := _DCP_RANK.fullmatch(file_name):
                yield from _torch(inner, base + file_name, match[1])
        for key, entry in _assembled(inner.entries):
            content.add(key, entry)
        return
    is_many = listed.world_size > 1
    inner = Content(content.folder, keys=content.keys)
    for file_name in sorted(listed.files):
        match = _REFERENCE_FILE.fullmatch(file_name)
        top = {"model": "model", "optim": "optim"}.get(match[1], "") if match else file_name
        rank = f"rank{match[2]}" if match and match[2] and is_many else ""
        yield from _torch(inner, base + file_name, joined(top, rank))
    for key, entry in ranks.together(inner.entries, listed.world_size, listed.layout).items():
        content.add(key, entry)


def _assembled(entries: dict[str, Entry]) -> Iterator[tuple[str, Entry]]:
    """Put the tensors of DCP where the states of the ranks refer to them; what all have, once."""
    head, tag, value = "skeleton.", f".{_TAG}", ".value"
    refers: dict[str, str] = {}
    for key, entry in entries.items():
        whose = key.removesuffix(tag)
        target = entries.get(f"{whose}{value}")
        if whose == key or entry != Value("tensor") or not isinstance(target, Value):
            continue
        if isinstance(target.value, str) and target.value in entries:
            refers[whose] = target.value
    hidden = {f"{whose}{end}" for whose in refers for end in (tag, value)} | {*refers.values()}
    for key, entry in entries.items():
        if key not in hidden:
            yield key.removeprefix(head), entry
    of_all = {whose.removeprefix(head): name for whose, name in refers.items()}
    for whose, name in of_all.items():
        if of_all.get(_OF_RANK.sub("", whose)) != name or not _OF_RANK.match(whose):
            yield whose, entries[name]
