"""Names on disk, learnt from what a manager wrote: which carry a step, and what others would be.

No suite knows how a manager names its files. What the newest save created and carries the number
of its step shows it; another step's name is the same name with another number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import NotApplicable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ckpt_conformance.subject.subject import Golden

LONGEST = 255  # bytes of a name that Linux file systems take
SMALL = 4096  # bytes: a pointer or an id is no longer
CONTENTS = ("file", "empty", "folder", "dangling", "loop")


@dataclass(frozen=True)
class StepName:
    """A path, relative to the root, whose last name was created by a save and carries its step."""

    path: str
    step: int
    is_folder: bool

    def of(self, other: int | str) -> str:
        """Return the path that another step would have; digits keep their padding."""
        folder, name = os.path.split(self.path)
        return os.path.join(folder, trees.renumbered(name, self.step, other))  # noqa: PTH118  relative


def of_step(golden: Golden, step: int) -> list[StepName]:
    """Return the outermost names that the save of a step created and that carry its number."""
    earlier = [save for save in golden.saves if save < step]
    before = golden.snapshot(max(earlier)) if earlier else None
    return created(golden.snapshot(step), before, step)


def created(root: Path, before: Path | None, step: int, folder: str = "") -> list[StepName]:
    """Return the outermost names in a tree that carry a step's number and are not in `before`."""
    outermost: list[StepName] = []
    for name in sorted(entry.name for entry in (root / folder).iterdir()):
        path = os.path.join(folder, name)  # noqa: PTH118  relative
        is_folder = (root / path).is_dir() and not (root / path).is_symlink()
        is_new = before is None or not os.path.lexists(before / path)
        if is_new and trees.carries(name, step):
            outermost.append(StepName(path, step, is_folder))
        elif is_folder:
            outermost += created(root, before, step, path)
    return outermost


def require_step_names(golden: Golden, step: int) -> list[StepName]:
    """Return them, or raise NotApplicable: a manager with one fixed name has no newer name."""
    step_names = of_step(golden, step)
    if not step_names:
        raise NotApplicable("no name that the manager writes carries the number of its step")
    return step_names


def pointers(golden: Golden, step: int) -> list[str]:
    """Return small files and links that the newest save changed, outside every step's own names.

    What it made anew is no pointer that it moved on, but a part of the step under a name of its
    own; what it left as it was says nothing about a step.
    """
    mine = [name.path for save in golden.saves for name in of_step(golden, save)]
    root, small = golden.snapshot(step), list[str]()
    before = golden.snapshot(max(save for save in golden.saves if save < step))
    for base, folders, files in os.walk(root):
        at = os.path.relpath(base, root)
        paths = [os.path.normpath(os.path.join(at, name)) for name in (*folders, *files)]  # noqa: PTH118
        folders[:] = [name for name in folders if not (root / at / name).is_symlink()]
        small += [path for path in paths if _is_small(root / path) and _moved(root, before, path)]
    inside = tuple(f"{path}/" for path in mine)
    return sorted(path for path in small if path not in mine and not path.startswith(inside))


def _is_small(path: Path) -> bool:
    info = path.lstat()
    return path.is_symlink() or (path.is_file() and info.st_size <= SMALL)


def _moved(root: Path, before: Path, path: str) -> bool:
    """Whether a file or link is in both trees, and says something else in each."""
    if not os.path.lexists(before / path):
        return False
    new, old = root / path, before / path
    if new.is_symlink() or old.is_symlink():
        return not (new.is_symlink() and old.is_symlink() and new.readlink() == old.readlink())
    return old.is_file() and new.read_bytes() != old.read_bytes()


def lookalikes(name: StepName) -> list[str]:
    """Return paths that look like a step's and are none: no number, a word, a sign, a suffix."""
    made = [name.of(word) for word in ("", "tmp", "latest", "-1", "1e9", "0x10", "latest.bak")]
    folder, last = os.path.split(name.of(8))
    copies = [f"{last}.bak", f"{last} (copy)", f"copy of {last}"]
    made += [os.path.join(folder, copy) for copy in copies]  # noqa: PTH118  relative
    return [path for path in dict.fromkeys(made) if os.path.basename(path) and path != name.path]  # noqa: PTH119


@lru_cache(maxsize=4)
def strange(seed: int, count: int) -> tuple[str, ...]:
    """Return names that people and tools leave behind, hostile ones too, and the longest."""
    from faker import Faker

    fake = Faker(["en_US", "ja_JP", "ar_SA", "de_DE"])
    fake.seed_instance(seed)
    makers = (
        fake.file_name,
        fake.name,
        lambda: f"{fake.word()}-tmp",
        lambda: f".{fake.word()}.swp",
        lambda: f"{fake.word()} {fake.emoji()}",
        lambda: f"{fake.word()}\n{fake.word()}",
    )
    made = ["step_tmp", "checkpoint-latest", "-rf", "~", " ", "lost+found", ".nfs0000000001"]
    made += [makers[at % len(makers)]().replace("/", "_") for at in range(count)]
    made.append("ü" * (LONGEST // 2))
    return tuple(dict.fromkeys(made))


def plant(root: Path, name: str, content: str) -> None:
    """Put one of `CONTENTS` under a free name."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if content == "folder":
        path.mkdir()
        (path / "notes.txt").write_text("not yours\n")
    elif content == "dangling":
        path.symlink_to("nowhere")
    elif content == "loop":
        path.symlink_to(path.name)
    else:
        path.write_bytes(b"" if content == "empty" else b"not yours\n")


def plant_all(root: Path, made: Iterable[str]) -> list[str]:
    """Plant every path that is free, with contents in turn; give those that were planted."""
    free = [name for name in dict.fromkeys(made) if not os.path.lexists(root / name)]
    for at, name in enumerate(free):
        plant(root, name, CONTENTS[at % len(CONTENTS)])
    return free


def plant_empty(root: Path, made: Iterable[str]) -> None:
    """Plant an empty file under each name of a flat list: cheap, for none may be there."""
    for name in made:
        os.close(os.open(f"{root}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))


HOUR = 3600  # seconds


def age(root: Path) -> None:
    """Let an hour pass: each file and directory below a root is that much older.

    Steps that a real run leaves are minutes apart at least, and a manager may go by their times.
    """
    for path in [*root.rglob("*"), root]:
        info = path.lstat()
        times = (info.st_atime - HOUR, info.st_mtime - HOUR)
        os.utime(path, times, follow_symlinks=False)


def plant_incomplete(root: Path, step_names: list[StepName], step: int) -> list[str]:
    """Plant an empty file or directory under each name that a save of `step` would create."""
    made = [name.of(step) for name in step_names]
    for name, path in zip(step_names, made, strict=True):
        if name.is_folder:
            (root / path).mkdir(parents=True)
        else:
            (root / path).write_bytes(b"")
    return made
