"""A checkpoint of several files is served whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance.checks import check
from ckpt_conformance.fault_injectors import at_rest, payload, points
from ckpt_conformance.verdicts import REFUSALS, NotApplicable, Outcome, Unknown

if TYPE_CHECKING:
    from ckpt_conformance.subject import Golden, Subject

NEVER_WRONG = {Outcome.NEW, Outcome.LOST_STEP, *REFUSALS}
OLDER, NEWEST = 2, 4
HOLE = "ckpt_conformance.fault_injectors.dcp_metadata:punch_hole"


def files_of_newest(golden: Golden) -> list[str]:
    """Name the files that the newest save made or changed; none if it is all that there is."""
    found = payload.of_step(golden, NEWEST)
    if len(payload.names(golden.snapshot(NEWEST))) == 1:
        raise NotApplicable("the checkpoint is one file, and there is no other")
    return found


def judge(subject: Subject, golden: Golden, done: dict[str, Any], message: str) -> Outcome:
    """Resume, and accept anything but a wrong state or a cold start."""
    return subject.judge(
        subject.resume(),
        subject.legal(golden) if not golden.served else golden.served,
        NEVER_WRONG,
        message,
        newest=NEWEST,
        acknowledged=(OLDER, NEWEST),
        damage=done,
    )


@check("CKC-SHRD-001")
def test_a_missing_file_is_never_passed_over(subject: Subject) -> None:
    """With any file of the newest step missing a load falls back, refuses, or did not need it.

    Why: a missing optimizer resumed with a cold one, a missing train state at step 0 with trained
    weights, a missing data position repeated what was seen (M040, B06, M027).
    How: delete each file that the newest save wrote, one at a time; resume in a new process.
    """
    golden = subject.golden()
    subject.legal(golden)
    for name in subject.sample(files_of_newest(golden), 7):
        subject.lay_out(golden)
        done = at_rest.remove(subject.root, name)
        judge(subject, golden, done.to_json(), f"{name} is missing")


@check("CKC-SHRD-002")
def test_discovery_does_not_name_a_step_that_lacks_a_file(subject: Subject) -> None:
    """Discovery does not name a step that lacks a file which its load needs.

    Why: metadata was there and its shards were not; the step was advertised, kept by rotation in
    place of a whole one, and failed when it was needed (M040, B06).
    How: delete a file of the newest step; ask discovery, and load the step if it is named.
    """
    subject.need("steps")
    golden = subject.golden()
    legal = subject.legal(golden)
    explicit = NEWEST if "explicit_step" in subject.info.capabilities else None
    for name in subject.sample(files_of_newest(golden), 4):
        subject.lay_out(golden)
        done = at_rest.remove(subject.root, name)
        named = subject.life({"op": "steps"}).result("steps").get("value", [])
        if NEWEST not in named:
            continue
        subject.judge(
            subject.resume(explicit),
            legal,
            {Outcome.NEW},
            f"{name} is missing, and discovery names step {NEWEST}",
            newest=NEWEST,
            acknowledged=(OLDER, NEWEST),
            damage=done.to_json(),
        )


@check("CKC-SHRD-003")
def test_a_dcp_directory_with_a_hole_or_a_stale_shard_is_refused(subject: Subject) -> None:
    """A DCP directory whose chunks leave a hole, or with another step's shard, is never served.

    Why: where the chunk list has a hole the destination stays as it was, and a shard of the same
    layout from another step fits: both load without a word (MX3).
    How: halve a chunk in `.metadata`, then put a shard of step 2 into step 4; resume.
    """
    golden = subject.golden()
    files = payload.of_step(golden, NEWEST)
    metadata = [name for name in files if name.rpartition("/")[2] == ".metadata"]
    if not metadata:
        raise NotApplicable("no file is the metadata of a DCP directory")
    subject.legal(golden)
    subject.lay_out(golden)
    ending = subject.life({"op": "probe", "probe": HOLE, "args": {"file": metadata[0]}})
    done = ending.result("probe").get("value", {})
    if done.get("before") == done.get("after"):
        raise Unknown(f"the hole was not made: {done or subject.tell(ending)}")
    judge(subject, golden, done, f"half of a tensor is in no chunk of {metadata[0]}")
    for name in subject.sample([name for name in files if name.endswith(".distcp")], 2):
        older = [
            n
            for n in payload.names(golden.snapshot(OLDER))
            if points.pattern(n) == points.pattern(name)
        ]
        if len(older) == 1:
            subject.lay_out(golden)
            stale = at_rest.replace_file(subject.root, name, golden.snapshot(OLDER) / older[0])
            judge(subject, golden, stale.to_json(), f"{name} is the shard of step {OLDER}")
