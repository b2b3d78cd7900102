"""Buckets that real programs mount as a folder: a recording is played on one, and it is killed.

s3fs and rclone of the distribution, in front of a server of S3 on loopback. Between them stands the
proxy, which kills the program at the request that a test names.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import s3_stores

from ckpt_conformance.crash.explore.materializer import Source, whole_bytes
from ckpt_conformance.crash.model import replay
from ckpt_conformance.crash.model.states import Content, State
from ckpt_conformance.fault_injectors.object_store import server
from ckpt_conformance.trace.operations import DATA, Kind, Operation, Recording
from ckpt_conformance.trace.requests import Action, StoreRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt_conformance.fault_injectors.object_store.proxy import StoreProxy

CHANGES = {Action.PUT, Action.COPY, Action.COMPLETE, Action.DELETE, Action.DELETE_MANY}
# Seconds: until it is mounted; until it is gone; without a request after the last call.
STARTS, ENDS, IDLE = 60.0, 60.0, 3.0
NEEDED = {"s3fs": ("s3fs", "umount"), "rclone": ("rclone", "fusermount", "umount")}
DEVICE = Path("/dev/fuse")


def unavailable(program: str) -> str:
    """Return why a program can't mount a bucket here, and what to do; empty if it can."""
    name = program.partition("-")[0]
    lacking = [one for one in NEEDED[name] if shutil.which(one) is None]
    if lacking:
        return f"needs {', '.join(lacking)}: apt-get install {name} fuse"
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"needs {DEVICE}: run as root, in a container with --device {DEVICE}"
    if os.geteuid() != 0:
        return "needs root, to unmount what a killed program leaves"
    return s3_stores.NEEDS if s3_stores.MISSING else ""


def _command(program: str, endpoint: str, place: Path, folder: Path) -> list[str]:
    account = server.ACCOUNT
    if program == "s3fs":
        secret = folder / "passwd"
        secret.write_text(f"{account}:{account}")
        secret.chmod(0o600)
        given = (f"passwd_file={secret}", f"url={endpoint}", "use_path_request_style", "retries=1")
        options = [word for one in given for word in ("-o", one)]
        return ["s3fs", server.BUCKET, str(place), "-f", *options]
    return [
        *("rclone", "mount", f":s3:{server.BUCKET}", str(place), "--config=/dev/null"),
        *("--s3-provider=Other", f"--s3-endpoint={endpoint}"),
        *(f"--s3-access-key-id={account}", f"--s3-secret-access-key={account}"),
        *("--low-level-retries=1", "--retries=1", "--vfs-write-back=20ms"),
        *(f"--vfs-cache-mode={program.partition('-')[2]}", f"--cache-dir={folder / 'cache'}"),
    ]


@dataclass
class Mounted:
    """A program that mounts the bucket, and dies at one of its changes."""

    program: str
    folder: Path
    store: str
    at: int  # the number of the change; one that does not come: after the last call
    is_done: bool = True  # the store has done it by then
    process: subprocess.Popen[bytes] | None = None
    count: int = 0
    issued: int = 0  # calls of the recording
    died_at: int = -1  # calls that had been issued then
    quiet: threading.Event = field(default_factory=threading.Event)

    def play(self, recording: Recording) -> set[int]:
        """Make the calls until the program dies; return the crash points at which it may have."""
        place = self.folder / "mount"
        place.mkdir(parents=True)
        hook = {"after" if self.is_done else "before": self._count}
        with s3_stores.proxied(self.store, self.folder / "requests", **hook) as proxy:
            try:
                self._start(proxy, place)
                self._make(recording, place)
                if self.died_at < 0:
                    self._wait(proxy)
            finally:
                self._end(place)
        return {max(0, self.died_at), self.issued} if self.died_at >= 0 else {self.issued}

    def _count(self, request: StoreRequest) -> None:
        if request.action not in CHANGES:
            return
        self.count += 1
        if self.count - 1 == self.at and self.process is not None:
            self.died_at = self.issued
            self._kill()
            if not self.is_done:
                raise ConnectionError

    def _kill(self) -> None:
        """Kill the program, and let the kernel give up what waits for it.

        Why: a thread of rclone that tells the kernel of a name waits for the folder's lock, which
        who waits for rclone holds; without the abort that a forced umount is, neither ends.
        """
        if self.process is None:
            return
        self.process.kill()
        place = str(self.folder / "mount")
        subprocess.run(["umount", "-f", place], check=False, capture_output=True, timeout=ENDS)
        self.process.wait(ENDS)

    def _start(self, proxy: StoreProxy, place: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "AWS_CA_BUNDLE"}
        words = _command(self.program, proxy.endpoint, place, self.folder)
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        end = time.monotonic() + STARTS
        while not os.path.ismount(place):
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError((self.folder / "log").read_text())
            self.quiet.wait(0.01)

    def _make(self, recording: Recording, place: Path) -> None:
        player = Player(recording, place)
        try:
            for one in recording.operations:
                self.issued = one.index + 1
                player.do(one)
        except OSError:
            if self.died_at < 0:
                raise
        finally:
            player.leave()

    def _wait(self, proxy: StoreProxy) -> None:
        """Wait until nothing is uploaded any more, or the program has died."""
        seen, since = -1, time.monotonic()
        while self.died_at < 0 and time.monotonic() < since + IDLE:
            if len(proxy.requests) != seen:
                seen, since = len(proxy.requests), time.monotonic()
            self.quiet.wait(0.02)

    def _end(self, place: Path) -> None:
        self._kill()
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


class Player:
    """Makes the calls of a recording; a file stays open until the recording closes it."""

    def __init__(self, recording: Recording, place: Path) -> None:
        """Nothing is open yet."""
        self.recording, self.place = recording, place
        self.open: dict[int, int] = {}

    def do(self, one: Operation) -> None:
        """Make one call; raises OSError."""
        path, target = self.place / one.path, self.place / one.target
        calls: dict[Kind, Callable[[], object]] = {
            Kind.CREATE: lambda: self._open(one, os.O_CREAT | os.O_EXCL),
            Kind.TRUNCATE: lambda: self._truncate(one),
            Kind.WRITE: lambda: self._write(one),
            Kind.FSYNC: lambda: os.fsync(self._opened(one)),
            Kind.CLOSE: lambda: os.close(self.open.pop(one.object)),
            Kind.MKDIR: path.mkdir,
            Kind.RENAME: lambda: path.rename(target),
            Kind.UNLINK: path.unlink,
            Kind.RMDIR: path.rmdir,
        }
        calls[one.kind]()

    def _truncate(self, one: Operation) -> None:
        if one.object not in self.open and not one.size:
            self._open(one, os.O_TRUNC)
        else:
            os.ftruncate(self._opened(one), one.size)

    def _write(self, one: Operation) -> None:
        os.pwrite(self._opened(one), self.recording.bytes_of(one), one.offset)

    def _open(self, one: Operation, flags: int) -> int:
        self.open[one.object] = os.open(self.place / one.path, os.O_WRONLY | flags, 0o644)
        return self.open[one.object]

    def _opened(self, one: Operation) -> int:
        return self.open[one.object] if one.object in self.open else self._open(one, 0)

    def leave(self) -> None:
        """Close what a program that died left open."""
        for descriptor in self.open.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)


def fill(recording: Recording, program: str) -> None:
    """Put into the bucket what was there before, and nothing else."""
    client = s3_stores.emptied()
    for entry in recording.initial:
        if entry.kind == "file":
            body = (recording.folder / "initial" / entry.path).read_bytes()
            client.put_object(Bucket=server.BUCKET, Key=entry.path, Body=body)
        elif program == "s3fs":
            client.put_object(Bucket=server.BUCKET, Key=f"{entry.path}/", Body=b"")


def states_of(recording: Recording, point: int, bucket: dict[str, bytes]) -> Iterator[State]:
    """Yield the states that a bucket may be: of equal files each may be the one."""
    files = {key: body for key, body in bucket.items() if not key.endswith("/")}
    made = {key.rstrip("/") for key in bucket if key.endswith("/")}
    above = {parent for key in bucket for parent in _above(key.rstrip("/"))} | made
    folders = _folders(recording, point)
    choices = [_objects(recording, point, body) or [(-1, Content(0))] for body in files.values()]
    for chosen in itertools.islice(itertools.product(*choices), 4096):
        contents = dict(chosen)
        if any(contents[number] != content for number, content in chosen):
            continue
        names = {path: number for path, (number, _) in zip(files, chosen, strict=True)}
        for given in itertools.product(*(folders.get(path, [-1]) for path in sorted(above))):
            both = names | dict(zip(sorted(above), given, strict=True))
            yield State(point, dict(sorted(both.items())), contents, apart=True)


def _above(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def _folders(recording: Recording, point: int) -> dict[str, list[int]]:
    """Return the folders that had each path, newest first."""
    known = replay.directories(recording)
    slots = replay.initial_slots(recording)
    found: dict[str, list[int]] = {}
    for one in [None, *recording.operations[:point]]:
        if one is not None:
            replay.put(slots, replay.slot_events(one))
        for path, number in replay.paths(slots, known).items():
            if number in known and number not in found.setdefault(path, []):
                found[path].insert(0, number)
    return found


def _objects(recording: Recording, point: int, body: bytes) -> list[tuple[int, Content]]:
    """Return the files, and their contents, that have these bytes."""
    source, contents = Source(recording), replay.initial_contents(recording)
    seen = list(contents.items())
    for one in recording.operations[:point]:
        if one.kind is Kind.CREATE:
            contents[one.object] = Content(0)
        elif one.kind in DATA:
            contents[one.object] = replay.changed(contents[one.object], one)
        else:
            continue
        seen.append((one.object, contents[one.object]))
    equal = [(n, c) for n, c in seen if c.size == len(body) and whole_bytes(source, n, c) == body]
    return list(dict.fromkeys(equal))[::-1]
