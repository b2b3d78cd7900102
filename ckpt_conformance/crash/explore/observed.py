"""Crash states of mounted images as cases of an explorer: what a real file system left.

The recorded operations are replayed on an image, journals are committed at chosen points, the image
is copied as it stands, mounted again and read (`real_states`). A state that was seen so is judged
like one that a model allows, in a row of its own, and lends its grade to the same state of a model.
"""

from __future__ import annotations

import contextlib
import errno
import time
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Cause, Unknown
from ckpt_conformance.crash.explore import real_fs, real_states
from ckpt_conformance.crash.explore.exploration import NOTABLE, Case, ModelReport
from ckpt_conformance.crash.explore.materializer import digest
from ckpt_conformance.crash.model.models import MODELS

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ckpt_conformance.crash.explore.exploration import BaseExplorer
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Recording

ROUNDS = 2  # replays with commits and write-back at random moments


def row_of(filesystem: str) -> str:
    """Return the name of the map's row for images of a file system."""
    return f"{filesystem} image"


def require(filesystems: Sequence[str]) -> None:
    """Raise Unknown, with the next step, where images can't be mounted."""
    for filesystem in filesystems:
        missing = real_fs.unavailable(filesystem)
        if missing:
            raise Unknown(
                f"this machine can't crash a real {filesystem}: {missing}. Run on Linux as root, "
                "where loop devices may be mounted (in a container: --privileged), or leave "
                f"--real {filesystem} out: the models need none of this",
                cause=Cause.MACHINE,
            )


def enumerate_states(explorer: BaseExplorer, filesystem: str) -> list[Case]:
    """Crash a real file system at points of the recording; return what it left as cases.

    Raises Unknown where the operations can't be replayed on an image.
    """
    name, recording = row_of(filesystem), explorer.recording
    cases: list[Case] = []
    explorer.cases[name] = cases
    report = explorer.result.models.setdefault(name, ModelReport(name))
    try:
        with contextlib.closing(_states(explorer, filesystem)) as states:
            for state in states:
                # A doubt is noted: the model's other verdicts rest on a rule that is wrong.
                strange = _strange(state)
                doubt = strange or MODELS[filesystem].illegal(recording, state)
                if not strange:
                    cases.append(_seen(explorer, filesystem, Case(name, state, "")))
                if doubt:
                    explorer.unknown(f"{state.why}, after operation {state.point}: {doubt}")
    except OSError as error:
        size = f"the image of {real_fs.SIZES[filesystem] >> 20} MiB is too small for what was saved"
        why = f"{size} ({error.strerror})" if error.errno == errno.ENOSPC else str(error)
        raise Unknown(
            f"the recorded operations do not replay on {filesystem}: {why}; leave "
            f"--real {filesystem} out: the models need no image"
        ) from (error)
    report.candidates = len(cases)
    report.distinct = len({case.content for case in cases})
    return cases


def _states(explorer: BaseExplorer, filesystem: str) -> Generator[State]:
    """Yield the states and report progress; how many there will be is not known before."""
    points = points_of(explorer.recording, explorer.limits.images)
    begun = time.monotonic()
    seed = explorer.seed
    states = real_states.real_states(
        explorer.recording, filesystem, points, rounds=ROUNDS, seed=seed
    )
    with contextlib.closing(states):  # whoever stops early leaves nothing mounted
        for count, state in enumerate(states, 1):
            explorer.on_progress(count, len(points) * (2 + ROUNDS), time.monotonic() - begun)
            yield state


def points_of(recording: Recording, most: int) -> list[int]:
    """Choose crash points: all of them, or those after names, syncs and markers, then the rest."""
    count = len(recording.operations)
    near = [op.index + 1 for op in recording.operations if op.kind in NOTABLE]
    ordered = dict.fromkeys([count, *near, *range(count + 1)])
    return sorted(_spread(list(ordered), len(near) + 1, most))


def _spread(points: list[int], first: int, most: int) -> list[int]:
    """Take at most `most`, evenly from the `first` ones, and from the rest if there is room."""
    head, rest = points[:first], points[first:]
    if len(head) >= most:
        return head[:: -(-len(head) // most)]
    room = most - len(head)
    return head + rest[:: max(1, -(-len(rest) // room))]


def _strange(state: State) -> str:
    """Return why a state can't be judged: bytes that no operation wrote; empty if it can."""
    strange = real_states.STRANGE
    for path, number in state.names.items():
        extents = state.contents[number].extents if number in state.contents else ()
        if number == strange or any(extent.source == strange for extent in extents):
            return f"{path} holds what no operation wrote, so the state is not judged"
    return ""


def _seen(explorer: BaseExplorer, filesystem: str, case: Case) -> Case:
    """Name the content of a case and note that it was seen."""
    named = Case(case.model, case.state, digest(explorer.recording, case.state))
    key = (named.content, explorer.result.facts(named.state.point))
    where = explorer.result.seen.setdefault(key, [])
    if filesystem not in where:
        where.append(filesystem)
    return named
