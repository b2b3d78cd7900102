"""A program that prints the most bytes of Python while synthetic buckets are listed and judged.

It is a process of its own without torch: a large one has tables whose growth would be seen as ours.

python fsck_memory.py CONTENT STEPS,FILES,SHARDS...
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from pathlib import Path

import fsspec
from url_stores import Synthetic

from ckpt_conformance.cli.disk import plan as fsck_plan
from ckpt_conformance.cli.disk import results as fsck_results
from ckpt_conformance.fsck.judge import judging
from ckpt_conformance.fsck.judge.judge import Options
from ckpt_conformance.fsck.source import remote
from ckpt_conformance.fsck.source.findings import State
from ckpt_conformance.fsck.source.places import place
from ckpt_conformance.work.items import Shard


def judge(steps: int, files: int, count: int) -> None:
    """List a bucket and judge its first shard, as the command does."""
    url, options = place(f"synthetic://{steps}x{files}"), Options(jobs=2)
    listed = fsck_plan.made(url, is_weighed=True, tell=lambda *_: None)
    with listed as plan, fsck_results.spool() as spool:
        jobs = plan.jobs(options, Shard(1, count))
        taker = fsck_results.Taker(spool)
        for job, judgement in judging.Judging(url, options).run(jobs):
            taker.take(job, judgement)
        states = [report.state for report in taker.index.reports()]
    if plan.listed.files != steps * files or states != [State.WHOLE] * (steps // count):
        raise SystemExit(f"{steps} steps of {files} files: {plan.listed}, {states}")


def peak(steps: int, files: int, count: int) -> int:
    """Return the most bytes that were allocated at once, of two runs the fewer.

    A table of the interpreter's own (of interned strings, say) grows by a megabyte in one of them.
    """
    return min(_peak(steps, files, count) for _ in range(2))


def _peak(steps: int, files: int, count: int) -> int:
    gc.collect()
    tracemalloc.start()
    judge(steps, files, count)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def main() -> None:
    """Make what is remembered, and kept before a file is used, small; then measure."""
    remote.MOST_LISTED = remote._MOST_ALONE = 100
    fsck_plan._IN_MEMORY = fsck_results._IN_MEMORY = 4096
    judging.OPEN_FAR = 2
    Synthetic.content = Path(sys.argv[1]).read_bytes()
    fsspec.register_implementation(Synthetic.protocol, Synthetic, clobber=True)
    judge(5, 5, 1)  # imports
    for words in sys.argv[2:]:
        steps, files, count = map(int, words.split(","))
        sys.stdout.write(f"{peak(steps, files, count)}\n")


if __name__ == "__main__":
    main()
