"""What the recorder says of each bundled manager equals what strace, the witness, says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from recording import Witness, is_seen_so, needs_strace, plain, record, replay, tree

from ckpt_conformance.contract import registry
from ckpt_conformance.trace.operations import Kind, Operation, Recording

QUICK = {"reference-dcp"}  # what torch.save does is among the scripts of test_crash_recorder
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in registry.BUNDLED
]
SCRIPT = """
import os, sys
from pathlib import Path
from ckpt_conformance.contract import registry
from ckpt_conformance.contract import OpenOptions
from ckpt_conformance.workload.job import Job
from ckpt_conformance.contract.journal import ChildJournal

root, adapter, job = Path(sys.argv[1]), registry.get({name!r}), Job("plain", 11)
keep = 1 if "retention" in adapter.capabilities else None
opened = adapter.open(root, OpenOptions(keep_last=keep))
if adapter.shape == "trainer":
    opened.fit(job, 4, (2, 4), False, ChildJournal(root.with_name("journal")))
else:
    for step in (2, 4):
        job.train(2)
        pending = opened.save(job, step)
        getattr(pending, "wait", lambda: None)()
getattr(opened, "close", lambda: None)()
os._exit(0)
"""


@needs_strace
@pytest.mark.parametrize("name", NAMES)
def test_a_managers_operations_equal_those_of_strace(name: str, tmp_path: Path) -> None:
    recording = _recorded(tmp_path, name)
    witness = Witness(tmp_path / "root")
    seen = witness.read(tmp_path / "strace")
    assert len(seen) > 5
    assert plain(recording) == seen or is_seen_so(recording, seen, witness.spans)
    assert recording.unsupported == []
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")


def _recorded(tmp_path: Path, name: str) -> Recording:
    try:
        return record(tmp_path, SCRIPT.format(name=name), by="strace")
    except RuntimeError as error:
        if "AdapterError" not in str(error):
            raise
        pytest.skip(f"{name} is an extra: pip install 'ckpt-conformance[{name}]'")


def test_only_calls_that_overlap_may_be_seen_either_way_round() -> None:
    """The control: what follows something is never before it."""
    one = Operation(0, Kind.WRITE, path="a", size=3, begin=1, end=2)
    beside = Operation(1, Kind.WRITE, path="b", size=3, begin=1, end=3)
    after = Operation(2, Kind.FSYNC, path="a", begin=4, end=5)
    recording = Recording("", Path(), [], [one, beside, after])
    told = plain(recording)
    assert is_seen_so(recording, [told[1], told[0], told[2]])
    assert not is_seen_so(recording, [told[2], told[0], told[1]])
    assert not is_seen_so(recording, told[:2])


def test_calls_that_the_witness_saw_overlap_have_no_order() -> None:
    first = Operation(0, Kind.WRITE, path="a", size=3, begin=1, end=2)
    second = Operation(1, Kind.WRITE, path="b", size=3, begin=3, end=4)
    recording = Recording("", Path(), [], [first, second])
    seen = plain(recording)[::-1]
    assert is_seen_so(recording, seen, [(1, 2), (0, 3)])
    assert not is_seen_so(recording, seen, [(0, 1), (2, 3)])
