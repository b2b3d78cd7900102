"""The files of a URL, read through fsspec: ranges of bytes, never a file as a whole.

A store lists a folder with all sizes at once, and each request takes its time: so folders are
listed once, small reads are answered from blocks, and what is read in order is fetched far ahead.
There are no inodes and no hard links; a link is never followed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckpt_conformance.contract.requests import RequestError, nearest
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.source import (
    Absent,
    Entry,
    EntryKind,
    Folder,
    Unreachable,
    in_threads,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckpt_conformance.fsck.source.untrusted import Json

Answer = TypeVar("Answer")

BLOCK = 64 << 10
"""Bytes that are fetched for a small read."""
AHEAD = 8 << 20
"""Bytes that are fetched at once where bytes are read in order."""
_MOST_BLOCKS = 4
MOST_LISTED = 200_000
"""Names of listings that are remembered; a folder with more is remembered alone."""
_MOST_ALONE = 10_000  # files and folders of which something else is remembered

_TRIES = 3  # for an answer that is shorter than what was asked for
_FEW = 4  # files that are asked for one by one, and not by a listing
_KINDS = {"file": EntryKind.FILE, "directory": EntryKind.FOLDER, "link": EntryKind.LINK}
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
_ETAGS = ("ETag", "etag", "md5Hash", "content_md5")
_ABSENT, _REFUSED = (404, 410), (401, 403, 407)  # answers of HTTP
_WHOLE_ONLY = "the store gives whole files only, and no ranges"
_ADVICE = "look at the network, the credentials and the endpoint, then try again"


# -- names -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Url:
    """A place in a store; it answers as a `Path` does.

    Attributes:
        text: the URL as the user gave it, with what was appended.
        path: what the filesystem of fsspec calls it.
        files: that filesystem.

    """

    text: str
    path: str
    files: Files = field(compare=False, repr=False)

    def __str__(self) -> str:
        """Return the URL."""
        return self.text

    def __truediv__(self, name: str) -> Url:
        """Return a place below."""
        inner = name.strip("/")
        return Url(f"{self.text}/{inner}", f"{self.path}/{inner}", self.files) if inner else self

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parts(self) -> tuple[str, ...]:
        """The names on the way to it."""
        return tuple(self.path.split("/"))

    @property
    def parent(self) -> Url:
        """The folder that it is in."""
        ends = self.text.rpartition("/")[0], self.path.rpartition("/")[0]
        return Url(*ends, self.files)

    def resolve(self) -> Url:
        """Return itself: no link is followed."""
        return self

    def exists(self) -> bool:
        """Return whether there is anything."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Return whether it is a folder."""
        return self._kind() is EntryKind.FOLDER

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return self._kind() is EntryKind.FILE

    def anew(self) -> Url:
        """Return the same place, of which nothing is remembered."""
        return Url(self.text, self.path, self.files.anew())

    def changed(self) -> float:
        """Return when it was changed, in seconds since 1970; 0 where the store does not say."""
        return self.files.changed(self.path)

    def _kind(self) -> EntryKind | None:
        """Ask for it alone; RequestError where the store refuses or does not answer."""
        try:
            entry = self.files.entry(self.path)
        except PermissionError as error:
            why = f"{str(error) or 'refused'}: use credentials that may list and read it"
            raise RequestError(f"{self} cannot be read: {why}") from error
        except OSError as error:
            raise RequestError(f"{self} cannot be read: {error}") from error
        return entry.kind if entry else None


def open_url(text: str) -> Url:
    """Find what reads a URL; RequestError where that is not installed, or nothing does."""
    if "::" in text:
        raise RequestError(f"{text} is a chain of URLs; give the URL of the folder itself")
    try:
        core: Any = importlib.import_module("fsspec.core")  # as Any: it has no types
    except ModuleNotFoundError:
        why = "which needs fsspec: pip install 'ckpt-conformance[reference]'"
        raise RequestError(f"{text} is a URL, {why}") from None
    try:  # an instance of its own: others may have listed, and remember what is not so any more
        files, path = core.url_to_fs(text, skip_instance_cache=True)
    except ImportError as error:
        extra = ": pip install 'ckpt-conformance[s3]'" if text.startswith(("s3:", "s3a:")) else ""
        raise RequestError(
            f"{text} needs a package that is not installed: {error}{extra}"
        ) from None
    except Exception as error:
        raise RequestError(f"{text} cannot be read: {_reason(text, error)}") from error
    shown = text if text.endswith("://") else text.rstrip("/")
    return Url(shown, str(path).rstrip("/"), Files(files, shown, str(path).rstrip("/")))


def _reason(text: str, error: Exception) -> str:
    """Explain why there is no filesystem for a URL."""
    fsspec: Any = importlib.import_module("fsspec")
    scheme = text.partition("://")[0]
    known: list[str] = fsspec.available_protocols()
    if scheme in known:
        return f"{type(error).__name__}: {error}"
    return f"fsspec knows no {scheme}://; {nearest(scheme, known)}it knows s3, gs, https and others"


# -- requests --------------------------------------------------------------------------------------


class _Recent(Generic[Answer]):
    """What was asked for last, by path: the oldest is forgotten where it gets too much."""

    def __init__(self, most: int, weigh: Callable[[Answer], int] = lambda _: 1) -> None:
        """Take how much is remembered, and how much one answer is."""
        self._most, self._weigh, self._weight = most, weigh, 0
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str) -> Answer | None:
        """Return an answer; None where there is none."""
        with self._lock:
            if path in self._kept:
                self._kept.move_to_end(path)
            return self._kept.get(path)

    def put(self, path: str, value: Answer) -> None:
        """Remember an answer; the newest is always kept."""
        with self._lock:
            if path in self._kept:
                self._weight -= self._weigh(self._kept.pop(path))
            self._kept[path] = value
            self._weight += self._weigh(value)
            while self._weight > self._most and len(self._kept) > 1:
                self._weight -= self._weigh(self._kept.popitem(last=False)[1])


class Files:
    """A filesystem of fsspec: what it says is remembered, and every error says the URL.

    Attributes:
        failures: requests that were not answered: nothing is known of what they asked for.

    """

    def __init__(self, files: Any, text: str, path: str) -> None:  # noqa: ANN401  no types
        """Take the filesystem, and the URL and the path of one place in it."""
        self.failures: list[str] = []
        self._files = files
        self._text, self._path = text, path
        self._listed = _Recent[dict[str, Entry]](MOST_LISTED, lambda listed: len(listed) + 1)
        self._alone = _Recent[tuple[Entry | None]](_MOST_ALONE)
        self._times = _Recent[float](_MOST_ALONE)
        self._unranged = _Recent[bool](_MOST_ALONE)

    def anew(self) -> Files:
        """Return the same filesystem, of which nothing is remembered."""
        again = Files(self._files, self._text, self._path)
        again.failures = self.failures
        return again

    def listing(self, path: str) -> dict[str, Entry]:
        """Return what is in a folder by name; FileNotFoundError, PermissionError, Unreachable."""
        listed = self._listed.get(path)
        if listed is None:
            infos = self._ask("listing", path, lambda: self._files.ls(path, detail=True))
            self._files.invalidate_cache(path)  # what is remembered is remembered here
            listed = dict(_entries(path, infos))
            self._listed.put(path, listed)
            self._note_time(path, max((one.changed for one in listed.values()), default=0.0))
        return listed

    def _note_time(self, path: str, time: float) -> None:
        """Keep the time of a change for a folder and for those that it is in."""
        while time and path.startswith(self._path):
            self._times.put(path, max(time, self._times.get(path) or 0.0))
            path = path.rpartition("/")[0]

    def entry(self, path: str) -> Entry | None:
        """Return what is there; None for nothing. Raises as `listing` does."""
        above, _, name = path.rpartition("/")
        listed = self._listed.get(above)
        known = listed.get(name) if listed is not None else None
        if listed is not None and (known is None or known.size >= 0):
            return known
        alone = self._alone.get(path)
        if alone is None:
            alone = (self._look(path),)
            self._alone.put(path, alone)
        return alone[0]

    def _look(self, path: str) -> Entry | None:
        try:
            info = self._ask("looking at", path, lambda: self._files.info(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if "mimetype" in info and not info.get("partial"):  # by HTTP
            self._unranged.put(path, value=True)
        return _entry(info)

    def read(self, path: str, start: int, end: int) -> bytes:
        """Read bytes [start, end) that are in the file by its size; Unreachable where fewer come.

        A connection that breaks, or a proxy, may give the beginning of an answer as all of it.
        """
        what = f"reading bytes {start}..{end} of"
        (known,) = (self._unranged.get(path) and self._alone.get(path)) or (None,)
        if known and known.size > end - start:
            raise self._failure(what, path, _WHOLE_ONLY)

        def action() -> bytes:
            answer: bytes = self._files.cat_file(path, start=start, end=end)
            return answer

        data = b""
        for _ in range(_TRIES):
            data = self._ask(what, path, action)
            if len(data) == end - start:
                return data
            if len(data) > end - start:
                raise self._failure(what, path, _WHOLE_ONLY)
        why = f"{len(data)} bytes came, {_TRIES} times: cut short on the way, or a shorter file now"
        raise self._failure(what, path, why)

    def changed(self, path: str) -> float:
        """Return when a file, or something in a folder, was changed; 0 where that is unknown."""
        time = self._times.get(path)
        if time is None:
            with contextlib.suppress(OSError):  # the reader of the file gets the same error
                entry = self.entry(path)
                return entry.changed if entry else 0.0
        return time or 0.0

    def _ask(self, what: str, path: str, action: Callable[[], Answer]) -> Answer:
        """Do a request; Unreachable for any error but those of the file itself.

        What is refused is noted, too: nothing is known of it.
        """
        try:
            return _told_apart(action)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except PermissionError as error:
            self._failure(what, path, str(error) or "refused")
            raise
        except Exception as error:  # each protocol's package has errors of its own
            raise self._failure(what, path, f"{type(error).__name__}: {error}") from error

    def _failure(self, what: str, path: str, why: str) -> Unreachable:
        url = self._text + path.removeprefix(self._path)
        self.failures.append(f"{what} {url} fails: {why}; {_ADVICE}")
        return Unreachable(self.failures[-1])


def _told_apart(action: Callable[[], Answer]) -> Answer:
    """Do a request; of fsspec, by HTTP, whatever goes wrong is a file that is not there."""
    try:
        return action()
    except FileNotFoundError as error:
        cause = error.__cause__
        is_http = type(cause).__module__.startswith("aiohttp") or isinstance(cause, TimeoutError)
        status = getattr(cause, "status", None)
        if cause is None or not is_http or status in _ABSENT:
            raise
        if status in _REFUSED:
            raise PermissionError(f"it answers {status}") from error
        raise cause from None


def _entries(path: str, listed: Iterable[Json]) -> Iterator[tuple[str, Entry]]:
    """Yield the names of a listing, less the object that stands for the folder itself."""
    for info in listed:
        name = str(info["name"]).rstrip("/")
        last = name.rpartition("/")[2]
        if name != path and last not in ("", ".", ".."):
            yield last, _entry(info)


def _time(info: Json) -> float:
    """Return when a file was changed, in seconds since 1970; each store has its own key for it."""
    if info.get("type") == "directory":
        return 0.0  # of a folder stores have no time, or that of something else
    time: Any = next((info[key] for key in _TIMES if info.get(key)), None)
    if isinstance(time, datetime):
        return time.timestamp()
    with contextlib.suppress(TypeError, ValueError):
        return float(time)
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(time).timestamp()
    return 0.0


def _entry(info: Json) -> Entry:
    """Read what a store says of a name; a file whose size it does not say has -1."""
    kind = _KINDS.get(str(info.get("type")), EntryKind.OTHER)
    if info.get("mimetype") == "text/html":  # an index, by HTTP
        kind = EntryKind.FOLDER
    elif info.get("islink"):
        kind = EntryKind.LINK
    size = info.get("size")
    if not isinstance(size, int):
        size = -1 if kind is EntryKind.FILE else 0
    etag = next((str(info[key]) for key in _ETAGS if info.get(key)), "")
    return Entry(kind, size, (0, 0), 1, _time(info), etag=etag)


# -- reading ---------------------------------------------------------------------------------------


class RemoteFile(io.RawIOBase):
    """A file that is read in ranges, for one thread; at most 9 MiB of it are kept."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        """Take what reads bytes [start, end), and the size."""
        super().__init__()
        self._read, self._size, self._at = read, size, 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._expected = (0, 0)
        self._stream = (0, b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a byte; nothing is read yet."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Read at most so many bytes."""
        return super().read(size) or b""

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  as RawIOBase
        """Fill a buffer from the front with what one request gives."""
        target = memoryview(buffer)
        length = min(len(target), self._size - self._at)
        if length <= 0:
            return 0
        first, data = self._chunk_at(self._at, length)
        piece = memoryview(data)[self._at - first :][:length]
        target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def expect(self, start: int, end: int) -> None:
        """Take that bytes [start, end) will be read in their order."""
        self._expected = (start, min(end, self._size))

    def _chunk_at(self, at: int, length: int) -> tuple[int, bytes]:
        """Return bytes that begin at or before a place and hold it, and where they begin."""
        first, data = self._stream
        if first <= at < first + len(data):
            return self._stream
        start, end = self._expected
        if start <= at < end and end - start > BLOCK:
            self._stream = (0, b"")  # let go of the bytes before the next come
            self._stream = at, self._read(at, min(at + AHEAD, end))
            return self._stream
        if length > BLOCK:
            return at, self._read(at, at + min(length, AHEAD))
        return self._block(at - at % BLOCK)

    def _block(self, first: int) -> tuple[int, bytes]:
        """Return one block of those that are kept."""
        data = self._blocks.pop(first, None)
        if data is None:
            data = self._read(first, min(first + BLOCK, self._size))
        self._blocks[first] = data
        if len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)
        return first, data


class RemoteFolder(Folder):
    """A folder of a URL."""

    def __init__(self, root: Url) -> None:
        """Take a folder; nothing is read yet."""
        super().__init__()
        self._root = root
        self._files = root.files

    @property
    def root(self) -> Url:
        """The folder."""
        return self._root

    def inner(self, base: str) -> RemoteFolder:
        """Return a folder below."""
        return RemoteFolder(self.root / base)

    def fetch(self, names: Iterable[str]) -> None:
        """Look at files: by a listing where a folder has many, for it says all sizes at once."""
        names = list(names)
        folders = Counter(name.rpartition("/")[0] for name in names)
        in_threads(self._list, [base for base, count in folders.items() if count > _FEW])
        super().fetch(names)

    def prefetch(self, bases: Sequence[str]) -> None:
        """List folders at the same time that will be listed soon."""
        in_threads(self._list, bases)

    def sizes(self, names: Sequence[str]) -> Iterator[int]:
        """Yield the bytes of each file as a listing says them; no file is asked for alone."""
        for name in names:
            base, _, last = name.rpartition("/")
            entry = self._files.listing((self.root / base).path).get(last)
            yield max(entry.size, 0) if entry is not None else 0

    def _list(self, base: str) -> None:
        with contextlib.suppress(OSError):  # looking at a file of it raises the same error
            self._files.listing((self.root / base).path)

    def _look(self, name: str) -> Entry | None:
        """Look at a name; `unread` where the store does not say."""
        try:
            return self._files.entry((self.root / name).path)
        except OSError:
            return Entry(EntryKind.UNREAD, 0, (0, 0), 1)

    def listing(self, base: str = "") -> dict[str, EntryKind]:
        """List a folder: the kind of each name, sorted."""
        entries = self._files.listing((self.root / base).path)
        return {name: entry.kind for name, entry in sorted(entries.items())}

    def link_problem(self, name: str) -> str:
        """Explain that a link is not followed; nothing for others."""
        entry = self.entry(name)
        return _LINK if entry is not None and entry.kind is EntryKind.LINK else ""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raises as `open` does."""
        entry = self.entry(name)
        if entry is not None and entry.kind is EntryKind.UNREAD:
            entry = self._files.entry((self.root / name).path)  # raises what it raised
        if entry is None:
            raise Absent(f"{name} is not there")
        if entry.kind is not EntryKind.FILE:
            raise Malformed(_LINK if entry.kind is EntryKind.LINK else "it is no regular file")
        if entry.size < 0:
            raise Unreachable(f"the store does not say how long {self.root / name} is")
        return entry.size

    def open(self, name: str) -> RemoteFile:
        """Open a file; the first request comes with the first read."""
        path, size = (self.root / name).path, self.size(name)
        return RemoteFile(lambda start, end: self._files.read(path, start, end), size)


_LINK = "a symbolic link: not followed in a URL; give the path instead"
