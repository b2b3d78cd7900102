"""How fast fsck is: digests and CRCs against `cat` and against their parts, metadata, start-up.

The parts of a rate are reading alone and the sum alone, by as many threads at once: to do one after
the other reaches 1 / (1 / read + 1 / sum). `single` and `reference` are one large file: its CRC is
divided, its digest shared, between the threads.

python benchmarks/bench_fsck.py [--mib 1024] [--chunks 1000000] [--jobs 4] [--folder DIR]
"""

from __future__ import annotations

import argparse
import io
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.source import CHUNK
from ckpt_conformance.fsck.source.sums import crc32
from ckpt_conformance.reference_impl import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
PARTS = 8


def seconds(action: Callable[[], object], runs: int = 4) -> float:
    """Time the best of some runs after the first: the files are warm then."""
    action()
    times: list[float] = []
    for _ in range(runs - 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def line(what: str, size: float, took: float, base: float, bound: float) -> None:
    """Print a rate, and its shares of that of cat and of what the parts allow."""
    shares = f"{100 * base / took:6.0f} % of cat {100 * bound / took:6.0f} % of the parts' bound"
    print(f"{what:<34}{size / took:8.0f} MiB/s {shares}")


def read_all(files: list[str]) -> None:
    """Read files through one buffer, as fsck does, and sum nothing."""
    buffer = memoryview(bytearray(CHUNK))
    for name in files:
        with io.FileIO(name, "rb") as file:
            while file.readinto(buffer):
                pass


def shared(action: Callable[[], object], threads: int) -> float:
    """Time an action that so many threads do at once, as seconds for each time that it is done."""
    with ThreadPoolExecutor(threads) as pool:
        return seconds(lambda: list(pool.map(lambda _: action(), range(threads)))) / threads


def sums_alone(counts: list[int]) -> dict[tuple[str, int], float]:
    """Time a MiB of each sum over bytes that are in a core's cache; print the rates."""
    block, rounds = memoryview(bytes(CHUNK)), 400
    crc = crc32()
    print(f"{'CRC-32 is that of':<34}{crc.__module__ or 'isal'}")
    times: dict[tuple[str, int], float] = {}
    sums: dict[str, Callable[[], object]] = {
        "CRC-32": lambda: [crc(block, 0) for _ in range(rounds)],
        "BLAKE3": lambda: [blake3(block) for _ in range(rounds)],
    }
    for (name, action), threads in product(sums.items(), counts):
        times[name, threads] = shared(action, threads) / (rounds * CHUNK / MIB)
        rate = 1 / times[name, threads]
        print(f"{f'{name} alone, threads: {threads}':<34}{rate:8.0f} MiB/s")
    return times


def write(folder: Path, mib: int) -> dict[str, Path]:
    """Write the same tensors in three formats, and once in a single file; a folder for each."""
    state = {f"w{at}": torch.randn(mib * MIB // PARTS // 4) for at in range(PARTS)}
    folders = {name: folder / name for name in ("torch", "single", "dcp", "reference")}
    for path in folders.values():
        path.mkdir()
    for at, (key, tensor) in enumerate(state.items()):
        torch.save({key: tensor}, folders["torch"] / f"step_5_part_{at}.pt")
    torch.save({"w": torch.cat(list(state.values()))}, folders["single"] / "step_5.pt")
    dcp.save(state, checkpoint_id=folders["dcp"] / "step_5")
    model = torch.nn.ParameterDict(state)
    CheckpointManager(folders["reference"], use_dcp=True, run_id="bench").save(5, model=model)
    return folders


def compare(folder: Path, mib: int, counts: list[int]) -> None:
    """Compare each format with cat and with the sums alone."""
    alone = sums_alone(counts)
    for name, path in write(folder, mib).items():
        files = [str(file) for file in path.rglob("*") if file.is_file()]
        size = sum(Path(file).stat().st_size for file in files) / MIB
        with Path("/dev/null").open("wb") as nothing:
            base = seconds(lambda: subprocess.run(["cat", *files], stdout=nothing, check=True))  # noqa: B023, S603, S607
        print(f"{f'{name}: cat, {size:.0f} MiB':<34}{size / base:8.0f} MiB/s")
        for threads in counts:
            reading = shared(lambda: read_all(files), threads)  # noqa: B023
            print(f"{f'{name}: read alone, threads: {threads}':<34}{size / reading:8.0f} MiB/s")
            summing = size * alone["BLAKE3" if name == "reference" else "CRC-32", threads]
            took = seconds(lambda: judge(path, Options(jobs=threads)))  # noqa: B023
            line(f"{name}: fsck --jobs {threads}", size, took, base, reading + summing)


def write_chunks(folder: Path, count: int) -> None:
    """Write the metadata of one tensor in many chunks, and shards that are holes of their sizes."""
    rows, files = 1000, 64
    chunks = [
        metadata.ChunkStorageMetadata(torch.Size([at * rows, 0]), torch.Size([rows, 8]))
        for at in range(count)
    ]
    stored = {
        metadata.MetadataIndex("w", chunk.offsets): filesystem._StorageInfo(  # noqa: SLF001
            f"__{at % files}_0.distcp", at // files * 100, 100
        )
        for at, chunk in enumerate(chunks)
    }
    properties = metadata.TensorProperties(torch.float32)
    tensor = metadata.TensorStorageMetadata(properties, torch.Size([count * rows, 8]), chunks)
    whole = metadata.Metadata({"w": tensor}, storage_data=stored)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    for at in range(files):
        with (folder / f"__{at}_0.distcp").open("wb") as file:
            file.truncate(-(-count // files) * 100)


def many_chunks(folder: Path, count: int) -> None:
    """Judge the metadata of one tensor in many chunks, as a large job writes it.

    Its memory is that of `/proc`: ru_maxrss would begin with the peak of this process, which exec
    hands on.
    """
    folder = folder / "step_7"
    folder.mkdir()
    write_chunks(folder, count)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from ckpt_conformance.fsck.judge.judge import Options, judge\n"
        "start = time.perf_counter()\n"
        "state = judge(Path(sys.argv[1]), Options(metadata_only=True)).state\n"
        "took = time.perf_counter() - start\n"
        "own = Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]\n"
        "print(f'{state}: {took:.1f} s, {int(own) >> 10} MiB')"
    )
    size = (folder / ".metadata").stat().st_size / MIB
    print(f"metadata of {count} chunks, {size:.0f} MiB: ", end="", flush=True)
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)  # noqa: S603


def start_up(folder: Path) -> None:
    """Time the command on one small file."""
    path = folder / "small-1.pt"
    torch.save({"w": torch.ones(2)}, path)
    for command in ("fsck", "diff"):
        words = [sys.executable, "-m", "ckpt_conformance", command, str(path)]
        words += [str(path)] if command == "diff" else []
        took = seconds(lambda: subprocess.run(words, check=True, stdout=subprocess.DEVNULL))  # noqa: B023, S603
        print(f"{command} of one small file: {took:.2f} s")


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        start_up(Path(name))
        many_chunks(Path(name), options.chunks)
        compare(Path(name), options.mib, sorted({1, options.jobs}))


if __name__ == "__main__":
    main()
