"""Kill ranks at random points of a save, again and again; resume from what each kill leaves.

    python benchmarks/nightly_ranks.py --kills 1000 --jobs 4 --seed 0 [ADAPTER]

Each kill draws a world of 2 to 4 ranks, a set of them that dies, and for each a call of its own.
It ends with 0 if every resume gave the step that was saved or the one before, whole; no survivor
waited for ever; every kill fired; no process is left; and nothing was written outside its folder.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Outcome, Unknown
from ckpt_conformance.fault_injectors import rank_points
from ckpt_conformance.fault_injectors.rank_points import NEWEST, OLDER
from ckpt_conformance.harness import facts
from ckpt_conformance.harness.client import Client, Server
from ckpt_conformance.harness.messages import ExitKind
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.contract.registry import AdapterInfo
    from ckpt_conformance.subject.worlds import Layout

LAYOUTS: tuple[Layout, ...] = (
    {"fsdp": 2},
    {"fsdp": 3},
    {"fsdp": 4},
    {"fsdp": 2, "tp": 2},
    {"replicate": 2, "fsdp": 2},
)
WHOLE = (Outcome.NEW, Outcome.PREVIOUS)
Trial = tuple[int, str, str]  # number of the kill, outcome, what was done


def kill(subject: Subject, number: int, seed: int) -> Trial:
    """Kill some ranks in one save, and resume."""
    rng = random.Random(f"{seed} {number}")  # noqa: S311  a choice, no secret
    layout = LAYOUTS[rng.randrange(len(LAYOUTS))]
    calls = rank_points.points_of(subject, layout)
    able = sorted({point.rank for point in calls})  # a rank that holds a replica may not write
    victims = rng.sample(able, rng.randint(1, len(able)))
    points = [rng.choice([p for p in calls if p.rank == victim]) for victim in victims]
    legal = worlds.legal(subject, worlds.golden(subject, layout), layout)
    trial = f"{layout}: " + "; ".join(point.name for point in points)
    result = rank_points.save(subject, layout, [point.spec("kill") for point in points])
    if not rank_points.fired(result):
        return number, "UNKNOWN", f"{trial}: no kill fired: {subject.tell(result)}"
    if result.exit_kind is ExitKind.HANG:
        return number, "HANG in the save", trial
    acknowledged = result.steps_of("acknowledged") or (OLDER,)
    resumed = worlds.resume(subject, layout)
    outcome = subject.classify(resumed, legal, newest=NEWEST, acknowledged=acknowledged)
    return number, str(outcome), f"{trial}: {subject.tell(resumed)}"


def work(
    info: AdapterInfo, socket: str, folder: Path, numbers: Sequence[int], seed: int
) -> Iterator[Trial]:
    """Make the kills of these numbers, with a connection and a folder for them alone."""
    with closing(Client(socket)) as client:
        subject = Subject(info, client, folder, seed=seed)
        for number in numbers:
            try:
                yield kill(subject, number, seed)
            except Unknown as error:
                yield number, "UNKNOWN", str(error)


def processes(token: str) -> list[str]:
    """Name the processes that carry the token of this run in their environment."""
    commands: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                token.encode() in (entry / "environ").read_bytes()
                and int(entry.name) != os.getpid()
            ):
                commands.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return commands


def run(options: argparse.Namespace, folder: Path) -> tuple[Counter[str], list[str], list[str]]:
    """Make all kills.

    Returns:
        The outcomes, the kills that went wrong, and the processes and files that were left.
    """
    token, elsewhere = uuid.uuid4().hex, folder / "elsewhere"
    elsewhere.mkdir()
    os.environ |= {"CKC_NIGHT": token, "TMPDIR": str(elsewhere), "HOME": str(elsewhere)}
    tempfile.tempdir = str(elsewhere)
    os.chdir(elsewhere)
    outcomes, wrong = Counter[str](), list[str]()
    begun = time.monotonic()
    with Server((options.adapter,)) as server:
        with closing(Client(server.socket)) as client:
            info = facts.read(client, options.adapter, server.folder)
        shares = [range(at, options.kills, options.jobs) for at in range(options.jobs)]

        def run_share(at: int) -> None:
            for _, outcome, trial in work(
                info, server.socket, folder / f"worker-{at}", shares[at], options.seed
            ):
                outcomes[outcome] += 1
                if outcome not in WHOLE:
                    wrong.append(f"{outcome}: {trial}")
                show(sum(outcomes.values()), options.kills, len(wrong), time.monotonic() - begun)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run_share, range(options.jobs)))
    left = [f"process: {command}" for command in processes(token)]
    left += [f"file: {path}" for path in trees.files(elsewhere)]
    return outcomes, wrong, left


def show(done: int, total: int, wrong: int, seconds: float) -> None:
    """Print the progress, after every hundredth part of the kills."""
    if done % max(1, total // 100) == 0:
        print(f"{done} of {total} kills, {seconds:.0f} s, {wrong} wrong", flush=True)


def main() -> int:
    """Run; the exit status is 1 if anything was wrong or left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("adapter", nargs="?", default="reference-dcp")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    options: Any = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckc-night-") as name:
        outcomes, wrong, left = run(options, Path(name))
        os.chdir("/")
    for line in [*wrong[:20], *left[:20]]:
        print(line)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    print(f"{options.adapter}, seed {options.seed}: {counts}; {len(left)} processes and files left")
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
