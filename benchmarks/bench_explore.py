"""States that the explorer recovers and compares per second, beside the manager's own loads.

Both on one core, in one run, on the same checkpoint: a warm process that loads it again and again,
and the batches of `explore` on the recording of its save.

    python benchmarks/bench_explore.py [--seconds S]
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from pathlib import Path

from ckpt_conformance.crash.explore import engine, workloads
from ckpt_conformance.crash.model.models import OF_A_DISK
from ckpt_conformance.harness import facts
from ckpt_conformance.harness.client import Client
from ckpt_conformance.harness.messages import Load, Probe, ProbeResult
from ckpt_conformance.subject.subject import Subject

ADAPTERS = ("torch-save-atomic-per-step", "reference", "reference-dcp", "dcp-per-step")
GOAL = 0.5  # of the rate of the manager's own loads


def measure(name: str, seconds: float, recoveries: int) -> tuple[int, int, int, float, float]:
    """Explore one save of an adapter, and load its checkpoint again and again.

    Returns:
        Operations of the save, candidate states, states that were recovered, states per second,
        loads per second.
    """
    with (
        facts.serve((name,), (name,)) as (server, infos),
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        closing(Client(server)) as client,
    ):
        subject = Subject(infos[name], client, Path(folder))
        recorded = workloads.record(subject, "second")
        probe = Probe(
            probe="ckpt_conformance.crash.explore.recovery:loads_per_second",
            args={"seconds": seconds},
        )
        rate = subject.execute(Load(), probe).of(ProbeResult).value
        limits = engine.Limits(candidates=4000, recoveries=recoveries, alone=0, rounds=0)
        result = engine.explore(subject, recorded, OF_A_DISK, limits)
        candidates = sum(report.candidates for report in result.models.values())
        states = result.recovered / result.batch_seconds
        return len(recorded.recording.operations), candidates, result.recovered, states, rate


def main() -> None:
    """Print one row for each adapter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0, help="of loading, for each adapter")
    parser.add_argument("--visits", type=int, default=200, help="distinct contents for each model")
    options = parser.parse_args()
    head = ("operations", "candidates", "visited", "states/s", "loads/s", "ratio")
    print(f"{'adapter':<28}" + "".join(f"{title:>12}" for title in head))
    for name in ADAPTERS:
        operations, candidates, recovered, states, rate = measure(
            name, options.seconds, options.visits
        )
        ratio = states / rate
        note = "" if ratio >= GOAL else f"  below the goal of {GOAL}"
        row = f"{operations:>12}{candidates:>12}{recovered:>12}{states:>12.0f}{rate:>12.0f}"
        print(f"{name:<28}{row}{ratio:>12.2f}{note}", flush=True)


if __name__ == "__main__":
    main()
