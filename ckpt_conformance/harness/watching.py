"""Watches what the fork server and its children open, from the start of each process on.

An audit hook of Python tells of most (`recorder`). Of some no event tells, so these functions are
wrapped: variables that are looked up, questions about a path (`os.stat`, and so `Path.exists`), and
interpreters that multiprocessing starts. A finder that finds nothing sees which modules are looked
for.

What is not seen: files that C code opens by itself, beyond libraries; files that are opened
relative to a descriptor; and whatever a program does that was started, so it is named.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.harness.opened import EVERYBODY, FOLDER, logs
from ckpt_conformance.harness.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

VARIABLE = "CKC_OPENED"  # for a child that becomes a new interpreter: its notes
QUESTIONS = {"stat": "exists", "lstat": "exists", "access": "exists", "readlink": "link"}
OF_DISKS = ("statvfs", "pathconf")  # which take no folder that a path is relative to
SUPPORTS = (
    os.supports_dir_fd,
    os.supports_fd,
    os.supports_follow_symlinks,
    os.supports_effective_ids,
)
_recorder: list[Recorder] = []  # of this process: a hook is never removed


def install(server: Path) -> None:
    """Take the events of this process, which is the server, and of what it forks."""
    folder = server / FOLDER
    watch(Recorder(folder, folder / EVERYBODY))


def begin(adapter: str, root: str) -> None:
    """Note for one adapter from here on, in a child whose manager works below `root`.

    Nothing happens without a hook.
    """
    for recorder in _recorder:
        recorder.places.add_root(root)
        recorder.log = str(logs(recorder.folder, adapter)[1])


def hand_over() -> None:
    """Let the interpreter that this process becomes take its notes; nothing without a hook."""
    for recorder in _recorder:
        os.environ[VARIABLE] = recorder.log
        recorder.handlers = {}  # the program that is started is our own


def take_over() -> None:
    """Go on with the notes of the process that became this one, if there was a hook."""
    log = os.environ.pop(VARIABLE, "")
    if log:
        watch(Recorder(Path(log).parent, Path(log)))


def watch(recorder: Recorder) -> None:
    """Take the events of this process and of what it forks from here on, for good."""
    _recorder.append(recorder)
    sys.addaudithook(recorder.hook)
    kind: Any = type(os.environ)
    look_up = kind.__getitem__

    @functools.wraps(look_up)
    def noted(self: object, key: object) -> object:
        recorder.looks_up(key)
        return look_up(self, key)

    kind.__getitem__ = noted
    _watch_names(recorder, kind)
    _watch_questions(recorder)
    _watch_disks(recorder)
    sys.meta_path.insert(0, Looking(recorder))
    _watch_interpreters(recorder)


def _watch_names(recorder: Recorder, kind: Any) -> None:  # noqa: ANN401  os._Environ
    """Note who asks for the names of all variables: to copy them, or to find some by a prefix."""
    for name in ("__iter__", "__len__"):
        ask = getattr(kind, name)

        def noted(self: object, ask: Callable[[object], object] = ask) -> object:
            recorder.looks_through()
            return ask(self)

        setattr(kind, name, functools.wraps(ask)(noted))
    write = kind.__repr__

    @functools.wraps(write)
    def noted_whole(self: Iterable[object]) -> object:
        for one in self:
            recorder.looks_up(one)
        return write(self)

    kind.__repr__ = noted_whole


class Looking:
    """Sees which modules are looked for, first of all finders, and finds none.

    An event tells of import statements alone, and not of the packages that a module lies in.
    """

    def __init__(self, recorder: Recorder) -> None:
        """Tell a recorder."""
        self.recorder = recorder

    def find_spec(self, name: str, path: Iterable[str] | None = None, _: object = None) -> None:
        """Take that a module is looked for in the folders of its package, or in all."""
        if name not in sys.stdlib_module_names:
            places = sys.path if path is None else getattr(path, "_path", path)
            self.recorder.looks_for(name.rpartition(".")[2], list(places))


def _watch_questions(recorder: Recorder) -> None:
    for name, kind in QUESTIONS.items():
        ask = getattr(os, name)

        def noted(
            path: object,
            *arguments: object,
            dir_fd: int | None = None,
            ask: Callable[..., object] = ask,
            kind: str = kind,
            **more: object,
        ) -> object:
            recorder.asks(path, dir_fd, kind)
            return ask(path, *arguments, dir_fd=dir_fd, **more)

        wrapped = functools.wraps(ask)(noted)
        setattr(os, name, wrapped)
        for supporting in SUPPORTS:
            if ask in supporting:
                supporting.add(wrapped)


def _watch_disks(recorder: Recorder) -> None:
    for name in OF_DISKS:
        ask = getattr(os, name)

        def noted(
            path: object, *arguments: object, ask: Callable[..., object] = ask, **more: object
        ) -> object:
            recorder.asks(path, None, "exists")
            return ask(path, *arguments, **more)

        wrapped = functools.wraps(ask)(noted)
        setattr(os, name, wrapped)
        if ask in os.supports_fd:
            os.supports_fd.add(wrapped)


def _watch_interpreters(recorder: Recorder) -> None:
    """Note the interpreters that multiprocessing starts: no event tells of these."""
    from multiprocessing import util

    tools: Any = util
    start = tools.spawnv_passfds

    @functools.wraps(start)
    def noted(path: bytes, arguments: list[Any], descriptors: list[int]) -> int:
        if not any("resource_tracker" in os.fsdecode(word) for word in arguments):
            recorder.starts(path)
        return int(start(path, arguments, descriptors))

    tools.spawnv_passfds = noted
