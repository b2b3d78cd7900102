"""A checkpoint of several files is served whole or not at all."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import REFUSALS, NotApplicable, Outcome, Unknown
from ckpt_conformance.fault_injectors import at_rest, payload
from ckpt_conformance.fault_injectors.at_rest import Damage
from ckpt_conformance.harness.messages import Probe, ProbeResult
from ckpt_conformance.subject.batched_recovery import Case, alone, resume_each, steps_each
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.subject.subject import Golden, Subject

NEVER_WRONG = {Outcome.NEW, Outcome.LOST_STEP, *REFUSALS}
OLDER, NEWEST = 2, 4
HOLE = "ckpt_conformance.fault_injectors.dcp_metadata:punch_hole"


def files_of_newest(golden: Golden) -> list[str]:
    """Name the files that the newest save made or changed; none if it is all that there is."""
    if len(payload.names(golden.snapshot(NEWEST))) == 1:
        raise NotApplicable("the checkpoint is one file, and there is no other")
    return payload.of_step(golden, NEWEST)


def never_served(subject: Subject, made: Sequence[tuple[str, Damage, Case]]) -> None:
    """Resume from each damaged directory; accept anything but a wrong state or a cold start."""
    legal = subject.legal(subject.golden())
    judge = partial(subject.classify, newest=NEWEST, acknowledged=(OLDER, NEWEST))
    cases = [case for _, _, case in made]
    results = resume_each(subject, cases, lambda result: judge(result, legal) in NEVER_WRONG)
    for (message, damage, _), result in zip(made, results, strict=True):
        subject.judge(
            result,
            legal,
            NEVER_WRONG,
            message,
            newest=NEWEST,
            acknowledged=(OLDER, NEWEST),
            damage=damage.to_json(),
        )


def without(
    subject: Subject, golden: Golden, names: Sequence[str]
) -> list[tuple[str, Damage, Case]]:
    """Copy the whole directory once per name, and delete that file in the copy."""
    made: list[tuple[str, Damage, Case]] = []
    for at, name in enumerate(names):
        folder = subject.scratch / str(at)
        trees.materialize(golden.snapshot(NEWEST), folder)
        made.append((f"{name} is missing", at_rest.remove(folder, name), Case(folder)))
    return made


@check("CKC-SHRD-001")
def test_a_missing_file_is_never_passed_over(subject: Subject) -> None:
    """With any file of the newest step missing a load falls back, refuses, or did not need it.

    Why: a missing optimizer resumed with a cold one, a missing train state at step 0 with trained
    weights, a missing data position repeated what was seen (M040, B06, M027).
    How: delete each file that the newest save wrote, one at a time; resume in a new process.
    """
    golden = subject.golden()
    names = subject.sample(files_of_newest(golden), 12)
    never_served(subject, without(subject, golden, names))


@check("CKC-SHRD-002")
def test_discovery_does_not_name_a_step_that_lacks_a_file(subject: Subject) -> None:
    """Discovery does not name a step that lacks a file which its load needs.

    Why: metadata was there and its shards were not; the step was advertised, kept by rotation in
    place of a whole one, and failed when it was needed (M040, B06).
    How: delete a file of the newest step; ask discovery, and load the step if it is named.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    step = NEWEST if "explicit_step" in subject.info.capabilities else None
    made = without(subject, golden, subject.sample(files_of_newest(golden), 12))
    answers = steps_each(subject, [case.folder for _, _, case in made])
    for (message, damage, case), answer in zip(made, answers, strict=True):
        if NEWEST in (answer.steps or []):
            subject.judge(
                alone(subject, Case(case.folder, step)),
                legal,
                {Outcome.NEW},
                f"{message}, and discovery names step {NEWEST}",
                newest=NEWEST,
                acknowledged=(OLDER, NEWEST),
                damage=damage.to_json(),
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
    subject.materialize(golden)
    result = subject.execute(Probe(probe=HOLE, args={"file": metadata[0]}))
    value = result.of(ProbeResult).value
    if value is None:
        raise Unknown(f"the hole was not made: {subject.tell(result)}")
    done = msgspec.convert(value, Damage)
    if done.before == done.after:
        raise Unknown(f"the hole was not made: {done.detail or subject.tell(result)}")
    folder = subject.scratch / "hole"
    trees.copy(subject.root, folder)
    made = [(f"half of a tensor is in no chunk of {metadata[0]}", done, Case(folder))]
    for name in subject.sample([name for name in files if name.endswith(".distcp")], 2):
        kind = trees.pattern(name)
        older = [n for n in payload.names(golden.snapshot(OLDER)) if trees.pattern(n) == kind]
        if len(older) == 1:
            folder = subject.scratch / f"stale {len(made)}"
            trees.materialize(golden.snapshot(NEWEST), folder)
            stale = at_rest.replace_file(folder, name, golden.snapshot(OLDER) / older[0])
            made.append((f"{name} is the shard of step {OLDER}", stale, Case(folder)))
    never_served(subject, made)
