"""Programs that mount a bucket as a folder: what each does with the calls of a save.

A table, from their documents; what is `seen` was held against the program itself, too
(`make validate-models`). An object is written whole, so nothing is ever torn. The programs differ
in when they upload, in what a rename is, and in which calls they refuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from ckpt_conformance.trace.operations import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.trace.operations import Operation, Recording

NAME = "fuse-object"  # of the model; `fuse-object:s3fs` is of one program


class When(StrEnum):
    """Whether a call makes an object of what the file holds."""

    ALWAYS = "always"
    PERHAPS = "perhaps"  # it depends on an option, a version, or on time
    NEVER = "never"


class Refusal(StrEnum):
    """A kind of call that fails; the value says what it would have done."""

    RENAME = "renames a file"
    RENAME_FOLDER = "renames a folder"
    REWRITE = "writes elsewhere than at the end of a file that was made or emptied as it was opened"
    RESIZE = "sets a size"
    STORE = "stores into a mapping"
    LINK = "makes a second name"
    SYMLINK = "makes a symbolic link"
    EXCHANGE = "swaps two names"
    UNNAMED = "takes in a file that was made without a name, or on another file system"
    MODE = "sets permissions"


COMMON = frozenset({Refusal.LINK, Refusal.EXCHANGE, Refusal.UNNAMED})
STREAMING = frozenset({Refusal.REWRITE, Refusal.RESIZE, Refusal.STORE, Refusal.SYMLINK})


@dataclass(frozen=True)
class Mount:
    """One program, as it is by default, but for what `document` says.

    `syncs`, `truncates`, `creates`: whether an fsync, a truncation, the creation of a file upload.
    `late`: a closed file is uploaded some time later, or was not yet when the crash came.
    `waits`: a file that is open has its old name in the bucket until it is closed.
    `folders`: a folder is an object; else it is there for the files in it.
    `ends_at_sync`: a file can't be written after an fsync.
    """

    name: str
    document: str
    syncs: When
    refuses: frozenset[Refusal]
    truncates: When = When.NEVER
    creates: When = When.NEVER
    late: bool = False
    waits: bool = False
    folders: bool = False
    ends_at_sync: bool = False
    seen: bool = False


# With `max_dirty_data` (5 GiB) it uploads what is not closed yet: not modelled.
S3FS = Mount(
    "s3fs",
    "https://github.com/s3fs-fuse/s3fs-fuse#limitations",
    syncs=When.ALWAYS,
    truncates=When.ALWAYS,
    folders=True,
    refuses=COMMON,
    seen=True,
)
RCLONE_OFF = Mount(
    "rclone-off",
    "https://rclone.org/commands/rclone_mount/#vfs-cache-mode-off",
    syncs=When.NEVER,
    waits=True,
    refuses=COMMON | STREAMING,
    seen=True,
)
RCLONE_WRITES = Mount(
    "rclone-writes",
    "https://rclone.org/commands/rclone_mount/#vfs-cache-mode-writes",
    syncs=When.NEVER,
    late=True,
    refuses=COMMON | {Refusal.SYMLINK},
    seen=True,
)
RCLONE_FULL = Mount(
    "rclone-full",
    "https://rclone.org/commands/rclone_mount/#vfs-cache-mode-full",
    syncs=When.NEVER,
    late=True,
    refuses=COMMON | {Refusal.SYMLINK},
    seen=True,
)
# An fsync uploads unless writes are streamed, which is the default since version 3. Buckets with a
# hierarchical namespace rename folders at once: those need no model of their own.
GCSFUSE = Mount(
    "gcsfuse",
    "https://github.com/GoogleCloudPlatform/gcsfuse/blob/master/docs/semantics.md",
    syncs=When.PERHAPS,
    truncates=When.PERHAPS,
    creates=When.PERHAPS,
    folders=True,
    refuses=COMMON | {Refusal.RENAME_FOLDER},
)
# With --allow-overwrite and --allow-delete; without them a save that replaces a file fails.
MOUNTPOINT = Mount(
    "mountpoint-s3",
    "https://github.com/awslabs/mountpoint-s3/blob/main/doc/SEMANTICS.md",
    syncs=When.ALWAYS,
    ends_at_sync=True,
    refuses=COMMON | STREAMING | {Refusal.RENAME, Refusal.RENAME_FOLDER, Refusal.MODE},
)
MOUNTS: Mapping[str, Mount] = {
    one.name: one for one in (S3FS, RCLONE_OFF, RCLONE_WRITES, RCLONE_FULL, GCSFUSE, MOUNTPOINT)
}
# Where closing a file uploads it. With the others each save is lost by a crash right after it:
# that says something of the mount, and nothing of the manager.
UPLOADING: tuple[Mount, ...] = tuple(one for one in MOUNTS.values() if not one.late)


@dataclass(frozen=True)
class Refused:
    """The first call of a recording that a program refuses."""

    mount: Mount
    operation: Operation
    why: Refusal

    def __str__(self) -> str:
        """Say which call fails, and where the manager makes it."""
        one = self.operation
        what = f"{one.kind} {one.path}{f' -> {one.target}' if one.target else ''}"
        source = f" ({one.source})" if one.source else ""
        return (
            f"{self.mount.name} refuses operation {one.index}, {what}{source}, which {self.why}: "
            "the save fails there with an error, unless it has another way"
        )


@dataclass
class _Open:
    """What is known of files as far as a refusal depends on it."""

    folders: set[int]
    ends: dict[int, int] = field(default_factory=dict[int, int])  # of files that may be written

    def of_write(self, mount: Mount, one: Operation) -> Refusal | None:
        """Return why a WRITE is refused."""
        if one.mapped and Refusal.STORE in mount.refuses:
            return Refusal.STORE
        at_end = self.ends.get(one.object) == one.offset
        self.ends[one.object] = one.stop
        return Refusal.REWRITE if Refusal.REWRITE in mount.refuses and not at_end else None

    def note(self, mount: Mount, one: Operation) -> None:
        """Take in what a call that succeeds does."""
        if one.kind is Kind.MKDIR:
            self.folders.add(one.object)
        elif one.kind is Kind.CREATE or (one.kind is Kind.TRUNCATE and not one.size):
            self.ends[one.object] = 0
        elif one.kind is Kind.CLOSE and not one.object:
            self.ends.clear()
        elif one.kind is Kind.CLOSE or (mount.ends_at_sync and one.kind in _SYNCS):
            self.ends.pop(one.object, None)


_SYNCS = {Kind.FSYNC, Kind.FDATASYNC}
_REFUSALS = {
    Kind.LINK: Refusal.LINK,
    Kind.SYMLINK: Refusal.SYMLINK,
    Kind.EXCHANGE: Refusal.EXCHANGE,
    Kind.ALLOCATE: Refusal.RESIZE,
    Kind.CHMOD: Refusal.MODE,
}


def _why(mount: Mount, one: Operation, known: _Open) -> Refusal | None:
    """Return why a call is refused; None if it succeeds."""
    if one.kind is Kind.WRITE:
        return known.of_write(mount, one)
    why = _REFUSALS.get(one.kind)
    if one.kind is Kind.CREATE and not one.path:
        why = Refusal.UNNAMED
    elif one.kind is Kind.RENAME:
        why = Refusal.RENAME_FOLDER if one.object in known.folders else Refusal.RENAME
        if one.path.startswith("/"):  # made elsewhere: the mount is a file system of its own
            why = Refusal.UNNAMED
    elif one.kind is Kind.TRUNCATE and (one.size or known.ends.get(one.object)):
        why = Refusal.RESIZE  # O_TRUNC comes before the first write
    return why if why in mount.refuses else None


def first_refused(mount: Mount, recording: Recording) -> Refused | None:
    """Return the first call that a program refuses; None if it takes all of them."""
    known = _Open({entry.object for entry in recording.initial if entry.kind == "dir"})
    for one in recording.operations:
        if why := _why(mount, one, known):
            return Refused(mount, one, why)
        known.note(mount, one)
    return None


def refused(mounts: Iterable[Mount], recording: Recording) -> list[Refused]:
    """List the first call that each of some programs refuses."""
    found = (first_refused(mount, recording) for mount in mounts)
    return [one for one in found if one is not None]


def usable(mounts: Sequence[Mount], recording: Recording) -> list[tuple[Mount, int]]:
    """List the programs with which the saves end, and up to which crash point there are states.

    If each refuses some call, all of them: up to that call.
    """
    ends = {one.mount.name: one.operation.index for one in refused(mounts, recording)}
    taking = [mount for mount in mounts if mount.name not in ends]
    count = len(recording.operations)
    return [(mount, ends.get(mount.name, count)) for mount in taking or mounts]
