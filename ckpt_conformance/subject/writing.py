"""What a manager writes under the installed release of torch, for others to read: see `written`."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance import __version__
from ckpt_conformance.contract import DEFAULT_KIND, trees, written
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown
from ckpt_conformance.contract.written import Written, WrittenRun
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.subject import SAVES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpt_conformance.subject.subject import Golden, Subject

# What a new release has changed before: settings of optimizers, state of schedulers, buffers of
# layers, dtypes, extra state.
QUICK = (
    DEFAULT_KIND,
    "two-optimizers",
    "rare-dtypes",
    "masters",
    "extra-state",
    "conv",
    "wsd",
    "steps",
)
FULL = (
    *QUICK,
    "unused",
    "empty",
    "scalar",
    "transformer",
    "accumulate",
    "packed",
    "cosine",
    "linear",
    "rex",
    "constant",
)
TWO = {"fsdp": 2}
OF_RANKS = "two-ranks"


def write(subject: Subject, folder: Path, kinds: Sequence[str] = ()) -> Written:
    """Save jobs of some kinds into `folder`, by two ranks too where the adapter has them.

    What it does not take, or what does not end well, is left out and named in the record. Raises
    Unknown if not even a plain job is saved, or nothing at all.
    """
    runs: list[WrittenRun] = []
    left_out: dict[str, str] = {}
    for kind in kinds or (FULL if subject.budget == "full" else QUICK):
        _add(runs, left_out, kind, partial(subject.golden, kind=kind), folder)
    if "ranks" in subject.info.capabilities:
        _add(runs, left_out, OF_RANKS, partial(worlds.golden, subject, TWO), folder)
    if not runs:
        raise Unknown("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return Written(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        suite=__version__,
        adapter=subject.info.name,
        library=subject.info.library,
        version=subject.info.version,
        torch=written.installed(),
        python=platform.python_version(),
        seed=subject.seed,
        without=tuple(sorted(subject.info.cannot_hold)),
        runs=runs,
        left_out=left_out,
        files=written.digests(folder),
    )


def _add(
    runs: list[WrittenRun],
    left_out: dict[str, str],
    name: str,
    save: Callable[[], Golden],
    folder: Path,
) -> None:
    """Save a job, and copy what is there after its newest save."""
    try:
        golden = save()
    except (NotApplicable, Unknown) as error:
        if name == DEFAULT_KIND:
            raise
        left_out[name] = str(error)
        return
    trees.copy(golden.snapshot(SAVES[-1]), folder / name)
    runs.append(run_of(golden, name, TWO if name == OF_RANKS else None))


def run_of(golden: Golden, folder: str, layout: dict[str, int] | None) -> WrittenRun:
    """Describe the newest save of a run without faults."""
    step = SAVES[-1]
    saved = {part: dict(leaves) for part, leaves in golden.at[step].items()}
    return WrittenRun(folder=folder, kind=golden.kind, step=step, layout=layout, saved=saved)
