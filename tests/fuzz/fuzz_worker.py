"""One process of the fuzz over the code of fsck and diff.

python fuzz_worker.py CACHE NUMBER SECONDS SEED SCRATCH

One with an even number is libFuzzer, through atheris: it sees which code an input reaches, and
finds the inputs from which to go on. That costs four times the judging, so the others draw from
the corpus that it makes, and see nothing.

The input that is judged is in a file while it is: who finds this process dead finds what killed it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

HANG = 120.0
"""Seconds on the clock until an input counts as one that hangs: ten times what it may take of a
processor, for others may have that."""
_TOLD = 5.0  # seconds between two notes of how far it is
_MOST_INPUT = 1 << 20
_RELOADED = 30.0  # seconds between two looks at the corpus

_IS_GUIDED = int(sys.argv[2]) % 2 == 0
if _IS_GUIDED:
    import atheris

    watched = atheris.instrument_imports(include=["ckpt_conformance.fsck"])
else:
    watched = contextlib.nullcontext()
with watched:
    import fuzz_judge

import fuzz_inputs  # noqa: E402  after the code that is watched
import fuzz_mutator  # noqa: E402


class Worker:
    """Judges what libFuzzer makes, and keeps what breaks a rule."""

    def __init__(self, cache: Path, number: int, seeds: fuzz_inputs.Seeds, scratch: Path) -> None:
        """Take the folder of the fuzz, and one on a fast disk."""
        self._judge = fuzz_judge.Judge(scratch, seeds, fuzz_judge.Loader())
        self._seeds, self._cache = seeds, cache
        self._current = scratch / "current"
        self._notes = cache / "notes" / f"{number}-{time.time_ns()}.json"
        self._seen: Counter[str] = Counter()
        self._began = self._told = time.monotonic()

    def one(self, data: bytes) -> int:
        """Judge one input; -1 keeps it out of the corpus."""
        one = fuzz_inputs.decode(data, self._seeds)
        if one is None:
            return -1
        self._current.write_bytes(data)
        faulthandler.dump_traceback_later(HANG, exit=True)
        faults = self._judge.check(one)
        faulthandler.cancel_dump_traceback_later()
        for fault in faults:
            self._keep(fault, data)
        if time.monotonic() - self._told > _TOLD:
            self.note()
        return 0

    def _keep(self, fault: fuzz_judge.Fault, data: bytes) -> None:
        """Keep the first input of each fault, and count the others."""
        self._seen[fault.key] += 1
        if self._seen[fault.key] == 1:
            save_fault(self._cache, fault, data)

    def note(self) -> None:
        """Write down how far it is."""
        self._told = time.monotonic()
        body = vars(self._judge.counts) | {
            "seconds": self._told - self._began,
            "processor": time.process_time(),
            "faults": self._seen,
        }
        self._notes.write_text(json.dumps(body))


def save_fault(cache: Path, fault: fuzz_judge.Fault, data: bytes) -> None:
    """Keep an input that breaks a rule, by the fault that it shows; nothing where one is there."""
    path = cache / "faults" / f"{fuzz_inputs.name_of(fault.key.encode())}.input"
    if not path.exists():
        path.write_bytes(data)
        path.with_suffix(".json").write_text(json.dumps({"key": fault.key, "what": fault.what}))


def main() -> None:
    """Fuzz for some seconds."""
    cache, number, seconds, seed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    scratch = Path(sys.argv[5])
    warnings.simplefilter("ignore")
    seeds = fuzz_inputs.load_seeds(cache / "seeds")
    worker = Worker(cache, number, seeds, scratch)
    try:
        run = _guided if _IS_GUIDED else _drawn
        run(worker, cache, seeds, float(seconds), int(seed), scratch)
    except BaseException:  # noqa: BLE001  whatever it is, it ends this worker
        traceback.print_exc()
        worker.note()
        os._exit(1)  # atheris waits for a lock for ever where its mutator has raised
    worker.note()


def _guided(  # noqa: PLR0913, PLR0917  as `_drawn`
    worker: Worker, cache: Path, seeds: fuzz_inputs.Seeds, seconds: float, seed: int, scratch: Path
) -> None:
    """Let libFuzzer make inputs; it keeps those that reach new code."""
    options = (
        f"-max_total_time={max(int(seconds), 1)}",
        f"-seed={seed}",
        f"-max_len={_MOST_INPUT}",
        f"-timeout={1 << 20}",  # the clock is ours: it counts time of the processor
        "-rss_limit_mb=0",  # and so is the memory
        "-len_control=0",
        "-print_final_stats=1",
        "-reload=30",
        f"-artifact_prefix={scratch}/",
    )
    mutate = fuzz_mutator.for_libfuzzer(seeds, lambda data: atheris.Mutate(data, len(data) + 64))
    atheris.Setup([sys.argv[0], *options, str(cache / "corpus")], worker.one, custom_mutator=mutate)
    atheris.Fuzz()


def _drawn(  # noqa: PLR0913, PLR0917  as `_guided`
    worker: Worker, cache: Path, seeds: fuzz_inputs.Seeds, seconds: float, seed: int, scratch: Path
) -> None:
    """Draw inputs from the corpus, and from the seeds."""
    del scratch
    rng = random.Random(seed)  # noqa: S311  a fuzz
    end, looked = time.monotonic() + seconds, 0.0
    known: list[Path] = []
    while time.monotonic() < end:
        if time.monotonic() > looked + _RELOADED:
            looked, known = time.monotonic(), sorted((cache / "corpus").iterdir())
        data = b""
        with contextlib.suppress(FileNotFoundError):  # libFuzzer has found a smaller one
            if known and rng.random() < 0.6:
                data = rng.choice(known).read_bytes()
        one = fuzz_inputs.decode(data, seeds) or fuzz_mutator.fresh(seeds, rng)
        for _ in range(rng.choice((1, 1, 2, 4))):
            one = fuzz_mutator.mutated(one, seeds, rng)
        worker.one(fuzz_inputs.encode(one))


if __name__ == "__main__":
    main()
