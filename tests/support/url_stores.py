"""Stores in memory that fsspec finds by a scheme: one that watches, one that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_conformance.contract import trees

if TYPE_CHECKING:
    from pathlib import Path


class Store(MemoryFileSystem):
    """A store in memory with a scheme of its own."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = MemoryFileSystem._strip_protocol(path.removeprefix(f"{cls.protocol}://"))
        return stripped


class Watched(Store):
    """Remembers what it was asked for."""

    protocol = "watched"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    asked: ClassVar[list[tuple[str, int]]] = []

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:  # noqa: ANN401, FBT001, FBT002
        self.asked.append(("ls", 0))
        return super().ls(path, detail)

    def info(self, path: str, **_: Any) -> Any:  # noqa: ANN401
        self.asked.append(("info", 0))
        return super().info(path)

    def cat_file(
        self,
        path: str,
        start: int | None = None,
        end: int | None = None,
        **_: Any,  # noqa: ANN401
    ) -> bytes:
        if start is None or end is None:
            raise AssertionError(f"{path} is read as a whole")
        self.asked.append(("read", end - start))
        data: bytes = super().cat_file(path, start, end)
        return data

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:  # noqa: ANN401
        if mode == "rb":
            raise AssertionError(f"{path} is opened as a whole")
        return super()._open(path, mode, **more)


class Broken(Store):
    """Fails where it is told to."""

    protocol = "broken"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failing: ClassVar[dict[str, tuple[str, Exception]]] = {}

    def _fail(self, what: str, path: str) -> None:
        part, error = self.failing.get(what, ("?", ValueError()))
        if part in path:
            raise error

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:  # noqa: ANN401, FBT001, FBT002
        self._fail("ls", path)
        return super().ls(path, detail)

    def info(self, path: str, **_: Any) -> Any:  # noqa: ANN401
        self._fail("info", path)
        return super().info(path)

    def cat_file(
        self,
        path: str,
        start: int | None = None,
        end: int | None = None,
        **_: Any,  # noqa: ANN401
    ) -> bytes:
        self._fail("read", path)
        data: bytes = super().cat_file(path, start, end)
        return data


class Synthetic(AbstractFileSystem):
    """A bucket `synthetic://STEPSxFILES`: so many folders of steps, each with so many files.

    Nothing is kept: every file has the same content.
    """

    protocol = "synthetic"
    cachable = False
    content: ClassVar[bytes] = b""

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: ANN401, FBT001, FBT002
        top, _, step = self._strip_protocol(path).partition("/")
        steps, files = map(int, top.split("x"))
        names = [f"part_{at}.pt" for at in range(files)] if step else []
        names = names or [f"step_{at}" for at in range(steps)]
        found = [self.info(f"{path.rstrip('/')}/{name}") for name in names]
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:  # noqa: ANN401
        kind = "file" if path.endswith(".pt") else "directory"
        size = len(self.content) if kind == "file" else 0
        return {"name": self._strip_protocol(path), "type": kind, "size": size, "mtime": 1e9}

    def cat_file(
        self,
        path: str,
        start: int | None = None,
        end: int | None = None,
        **_: Any,  # noqa: ANN401
    ) -> bytes:
        del path
        return self.content[start:end]


def upload(root: Path, url: str) -> str:
    """Copy a folder into a store."""
    files = fsspec.filesystem(url.partition("://")[0])
    for path in trees.files(root):
        name = f"{url}/{path.relative_to(root).as_posix()}"
        files.pipe_file(files._strip_protocol(name), path.read_bytes())
    return url
