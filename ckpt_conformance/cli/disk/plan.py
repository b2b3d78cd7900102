"""The plan of `fsck`: a file of what was listed, a line for each checkpoint, and its parts.

A listing may be of ten million files, so it goes through a file, named by the user or temporary;
of each checkpoint only its cost is in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ckpt_conformance import __version__
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.judge import stored
from ckpt_conformance.fsck.judge.examine import Checkpoints
from ckpt_conformance.fsck.judge.judging import Job, Slice
from ckpt_conformance.fsck.source.places import is_far
from ckpt_conformance.work.items import Shard, balance

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from ckpt_conformance.fsck.judge.judge import Options
    from ckpt_conformance.fsck.source.places import Where

SCHEMA = "ckpt-conformance/fsck-plan/v2"
BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one after each start of a machine
_IN_MEMORY = 8 << 20  # bytes of a temporary plan


@dataclass(frozen=True)
class Origin:
    """Which folder or file a plan is of, beyond what the user called it.

    Within one start of a machine a folder is known by its device and inode, wherever it is moved or
    mounted. Elsewhere these say nothing, and its absolute path has to do.
    """

    path: str  # absolute, links in it as they are; of a URL the URL
    boot: str = ""  # empty for a URL
    inode: tuple[int, int] = (0, 0)  # with its device

    @classmethod
    def of(cls, where: Where) -> Origin:
        """Look at a place; of one that cannot be looked at its path is known."""
        if is_far(where):
            return cls(str(where))
        path = os.path.abspath(str(where))  # noqa: PTH100  which resolves no link
        try:
            info, boot = os.stat(path), BOOT.read_text().strip()  # noqa: PTH116
        except OSError:
            return cls(path)
        return cls(path, boot, (info.st_dev, info.st_ino))

    def trouble(self, here: Origin) -> str:
        """Say why something else is here; empty if it is what was listed."""
        if self.boot and self.boot == here.boot:
            if self.inode == here.inode:
                return ""
            if self.path == here.path:
                return f"is of another folder, which was at {self.path} when it was listed"
        return "" if self.path == here.path else f"is of {self.path}, and not of {here.path}"


@dataclass(frozen=True)
class Listed:
    """What a listing came to; `digest` names it: shards of another one do not belong together."""

    place: str
    checkpoints: int
    files: int
    size: int
    digest: str
    leftovers: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        """Write it for people."""
        return f"{self.checkpoints:,} checkpoints, {self.files:,} files, {self.size:,} bytes"


@dataclass(frozen=True)
class StoredPlan:
    """A plan in a file that is open: what was listed, in its order."""

    file: IO[bytes]
    listed: Listed
    name: str  # of the file, for messages

    def listing(self) -> Iterator[Job]:
        """Yield what was listed, each as a job."""
        return (job for _, job in self.places())

    def places(self) -> Iterator[tuple[int, Job]]:
        """Yield what was listed, each as a job, with the offset of its line."""
        self.file.seek(0)
        number = offset = 0
        for line in self.file:
            plain = stored.decode(line)
            if plain["line"] == "checkpoint":
                yield offset, Job(number, stored.found_of(plain["found"]))
                number += 1
            offset += len(line)

    def job_at(self, offset: int, number: int, part: Slice) -> Job:
        """Read again what was listed in the line at an offset."""
        self.file.seek(offset)
        found = stored.found_of(stored.decode(self.file.readline())["found"])
        return Job(number, found, part)

    def jobs(self, options: Options, shard: Shard, *, is_cut: bool = False) -> Jobs:
        """Return the part of a shard; all parts together are the plan.

        A large checkpoint is cut into slices where there are shards, the same ones for any number,
        or where several machines share the work (`is_cut`).
        """
        if shard.count == 1 and not is_cut:
            return Jobs(self, options, None)
        costs = array("d")
        for job in self.listing():
            count = stored.slices(job.found, options)
            costs.extend([stored.cost(job.found, options, count)] * count)
        chosen = bytearray(len(costs))
        parts = balance(range(len(costs)), shard.count, costs.__getitem__)
        for place in parts[shard.number - 1]:
            chosen[place] = 1
        return Jobs(self, options, chosen)


@dataclass(frozen=True)
class Jobs:
    """What one shard judges; `chosen` has a byte for each job of the plan, None is all."""

    plan: StoredPlan
    options: Options
    chosen: bytearray | None

    def __len__(self) -> int:
        """Count the jobs of this shard."""
        return self.plan.listed.checkpoints if self.chosen is None else sum(self.chosen)

    def __iter__(self) -> Iterator[Job]:
        """Yield the jobs, in the order of the plan."""
        return (job for _, job in self.places())

    def places(self) -> Iterator[tuple[int, Job]]:
        """Yield the jobs, each with the offset of its checkpoint's line in the plan."""
        place = 0
        for offset, job in self.plan.places():
            if self.chosen is None:
                yield offset, job
                continue
            count = stored.slices(job.found, self.options)
            for number in range(1, count + 1):
                if self.chosen[place]:
                    yield offset, replace(job, slice=Slice(number, count))
                place += 1


def _line(kind: str, **values: Any) -> bytes:  # noqa: ANN401  plain values
    return stored.encode({"line": kind} | values) + b"\n"


def _write(
    file: IO[bytes], where: Where, *, is_weighed: bool, tell: Callable[[int, int], None]
) -> Listed:
    """List a place into a file; `tell` is told how many checkpoints and files were listed."""
    place = str(where)
    origin = vars(Origin.of(where))
    file.write(_line("plan", schema=SCHEMA, version=__version__, place=place, origin=origin))
    checkpoints = Checkpoints(where, is_weighed=is_weighed)
    digest = hashlib.blake2b(digest_size=16)
    count = files = size = 0
    for found in checkpoints:
        file.write(_line("checkpoint", found=stored.found_json(found)))
        digest.update(stored.identity(found) + b"\n")
        count, files, size = count + 1, files + found.weight.files, size + found.weight.size
        tell(count, files)
    leftovers = sorted(set(checkpoints.leftovers))
    listed = Listed(place, count, files, size, digest.hexdigest(), leftovers)
    file.write(_line("end", listed=vars(listed)))
    file.flush()
    return listed


@contextlib.contextmanager
def made(
    where: Where, *, is_weighed: bool, tell: Callable[[int, int], None]
) -> Generator[StoredPlan]:
    """List a place; the plan is in memory, or in a temporary file if it is a large one."""
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
        listed = _write(file, where, is_weighed=is_weighed, tell=tell)
        yield StoredPlan(file, listed, "the listing")


def write(path: Path, where: Where, tell: Callable[[int, int], None]) -> Listed:
    """List a place into a file, whole or not at all; RequestError for a file of somebody else."""
    _refuse_foreign(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with trees.replacing(path) as file:
            return _write(file, where, is_weighed=True, tell=tell)
    except OSError as error:
        reason = f"--write-plan {path} cannot be written: {error.strerror}"
        raise RequestError(f"{reason}; name another file") from error


def _refuse_foreign(path: Path) -> None:
    """Raise RequestError for a file that is no plan: it would be overwritten."""
    try:
        if not path.exists():
            return
        with path.open("rb") as file:
            _check_head(file.readline(1 << 20), "--write-plan", path)
    except OSError as error:
        raise RequestError(f"--write-plan {path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def opened(path: Path, where: Where) -> Generator[StoredPlan]:
    """Open a plan that `write` wrote; RequestError for another file, or one of another place.

    A name that is relative may be that of another folder. What was moved is the same folder still,
    and what was copied is another one.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        reason = f"--plan {path} cannot be read: {error.strerror}"
        raise RequestError(f"{reason}; write one with --write-plan") from error
    with file:
        origin = _check_head(file.readline(), "--plan", path)
        if trouble := origin.trouble(Origin.of(where)):
            raise RequestError(f"--plan {path} {trouble}; {_ELSEWHERE}")
        listed = _check_lines(file, path)
        yield StoredPlan(file, listed, str(path))


_ELSEWHERE = (
    "name the folder that was listed, or list this one with --write-plan. On another machine the "
    "same folder needs the same absolute path: mount it there, or make a symbolic link"
)


def _check_head(line: bytes, option: str, path: Path) -> Origin:
    """Return what a plan is of; RequestError for a file that is none."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        head = stored.decode(line)
        if head["schema"] == SCHEMA:
            origin = head["origin"]
            return Origin(origin["path"], origin["boot"], tuple(origin["inode"]))
    advice = "name another file" if option == "--write-plan" else "name one that it wrote"
    raise RequestError(f"{option} {path} is no plan that fsck --write-plan wrote; {advice}")


def _check_lines(file: IO[bytes], path: Path) -> Listed:
    """Read a plan to its end; RequestError if it is not what was written."""
    digest, last = hashlib.blake2b(digest_size=16), b""
    try:
        for line in file:
            last = line
            plain = stored.decode(line)
            if plain["line"] == "checkpoint":
                digest.update(stored.identity(stored.found_of(plain["found"])) + b"\n")
        end = stored.decode(last)
        listed = Listed(**end["listed"])
    except (json.JSONDecodeError, ValueError, TypeError, KeyError):
        listed = None
    if listed is None or listed.digest != digest.hexdigest():
        why = "it was cut short or changed"
        raise RequestError(f"--plan {path} is not whole: {why}; write it again with --write-plan")
    return listed
