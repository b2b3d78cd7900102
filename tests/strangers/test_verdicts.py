"""Managers that nobody wrote for this suite get the verdict that their own documentation says.

What is expected stands beside each, by profile or by invariant; nothing that the kernel shows is
UNKNOWN.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.catalogue import load_catalogue
from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.fault_injectors.object_store import server
from ckpt_conformance.harness.client import Server
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.session import run_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.contract.verdicts import CheckOutcome

pytestmark = pytest.mark.slow  # certificates of whole managers
HERE = Path(__file__).parent
KILLED = tuple(f"CKC-ATOM-00{number}" for number in range(1, 6))
# torch's load_state_dict casts what it is given, and torch.save writes the storage behind a view.
OF_TORCH = {"CKC-RSUM-010", "CKC-SIDE-005"}
GOOD = {Verdict.PASS, Verdict.NOT_APPLICABLE}
LOST = tuple(f"CKC-DURA-00{number}" for number in range(1, 5))
MAPPED = ("memmap", "memmap_unsynced", *(f"lmdb_{how}" for how in ("default", "writemap")))
DATABASES = ("extra", "full", "truncate", "wal", "wal_alone", "wal_open", "wal_normal", "off")
UNDECLARED = {
    "empty_undeclared": {"CKC-RTRP-011"},
    "scalar_undeclared": {"CKC-RTRP-012"},
    "unused_undeclared": {"CKC-RTRP-010", "CKC-COMP-015"},  # the second stands on the first
    "extra_undeclared": {"CKC-RTRP-006"},
    "float8_undeclared": {"CKC-RTRP-004"},
    "views_undeclared": {"CKC-RTRP-004"},
    "channels_undeclared": {"CKC-RTRP-004"},
}
TRICKS = ("log", "linked", "synchronous", "data_synchronous", "direct")
ASCENDING = ("ascending", "ascending_wordless")
HORIZON = ("horizon", "horizon_unnamed")
STAGED = {
    "careful": set[str](),
    "logging": set[str](),
    "deaf_to_writes": {"CKC-IOER-001"},
    "deaf_to_syncs": {"CKC-IOER-001"},
    "counts_nothing": {"CKC-IOER-006"},
}
HASTY = {
    "plain": set[str](),
    "replaying": set[str](),
    # An error between the two calls costs as much as a kill there.
    "replaying_hastily": {"CKC-ATOM-007", "CKC-IOER-005"},
    "making_room": {"CKC-IOER-007"},
    "setting_aside": set[str](),
    "aside_hastily": {"CKC-IOER-005"},
}
DECLARED = ("nothing", "everything", "scalar_lost", "declared_in_vain", "without_extra")
REUSING = (
    *("addressed", "fanned", "built", "slots", "two_slots", "always_three"),
    *("sweeping", "three_unsaid", "trusting"),
)
ROTATED = ("CKC-SMOK-003", *(f"CKC-RETN-00{number}" for number in range(1, 7)))
UNSYNCED = tuple(f"unsynced_{count}" for count in (1, 20, 60, 160, 500))
SYNCED = tuple(f"synced_{count}" for count in (1, 20, 160, 500))
BUT_ONE = tuple(f"but_one_{count}" for count in (20, 160, 500))
SHARDED = (*UNSYNCED, *SYNCED, *BUT_ONE)
NAMED = ("CKC-SMOK", "CKC-DISC", "CKC-RETN", "CKC-CORR", "CKC-RTRP", "CKC-SIDE", "CKC-IOER")
LIMITS = ("CKC-SMOK", "CKC-RTRP", "CKC-COMP", "CKC-RSUM", "CKC-INTN")
PATIENT: dict[str, set[str]] = {
    "retrying": set(),
    "syncing_again": {"CKC-IOER-001"},
    "hinting": set(),
    "hint_is_needed": {"CKC-IOER-001"},
}
HEADED: dict[str, set[str]] = {
    "covered": set(),
    "uncovered": {"CKC-CORR-001"},
    "log_covered": {"CKC-CORR-008"},  # it reads up to the first record that does not fit
    "log_uncovered": {"CKC-CORR-001", "CKC-CORR-008"},
    "log_mended": set(),
}
# A stage that waits for another process's is let wait, where the kernel shows that it does.
LOCKED = {
    "flock": Verdict.PASS,
    "sleeps": Verdict.PASS,
    "unseen": Verdict.UNKNOWN,
    "unlocked": Verdict.VIOLATION,
}
# A mirror of one file for all steps, and of files that are empty, is damaged as others are.
MIRRORED: dict[str, set[str]] = {
    "flock": set(),
    "pooled": set(),
    "trusting": {"CKC-STAG-003"},
    "pooled_trusting": {"CKC-STAG-003"},
}
# A save over a step that fails by itself is not passed over, nor an upload that nobody can hold.
UPLOADED = {
    "uploading": Verdict.PASS,
    "declared": Verdict.PASS,
    "refusing": Verdict.UNKNOWN,
    "ungated": Verdict.UNKNOWN,
}
# That a mirror tries no upload again is told whether its `close` raises or says nothing.
FAILING: dict[str, dict[str, Verdict]] = {
    "silent": {"CKC-MIRR-002": Verdict.PASS, "CKC-MIRR-010": Verdict.NOT_MET},
    "rotating": {"CKC-MIRR-002": Verdict.PASS, "CKC-MIRR-010": Verdict.NOT_MET},
    "hanging": {"CKC-MIRR-004": Verdict.PASS, "CKC-MIRR-011": Verdict.VIOLATION},
    "forgetful": {"CKC-MIRR-005": Verdict.VIOLATION},
}
# A signal that comes to nobody, or a job that fails before one is sent, says nothing.
TOLD = {
    "noting": Verdict.PASS,
    "bare": Verdict.PASS,
    "blocking": Verdict.UNKNOWN,
    "failing": Verdict.UNKNOWN,
}
# A step of many digits is refused; or a save fails that happens to be of one.
REFUSING = {"short": Verdict.PASS, "tired": Verdict.UNKNOWN}
# Both refuse what is damaged; one has changed half of the job by then.
NUMBERED: dict[str, set[str]] = {"first": set(), "each": {"CKC-CORR-007"}}
ADAPTERS = (
    *(f"databases:{name}" for name in DATABASES),
    *(f"native:{name}" for name in ("in_place", "renamed")),
    *(
        f"background:{name}"
        for name in (
            "thread",
            "once",
            "locking",
            "looping",
            "looking",
            "looping_late",
            "aliasing",
            "sharing_counters",
            "sharing_lists",
            "forgetful",
            "unwrapped",
            "wrapping",
            "not_rotating",
            "purging",
            "counting",
            "sparing",
            "trainer",
        )
    ),
    *(f"mapped:{name}" for name in (*MAPPED, "lmdb_unsynced", "lmdb_in_place")),
    *(f"limited:{name}" for name in (*UNDECLARED, *DECLARED, *ASCENDING, *HORIZON, "once")),
    *(f"tricks:{name}" for name in (*TRICKS, "exchange", "ring", "folders")),
    *(f"reused:{name}" for name in REUSING),
    *(f"sharded:{name}" for name in SHARDED),
    *(f"staged:{name}" for name in STAGED),
    *(f"patient:{name}" for name in (*PATIENT, "drawn")),
    *(f"headed:{name}" for name in (*HEADED, "twins")),
    *(f"hasty:{name}" for name in HASTY),
    *(f"numbered:{name}" for name in NUMBERED),
    *(f"numbered:{name}" for name in REFUSING),
    *(f"mirroring:{name}" for name in {**LOCKED, **MIRRORED, **UPLOADED, **FAILING}),
    "mirroring:bucketed",
    *(f"told:{name}" for name in TOLD),
    *(f"large:{name}" for name in ("head", "body", "narrow", "few")),
    *("by_times:make", "by_times:either"),
    "drawing:make",
    "parallel:make",
    *(f"skipping:{name}" for name in ("declared", "undeclared", "one_too_few")),
)


@pytest.fixture(scope="module")
def strangers() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(HERE), *filter(None, sys.path)]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.syspath_prepend(str(HERE))
        with Server(ADAPTERS) as started:
            yield started


def verdicts(
    adapter: str, server: Server, *only: str, budget: str = "quick"
) -> dict[str, list[CheckOutcome]]:
    """Return the outcomes of an adapter by invariant."""
    found: dict[str, list[CheckOutcome]] = defaultdict(list)
    given = SessionOptions((adapter,), only=only, server=server.socket, budget=budget)
    for outcome in run_session(given):
        found[outcome.invariant].append(outcome)
    return found


def others(found: dict[str, list[CheckOutcome]]) -> dict[str, str]:
    """Return the reasons of what is neither kept nor not applicable."""
    return {
        invariant: f"{one.verdict}: {one.reason}"
        for invariant, outcomes in found.items()
        for one in outcomes
        if one.verdict not in GOOD
    }


@pytest.mark.parametrize("adapter", ["databases:extra", "databases:truncate", "native:renamed"])
def test_a_native_writer_that_stands_kills_is_seen_to(adapter: str, strangers: Server) -> None:
    found = verdicts(adapter, strangers, *KILLED, "CKC-RETN-001", "CKC-SIDE-003", "CKC-INTN-003")
    assert others(found) == {}
    assert {one.verdict for one in found["CKC-ATOM-001"]} == {Verdict.PASS}
    assert {one.verdict for one in found["CKC-SIDE-003"]} == {Verdict.PASS}


def test_a_native_writer_in_place_is_violated(strangers: Server) -> None:
    found = verdicts("native:in_place", strangers, *KILLED[:2])
    outcomes = [one for invariant in KILLED[:2] for one in found[invariant]]
    assert {one.verdict for one in outcomes} == {Verdict.VIOLATION}
    killed = next(one for one in outcomes if "sigkill_truncation" in one.check)
    assert "step-00000004" in killed.reason


BACKGROUND = ("CKC-SMOK", "CKC-ATOM", "CKC-DURA", "CKC-IOER", "CKC-RTRP", "CKC-SIDE", "CKC-RSUM")


def ids(*families: str) -> tuple[str, ...]:
    return tuple(name for name in load_catalogue().invariants if name.startswith(families))


@pytest.mark.parametrize("adapter", ["background:thread", "background:wrapping"])
def test_a_manager_that_saves_in_a_thread_is_judged_as_what_it_is(
    adapter: str, strangers: Server
) -> None:
    """An asynchronous manager is acknowledged when it says so: nothing of that is UNKNOWN."""
    found = verdicts(adapter, strangers, *ids(*BACKGROUND))
    assert others(found).keys() == OF_TORCH


@pytest.mark.parametrize("name", ["once", "locking", "looping", "looking"])
def test_a_save_in_the_background_is_decided(name: str, strangers: Server) -> None:
    """A step is taken once; the caller waits for a lock, or in a loop; a thread looks for one."""
    found = verdicts(f"background:{name}", strangers, *ids("CKC-ASYN"))
    # Nobody asks its thread how it ended, close neither.
    assert others(found).keys() == {"CKC-ASYN-004", "CKC-ASYN-005"}
    assert {one.verdict for one in found["CKC-ASYN-005"]} == {Verdict.NOT_MET}


def test_a_thread_stands_after_the_caller_has_waited_for_others(strangers: Server) -> None:
    """The loop's pool went on while the caller waited for it; what comes later is late again."""
    (outcome,) = verdicts("background:looping_late", strangers, "CKC-ASYN-001")["CKC-ASYN-001"]
    assert outcome.verdict is Verdict.VIOLATION, outcome.reason


def test_a_fault_hits_the_save_that_it_is_for(strangers: Server) -> None:
    """A trainer's thread that still writes step 2 as step 4 begins is let finish it first."""
    found = verdicts("background:trainer", strangers, *ids("CKC-ATOM", "CKC-IOER", "CKC-DURA"))
    assert others(found) == {}


def test_a_job_is_wrapped_before_it_trains(strangers: Server) -> None:
    """Also where a check counts steps that it does not train."""
    (outcome,) = verdicts("background:wrapping", strangers, "CKC-DISC-001")["CKC-DISC-001"]
    assert outcome.verdict is Verdict.PASS, outcome.reason


def test_a_thread_that_writes_the_live_state_is_seen(strangers: Server) -> None:
    """The job trains on while it is written: what arrives is of no step."""
    found = verdicts("background:aliasing", strangers, "CKC-RTRP-001", "CKC-RSUM-001")
    told = {one.verdict for one in found["CKC-RTRP-001"]}
    assert Verdict.VIOLATION in told <= {Verdict.VIOLATION, Verdict.UNKNOWN}  # other jobs


@pytest.mark.parametrize("shared", ["counters", "lists"])
def test_what_a_thread_shares_with_the_job_is_seen(shared: str, strangers: Server) -> None:
    """However soon the thread has written in a run that nobody disturbs."""
    found = verdicts(f"background:sharing_{shared}", strangers, "CKC-SIDE-003")
    (outcome,) = found["CKC-SIDE-003"]
    assert outcome.verdict is Verdict.VIOLATION
    assert "while a save goes on" in outcome.reason


def test_a_thread_whose_error_nobody_asks_for_is_seen(strangers: Server) -> None:
    found = verdicts("background:forgetful", strangers, "CKC-IOER-001")
    assert {one.verdict for one in found["CKC-IOER-001"]} == {Verdict.VIOLATION}


def test_a_future_that_nobody_waits_for_is_a_clear_error(strangers: Server) -> None:
    found = verdicts("background:unwrapped", strangers, "CKC-SMOK-001")
    outcome, *_ = found["CKC-SMOK-001"]
    assert "return ckpt_conformance.contract.FutureSave(future)" in str(outcome.evidence)


def test_an_option_that_is_not_implemented_is_not_applicable(strangers: Server) -> None:
    """But one that is declared, and implemented with no value, is declared in vain."""
    found = verdicts("background:not_rotating", strangers, "CKC-RETN-003", "CKC-SMOK-003")
    (rotation,), (smoke,) = found["CKC-RETN-003"], found["CKC-SMOK-003"]
    assert rotation.verdict is Verdict.NOT_APPLICABLE
    assert rotation.reason.startswith("the adapter does not implement keep_last=")
    assert smoke.verdict is Verdict.VIOLATION
    assert "retention is declared and does not work" in smoke.reason


def test_a_save_that_two_kills_left_whole_is_not_made_again(strangers: Server) -> None:
    """Beside what a dead save left it makes fewer calls: the second kill comes after its rename."""
    (outcome,) = verdicts("limited:once", strangers, "CKC-ATOM-005")["CKC-ATOM-005"]
    assert outcome.verdict is Verdict.PASS, outcome.reason


@pytest.mark.parametrize(
    ("adapter", "verdict"),
    [*zip(ASCENDING, (Verdict.NOT_APPLICABLE, Verdict.UNKNOWN), strict=True)],
)
def test_a_save_that_is_refused_in_words_deletes_nothing(
    adapter: str, verdict: Verdict, strangers: Server
) -> None:
    """A manager may refuse a step below the newest one: then no save can delete what it wrote."""
    (outcome,) = verdicts(f"limited:{adapter}", strangers, "CKC-RETN-004")["CKC-RETN-004"]
    assert outcome.verdict is verdict, outcome.reason


@pytest.mark.parametrize(
    ("adapter", "verdict"), [*zip(HORIZON, (Verdict.PASS, Verdict.UNKNOWN), strict=True)]
)
def test_what_is_there_and_not_listed_was_not_deleted(
    adapter: str, verdict: Verdict, strangers: Server
) -> None:
    """A save that deletes nothing is no save that deletes, whatever `steps` names after it."""
    (outcome,) = verdicts(f"limited:{adapter}", strangers, "CKC-RETN-004")["CKC-RETN-004"]
    assert outcome.verdict is verdict, outcome.reason


@pytest.mark.parametrize("adapter", ["databases:wal", "databases:full", "mapped:lmdb_default"])
def test_who_waits_for_a_lock_is_not_disturbed(adapter: str, strangers: Server) -> None:
    """Readers wait while a writer commits: SQLite for 5 seconds, LMDB where a directory is new."""
    needs_library(adapter)
    (outcome,) = verdicts(adapter, strangers, "CKC-SIDE-012")["CKC-SIDE-012"]
    assert outcome.verdict is Verdict.PASS, outcome.reason


@pytest.mark.parametrize("name", LOCKED)
def test_who_waits_for_a_stage_of_another_process_may(name: str, strangers: Server) -> None:
    """Whoever is held has the lock; whoever waits for it in a way of its own tells nothing."""
    (outcome,) = verdicts(f"mirroring:{name}", strangers, "CKC-STAG-005")["CKC-STAG-005"]
    assert outcome.verdict is LOCKED[name], outcome.reason


@pytest.mark.parametrize("name", MIRRORED)
def test_whatever_files_a_mirror_has_they_are_damaged(name: str, strangers: Server) -> None:
    names = (*(f"CKC-STAG-00{number}" for number in range(1, 5)), "CKC-SMOK-003")
    assert others(verdicts(f"mirroring:{name}", strangers, *names)).keys() == MIRRORED[name]


def test_a_mirror_of_two_files_a_step_is_judged(strangers: Server) -> None:
    """Half an upload is one of them: no third file is waited for."""
    found = verdicts("mirroring:uploading", strangers, "CKC-MIRR-006")["CKC-MIRR-006"]
    assert {one.verdict for one in found} <= {Verdict.PASS, Verdict.NOT_APPLICABLE}
    assert Verdict.PASS in {one.verdict for one in found}


@pytest.mark.parametrize("name", UPLOADED)
def test_what_cannot_be_saved_again_says_nothing_of_the_mirror(
    name: str, strangers: Server
) -> None:
    """Whether a refusal is one that the adapter declares says another promise."""
    (outcome,) = verdicts(f"mirroring:{name}", strangers, "CKC-MIRR-003")["CKC-MIRR-003"]
    assert outcome.verdict is UPLOADED[name], outcome.reason
    assert outcome.see == ("CKC-RTRP-008" if name == "refusing" else "")


@pytest.mark.parametrize("name", FAILING)
def test_what_close_says_of_a_failed_upload_changes_no_verdict(
    name: str, strangers: Server
) -> None:
    found = verdicts(f"mirroring:{name}", strangers, *FAILING[name])
    assert {id_: one.verdict for id_, (one,) in found.items()} == FAILING[name]


@pytest.mark.skipif(bool(server.missing()), reason="no store: pip install '.[store]'")
def test_a_mirror_that_has_to_be_a_bucket_is_judged_in_one(strangers: Server) -> None:
    ids = ("CKC-SMOK-003", "CKC-MIRR-012", "CKC-MIRR-014", "CKC-MIRR-015")
    found = verdicts("mirroring:bucketed", strangers, *ids)
    assert {id_: one.verdict for id_, (one,) in found.items()} == dict.fromkeys(ids, Verdict.PASS)


@pytest.mark.parametrize("name", TOLD)
def test_signals_count_where_they_have_come(name: str, strangers: Server) -> None:
    (outcome,) = verdicts(f"told:{name}", strangers, "CKC-EMRG-005")["CKC-EMRG-005"]
    assert outcome.verdict is TOLD[name], outcome.reason


def needs_library(adapter: str) -> None:
    if "lmdb" in adapter:
        pytest.importorskip("lmdb", reason="lmdb is not installed: pip install lmdb")


@pytest.mark.parametrize(
    "adapter",
    [
        "mapped:memmap",
        # "sync: ... a system crash can corrupt the database" holds for sync=False alone:
        # https://lmdb.readthedocs.io/en/release/#environment-class
        "mapped:lmdb_default",
        "mapped:lmdb_writemap",
        # "synchronous=FULL ... ensures that an operating system crash or power failure will not
        # corrupt the database", and in WAL mode the log is synced after each transaction:
        # https://www.sqlite.org/pragma.html#pragma_synchronous
        "databases:wal",
        "databases:wal_open",
        "databases:wal_alone",
    ],
)
def test_what_is_stored_in_maps_and_synced_stands_all(adapter: str, strangers: Server) -> None:
    needs_library(adapter)
    found = verdicts(adapter, strangers, *KILLED, *LOST)
    assert others(found) == {}
    kept = ("CKC-ATOM-001", "CKC-DURA-001", "CKC-DURA-004")
    told = {one.verdict for name in kept for one in found[name]}
    assert Verdict.PASS in told <= {Verdict.PASS, Verdict.NOT_APPLICABLE}  # no write to die in


@pytest.mark.parametrize(
    ("adapter", "lost"),
    [
        ("mapped:memmap_unsynced", {"CKC-DURA-001", "CKC-DURA-004"}),
        ("mapped:lmdb_unsynced", {"CKC-DURA-004"}),
        # "WAL mode is always consistent with synchronous=NORMAL, but WAL mode does lose durability.
        # A transaction committed in WAL mode with synchronous=NORMAL might roll back following a
        # power loss": https://www.sqlite.org/pragma.html#pragma_synchronous
        # (a first save that is rolled back leaves a database without a step)
        ("databases:wal_normal", {"CKC-DURA-001", "CKC-DURA-004"}),
        # "With synchronous OFF, SQLite continues without syncing ... the database might become
        # corrupted if the operating system crashes or the computer loses power", same page
        ("databases:off", {"CKC-DURA-001", "CKC-DURA-004"}),
    ],
)
def test_what_is_not_synced_stands_kills_and_no_power_loss(
    adapter: str, lost: set[str], strangers: Server
) -> None:
    """Power losses: a promise that these adapters do not make is not met, no violation."""
    needs_library(adapter)
    found = verdicts(adapter, strangers, *KILLED, *LOST)
    assert {one.verdict for name in KILLED for one in found[name]} <= GOOD
    not_met = {name for name in LOST if {one.verdict for one in found[name]} - GOOD}
    assert not_met >= lost
    assert {one.verdict for name in not_met for one in found[name]} <= {*GOOD, Verdict.NOT_MET}
    if adapter == "databases:wal_normal":  # always consistent: no step is damaged
        assert not_met == lost
        reasons = [one.reason for name in lost for one in found[name]]
        assert not any("Damaged" in reason or "DatabaseError" in reason for reason in reasons)


def test_an_environment_that_is_made_in_place_is_blocked_by_a_kill(strangers: Server) -> None:
    """A real kill shows it: LMDB opens no file that has its size and no first page yet."""
    needs_library("lmdb")
    found = verdicts("mapped:lmdb_in_place", strangers, "CKC-ATOM-003")
    outcome = next(one for one in found["CKC-ATOM-003"] if one.verdict is Verdict.VIOLATION)
    assert "MDB_INVALID" in outcome.reason


@pytest.fixture(scope="module")
def unlimited(strangers: Server) -> dict[str, str]:
    """Return what is said of the same manager where it refuses nothing."""
    return others(verdicts("limited:nothing", strangers, *ids(*LIMITS)))


@pytest.mark.parametrize("adapter", UNDECLARED)
def test_what_a_manager_refuses_costs_one_check(
    adapter: str, strangers: Server, unlimited: dict[str, str]
) -> None:
    refused = others(verdicts(f"limited:{adapter}", strangers, *ids(*LIMITS)))
    assert refused.keys() - unlimited.keys() == UNDECLARED[adapter]
    assert "declare it in cannot_hold" in refused[max(UNDECLARED[adapter])]


def test_what_an_adapter_declares_is_no_violation_and_left_out(
    strangers: Server, unlimited: dict[str, str]
) -> None:
    """One that holds nothing hard has a verdict in every other check."""
    found = verdicts("limited:everything", strangers, *ids(*LIMITS))
    assert others(found).keys() <= unlimited.keys()
    for invariant in ("CKC-RTRP-010", "CKC-RTRP-011", "CKC-RTRP-012", "CKC-RTRP-005"):
        (outcome,) = found[invariant]
        assert outcome.verdict is Verdict.NOT_APPLICABLE
        assert "'no place for it'; it is refused: builtins.ValueError" in outcome.reason
    for invariant in ("CKC-RTRP-004", "CKC-RTRP-006", "CKC-COMP-015"):
        assert {one.verdict for one in found[invariant]} == {Verdict.PASS}


def test_what_is_declared_and_lost_in_silence_is_a_violation(strangers: Server) -> None:
    """An empty tensor has no bits to lose: its absence shows where the load is strict."""
    found = verdicts("limited:scalar_lost", strangers, "CKC-RTRP-012")
    (outcome,) = found["CKC-RTRP-012"]
    assert outcome.verdict is Verdict.VIOLATION
    assert "but it is saved, and does not come back" in outcome.reason


def test_what_is_declared_and_held_is_kept(strangers: Server) -> None:
    found = verdicts("limited:declared_in_vain", strangers, "CKC-RTRP-011")
    assert [one.verdict for one in found["CKC-RTRP-011"]] == [Verdict.PASS]


def test_a_position_that_is_found_by_skipping_is_a_position(
    strangers: Server, unlimited: dict[str, str]
) -> None:
    """The order of the data is the script's own, as it is where a framework skips batches."""
    found = verdicts("skipping:declared", strangers, *ids(*LIMITS))
    assert others(found).keys() == unlimited.keys()
    assert {one.verdict for one in found["CKC-COMP-011"]} == {Verdict.PASS}


@pytest.mark.parametrize("adapter", ["skipping:undeclared", "skipping:one_too_few"])
def test_a_position_that_is_not_found_is_a_violation(adapter: str, strangers: Server) -> None:
    found = verdicts(adapter, strangers, "CKC-COMP-011", "CKC-RSUM-001")
    told = {one.verdict for outcomes in found.values() for one in outcomes}
    assert Verdict.VIOLATION in told <= {Verdict.VIOLATION, Verdict.UNKNOWN}  # also by other jobs


def test_sequences_ask_for_what_steers_a_run_and_for_no_more(strangers: Server) -> None:
    found = verdicts("limited:without_extra", strangers, "CKC-RTRP-020")
    assert {one.verdict for one in found["CKC-RTRP-020"]} == {Verdict.PASS}


def test_what_dead_saves_left_is_older_than_the_next_save(strangers: Server) -> None:
    """A process that starts again takes longer than one second; the check does not."""
    (outcome,) = verdicts("by_times:make", strangers, "CKC-RETN-012")["CKC-RETN-012"]
    assert outcome.verdict is Verdict.PASS, outcome.reason


def test_what_others_left_is_older_than_the_run(strangers: Server) -> None:
    """Rotation by times meets it as on a disk: what people left is no file of this second."""
    (outcome,) = verdicts("by_times:either", strangers, "CKC-RETN-005")["CKC-RETN-005"]
    assert outcome.verdict is Verdict.VIOLATION, outcome.reason


@pytest.mark.parametrize("name", TRICKS)
def test_a_rare_way_that_is_right_stands_all(name: str, strangers: Server) -> None:
    """open(2): with O_SYNC, and for the bytes O_DSYNC, a write is synced when it returns."""
    found = verdicts(f"tricks:{name}", strangers, *KILLED, *LOST)
    assert others(found) == {}
    kept = ("CKC-ATOM-001", "CKC-DURA-001", "CKC-DURA-004")
    assert {one.verdict for invariant in kept for one in found[invariant]} == {Verdict.PASS}


@pytest.mark.parametrize("name", STAGED)
def test_what_fails_where_a_file_is_staged_is_a_failure_of_the_save(
    name: str, strangers: Server
) -> None:
    """rename(2) moves a file in from TMPDIR; the disk may be full, or fail, there as well."""
    found = verdicts(f"staged:{name}", strangers, *KILLED, *LOST, *ids("CKC-IOER"))
    assert others(found).keys() == STAGED[name]


@pytest.mark.parametrize("name", HASTY)
def test_haste_in_one_place_is_seen_there(name: str, strangers: Server) -> None:
    """What a kill or a passing error costs in a recovery, in a rotation and in a load."""
    found = verdicts(f"hasty:{name}", strangers, *KILLED, "CKC-ATOM-007", *ids("CKC-IOER"))
    assert others(found).keys() == HASTY[name]


def test_blocks_of_o_direct_are_cut_between_blocks(strangers: Server) -> None:
    """A short write of them does whole blocks, and never none."""
    assert others(verdicts("tricks:direct", strangers, *ids("CKC-IOER"))) == {}


@pytest.mark.parametrize("name", PATIENT)
def test_who_outlives_an_error_of_the_disk_is_judged_by_what_it_costs(
    name: str, strangers: Server
) -> None:
    """Another try from a new file costs nothing, nor does a hint; a second sync alone does."""
    found = verdicts(f"patient:{name}", strangers, "CKC-IOER-001", "CKC-IOER-002")
    assert others(found).keys() == PATIENT[name]


@pytest.mark.parametrize("name", HEADED)
def test_a_header_that_no_digest_covers_is_damaged_too(name: str, strangers: Server) -> None:
    found = verdicts(f"headed:{name}", strangers, *ids("CKC-CORR"))
    assert others(found).keys() == HEADED[name]


@pytest.mark.parametrize("name", NUMBERED)
def test_every_file_of_a_step_is_damaged_though_its_folder_is_drawn(
    name: str, strangers: Server
) -> None:
    """A file that is verified just before it is applied is refused after others were applied."""
    found = verdicts(f"numbered:{name}", strangers, "CKC-CORR-003", "CKC-CORR-007")
    assert others(found).keys() == NUMBERED[name]
    assert Verdict.PASS in {one.verdict for one in found["CKC-CORR-003"]}


@pytest.mark.parametrize("name", REFUSING)
def test_a_step_of_too_many_digits_may_be_refused(name: str, strangers: Server) -> None:
    """Those that were saved before count, if the number is why."""
    (outcome,) = verdicts(f"numbered:{name}", strangers, "CKC-DISC-001")["CKC-DISC-001"]
    assert outcome.verdict is REFUSING[name], outcome.reason


def test_of_a_step_that_is_there_twice_both_are_hit(strangers: Server) -> None:
    """Damage to one of two copies costs nothing, and so says nothing."""
    names = (*ids("CKC-CORR"), "CKC-SECU-003")
    found = verdicts("headed:twins", strangers, *names)
    assert others(found) == {}
    assert Verdict.PASS in {one.verdict for one in found["CKC-CORR-006"]}
    assert {one.verdict for one in found["CKC-CORR-007"]} == {Verdict.PASS}


def test_a_part_of_a_name_that_is_drawn_costs_nothing(strangers: Server) -> None:
    found = verdicts("patient:drawn", strangers, "CKC-RETN-009", "CKC-ATOM-005", "CKC-RETN-002")
    assert others(found) == {}


def test_of_a_log_every_step_is_damaged_or_none(strangers: Server) -> None:
    """Half of the one file is a whole older step: that it is served is no fault."""
    found = verdicts("tricks:log", strangers, "CKC-CORR-005", "CKC-CORR-007")
    assert others(found) == {}
    assert {one.verdict for outcomes in found.values() for one in outcomes} == {Verdict.PASS}


@pytest.mark.parametrize("name", ["extra", "full", "truncate", "wal"])
def test_a_sync_that_fails_and_costs_nothing_may_be_passed_over(
    name: str, strangers: Server
) -> None:
    """SQLite keeps its log where what it wrote into the database could not be synced."""
    found = verdicts(f"databases:{name}", strangers, "CKC-IOER-001")
    assert others(found) == {}


@pytest.mark.parametrize("name", ["extra", "truncate", "wal", "wal_alone", "wal_open"])
def test_a_load_may_recover_from_a_log(name: str, strangers: Server) -> None:
    """SQLite writes what its WAL holds into the database when it is opened, once.

    While it is open it has an index and a log beside it, which come and go.
    """
    found = verdicts(f"databases:{name}", strangers, "CKC-SIDE-002")
    assert {one.verdict for one in found["CKC-SIDE-002"]} == {Verdict.PASS}


def test_a_half_of_a_step_that_is_deleted_is_named(strangers: Server) -> None:
    found = others(verdicts("tricks:folders", strangers, "CKC-ATOM-004", "CKC-RETN-001"))
    assert found.keys() == {"CKC-ATOM-004"}
    assert "discovery names step 2" in found["CKC-ATOM-004"]


def test_a_torn_object_that_is_taken_for_whole_costs_the_step_that_is_saved_again(
    strangers: Server,
) -> None:
    assert others(verdicts("reused:trusting", strangers, "CKC-ATOM-003")).keys() == {"CKC-ATOM-003"}


def test_of_two_slots_no_check_asks_for_three_steps(strangers: Server) -> None:
    names = ids("CKC-DISC", "CKC-RETN", "CKC-CORR", "CKC-SMOK")
    assert others(verdicts("reused:two_slots", strangers, *names)) == {}


def test_an_exchange_keeps_one_whole_step_at_any_moment(strangers: Server) -> None:
    """renameat2(2): RENAME_EXCHANGE is atomic. It holds one step: what needs two does not apply."""
    found = verdicts("tricks:exchange", strangers, *KILLED, *LOST)
    assert others(found) == {}
    assert {one.verdict for one in found["CKC-DURA-004"]} == {Verdict.PASS}


def test_a_ring_is_named_where_it_can_not_be_followed(strangers: Server) -> None:
    found = verdicts("tricks:ring", strangers, "CKC-DURA-001", "CKC-SMOK-001")
    assert {one.verdict for one in found["CKC-SMOK-001"]} == {Verdict.PASS}
    (outcome,) = found["CKC-DURA-001"]
    assert outcome.verdict is Verdict.UNKNOWN
    assert "io_uring_enter" in outcome.reason


def test_a_journal_whose_removal_is_not_synced_may_come_back(strangers: Server) -> None:
    """And rolls the last transaction back: what `synchronous=EXTRA` is for, beside FULL.

    "EXTRA synchronous is like FULL with the addition that the directory containing a rollback
    journal is synced after that journal is unlinked to commit a transaction":
    https://www.sqlite.org/pragma.html#pragma_synchronous
    """
    found = verdicts("databases:full", strangers, *KILLED, *LOST)
    assert {one.verdict for name in KILLED for one in found[name]} <= GOOD
    (lost,) = [one for one in found["CKC-DURA-004"] if one.verdict not in GOOD]
    assert lost.verdict is Verdict.NOT_MET
    assert str(lost.evidence["blame"]).startswith("removal-not-synced: steps.sqlite-journal: ")


def test_threads_that_write_while_the_tree_is_kept_cost_no_verdict(strangers: Server) -> None:
    """What is kept of the directory at each call is read while the other threads go on.

    The directories of its dead saves pile up, each under a name of its own.
    """
    names = ("CKC-IOER-001", "CKC-IOER-002", "CKC-IOER-003", *KILLED, *LOST)
    assert others(verdicts("parallel:make", strangers, *names)).keys() == {"CKC-ATOM-005"}


@pytest.mark.parametrize("name", ["addressed", "fanned", "slots"])
def test_a_file_that_belongs_to_no_one_step_is_not_blamed(name: str, strangers: Server) -> None:
    """Contents under their digests, and slots that are written to again, are no pointers."""
    found = verdicts(f"reused:{name}", strangers, *ids(*NAMED), *KILLED, *LOST)
    # SIDE-005 is torch's; a step whose contents are cut takes a slot: a SHOULD, where names tell.
    # It is for one process: what another one rotates away while it loads or saves is a SHOULD, too.
    allowed = {"CKC-SIDE-005", "CKC-RETN-009", "CKC-SIDE-012", "CKC-SIDE-016"}
    assert others(found).keys() <= allowed
    assert {one.verdict for one in found["CKC-RTRP-020"]} == {Verdict.PASS}
    assert {one.verdict for one in found["CKC-CORR-007"]} == {Verdict.PASS}


def test_names_are_planted_in_folders_that_are_there(strangers: Server) -> None:
    """A manager that makes its own folder by one rename cannot find somebody's files in it."""
    assert others(verdicts("reused:built", strangers, "CKC-DISC-005", "CKC-RETN-002")) == {}


def test_what_rotation_leaves_has_to_load(strangers: Server) -> None:
    """Its names are there, and what they name was swept."""
    (outcome,) = verdicts("reused:sweeping", strangers, "CKC-RETN-002")["CKC-RETN-002"]
    assert outcome.verdict is Verdict.VIOLATION
    assert outcome.reason == "rotation leaves step 10, and it does not load"


def test_a_manager_that_always_keeps_three_says_so(strangers: Server) -> None:
    names = ("CKC-SMOK-003", "CKC-RETN-002", "CKC-RETN-003", "CKC-RETN-006", "CKC-RTRP-020")
    assert others(verdicts("reused:always_three", strangers, *names)) == {}
    assert others(verdicts("reused:three_unsaid", strangers, *names)).keys() >= {"CKC-SMOK-003"}


def test_a_thread_that_deletes_after_the_save_is_waited_for(strangers: Server) -> None:
    """What it deletes meets the faults of that save, and is gone when it is asked for."""
    names = (*(f"CKC-RETN-00{number}" for number in range(1, 8)), *ids("CKC-IOER"), "CKC-SMOK-003")
    assert others(verdicts("background:purging", strangers, *names)) == {}


def test_a_save_in_the_background_may_leave_one_more_and_not_two(strangers: Server) -> None:
    """What counts while the newest is not there yet keeps one more; torchtitan's thread may."""
    assert others(verdicts("background:counting", strangers, *ROTATED)) == {}
    wrong = others(verdicts("background:sparing", strangers, *ROTATED))
    assert wrong.keys() == {"CKC-RETN-002"}


@pytest.mark.parametrize("name", UNSYNCED)
def test_however_many_files_nothing_that_is_not_synced_is_kept(
    name: str, strangers: Server
) -> None:
    """A save of many files has more crash points than states are made: none may starve."""
    found = verdicts(f"sharded:{name}", strangers, "CKC-DURA-001", "CKC-DURA-004")
    assert {one.verdict for outcomes in found.values() for one in outcomes} == {Verdict.NOT_MET}


@pytest.mark.parametrize("name", SYNCED)
def test_however_many_files_what_is_synced_is_kept(name: str, strangers: Server) -> None:
    found = verdicts(f"sharded:{name}", strangers, *LOST)
    assert others(found) == {}
    kept = ("CKC-DURA-001", "CKC-DURA-004")
    assert {one.verdict for invariant in kept for one in found[invariant]} == {Verdict.PASS}


@pytest.mark.parametrize("name", BUT_ONE)
def test_one_file_of_many_that_is_not_synced_is_found(name: str, strangers: Server) -> None:
    (outcome,) = verdicts(f"sharded:{name}", strangers, "CKC-DURA-001")["CKC-DURA-001"]
    assert outcome.verdict is Verdict.NOT_MET
    blame = str(outcome.evidence["blame"])
    assert f"shard-{int(name.rpartition('_')[2]) // 2:05d}" in blame, blame


BEYOND = "test_a_large_tensor_is_the_saved_one"


@pytest.mark.parametrize(
    ("name", "violated"), [("head", {"CKC-CORR-001", "CKC-CORR-002"}), ("body", set[str]())]
)
def test_what_is_verified_of_a_large_file_in_part_only_is_seen(
    name: str, violated: set[str], strangers: Server
) -> None:
    names = ("CKC-CORR-001", "CKC-CORR-002", "CKC-RTRP-001", "CKC-IOER-006")
    found = verdicts(f"large:{name}", strangers, *names)
    assert others(found).keys() == violated
    wrong = [one.check for id_ in violated for one in found[id_] if one.verdict not in GOOD]
    assert {check.partition("::")[0] for check in wrong} <= {"test_large_tensors"}


@pytest.mark.parametrize(("name", "kind"), [("narrow", "huge"), ("few", "many")])
def test_who_counts_in_few_bits_is_seen_at_the_full_budget(
    name: str, kind: str, strangers: Server
) -> None:
    found = verdicts(f"large:{name}", strangers, "CKC-RTRP-001", budget="full")
    wrong = [one for one in found["CKC-RTRP-001"] if one.verdict is Verdict.VIOLATION]
    assert [one.check.partition("::")[2] for one in wrong] == [BEYOND]
    assert f"kind {kind}" in wrong[0].reason


def test_a_draw_in_every_save_is_no_matter_of_an_error(strangers: Server) -> None:
    found = verdicts("drawing:make", strangers, "CKC-SIDE-001", "CKC-IOER-002", "CKC-IOER-003")
    assert {one.verdict for one in found["CKC-SIDE-001"]} == {Verdict.VIOLATION}
    rest = [one for id_ in ("CKC-IOER-002", "CKC-IOER-003") for one in found[id_]]
    assert {one.verdict for one in rest} <= {Verdict.PASS, Verdict.UNKNOWN}
    assert {one.see for one in rest if one.verdict is Verdict.UNKNOWN} == {"CKC-SIDE-001"}


@pytest.mark.parametrize("name", ["extra", "truncate", "wal"])
def test_the_journal_of_a_save_is_no_old_checkpoint(name: str, strangers: Server) -> None:
    """SQLite unlinks its rollback journal to commit: where that fails the save has failed."""
    found = verdicts(f"databases:{name}", strangers, "CKC-RETN-007")
    assert {one.verdict for one in found["CKC-RETN-007"]} == {Verdict.NOT_APPLICABLE}
