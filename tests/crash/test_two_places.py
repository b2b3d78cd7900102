"""What the disk of a mirror may have lost before the node's: the newest moments come first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces import Trace

from ckpt_conformance.crash.explore import two_places
from ckpt_conformance.trace.operations import Kind

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.trace.operations import Recording

HERE, THERE = "ckpt-2.pt", "mirror/ckpt-2.pt"
DATA = bytes(range(256)) * 64


def uploaded(folder: Path, *, is_synced: bool) -> Recording:
    """Record a save that is durable here, its copy in the mirror, and the begin of the next save.

    `is_synced`: the copy, its name and the mirror's own name are synced before the save ends.
    """
    trace = Trace(folder / "recording", folder / "root")
    trace.mark("begun", 2)
    trace.create(HERE)
    trace.write(HERE, DATA)
    trace.say(Kind.FSYNC, HERE)
    trace.say(Kind.FSYNC)
    trace.made += 1
    trace.objects["mirror"] = trace.made
    trace.say(Kind.MKDIR, "mirror", mode=0o755)
    trace.create(THERE)
    trace.write(THERE, DATA)
    for path in (THERE, "mirror", "") if is_synced else ():
        trace.say(Kind.FSYNC, path)
    trace.mark("acknowledged", 2)
    trace.mark("begun", 4)
    trace.create("ckpt-4.pt")
    return trace.finish()


def sizes(loss: two_places.Loss, path: str) -> int | None:
    """Return the size of a file in a state; None where it has no such name."""
    number = loss.state.names.get(path)
    return None if number is None else loss.state.contents[number].size


def test_a_copy_that_is_not_synced_may_be_gone_or_short_while_the_node_has_all(
    tmp_path: Path,
) -> None:
    found = list(two_places.unsettled(uploaded(tmp_path, is_synced=False), 2))
    points = [loss.state.point for loss in found]
    assert points == sorted(points, reverse=True), "the latest moment first"
    last = [loss for loss in found if loss.state.point == points[0]]
    assert {sizes(loss, THERE) for loss in last} & {None, 0}, "the copy is lost in the end"
    assert {sizes(loss, HERE) for loss in last} == {len(DATA)}, "the node has what it issued"
    assert not any("ckpt-4.pt" in loss.state.names for loss in found), "the upload alone"


def test_a_kill_leaves_a_part_of_a_copy_under_its_name(tmp_path: Path) -> None:
    (loss,) = two_places.half_sent(uploaded(tmp_path, is_synced=True), 2)
    assert 0 < (sizes(loss, THERE) or 0) < len(DATA)
    assert sizes(loss, HERE) == len(DATA), "what the node was given is kept"
    assert "ckpt-4.pt" not in loss.state.names, "the upload alone"


def test_a_copy_that_is_synced_is_lost_at_no_acknowledged_moment(tmp_path: Path) -> None:
    recording = uploaded(tmp_path, is_synced=True)
    done = next(o.index for o in recording.operations if o.mark == "acknowledged")
    found = list(two_places.unsettled(recording, 2))
    assert found, "before the syncs it may be lost"
    assert all(loss.state.point < done for loss in found)
