"""What a run produced: a file, a folder, or what a command prints; and whether two are the same.

Equal bytes are equal. Where bytes differ, the tensors inside are compared bit for bit: an archive
may hold the same tensors in another order. What no library of tensors reads is its bytes.
"""

from __future__ import annotations

import hashlib
import importlib
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_conformance.contract import trees
from ckpt_conformance.crash.script.command import TENSOR_FILES
from ckpt_conformance.processes import children
from ckpt_conformance.processes.lifecycle import ExitKind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.processes.children import Put

ABSENT = "absent"
DEADLINE = 60.0  # seconds to read one result
SHOWN = 6  # differences


@dataclass(frozen=True)
class Result:
    """A digest of the bytes; and of every leaf, where they were read."""

    bytes: str
    leaves: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def digest(self) -> str:
        """Name what is in it: its leaves if they are known."""
        if not self.leaves:
            return self.bytes
        return _hash("".join(f"{k}\0{v}\0" for k, v in sorted(self.leaves.items())).encode())


class FileLeaves(msgspec.Struct, frozen=True):
    """What the child that reads a result says of one file."""

    leaves: dict[str, str]  # path of a leaf -> digest


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def bytes_of(path: Path) -> str:
    """Digest a file, or all files of a folder with their names."""
    if path.is_dir():
        lines = [f"{p.relative_to(path)}\0{_of_file(p)}\0" for p in trees.files(path)]
        return _hash("".join(lines).encode())
    return _of_file(path) if path.is_file() else ABSENT


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read(path: Path) -> Result:
    """Read a result with its leaves, in a child: what is there may be damaged."""
    content = bytes_of(path)
    if content == ABSENT:
        return Result(content)

    def work(put: Put[FileLeaves]) -> None:
        files = trees.files(path) if path.is_dir() else [path]
        for file in files:
            name = file.relative_to(path).as_posix() if path.is_dir() else ""
            prefix = f"{name}:" if name else ""
            leaves = {f"{prefix}{leaf}": digest for leaf, digest in _leaves(file).items()}
            put(FileLeaves(leaves))

    leaves: dict[str, str] = {}
    for message in children.run(work, FileLeaves, DEADLINE):
        if isinstance(message, FileLeaves):
            leaves |= message.leaves
        elif message.exit_kind is not ExitKind.ENDED:
            return Result(content)
    return Result(content, leaves)


def _leaves(path: Path) -> dict[str, str]:
    """Map what a file holds to digests; a file that nobody reads holds its bytes."""
    from ckpt_conformance.workload import digests

    try:
        return digests.leaves(_loaded(path))
    except Exception:  # noqa: BLE001  whatever a damaged file makes a library raise
        return {"(bytes)": _of_file(path)}


def _loaded(path: Path) -> object:
    import torch

    if path.suffix == ".safetensors":
        formats: Any = importlib.import_module("safetensors.torch")  # an extra
        return formats.load_file(path)
    if path.suffix in {".npz", ".npy"}:
        import numpy as np

        loaded: Any = np.load(path, allow_pickle=False)
        return {name: loaded[name] for name in loaded.files} if path.suffix == ".npz" else loaded
    if path.suffix not in TENSOR_FILES and not zipfile.is_zipfile(path):
        raise ValueError(f"{path.suffix} is no file of tensors")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001  other types inside: the user's own, made by this very script
        return torch.load(path, map_location="cpu", weights_only=False)


def of_text(text: str) -> Result:
    """Make the result of a text that was printed: each line is a leaf."""
    lines = {f"line {number}": line for number, line in enumerate(text.splitlines(), 1)}
    return Result(_hash(text.encode()), lines or {"line 1": ""})


def differences(result: Result, expected: Result) -> list[str]:
    """Name what differs: at most `SHOWN` leaves that are wrong, then two that are too much."""
    if result.bytes == ABSENT:
        return ["it is not there"]
    keys = [k for k in expected.leaves if result.leaves.get(k) != expected.leaves[k]]
    lines: list[str] = []
    for key in keys[:SHOWN]:
        now = _short(result.leaves.get(key, ABSENT))
        lines.append(f"{key or 'value'}: {now}, not {_short(expected.leaves[key])}")
    unexpected = list(result.leaves.keys() - expected.leaves.keys())
    lines += [f"{key}: too much" for key in unexpected[:2]]
    more = len(keys) - SHOWN
    return lines + ([f"and {more} more"] if more > 0 else [])


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."  # noqa: PLR2004  of one line
