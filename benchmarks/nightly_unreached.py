"""Run some of the pairs that `mutants` passes over, and hold what it says of them against that.

    python benchmarks/nightly_unreached.py --share 0.02 --jobs 4 --seed 0 --cache DIR

`mutants` gives a pair of a mutant and a check the outcome of the unbroken manager, where the check
enters none of the functions that the mutant changes. It ends with 0 if each pair that was drawn had
that verdict when it ran.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.cli.unreached import Recorder
from ckpt_conformance.contract.catalogue import PROFILES
from ckpt_conformance.mutants import all_mutants
from ckpt_conformance.plugin import depends
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.plan import plan_of, selection
from ckpt_conformance.plugin.session import run_session
from ckpt_conformance.report import environment
from ckpt_conformance.work.cache import Cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.contract.verdicts import CheckOutcome
    from ckpt_conformance.plugin.plan import CheckItem


def draw(items: Sequence[CheckItem], share: float, seed: int) -> list[CheckItem]:
    """Draw a share of some items, at least one."""
    count = max(1, round(share * len(items)))
    return random.Random(seed).sample(list(items), min(count, len(items)))  # noqa: S311


def differences(
    known: dict[str, CheckOutcome], ran: Sequence[CheckOutcome], drawn: Sequence[CheckItem]
) -> list[str]:
    """Say which pairs have another verdict than `mutants` gives them, or did not run."""
    verdicts = {f"{outcome.adapter} {outcome.check}": outcome for outcome in ran}
    lines: list[str] = []
    for item in drawn:
        outcome = verdicts.get(item.id)
        if outcome is None:
            lines.append(f"{item.id}: did not run")
        elif outcome.verdict != known[item.id].verdict:
            said = f"{outcome.verdict} when it ran, {known[item.id].verdict} without a run"
            lines.append(f"{item.id}: {said}: {outcome.reason}")
    return lines


def main() -> None:
    """Draw, run, compare; print what was drawn and what differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=float, default=0.02, help="of the pairs (0 to 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=dt.datetime.now(dt.UTC).toordinal())
    parser.add_argument("--cache", type=Path, help="folder of results, as `mutants --cache` has it")
    given = parser.parse_args()
    adapters = tuple(f"mutant:{name}" for name in all_mutants())
    options = SessionOptions(adapters, claims=tuple(PROFILES), jobs=given.jobs, pretends=True)
    cache = Cache.open(given.cache) if given.cache else None
    scratch = environment.filesystem_type(Path(tempfile.gettempdir()))
    inputs = depends.inputs(options, scratch) if cache else None
    items = plan_of(options).items
    known = Recorder(options, cache, inputs, lambda *_: None).outcomes(items)
    unreached = [item for item in items if item.id in known]
    drawn = draw(unreached, given.share, given.seed)
    print(f"{len(drawn)} of {len(unreached)} pairs, seed {given.seed}", flush=True)
    chosen = tuple(dict.fromkeys(item.adapter for item in drawn))
    ran = run_session(replace(options, adapters=chosen, selection=selection(drawn)))
    wrong = differences(known, ran, drawn)
    print(*wrong, sep="\n" if wrong else "")
    print(dict(Counter(str(outcome.verdict) for outcome in ran)), f"{len(wrong)} differ")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
