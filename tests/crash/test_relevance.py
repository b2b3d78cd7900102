"""The audit tells of what a load needs: of no log, no temporary file, no removal without effect."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.crash.explore import engine, workloads
from ckpt_conformance.crash.explore.audit import OF_SYNCS
from ckpt_conformance.harness import facts
from ckpt_conformance.harness.client import Client, Server
from ckpt_conformance.subject.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt_conformance.crash.explore.exploration import Exploration

    Explore = Callable[..., Exploration]

pytestmark = pytest.mark.xdist_group("relevance")  # they share the server below
NAMES = ("with_noise", "in_turn", "with_pointer", "with_flag", "unsynced")


@pytest.fixture(scope="module")
def explore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explore]:
    """Explore a workload of an adapter of `noisy`, with all that a model allows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
        with (
            Server(tuple(f"noisy:{name}" for name in NAMES)) as server,
            closing(Client(server.socket)) as client,
        ):

            def explored(name: str, *models: str, workload: str = "second") -> Exploration:
                adapter, folder = f"noisy:{name}", tmp_path_factory.mktemp("facts")
                info = facts.read(client, adapter, folder)
                subject = Subject(info, client, tmp_path_factory.mktemp("subject"))
                recorded = workloads.record(subject, workload)
                return engine.explore(subject, recorded, models)

            yield explored


def told(result: Exploration) -> set[tuple[str, str]]:
    assert not result.unknown
    return {(finding.rule, finding.path) for finding in result.audit}


def test_what_no_load_needs_is_not_told(explore: Explore) -> None:
    """But that the manager leaves a temporary file behind is."""
    result = explore("with_noise", "ext4", "posix")
    assert not result.violations
    assert {path for _, path in told(result)} <= {"metrics-4.tmp"}
    assert {rule for rule, _ in told(result)} <= {"left-behind"}


def test_what_a_load_needs_is_told_beside_what_it_does_not(explore: Explore) -> None:
    found = told(explore("with_pointer", "ext4"))
    assert found == {("never-synced", "newest"), ("removed-before-replaced", "newest")}


def test_what_is_written_in_place_beside_a_whole_step_is_not_told(explore: Explore) -> None:
    result = explore("in_turn", "ext4", workload="thrice")
    assert not result.violations
    assert told(result) == set()


def test_a_removal_that_costs_a_step_when_the_name_comes_back(explore: Explore) -> None:
    result = explore("with_flag", "ext4")
    assert told(result) == {("removal-not-synced", "saving")}
    assert [one.outcome for one in result.violations] == ["LOST_STEP"]
    assert [one.blame and one.blame.rule for one in result.violations] == ["removal-not-synced"]


@pytest.mark.slow
def test_a_kill_needs_no_sync(explore: Explore) -> None:
    assert told(explore("unsynced", "kill")) == set()
    both = explore("unsynced", "kill", "ext4")
    assert {rule for rule, _ in told(both)} == {"renamed-unsynced", "directory-not-synced"}
    assert {path for _, path in told(both)} == {"step-0004.pt"}
    by_kill = [one.blame for one in both.violations if one.case.model == "kill" and one.blame]
    assert [blame for blame in by_kill if blame.rule in OF_SYNCS] == []
