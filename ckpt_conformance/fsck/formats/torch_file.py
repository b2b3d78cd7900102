"""The files of `torch.save`: the zip archive, the pickled structure, and each tensor's place."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_conformance.fsck.formats import (
    joblib_arrays,
    small_records,
    torchscript,
    zips,
)
from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE, STORAGES, elements
from ckpt_conformance.fsck.formats.written_names import ANY, judge_names
from ckpt_conformance.fsck.pickled import cpp_pickles, effort, pickles
from ckpt_conformance.fsck.pickled.asked import Asked
from ckpt_conformance.fsck.pickled.faults import Broken, Short
from ckpt_conformance.fsck.pickled.machine import FROM_BYTES, MOST_BYTES, Steps
from ckpt_conformance.fsck.pickled.pickle_values import Made, Name, Persistent
from ckpt_conformance.fsck.source.findings import Kind, Malformed, NotRead, TooLarge
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.sums import Span
from ckpt_conformance.fsck.source.untrusted import (
    MOST_COUNT,
    clip,
    count,
    is_dict,
    is_sequence,
    is_tuple,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ckpt_conformance.fsck.source.source import Readable

_UTILS = "torch._utils"
_REBUILD_V3 = Name(_UTILS, "_rebuild_tensor_v3")  # over a storage of plain bytes
_REBUILD = {Name(_UTILS, "_rebuild_tensor_v2"), _REBUILD_V3}
SCRIPT = torchscript.SCRIPT
_PROTOCOL = b"\x80"  # since protocol 2, a pickle begins with it
_PLAIN = re.compile(rb"\([dl]p\d+\n")  # a dict or a list as protocol 0 begins it
_NO_TEXT = re.compile(
    rb"[^\t\n\f\r\x1b\x20-\xff]"
)  # signs that no text has in an encoding by bytes
_PACKAGE = ".data/extern_modules"  # torch.package writes it
_PICKLES = (".pkl", ".pickle", ".p")
_MOST_LEVELS = 200
_MOST_DIMENSIONS = 64
_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a file of torch before 1.6
_MOST_TOLD = 20
_MOST_NESTED = 3  # files of torch in one another
_MOST_PICKLES = 1_000_000  # one behind the other, as programs append them
_OF_STORAGE = 5  # parts that name one
_OF_LEGACY = 5  # its pickles: magic, version, machine, structure, keys of storages
STREAMS = (
    1 << 12,
    1 << 20,
    16 << 20,
    MOST_BYTES,
)  # bytes of pickles that are read, one after the other


@dataclass(frozen=True)
class Stream:
    """Pickles that stand one behind the other: a file of torch before 1.6, or a plain pickle.

    Attributes:
        asked: what any of them asks for.
        is_legacy: whether torch takes it for a file of its own.
        problem: why the structure cannot be read; empty where it can.
        is_limit: whether Python may read on where this stopped.
        is_archive: whether it is members of a zip, and not the file itself.

    """

    asked: Asked
    is_legacy: bool
    problem: str = ""
    is_limit: bool = False
    is_archive: bool = False


@dataclass(frozen=True)
class Tensor:
    """A tensor of the structure: where it stands, and which bytes of which record it views.

    Attributes:
        name: keys from the root, joined by dots.
        record: the name of the record, as `data/3`.
        first, last: bytes of the record, end exclusive.
        start: the byte of the file where its first element lies.
        stride: bytes from one element to the next, per dimension.
        pending: what is still to be done with the elements, as `conj`; mostly nothing.
        requires_grad: whether a load gives one that gets a gradient.

    """

    name: str
    record: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int
    start: int
    stride: tuple[int, ...]
    pending: str = ""
    requires_grad: bool = False


class Problem(NamedTuple):
    """Something in an archive that no save wrote: what it means, the reason, tensors, bytes."""

    kind: Kind
    what: str
    tensors: tuple[str, ...] = ()
    start: int | None = None
    end: int | None = None
    name: str = ""  # what an unsafe pickle asks for


@dataclass
class Archive:
    """What one archive holds.

    Attributes:
        tensors: in the order of the structure.
        spans: the payload of each record that has a CRC.
        unsummed: the records without one.
        overhead: bytes of headers, which were held against each other: any flip in them shows.
        problems: what no save wrote; none of it keeps the rest unread.
        tree: the structure as `pickles` gives it; None where it could not be read.
        records: every record by its name.

    """

    tensors: list[Tensor] = field(default_factory=list[Tensor])
    spans: list[Span] = field(default_factory=list[Span])
    unsummed: list[str] = field(default_factory=list[str])
    overhead: int = 0
    problems: list[Problem] = field(default_factory=list[Problem])
    tree: Any = None
    records: dict[str, zips.Record] = field(default_factory=dict[str, zips.Record])

    def problem(self, what: str, kind: Kind = Kind.DAMAGED, tensors: Sequence[str] = ()) -> None:
        """Add a problem that is about no place."""
        self.problems.append(Problem(kind, what, tuple(tensors)))


@effort.for_one_file()
def read(file: Readable, start: int, length: int) -> Archive:
    """Read the archive in [start, start + length) of a file, all but the payload.

    Raises:
        Malformed: it is no archive at all. What is wrong inside of one is in `problems`.

    """
    records = zips.records(file, start, length)
    overhead = length - sum(one.end - one.start for one in records.values())
    archive = Archive(overhead=overhead, records=records)
    structure = records.get("data.pkl")
    _read_small(file, records, archive)
    constants = _read_others(file, records, archive)
    if structure is None and _PACKAGE in records:
        what = "it is a file of torch.package: who imports it runs the sources in it"
        archive.problems.append(Problem(Kind.UNSAFE, what, name=ANY))
    elif structure is None:
        archive.problem("the record data.pkl is missing: the structure of the checkpoint")
    else:
        asked = _read_structure(file, structure, archive)
        if _is_script(records):
            _read_script(file, records, archive, asked, constants)
    _spans(records, archive)
    return archive


@effort.for_one_file()
def read_stream(file: Readable, length: int) -> Stream | None:
    """Read the pickles at the beginning of a file that is no archive; None where there is none.

    torch.load runs the first of them before it looks whether the file is one of its own.
    """
    return grown(lambda most: exactly(file, 0, min(length, most)), stream_of)


def grown(
    read: Callable[[int], bytes], look: Callable[[bytes, int], Stream | None]
) -> Stream | None:
    """Look at the first bytes of a pickle, at most as many as it takes.

    `read` gives at most so many bytes from the beginning, `look` takes them and how many were asked
    for.
    """
    for most in STREAMS:
        data = read(most)
        try:
            return look(data, most)
        except Short:
            continue
    what = f"a pickle of more than {STREAMS[-1]} bytes, which are not read"
    return Stream(Asked(), is_legacy=False, problem=what, is_limit=True)


def stream_of(data: bytes, most: int) -> Stream | None:
    """Read all pickles that a legacy file has: which the first is, a call in it may hide.

    Those of joblib are read as joblib and as pickle do it. None where the bytes begin with no
    pickle. Raises Short where they are too few, and as many as were asked for: there may be more.
    """
    try:
        stream = _stream_of(data, most)
    except Short as error:
        # The bytes of an array may say anything of their length: joblib may need fewer of them.
        stream = Stream(error.asked, is_legacy=False) if isinstance(error, _ShortOf) else None
        if stream is None or not joblib_arrays.is_any(stream.asked.names):
            raise
    if stream is None or not joblib_arrays.is_any(stream.asked.names):
        return stream
    joblibs = _stream_of(data, most, joblib_arrays.ARRAYS)
    if joblibs is None:
        return replace(stream, is_limit=True)
    joblibs.asked.add(stream.asked)
    return replace(joblibs, is_limit=bool(joblibs.problem))


class _ShortOf(Short):
    """Too few bytes of pickles, and what they ask for."""

    def __init__(self, what: str, asked: Asked) -> None:
        super().__init__(what)
        self.asked = asked


def _look_inside(asked: Asked, level: int) -> None:
    """Ask for what the files of torch ask for that stand in a pickle, in place of their load.

    One that cannot be followed to its end leaves the load as it is, which no list has.
    """
    found = Asked()
    for args in asked.nested:
        (data,) = args if is_tuple(args) and len(args) == 1 else (None,)
        if not isinstance(data, bytes) or level >= _MOST_NESTED:
            return
        try:
            stream = _stream_of(data, len(data) + 1, level=level + 1)
        except Malformed:
            return
        if stream is None or stream.problem or not stream.is_legacy:
            return
        found.add(stream.asked)
    if asked.nested and FROM_BYTES not in asked.handed:
        asked.names.discard(FROM_BYTES)
        asked.called.discard(FROM_BYTES)
        asked.nested.clear()
        asked.add(found)


def _stream_of(data: bytes, most: int, steps: Steps | None = None, level: int = 0) -> Stream | None:
    asked, is_legacy, number = Asked(), False, 0
    try:
        for held, one in pickles.load_each(data, _MOST_PICKLES, steps):
            number += 1
            _look_inside(one, level)
            asked.add(one)
            is_legacy = is_legacy or (number == 1 and held == _MAGIC)
            if is_legacy and number == _OF_LEGACY:
                return Stream(asked, is_legacy)  # storages follow
    except Broken as error:
        if len(data) == most and error.is_short:
            asked.add(error.asked)
            raise _ShortOf(str(error), asked) from None
        is_pickle = _is_pickle(data, error)
        if number and not (is_legacy or is_pickle):
            return Stream(asked, is_legacy)  # a plain pickle, and what else there is
        asked.add(error.asked)
        is_any = number or is_pickle
        return Stream(asked, is_legacy, str(error), error.is_limit) if is_any else None
    what = "more pickles one behind the other than are followed"
    return Stream(asked, is_legacy, what, is_limit=True)


def _is_pickle(data: bytes, error: Broken) -> bool:
    """Return whether it is more than bytes that begin like a pickle: a text may ask for a name."""
    asked = error.asked
    is_said = (data.startswith(_PROTOCOL) or _PLAIN.match(data)) and asked.names
    is_no_text = any(_is_name(one.module) for one in asked.names) and _NO_TEXT.search(data)
    is_made = any(map(_is_name, asked.made))
    return bool(is_said or is_no_text or is_made or error.is_limit or asked.called or asked.tricks)


def _is_name(name: Name | str) -> bool:
    """Return whether something can be imported by a name; a text that is none has other signs."""
    return all(map(str.isidentifier, str(name).split(".")))


def _is_script(records: dict[str, zips.Record]) -> bool:
    """Return whether `torch.jit.save` wrote an archive: its classes stand below `code/`."""
    return torchscript.CONSTANTS in records and any(name.startswith("code/") for name in records)


def _read_script(
    file: Readable,
    records: dict[str, zips.Record],
    archive: Archive,
    structure: Asked | None,
    constants: Asked,
) -> None:
    """Look for what of TorchScript's sources a load runs, and whether they define its classes."""
    archive.problem("it is a TorchScript archive: torch.jit.load reads it", Kind.NOTE)
    sources = _sources(file, records)
    found = [*torchscript.problems(sources)]
    if torchscript.BYTECODE in records:
        place = records[torchscript.BYTECODE]
        size = min(place.end - place.start, MOST_BYTES)
        found += torchscript.bytecode(exactly(file, place.start, size))
    for why in found:
        archive.problems.append(Problem(Kind.UNSAFE, torchscript.unsafe(why), name=ANY))
    defined = torchscript.defined(sources)
    for record, asked in ((torchscript.CONSTANTS, constants), ("data.pkl", structure)):
        if asked is not None and defined is not None:
            for why in torchscript.undefined(asked, defined):
                archive.problem(f"{record} {why}")
    if structure is not None and not cpp_pickles.is_module(archive.tree):
        archive.problem("data.pkl holds no object of a class of TorchScript: a load fails")


def _sources(file: Readable, records: dict[str, zips.Record]) -> dict[str, bytes]:
    """Read the sources of TorchScript, a little more of them than are parsed at most."""
    sources, left = dict[str, bytes](), torchscript.MOST + 1
    for name, record in records.items():
        if not torchscript.is_source(name) or left <= 0:
            continue
        if record.packed:
            data = exactly(file, record.start, record.end - record.start)
            text = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, left)
        else:
            text = exactly(file, record.start, min(record.end - record.start, left))
        sources[name], left = text, left - len(text)
    return sources


def _read_structure(file: Readable, record: zips.Record, archive: Archive) -> Asked | None:
    """Rebuild the structure and find the tensors in it; return what it asks for.

    None, and a problem, where it cannot be read.
    """
    is_script = _is_script(archive.records)
    own = (SCRIPT,) if is_script else ()
    try:
        tree, asked = _load(file, record, is_script=is_script)
    except Malformed as error:
        kind = Kind.UNKNOWN if isinstance(error, NotRead) else Kind.DAMAGED
        problem = Problem(kind, f"data.pkl: {error}", (), record.start, record.end)
        archive.problems.append(problem)
        if isinstance(error, Broken):
            archive.problems += _unsafe("data.pkl", error.asked, own)
        return None
    archive.tree = tree
    for kind, text, name in judge_names(asked, own):
        archive.problems.append(Problem(kind, f"data.pkl {text}", name=name))
    for why in torchscript.classes(asked):
        archive.problems.append(Problem(Kind.UNSAFE, torchscript.unsafe(why), name=ANY))
    seen = set[int]()
    for name, made in _tensors_of(tree):
        seen.update(map(id, made.args if is_tuple(made.args) else ()))
        try:
            archive.tensors.append(tensor_of(name, made, archive.records))
        except Malformed as error:
            archive.problem(f"{name}: {error}", tensors=(name,))
    for why in sorted(set(_of_no_tensor(asked, seen, archive.records)))[:_MOST_TOLD]:
        archive.problem(f"of what is in no tensor, {why}: a load fails")
    return asked


def _of_no_tensor(
    asked: Asked, seen: Collection[int], records: dict[str, zips.Record]
) -> Iterator[str]:
    """Tell what is wrong with storages that no tensor shows: torch loads each that is named."""
    for one in asked.outside:
        if id(one) in seen:
            continue
        try:
            storage_of(one.id, records)
        except Malformed as error:
            yield str(error)


def _unsafe(record: str, asked: Asked, own: Collection[str] = ()) -> Iterator[Problem]:
    """Yield what is unsafe of what a record asks for."""
    for kind, text, name in judge_names(asked, own):
        if kind is Kind.UNSAFE:
            yield Problem(kind, f"{clip(record)} {text}", name=name)


def _read_small(file: Readable, records: dict[str, zips.Record], archive: Archive) -> None:
    """Look into the small records without which torch loads nothing."""
    for _, error in small_records.check(file, records):
        kind = Kind.UNKNOWN if isinstance(error, NotRead) else Kind.DAMAGED
        archive.problems.append(Problem(kind, str(error), (), error.start, error.end))


def _read_others(file: Readable, records: dict[str, zips.Record], archive: Archive) -> Asked:
    """Look into pickles that torch.load does not read, and that other programs may.

    Return what the constants of TorchScript ask for: its load reads them.
    """
    own = (SCRIPT,) if _is_script(records) else ()
    constants = Asked()
    for name, record in records.items():
        if name == "data.pkl" or record.packed or not name.endswith(_PICKLES):
            continue
        asked = Asked()
        is_constants = bool(own) and name == torchscript.CONSTANTS
        try:
            value, asked = _load(file, record, is_script=is_constants)
            if is_constants and not is_tuple(value):
                archive.problem(f"{name} holds a {type(value).__name__}, and no tuple")
        except Malformed as error:
            asked = error.asked if isinstance(error, Broken) else asked
            if isinstance(error, NotRead):
                archive.problems.append(Problem(Kind.UNKNOWN, f"{clip(name)}: {error}"))
            elif is_constants:
                archive.problem(f"{name}: {error}")
        archive.problems += _unsafe(name, asked, own)
        constants = asked if is_constants else constants
    return constants


def _load(file: Readable, record: zips.Record, *, is_script: bool) -> tuple[Any, Asked]:
    """Read a record as a pickle, if it is small enough for one; of TorchScript as C++ does."""
    size = record.end - record.start
    if size > MOST_BYTES:
        raise TooLarge(f"a structure of {size} bytes: {MOST_BYTES} are read at most")
    data = exactly(file, record.start, size)
    return cpp_pickles.load(data) if is_script else pickles.load(data)


def _tensors_of(tree: Any) -> Iterator[tuple[str, Made]]:  # noqa: ANN401  what a pickle holds
    """Walk the structure; each part is visited once, however often it is shared."""
    pending: list[tuple[Any, tuple[str, ...]]] = [(tree, ())]
    seen: set[int] = set()
    while pending:
        part, path = pending.pop()
        if len(path) > _MOST_LEVELS or not _is_holder(part):
            continue
        if tensor := as_tensor(part):
            yield ".".join(path) or "(the tensor)", tensor
            continue
        if id(part) in seen:
            continue
        seen.add(id(part))
        pending.extend(reversed([(value, (*path, *step)) for step, value in _children(part)]))


def _is_holder(part: object) -> bool:
    return isinstance(part, dict | list | tuple | Made)


def _children(part: Any) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401  as above
    """Yield what a part holds, with the step of the path; a call's own arguments add none."""
    if is_dict(part):
        yield from (((_step(key),), value) for key, value in part.items())
    elif is_sequence(part):
        yield from (((str(at),), value) for at, value in enumerate(part))
    else:
        for group in (part.args, part.state, part.parts):
            if is_sequence(group):
                yield from (((), value) for value in group)
            elif group is not None:
                yield (), group


def _step(key: object) -> str:
    """Write the key of a dict as a part of a name."""
    return key[:200] if isinstance(key, str) else clip(key)


def as_tensor(part: object) -> Made | None:
    """Return the call that rebuilds a plain tensor, out of a subclass of one too; else None."""
    if not isinstance(part, Made) or not isinstance(part.of, Name):
        return None
    if part.of in _REBUILD:
        return part
    if part.of == (_UTILS, "_rebuild_from_type_v2"):
        args: tuple[Any, ...] = part.args if is_tuple(part.args) else ()
        if len(args) > 2 and isinstance(args[0], Name) and args[0] in _REBUILD:  # noqa: PLR2004
            return Made(args[0], args[2])
    return None


def tensor_of(name: str, made: Made, records: dict[str, zips.Record]) -> Tensor:
    """Check a tensor against its storage, and the storage against its record."""
    args = made.args
    if not is_tuple(args) or len(args) < 4 or not isinstance(args[0], Persistent):  # noqa: PLR2004
        raise Malformed("it is rebuilt from something that no save writes")
    record, dtype, nbytes = storage_of(args[0].id, records)
    if made.of == _REBUILD_V3:
        dtype = dtype_name(args[6]) if len(args) > 6 else ""  # noqa: PLR2004  its seventh argument
    item = ITEM_SIZE.get(dtype)
    if item is None:
        raise Malformed(f"its dtype is {clip(dtype)}, which torch does not have")
    shape, stride = sizes(args[2], "shape"), sizes(args[3], "stride")
    if len(shape) != len(stride):
        raise Malformed(f"its shape {shape} and its stride {stride} differ in length")
    first = count(args[1], "its offset")
    extent = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    last = first + (extent if elements(shape) else 0)
    if last * item > nbytes:
        raise Malformed(f"it needs {last * item} bytes of {record}, which has {nbytes}")
    has_grad = args[4] if len(args) > 4 else False  # noqa: PLR2004  its fifth argument
    if type(has_grad) is not bool:
        raise Malformed(f"whether it gets a gradient is {clip(has_grad)}, and no bool")
    start = records[record].start + first * item
    steps = tuple(one * item for one in stride)
    place = (first * item, last * item, start, steps)
    return Tensor(name, record, dtype, shape, *place, requires_grad=has_grad)


def storage_of(pid: Any, records: dict[str, zips.Record]) -> tuple[str, str, int]:  # noqa: ANN401
    """Return record, dtype and bytes of `("storage", type, key, device, number of elements)`.

    A sixth part, of a view, is of files before torch 1.6: the reader in C++ alone passes over it.
    """
    is_named = is_tuple(pid) and pid[:1] == ("storage",) and len(pid) >= _OF_STORAGE
    if not is_named or (len(pid) > _OF_STORAGE and not _is_script(records)):
        raise Malformed("its storage is named in a way that no save uses")
    dtype = STORAGES.get(pid[1].name) if isinstance(pid[1], Name) else None
    if dtype is None:
        raise Malformed(f"its storage is a {clip(str(pid[1]))}, which torch does not have")
    nbytes = count(pid[4], "the length of its storage") * ITEM_SIZE[dtype]
    record = records.get(f"data/{pid[2]}" if isinstance(pid[2], str) else "")
    if record is None:
        raise Malformed(f"the record data/{clip(pid[2])} is missing")
    if record.end - record.start != nbytes:
        has = record.end - record.start
        raise Malformed(f"{record.name} has {has} bytes, and the structure says {nbytes}")
    return record.name, dtype, nbytes


def dtype_name(value: object) -> str:
    """Return `float32` for the name torch.float32."""
    return value.name if isinstance(value, Name) and value.module == "torch" else ""


def sizes(value: object, what: str) -> tuple[int, ...]:
    """Return a tuple of numbers of things."""
    if not is_tuple(value):
        raise Malformed(f"its {what} is a {type(value).__name__}")
    if len(value) > _MOST_DIMENSIONS:
        raise Malformed(f"its {what} has {len(value)} dimensions")
    for size in value:
        if type(size) is not int or not 0 <= size < MOST_COUNT:
            count(size, f"a {what}")  # raises
    return value


def _spans(records: dict[str, zips.Record], archive: Archive) -> None:
    """Divide the records by whether they have a CRC, with the tensors that each holds."""
    users: dict[str, list[str]] = {}
    for tensor in archive.tensors:
        users.setdefault(tensor.record, []).append(tensor.name)
    for name, record in records.items():
        if record.packed:
            continue
        if record.crc is None:
            archive.unsummed.append(name)
        else:
            tensors = tuple(users.get(name, ()))
            archive.spans.append(Span(name, record.start, record.end, record.crc, tensors))
