"""What it costs to follow a mapped file: 100 stores into a map of 64 MiB, an msync after each.

    python benchmarks/bench_mapped.py [MIB] [COUNT]

Prints the seconds of the same work, not recorded and recorded, and what one look costs.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from pathlib import Path

from ckpt_conformance.trace.recorder import Recorder

MIB = 1 << 20


def store(path: Path, size: int, count: int) -> None:
    """Map a full file; store one byte in a page of its own and sync it, so many times."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapping:
        for index in range(count):
            mapping[index * (size // count)] = index % 255 + 1
            mapping.flush()


def main(size: int, count: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "root"
        root.mkdir()
        (root / "map").write_bytes(os.urandom(size))
        begin = time.perf_counter()
        store(root / "map", size, count)
        plain = time.perf_counter() - begin
        (root / "map").write_bytes(os.urandom(size))
        recorder = Recorder(root, Path(name) / "record")
        begin, busy = time.perf_counter(), time.process_time()
        recording = recorder.function(lambda: store(root / "map", size, count))
        recorded, busy = time.perf_counter() - begin, time.process_time() - busy
    stores = sum(operation.mapped for operation in recording.operations)
    print(f"{size // MIB} MiB mapped, {count} times one page stored and msync(2)")
    print(f"not recorded {plain:.2f} s, recorded {recorded:.2f} s, {stores} stores seen")
    print(f"a look costs the supervisor {1000 * busy / count:.1f} ms of CPU")


if __name__ == "__main__":
    mib, times = [int(argument) for argument in (*sys.argv[1:], 64, 100)[:2]]
    main(mib * MIB, times)
