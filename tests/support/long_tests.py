"""Which tests take long: `make test` leaves them out, but for those that stand for the others.

`long_tests.json` has the seconds of each test that took `LONG` or more by itself, without fixtures
that it shares, in a run with `CKC_RECORD_LONG_TESTS=1` (`make long-tests`). A test that is not
there yet runs, so one that is new and long belongs on the list, or says `slow` itself.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

LONG = 3.0  # seconds
PLACE = Path(__file__).with_suffix(".json")
RECORD = "CKC_RECORD_LONG_TESTS"
SUITES = "ckpt_conformance/suites"
# How ids of tests begin that run although they are long: what ships, what a user stops, what a
# crash model stands on, what would be trusted wrongly. Others of their kind are left out.
ALWAYS = (
    (
        f"{SUITES}/controls/test_bit_exact_resume.py::test_a_run_resumed_with_another_hash_seed_goes_on"
        "_as_if_unbroken[reference]"
    ),
    f"{SUITES}/test_stateful.py::test_no_sequence_of_operations_leaves_the_model[reference]",
    f"{SUITES}/test_system_call_errors.py::test_an_error_of_any_system_call_reaches_the_caller[ref",
    "tests/cli/test_cache_opened.py::test_what_a_run_has_opened_is_held_against",
    "tests/cli/test_explore_cache.py::test_what_has_not_changed_is_not_recovered_again",
    "tests/cli/test_explore_parts.py::test_shards_make_the_report_of_one_run[torch-save-inplace",
    "tests/cli/test_stopping.py::test_a_stopped_certify_leaves_its_certificate[signals1",
    "tests/cli/test_unreached.py::test_a_pair_that_is_not_reached_has_the_outcome_of_a_real_run",
    "tests/cluster/test_fsck_cluster.py::test_the_report_is_that_of_one_process",
    "tests/contract/test_registry.py::test_list_adapters_shows_entry_points",
    "tests/crash/test_crash_models_of_ranks.py",
    "tests/crash/test_crash_object_store.py::test_a_bucket_after_a_kill_is_one_that_the_model_lists",
    "tests/crash/test_crash_states_of_ranks.py::test_cuts_of_the_model_are_what_real_ranks_can_leave",
    "tests/crash/test_scripts.py::test_a_rename_without_a_sync_stands_a_kill_and_no_power_cut",
    "tests/fault_injectors/test_injected_calls.py::test_a_short_write_is_finished",
    "tests/fsck/test_fsck.py::test_every_bit_that_counts_as_covered_is",
    "tests/fsck/test_fsck_timeout.py::test_a_file_that_takes_an_hour_is_unknown[--file-timeout]",
    "tests/fsck/test_fsck_unsafe.py::test_every_way_to_run_is_unsafe",
    "tests/plugin/test_depends.py::test_an_edit_of_any_module_changes_exactly_the_keys",
    "tests/plugin/test_depends.py::test_every_file_that_runs_is_known[reference]",
    "tests/project/test_packaging.py",
    "tests/reference_impl/test_reference_async.py::test_the_death_of_the_writer_is_an_error",
    "tests/reference_impl/test_reference_ranks_faults.py",
    "tests/suites/test_mutants.py",
    "tests/suites/test_versions.py",
)


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that were long as slow, so that `-m 'not slow'` leaves them out."""
    long = json.loads(PLACE.read_text(encoding="utf-8"))
    for item in items:
        name = name_of(item.nodeid)
        if name in long and not name.startswith(ALWAYS):
            item.add_marker(pytest.mark.slow)


def name_of(nodeid: str) -> str:
    """Return the id of a test without its group, which pytest-xdist writes behind it."""
    head, bracket, behind = nodeid.rpartition("]")
    return head + bracket + behind.partition("@")[0]


class Recorder:
    """Adds up the seconds of each test, in the process that gets the reports of all workers."""

    def __init__(self) -> None:
        """Begin with none."""
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the seconds of a test itself."""
        if report.when == "call":
            self.seconds[name_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file, once; of a test that was not run it keeps what it has."""
        if not hasattr(session.config, "workerinput"):
            found = {name: round(seconds, 1) for name, seconds in self.seconds.items()}
            all_ = json.loads(PLACE.read_text(encoding="utf-8")) | found
            long = {name: seconds for name, seconds in sorted(all_.items()) if seconds >= LONG}
            PLACE.write_text(json.dumps(long, indent=0) + "\n", encoding="utf-8")


def record(config: pytest.Config) -> None:
    """Record the seconds of tests, if that is asked for."""
    if os.environ.get(RECORD):
        config.pluginmanager.register(Recorder())
