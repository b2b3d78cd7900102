"""What a checkpoint holds, as entries by name: tensors as pieces, other values as data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.contents import leaves
from ckpt_conformance.fsck.contents.leaves import Value
from ckpt_conformance.fsck.contents.tiles import Packed, Piece
from ckpt_conformance.fsck.formats import torch_file
from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE, elements

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Folder

BYTES = "bytes"
"""The dtype of a file that no reader knows."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in the global view: its pieces cover it.

    Attributes:
        dtype: the name of the torch dtype, or BYTES.
        item: bytes of an element.
        pending: what is still to be done with the elements, as `conj`; mostly nothing.
        requires_grad: whether a load gives one that gets a gradient; None where nothing says so.

    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    item: int
    pending: str = ""
    requires_grad: bool | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return elements(self.shape) * self.item


Entry = Tensor | Value


@dataclass
class Content:
    """The entries of a checkpoint by name, and the folder of its files.

    Attributes:
        keys: types of keys of dicts, by the names that they lead to, as far as files say them.
        by_bytes: files whose tensors are not read: they are entries themselves.
        own: names of what one rank has, with the names that the first rank has it under.

    """

    folder: Folder
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    keys: dict[str, str] = field(default_factory=dict[str, str])
    by_bytes: list[str] = field(default_factory=list[str])
    own: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry; a name that is there gets a number: 1 and "1" may both be keys."""
        unique, number = name, 2
        while unique in self.entries:
            unique, number = f"{name} ({number})", number + 1
        self.entries[unique] = entry


def tree_entries(
    archive: torch_file.Archive, file: str, top: str = "", keys: dict[str, str] | None = None
) -> Iterator[tuple[str, Entry]]:
    """Yield the leaves of an archive as entries; `keys` as of `leaves.of_tree`."""
    spans = {one.what: one for one in archive.spans}
    for key, leaf in leaves.of_tree(archive.tree, archive.records, top, keys):
        if isinstance(leaf, Value):
            yield key, leaf
            continue
        box = ((0,) * len(leaf.shape), leaf.shape)
        piece = Piece(box, file, leaf.start, leaf.stride, span=spans.get(leaf.record))
        item = ITEM_SIZE[leaf.dtype]
        says = (leaf.pending, leaf.requires_grad)
        yield key, Tensor(leaf.dtype, leaf.shape, (piece,), item, *says)


def entry_of(entry: Entry, packed: Packed) -> Entry:
    """Return an entry of an archive that has to be unpacked first."""
    if isinstance(entry, Value):
        return entry
    pieces = (replace(one, packed=packed, span=None) for one in entry.pieces)
    return replace(entry, pieces=tuple(pieces))


def add_item(content: Content, shard: str, key: str, place: int, length: int) -> None:
    """Add what `torch.save` wrote at a place of a file: a structure, and no bare tensor."""
    with content.folder.open(shard) as file:
        archive = torch_file.read(file, place, length)
    for name, entry in tree_entries(archive, shard, key, content.keys):
        content.add(name, entry)
