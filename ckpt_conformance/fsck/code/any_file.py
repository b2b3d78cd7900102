"""What a load of a file of any name may run: pickles, wherever programs look for them.

That is a plain pickle, objects in an array of numpy, pickles in a zip of any writer, and those in a
tar archive, which torch.load still unpacks; packed or not (`packed`), and in one another up to
`_MOST_LAYERS`. What stable-baselines3 keeps in a zip as JSON is a pickle, too. Tags of YAML are
looked for in a text of that name. Nothing here says that a file is right.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING, cast

from ckpt_conformance.fsck.code import serialized, yaml_tags
from ckpt_conformance.fsck.code.packed import Budget, Packer, Unpacked, packer_of
from ckpt_conformance.fsck.formats import any_zip, zip_ends
from ckpt_conformance.fsck.formats.torch_file import SCRIPT, Stream, grown, read_stream, stream_of
from ckpt_conformance.fsck.formats.written_names import judge_names
from ckpt_conformance.fsck.formats.zip_ends import UNREADABLE, WholeFile
from ckpt_conformance.fsck.pickled import effort
from ckpt_conformance.fsck.pickled.asked import Asked
from ckpt_conformance.fsck.pickled.faults import Short
from ckpt_conformance.fsck.source.findings import Kind, Malformed, NotRead, OutOfTime, TooLarge
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from ckpt_conformance.fsck.source.source import Readable

_ARRAY = b"\x93NUMPY"
_BLOCK = 512  # bytes of a header in a tar archive
_CHECKSUM = slice(148, 156)
_OF_TORCH = {"storages", "tensors", "pickle"}  # members of the archives of torch before 0.1.10
_MOST_MEMBERS = 100_000
_MOST_LAYERS = 4
_MOST_HELD = 256 << 20  # bytes of an archive in another one, which is held to be looked into


@dataclass
class _Layer:
    """Where a look is: how many files around it, and what may still be unpacked.

    Attributes:
        depth: archives and packed files around it.
        budget: of the file on the disk.

    """

    depth: int
    budget: Budget

    def inner(self) -> _Layer:
        """Go into one; TooLarge where it is one too many."""
        if self.depth >= _MOST_LAYERS:
            raise TooLarge(f"it is packed, or an archive, more than {_MOST_LAYERS} times over")
        return _Layer(self.depth + 1, self.budget)


@effort.for_one_file()
def read(file: Readable, length: int, name: str) -> Stream | None:
    """Return what a load of a file asks for; None where it holds no pickle, and no tags of YAML.

    Tags are looked for where the name says YAML, or a text without a format: others may have their
    signs. What is not
    looked into (too large, packed too often) is a stream with `is_limit`.

    Raises:
        OSError, Malformed: it cannot be read.

    """
    stream = _look(file, length, _Layer(0, Budget()))
    if stream is None and yaml_tags.is_named(name):
        return _of_yaml(file, length)
    if stream is None and yaml_tags.may_be_named(name):
        asked = yaml_tags.asked_by_text(exactly(file, 0, min(length, yaml_tags.MOST_OF_ANY)))
        return Stream(asked, is_legacy=False) if asked.names else None
    return stream


def _of_yaml(file: Readable, length: int) -> Stream | None:
    """Return what the tags of a text ask for; None for nothing."""
    asked = yaml_tags.asked_by(exactly(file, 0, min(length, yaml_tags.MOST)))
    if length > yaml_tags.MOST:
        what = f"a text of {length} bytes: {yaml_tags.MOST} are read at most"
        return Stream(asked, is_legacy=False, problem=what, is_limit=True)
    return Stream(asked, is_legacy=False) if asked.names else None


def _look(file: Readable, length: int, layer: _Layer) -> Stream | None:
    head = exactly(file, 0, min(_BLOCK, length))
    if head.startswith(zip_ends.MAGIC):
        zipped = _together(_zipped(file, length, layer))
        return zipped and replace(zipped, is_archive=True)
    if head.startswith(_ARRAY):
        return grown(lambda most: exactly(file, 0, min(length, most)), _array)
    if _is_tar(head):
        found = None
        with _tar_errors(), tarfile.open(fileobj=WholeFile(file, length), mode="r:") as archive:
            found = _tar(archive, partial(_in_place, layer=layer))
        return found  # noqa: RET504  an error of the archive is no error here
    stream = read_stream(file, length)
    if stream is None and (packer := packer_of(head)):
        return _unpacked(file, length, packer, layer)
    return _with_a_zip_behind(stream, file, length, layer)


def _with_a_zip_behind(
    stream: Stream | None, file: Readable, length: int, layer: _Layer
) -> Stream | None:
    """Look for a zip that begins somewhere in a file: readers begin at its end."""
    if not zip_ends.has_end(zip_ends.tail(file, length)):
        return stream
    zipped = _together(_zipped(file, length, layer))
    if zipped is None:
        return stream
    if stream is None:
        return replace(zipped, is_archive=True)
    stream.asked.add(zipped.asked)
    is_limit, problem = stream.is_limit or zipped.is_limit, stream.problem or zipped.problem
    return replace(stream, is_limit=is_limit, problem=problem)


def _not_looked_into(error: NotRead) -> Stream:
    return Stream(Asked(), is_legacy=False, problem=str(error), is_limit=True, is_archive=True)


def _unpacked(file: Readable, length: int, packer: Packer, layer: _Layer) -> Stream | None:
    """Return what the bytes ask for that others are packed from."""
    found = None
    try:
        inner = layer.inner()
        opened = Unpacked(file, length, packer, layer.budget)
        if not _is_tar(opened.peek(_BLOCK)):
            stream = _of_opened(opened, inner)
            return stream and replace(stream, is_archive=True)
        with _tar_errors(), tarfile.open(fileobj=opened, mode="r|") as archive:
            found = _tar(archive, partial(_in_order, layer=inner))
    except TooLarge as error:
        return _not_looked_into(error)
    return found


def _of_opened(opened: Unpacked | IO[bytes], layer: _Layer) -> Stream | None:
    """Look at a member, or at what was unpacked: once, from its front."""
    data = bytearray()
    head = _up_to_the_fault(data, opened, _BLOCK)
    is_layer = head.startswith(zip_ends.MAGIC) or _is_tar(head)
    if not is_layer:
        stream = grown(partial(_up_to_the_fault, data, opened), _of_bytes)
        if stream is not None or not (head[:1] == b"{" or packer_of(head)):
            return stream
    held = _up_to_the_fault(data, opened, _MOST_HELD + 1)
    layer.budget.spend(len(held))
    if len(held) > _MOST_HELD:
        if head[:1] == b"{" and serialized.KEY not in held:
            return None
        raise TooLarge(f"an archive or JSON in it has more than {_MOST_HELD} bytes")
    if head[:1] == b"{":
        return _together(_in_json(held))
    return _look(io.BytesIO(held), len(held), layer.inner())


def _in_json(data: bytes) -> Iterator[Stream | None]:
    """Yield what pickles in a JSON text ask for."""
    for one in serialized.pickles_in(data):
        yield grown(partial(_front, one), stream_of)


def _front(data: bytes, most: int) -> bytes:
    return data[:most]


def is_unsafe(file: Readable, length: int, name: str) -> bool:
    """Return whether a load of a file may run code."""
    stream = read(file, length, name)
    return stream is not None and any(
        kind is Kind.UNSAFE for kind, *_ in judge_names(stream.asked, (SCRIPT,))
    )


def _of_bytes(data: bytes, most: int) -> Stream | None:
    look = _array if data.startswith(_ARRAY) else stream_of
    return look(data, most)


def _array(data: bytes, most: int) -> Stream | None:
    """Return what the objects of an array ask for: they follow its header as a pickle.

    Raises Short where the header goes on behind as many bytes as were asked for.
    """
    wide = data[6:7] > b"\x01"
    form = struct.Struct("<I" if wide else "<H")
    start = 8 + form.size
    if len(data) < start:
        return None
    (size,) = form.unpack_from(data, 8)
    if len(data) >= most < start + size:
        raise Short("the header of an array")
    if any_zip.has_plain_dtype(data[start : start + size]):
        return None
    return stream_of(data[start + size :], most - start - size)


def _together(streams: Iterator[Stream | None]) -> Stream | None:
    """Put what the members of an archive ask for together."""
    asked, is_any, problem = Asked(), False, ""
    for stream in streams:
        if stream is not None:
            asked.add(stream.asked)
            is_any = True
            problem = problem or (stream.problem if stream.is_limit else "")
    return (
        Stream(asked, is_legacy=False, problem=problem, is_limit=bool(problem)) if is_any else None
    )


# -- archives --------------------------------------------------------------------------------------


def _zipped(file: Readable, length: int, layer: _Layer) -> Iterator[Stream | None]:
    """Yield what the members of a zip ask for, however wrong the archive is.

    Torch's reader and Python's may find two archives in one file.
    """
    seen = set[tuple[object, ...]]()
    for opens in (zip_ends.TorchZip, zip_ends.of_python):
        try:
            yield from _of_archive(opens(file, length), seen, layer)
        except TooLarge as error:
            yield _not_looked_into(error)
        except OutOfTime:
            if layer.depth:
                raise
        except (*UNREADABLE, Malformed):
            continue


def _of_archive(
    archive: zip_ends.Opened, seen: set[tuple[object, ...]], layer: _Layer
) -> Iterator[Stream | None]:
    """Yield what the members of an archive ask for that were not `seen` before."""
    members = archive.infolist()
    for one in members[:_MOST_MEMBERS]:
        what = (one.filename, one.compress_type, one.compress_size, one.file_size)
        if (one.header_offset, *what) not in seen:
            seen.add((one.header_offset, *what))
            yield _of_member(archive, one, layer)
    if len(members) > _MOST_MEMBERS:
        raise TooLarge(f"{len(members)} members, and {_MOST_MEMBERS} are looked into")


_RAW = (["data", "weights"], ["data", "constants"])  # of torch.export: any bytes may be there


def _of_member(archive: zip_ends.Opened, member: zipfile.ZipInfo, layer: _Layer) -> Stream | None:
    parts = member.filename.split("/")
    if parts[-2:-1] == ["data"] and parts[-1].isdecimal():
        return None  # a storage
    try:
        with archive.open(member) as opened:
            zip_ends.without_sum(opened)
            stream = _of_opened(opened, layer)
            is_raw = parts[-3:-1] in _RAW and stream is not None and stream.is_limit
            return None if is_raw and stream and not stream.asked.names else stream
    except TooLarge as error:
        return _not_looked_into(error)
    except OutOfTime:
        raise
    except (*UNREADABLE, Malformed):
        return None


def _up_to_the_fault(data: bytearray, opened: Unpacked | IO[bytes], most: int) -> bytes:
    """Read on in a member; what comes before its CRC turns out wrong is kept in `data`."""
    try:
        while len(data) < most and (piece := opened.read(min(most - len(data), 1 << 16))):
            data += piece
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError):
        pass
    except OSError as error:
        if error.errno is not None:  # of a disk; that of bzip2 has no number
            raise
    return bytes(data[:most])


def _is_tar(head: bytes) -> bool:
    """Return whether a block is the header of a tar archive: its bytes have the sum it says."""
    if len(head) < _BLOCK:
        return False
    try:
        said = int(head[_CHECKSUM].rstrip(b" \0").strip() or b"-1", 8)
    except ValueError:
        return False
    return said == sum(head) - sum(head[_CHECKSUM]) + 8 * ord(" ")


def _tar(
    archive: tarfile.TarFile, look: Callable[[IO[bytes], int], Stream | None]
) -> Stream | None:
    """Return what the members of a tar archive ask for; one of torch's is not read as a whole."""
    names, streams = set[str](), list[Stream | None]()
    try:
        with _tar_errors():
            for number, member in enumerate(archive):
                if number == _MOST_MEMBERS:
                    what = f"more than {_MOST_MEMBERS} members, which are looked into at most"
                    streams.append(_not_looked_into(TooLarge(what)))
                    break
                names.add(member.name)
                opened = archive.extractfile(member) if member.isreg() else None
                if opened:
                    streams.append(look(opened, member.size))
    except OutOfTime as error:  # whose archive it is may be said by a member that was not read
        asked = (_together(iter(streams)) or _not_looked_into(error)).asked
        return Stream(asked, is_legacy=False, problem=str(error), is_limit=True)
    stream = _together(iter(streams))
    if not names & _OF_TORCH:
        return stream and replace(stream, is_archive=True)
    what = "it is a tar archive of torch before 0.1.10, which cannot be checked"
    return Stream(stream.asked if stream else Asked(), is_legacy=False, problem=what, is_limit=True)


def _in_place(opened: IO[bytes], size: int, layer: _Layer) -> Stream | None:
    """Look at a member of an archive that is not packed, wherever in it."""
    try:
        whole = cast("Readable", opened)  # a BufferedReader, as every member is
        return _look(whole, size, layer.inner()) if size >= 0 else None
    except TooLarge as error:
        return _not_looked_into(error)
    except OutOfTime:
        raise
    except Malformed:
        return None


def _in_order(opened: IO[bytes], _size: int, layer: _Layer) -> Stream | None:
    """Look at a member of a packed archive, which is read from its front."""
    try:
        return _of_opened(opened, layer)
    except TooLarge as error:
        return _not_looked_into(error)


@contextlib.contextmanager
def _tar_errors() -> Generator[None]:
    """Take an archive that the standard library cannot read on for one that ends there."""
    try:
        yield
    except NotRead:
        raise
    except (tarfile.TarError, Malformed, ValueError, EOFError):
        pass
