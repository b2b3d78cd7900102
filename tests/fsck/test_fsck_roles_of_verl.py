"""A role that a step of verl lacks: what the other steps and the run's pointer tell of it.

verl's trainer saves all roles at every save, one after the other, and its pointer last; a load
raises where a role is missing. Each role has a number of its own of checkpoints that are kept.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from fsck_runs import Finished
from megatron_layouts import manifest, v2_role, write_manifest
from test_fsck_verl import role

from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
BOTH, ACTOR = ("actor", "critic"), ("actor",)


def run(root: Path, steps: dict[int, tuple[str, ...]], folder: str = "global_step_{}") -> Path:
    """Write a run in which each step has some roles."""
    for step, roles in steps.items():
        for name in roles:
            role(root / folder.format(step) / name)
    return root


def told(root: Path) -> dict[int, list[tuple[str, Kind]]]:
    """Return what is said of each step."""
    return {
        one.step or 0: [(finding.file, finding.kind) for finding in one.findings]
        for one in judge(root).reports
        if one.findings
    }


def newest(root: Path) -> str:
    found = judge_newest(root).newest_whole
    assert found is not None
    return found.path.name


@pytest.mark.parametrize("folder", ["global_step_{}", "global_steps_{}"])
@pytest.mark.parametrize("lost", [20, 30])
def test_a_role_that_all_others_have_is_missing(lost: int, folder: str, tmp_path: Path) -> None:
    root = run(tmp_path, dict.fromkeys((10, 20, 30), BOTH), folder)
    assert told(root) == {}
    shutil.rmtree(root / folder.format(lost) / "critic")
    assert told(root) == {lost: [("critic/", Kind.MISSING)]}
    assert judge(root).state is State.INCOMPLETE
    whole = folder.format(30 if lost == 20 else 20)
    assert newest(root) == whole
    done = Finished("fsck", root, "--newest-whole")
    assert (done.status, done.out) == (0, f"{root / whole}\n")


def test_the_names_of_ranks_may_be_many(tmp_path: Path) -> None:
    """More files than are held against those of neighbours one by one."""
    for step in (10, 20, 30):
        for name in BOTH:
            role(tmp_path / f"global_step_{step}" / name, 12, said=12)
    shutil.rmtree(tmp_path / "global_step_30" / "critic")
    assert told(tmp_path) == {30: [("critic/", Kind.MISSING)]}


def test_a_role_of_megatron_is_missing(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        for name in BOTH:
            folder = tmp_path / f"global_step_{step}" / name
            v2_role(folder, name)
            write_manifest(folder, manifest(name) | {"global_step": step})
    before = judge(tmp_path)
    assert all(one.state is State.WHOLE for one in before.reports), before.reports
    shutil.rmtree(tmp_path / "global_step_30" / "critic")
    assert told(tmp_path)[30] == [("critic/", Kind.MISSING)]


@pytest.mark.parametrize(
    ("named", "state"), [("10", State.INCOMPLETE), ("20", State.WHOLE), (None, State.WHOLE)]
)
def test_of_two_steps_the_pointer_tells(named: str | None, state: State, tmp_path: Path) -> None:
    """It is written last: where it names the one before, the save did not end."""
    root = run(tmp_path, {10: BOTH, 20: ACTOR})
    if named is not None:
        (root / TRACKER).write_text(named)
    kind = Kind.MISSING if state is State.INCOMPLETE else Kind.NOTE
    assert told(root) == {20: [("critic/", kind)]}
    assert newest(root) == ("global_step_10" if state is State.INCOMPLETE else "global_step_20")


@pytest.mark.parametrize(
    "steps",
    [
        {10: ACTOR, 20: BOTH, 30: ACTOR, 40: BOTH},  # every second save
        {10: ACTOR, 20: BOTH, 30: ACTOR},
        {20: BOTH, 30: ACTOR, 40: BOTH},  # the same, of which three are kept
        {10: BOTH, 20: BOTH, 25: ACTOR},  # the last save, at another distance
        {10: ACTOR, 20: ACTOR, 30: BOTH},  # fewer critics than actors are kept
        {10: ACTOR, 20: BOTH, 30: BOTH},
        {10: BOTH, 20: BOTH, 30: ACTOR, 40: ACTOR},  # went on without a critic
        {10: BOTH, 20: ACTOR, 30: ACTOR},  # of a milestone
    ],
)
def test_a_role_that_is_saved_less_often_is_a_remark(
    steps: dict[int, tuple[str, ...]], tmp_path: Path
) -> None:
    root = run(tmp_path, steps)
    lacks = {step for step, roles in steps.items() if roles == ACTOR}
    assert told(root) == {step: [("critic/", Kind.NOTE)] for step in lacks}
    assert judge(root).state is State.WHOLE
    assert newest(root) == f"global_step_{max(steps)}"


def test_a_run_of_one_role_is_whole(tmp_path: Path) -> None:
    root = run(tmp_path, dict.fromkeys((10, 20, 30), ACTOR))
    assert told(root) == {}


def test_shards_tell_what_one_process_tells(tmp_path: Path) -> None:
    root = run(tmp_path / "run", {10: BOTH, 20: ACTOR})
    (root / TRACKER).write_text("20")
    assert "remark  critic/" in Finished("fsck", root, "--details").out
    (root / TRACKER).write_text("10")
    files = [tmp_path / f"{number}.jsonl" for number in (1, 2)]
    for number, file in enumerate(files, 1):
        Finished("fsck", root, "--shard", f"{number}/2", "--results", file)
    told = Finished("combine", *files)
    assert told.status == 1
    assert "missing  critic/" in told.out
