"""Faults at calls of Python functions: a table of injectors, and the engine that drives it.

Each `PatchedCall` of the table is one injector: the functions that it replaces, the parameters that
say which file a call is about, and what its fault models. A new one is a row here and a name in
`fault_injectors.AT_CALL`; where saves are to be hit there, it is named in `points.WRITERS`, too.
What does more than to hit a call, or to cut the file that it writes, is a module of its own
(`file_write`, `cross_device`, ...).
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector, length_of, path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpt_conformance.contract.journal import ChildJournal

    Below = Callable[[object], str | None]  # `Injector.below`
    Find = Callable[[Below, Sequence[Any]], str | None]


class Kind(Enum):
    """How a call of a function can be hit."""

    AROUND = auto()  # before it or after it
    WHOLE_FILE = auto()  # also after a prefix of the bytes of the one file that it writes


# -- which name below the watched directory a call is about ----------------------------------------
# Each gets `Injector.below` and the values of the row's `paths`, None for one that is not given.


def first_below(below: Below, paths: Sequence[Any]) -> str | None:
    """Return the first path that lies below the directory."""
    return next((name for path in paths if (name := below(path))), None)


def entry_of_folder(below: Below, paths: Sequence[Any]) -> str | None:
    """Return the name of a path, which is relative to a descriptor where one is given."""
    path, dir_fd = paths
    folder = below(dir_fd)
    if folder is None:
        return below(path)
    return os.path.normpath(os.path.join(folder, os.fsdecode(path)))  # noqa: PTH118  relative names


def descriptor_of(below: Below, paths: Sequence[Any]) -> str | None:
    """Return the present name of an open file, of which the kernel knows more than its object."""
    (file,) = paths
    return below(file if isinstance(file, int) else file.fileno())


def dcp_directory(below: Below, paths: Sequence[Any]) -> str | None:
    """Return the directory of a DCP call: its id, or else the path of its reader or writer."""
    checkpoint_id, *storages = paths
    if checkpoint_id is not None:
        return below(checkpoint_id)
    directories = (getattr(storage, "path", None) for storage in storages)
    return below(next((path for path in directories if path is not None), None))


def storage_directory(below: Below, paths: Sequence[Any]) -> str | None:
    """Return the directory of a DCP reader or writer."""
    (storage,) = paths
    return below(storage.path)


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PatchedCall:
    """One row: functions that an injector replaces, and how it hits a call of them.

    Called like the class of any injector, it makes one. `models`, `not_models` and `proof` are what
    users read of the fault.
    """

    name: str  # of the injector
    owner: str  # of the functions: a module, or `module:Class`
    functions: tuple[str, ...]
    shown: str  # what stands before a function's name in journals: `os` of `os.replace`
    parameters: tuple[str, ...]  # the first ones of the functions, as they are given by position
    paths: tuple[str, ...]  # parameters that take a path, a descriptor, an open file or a storage
    find: Find = first_below  # the name below the directory, by the values of `paths`
    kind: Kind = Kind.AROUND  # of a WHOLE_FILE, `paths` is the parameter that takes the file
    is_optional: bool = False  # idle where nobody has imported the module yet
    models: str
    not_models: str
    proof: str = "`fired`, and an event in the journal before the process dies."

    def __call__(
        self,
        root: Path,
        journal: ChildJournal,
        **given: Any,  # noqa: ANN401  JSON-plain arguments of a program
    ) -> CallInjector:
        """Make the injector; raises TypeError for an argument that `Injector` does not take."""
        return CallInjector(self, root, journal, **given)


TORCH_SAVE = PatchedCall(
    name="torch-save",  # to a path or to an open file
    owner="torch",
    functions=("save",),
    shown="torch",
    parameters=("obj", "f"),
    paths=("f",),
    kind=Kind.WHOLE_FILE,
    models="a process killed, or a disk full, at the beginning, in the middle or at the last byte "
    "of the file that torch's C++ writer makes.",
    not_models="single writes inside the C++ writer; a save into memory, which is no I/O.",
)

TORCH_LOAD = PatchedCall(
    name="torch-load",  # from a path or from an open file
    owner="torch",
    functions=("load",),
    shown="torch",
    parameters=("f",),
    paths=("f",),
    models="an I/O error of the medium or the network while a checkpoint is read.",
    not_models="bytes that are wrong (see at_rest), or a load from memory.",
    proof="`fired`, and an event in the journal.",
)

SAFETENSORS_SAVE = PatchedCall(
    name="safetensors-save",  # its writer is in Rust
    owner="safetensors.torch",
    functions=("save_file",),
    shown="safetensors",
    parameters=("tensors", "filename"),
    paths=("filename",),
    kind=Kind.WHOLE_FILE,
    is_optional=True,
    models="a process killed, or a disk full, at the beginning, in the middle or at the last byte.",
    not_models="single writes inside the Rust writer, and the name that newer versions write to "
    "before they rename: the final name is what is cut.",
)

DCP_SAVE = PatchedCall(
    name="dcp-save",
    owner="torch.distributed.checkpoint",
    functions=("save",),
    shown="dcp",
    parameters=("state_dict", "storage"),
    paths=("checkpoint_id", "storage_writer", "storage_reader", "storage"),
    find=dcp_directory,
    models="a process killed just before or just after the call, and a call that fails as a whole.",
    not_models="what happens inside (see dcp-writer and file-write); `async_save`.",
)

DCP_LOAD = PatchedCall(
    name="dcp-load",
    owner="torch.distributed.checkpoint",
    functions=("load",),
    shown="dcp",
    parameters=("state_dict", "storage"),
    paths=("checkpoint_id", "storage_writer", "storage_reader", "storage"),
    find=dcp_directory,
    models="a process killed just before or just after the call, and a call that fails as a whole.",
    not_models="what happens inside (see file-read).",
)

DCP_WRITER = PatchedCall(
    name="dcp-writer",  # the two stages of a save
    owner="torch.distributed.checkpoint.filesystem:FileSystemWriter",
    functions=("write_data", "finish"),
    shown="dcp",
    parameters=("self",),
    paths=("self",),
    find=storage_directory,
    models="a process killed between the shards and the metadata that commits them, or an error "
    "there.",
    not_models="single writes inside a shard (see file-write), several ranks.",
)

RENAME = PatchedCall(
    name="rename",  # also through pathlib and shutil
    owner="os",
    functions=("replace", "rename", "link", "symlink"),
    shown="os",
    parameters=("src", "dst"),
    paths=("dst", "src"),
    models="a process killed just before or just after a name is published, and a rename that "
    "fails.",
    not_models="a rename that a power cut takes back; renames by code in C++ or Rust.",
)

UNLINK = PatchedCall(
    name="unlink",  # also through pathlib and shutil
    owner="os",
    functions=("unlink", "remove", "rmdir"),
    shown="os",
    parameters=("path",),
    paths=("path", "dir_fd"),
    find=entry_of_folder,
    models="a process killed just before or just after a file is deleted, and a deletion that "
    "fails.",
    not_models="a directory that another process fills while it is being removed.",
)

FSYNC = PatchedCall(
    name="fsync",  # of files and of directories
    owner="os",
    functions=("fsync", "fdatasync"),
    shown="os",
    parameters=("fd",),
    paths=("fd",),
    find=descriptor_of,
    models="a disk that reports its write error only when it is asked to flush, and a process "
    "killed just before or just after a flush.",
    not_models="what a power cut leaves of bytes that were never flushed.",
)


# -- the engine ------------------------------------------------------------------------------------


class CallInjector(Injector):
    """Hits at the N-th call of a row's functions that is about a name below the directory."""

    def __init__(
        self,
        row: PatchedCall,
        root: Path,
        journal: ChildJournal,
        **given: Any,  # noqa: ANN401  JSON-plain arguments of a program
    ) -> None:
        """Keep the row and the arguments; raises TypeError for an unknown one."""
        self.row, self.name = row, row.name
        super().__init__(root, journal, **given)

    def install(self) -> None:
        """Replace functions wherever they were imported by name, methods where they are defined."""
        module, _, class_name = self.row.owner.partition(":")
        if self.row.is_optional and module not in sys.modules:
            return
        owner = importlib.import_module(module)
        if not class_name:
            self.patch_functions(owner, self.row.functions, self._call)
            return
        for name in self.row.functions:
            bases = getattr(owner, class_name).__mro__
            defining = next(base for base in bases if name in vars(base))
            real: Callable[..., object] = vars(defining)[name]
            self.patch(defining, name, self._method(name, real))

    def _method(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def method(*args: object, **kwargs: object) -> object:
            return self._call(name, real, *args, **kwargs)

        return method

    def _call(
        self, name: str, real: Callable[..., object], /, *args: object, **kwargs: object
    ) -> object:
        given = dict(zip(self.row.parameters, args, strict=False)) | kwargs
        path = self.row.find(self.below, [given.get(parameter) for parameter in self.row.paths])
        call = partial(real, *args, **kwargs)
        what = f"{self.row.shown}.{name}"
        if self.row.kind is Kind.AROUND:
            return self.around(what, path, call)
        if not self.count(what, path) or path is None:
            return call()
        if self.moment == "before":
            self.inject(what, path)
        if self.moment == "after":
            call()
        else:
            self._write_prefix(call)
        self.inject(what, path)
        return None

    def _write_prefix(self, call: partial[object]) -> None:
        """Run a WHOLE_FILE call, and leave a prefix of what it writes.

        A native writer calls the kernel itself, so nothing in Python sees its single writes. The
        real function runs, and its real bytes are then cut: the disk holds what a writer that was
        stopped there would have left, because these writers write from front to back.
        """
        (parameter,) = self.row.paths
        at = self.row.parameters.index(parameter)
        by_name = parameter in call.keywords
        target: Any = call.keywords[parameter] if by_name else call.args[at]
        if isinstance(target, str | bytes | os.PathLike):
            call()
            path = str(path_of(target))
            os.truncate(path, length_of(self.prefix, os.stat(path).st_size))  # noqa: PTH116  str
            return
        buffer = io.BytesIO()
        if by_name:
            call.func(*call.args, **{**call.keywords, parameter: buffer})
        else:
            call.func(*call.args[:at], buffer, *call.args[at + 1 :], **call.keywords)
        data = buffer.getvalue()
        target.write(data[: length_of(self.prefix, len(data))])
        target.flush()
