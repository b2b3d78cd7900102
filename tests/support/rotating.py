# ruff: noqa: T201  its output is what the test reads
"""A process that saves, rotates and replaces checkpoints, and a test that says when.

It is no thread of the test: what it does to the disk is what a trainer does. Each command is a line
on its standard input, and is done when a line comes back.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

FILES = ("model.pt", "optimizer.pt")


# -- in the process --------------------------------------------------------------------------------


def write(folder: Path, value: float) -> None:
    """Save each part; all of a step have the same bytes but for the value."""
    folder.mkdir()
    for name in FILES:
        torch.save({"w": torch.full((300,), value), "of": torch.tensor(value)}, folder / name)


def save(root: Path, name: str, value: float) -> None:
    """Save under another name first, as a careful trainer does."""
    write(draft := root / f"{name}.tmp", value)
    draft.rename(root / name)


def remove(root: Path, name: str) -> None:
    """Remove a step."""
    shutil.rmtree(root / name)


def rename(root: Path, name: str, other: str) -> None:
    """Rename a step."""
    (root / name).rename(root / other)


def replace(root: Path, name: str, value: float, *, is_torn: bool = False) -> None:
    """Put another save into the place of a step, by two renames."""
    write(draft := root / f"{name}.tmp", value)
    if is_torn:
        tear(root, draft.name)
    (root / name).rename(root / f"{name}.old")
    draft.rename(root / name)
    shutil.rmtree(root / f"{name}.old")


def replace_file(root: Path, name: str, value: float, file: str = "model.pt") -> None:
    """Put the file of another save into the place of one, by a rename."""
    write(draft := root / f"{name}.tmp", value)
    (draft / file).replace(root / name / file)
    shutil.rmtree(draft)


def tear(root: Path, name: str, file: str = "model.pt", *, keeps_time: bool = False) -> None:
    """Write over the middle of a file in place: its size stays, and its time may."""
    path = root / name / file
    before = path.stat()
    with path.open("r+b") as out:
        out.seek(before.st_size // 2)
        out.write(b"\xa5" * 16)
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def overwrite(root: Path, name: str, value: float) -> None:
    """Save over the files of a step in place, as a script that has one name does."""
    write(draft := root / f"{name}.tmp", value)
    for file in FILES:
        (root / name / file).write_bytes((draft / file).read_bytes())
    shutil.rmtree(draft)


def cut(root: Path, name: str, file: str = "model.pt") -> None:
    """Cut a file to a half."""
    os.truncate(root / name / file, (root / name / file).stat().st_size // 2)


def append(root: Path, name: str, file: str) -> None:
    """Write to the end of a file, which is made if it is not there."""
    with (root / name / file).open("a") as out:
        out.write(" ")


def begin(root: Path, name: str, value: float) -> None:
    """Save the first of several files right under the name of a step."""
    write(draft := root / f"{name}.tmp", value)
    (root / name).mkdir()
    (draft / FILES[0]).rename(root / name / FILES[0])
    cut(root, name)
    shutil.rmtree(draft)


def point(root: Path, link: str, name: str) -> None:
    """Have a symbolic link lead elsewhere, at once."""
    (root / f"{link}.tmp").symlink_to(name)
    (root / f"{link}.tmp").replace(root / link)


COMMANDS = {
    one.__name__: one
    for one in (
        *(save, remove, rename, replace, replace_file, overwrite, tear, cut, append, begin, point),
    )
}


def _serve() -> None:
    """Do what the lines say, one after the other."""
    root = Path(sys.argv[1])
    print(flush=True)
    for line in sys.stdin:
        name, words, options = json.loads(line)
        COMMANDS[name](root, *words, **options)
        print(flush=True)


def _hammer(seed: int, steps: int) -> None:
    """Save and rotate without a pause, and note when each step became whole, and ceased to be.

    A step ceases to be whole before the first of its files goes, and is whole after its rename.
    """
    root, rng, kept = Path(sys.argv[1]), random.Random(seed), list[str]()  # noqa: S311
    print(flush=True)
    for step in range(1, steps + 1):
        name = f"step_{step}"
        how = rng.choice(("save", "save", "save", "in place", "torn", "replace"))
        if how == "in place":
            _note("begun", name)
            begin(root, name, step)
            shutil.rmtree(root / name)
        save(root, name, step)
        _note("whole", name)
        kept.append(name)
        if how == "torn":
            _note("broken", name)
            tear(root, name, rng.choice(FILES), keeps_time=rng.random() < 0.5)
            _note("torn", name)
        elif how == "replace":
            _note("broken", name)
            replace(root, name, step + 0.5)
            _note("whole", name)
        while len(kept) > rng.choice((1, 2, 3)):
            old = kept.pop(0)
            _note("broken", old)
            remove(root, old)
            _note("gone", old)
    _note("end", "")


def _note(what: str, name: str) -> None:
    print(json.dumps([time.monotonic(), what, name]), flush=True)


# -- in the test -----------------------------------------------------------------------------------


class Trainer:
    """The process; a command has been done when its call returns."""

    def __init__(self, root: Path, *words: str) -> None:
        """Start it, and wait until it can save."""
        root.mkdir(exist_ok=True)
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(root), *words],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("a pipe was asked for")
        self._in, self._out = self.process.stdin, self.process.stdout
        self.root = root
        self._done()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()

    def _done(self) -> None:
        if self._out.readline() != "\n":
            raise RuntimeError("the job has ended; its errors are above")

    def __call__(self, command: str, *words: Any, **options: Any) -> None:  # noqa: ANN401
        """Have it do something."""
        self._in.write(json.dumps([command, words, options]) + "\n")
        self._in.flush()
        self._done()

    def notes(self) -> Iterator[tuple[float, str, str]]:
        """Yield what a hammer notes: seconds of the monotonic clock, what, and of which step."""
        for line in self._out:
            at, what, name = json.loads(line)
            yield at, what, name


def value_of(path: Path) -> set[float]:
    """Load all files of a step, and return the values that are in them."""
    found = [torch.load(path / name, weights_only=True) for name in FILES]
    return {float(one["of"]) for one in found} | {float(one["w"].mean()) for one in found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        _hammer(int(sys.argv[2]), int(sys.argv[3]))
    else:
        _serve()
