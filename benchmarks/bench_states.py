"""Cost of one crash state as the recording grows: enumerate, digest, lay out.

The workload is a manager that keeps three checkpoints and syncs half of them, so that what is alive
stays the same while the operations grow. Microseconds per state should not grow with them.

    python benchmarks/bench_states.py [--per-operation 4] [--models kill,ext4,posix]
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path

from ckpt_conformance.crash.explore.materializer import Materializer, digest
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.trace.operations import ROOT, Kind, Operation, Recording

COUNTS = (100, 1_000, 10_000)  # operations
PIECE = 4096  # bytes of one write
PIECES = 4  # writes of one checkpoint
KEPT = 3


def workload(folder: Path, count: int) -> Recording:
    """Make a recording of at least `count` operations; its files go into `folder`."""
    (folder / "initial").mkdir()
    recording = Recording(str(folder), folder, [], [])
    data = bytearray()
    step = 0
    while len(recording.operations) < count:
        append_save(recording, data, step)
        step += 1
    (folder / "data").write_bytes(data)
    return recording


def append_save(recording: Recording, data: bytearray, step: int) -> None:
    """Append the operations of one save, and of the deletion of what is too old."""
    operations, inode = recording.operations, ROOT + 1 + step

    def note(kind: Kind, object_: int, path: str = "", **rest: object) -> None:
        fields = {"parent": ROOT, **rest}
        number = len(operations)
        operations.append(Operation(number, kind, object_, path, **fields))  # type: ignore[arg-type]

    note(Kind.CREATE, inode, "tmp", mode=0o644)
    for piece in range(PIECES):
        note(Kind.WRITE, inode, "tmp", offset=piece * PIECE, size=PIECE, data=len(data))
        data += random.Random(len(data)).randbytes(PIECE)  # noqa: S311
    if step % 2:
        note(Kind.FSYNC, inode, "tmp")
    note(Kind.RENAME, inode, "tmp", target=f"step-{step}", new_parent=ROOT)
    if step % 2:
        note(Kind.FSYNC, ROOT)
    note(Kind.MARK, 0, mark="acknowledged", step=step)
    if step >= KEPT:
        note(Kind.UNLINK, inode - KEPT, f"step-{step - KEPT}")


def row(model: str, count: int, per_operation: int) -> str:
    """Measure one model on one recording; return a row of the table."""
    folder = Path(tempfile.mkdtemp(prefix="bench-states-", dir=memory()))
    try:
        recording = workload(folder, count)
        operations = len(recording.operations)
        budget = per_operation * operations
        begun = time.perf_counter()
        states = list(MODELS[model].states(recording, random.Random(0), budget))  # noqa: S311
        made = time.perf_counter()
        distinct = {digest(recording, state): state for state in states}
        named = time.perf_counter()
        materializer = Materializer(recording, folder / "laid")
        for state in distinct.values():
            materializer.apply(state)
        laid = time.perf_counter()
    finally:
        shutil.rmtree(folder)
    costs = (
        1e6 * (made - begun) / len(states),
        1e6 * (named - made) / len(states),
        1e6 * (laid - named) / len(distinct),
    )
    return (
        f"{model:<6} {operations:>10,} {budget:>8,} {len(states):>10,} {len(distinct):>9,} "
        f"{costs[0]:>12.0f} {costs[1]:>10.0f} {costs[2]:>11.0f} {sum(costs):>8.0f}"
    )


def memory() -> str | None:
    """Return a directory in memory; None where there is none, for the default of tempfile."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  a directory in it is made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-operation", type=int, default=4, help="budget: states per operation")
    parser.add_argument("--models", default="kill,ext4,posix")
    options = parser.parse_args()
    print(f"{'microseconds per state':>76}")
    heads = ("enumerate", "digest", "lay out", "sum")
    print(
        f"{'model':<6} {'operations':>10} {'budget':>8} {'candidates':>10} {'distinct':>9} "
        f"{heads[0]:>12} {heads[1]:>10} {heads[2]:>11} {heads[3]:>8}"
    )
    for model in options.models.split(","):
        for count in COUNTS:
            print(row(model, count, options.per_operation), flush=True)


if __name__ == "__main__":
    main()
