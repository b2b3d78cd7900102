"""What other releases of torch wrote: the golden files load here, and broken managers are seen.

The archives of `tests/golden/torch` are real: each was written under the release that it is named
after. That of the installed release says nothing, and must not be taken for a result.
"""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract import written
from ckpt_conformance.contract.verdicts import Verdict
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.session import run_session
from ckpt_conformance.suites import releases

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.contract.verdicts import CheckOutcome
    from ckpt_conformance.harness.client import Server

GOLDEN = Path(__file__).parents[1] / "golden"
ARCHIVES = sorted((GOLDEN / "torch").glob("*.tar.xz"))
HERE = f"torch-{written.release_of(written.installed())}.tar"
OTHERS = [path for path in ARCHIVES if path.stem != HERE]
# Changes of torch, and no fault of ours: see docs/torch-versions.md.
REFUSED = ("dcp-per-step", "CKC-VERS-004")
WHY = ("scheduler._is_initial", "to unpack (expected 5)")
PLAIN = {
    "CKC-VERS-002": "test_what_another_release_wrote_is_not_passed_over",
    "CKC-VERS-003": "test_what_another_release_wrote_is_not_loaded_as_something_else",
    "CKC-VERS-004": "test_what_another_release_wrote_loads",
}
OF_RANKS = {
    "CKC-VERS-004": "test_what_ranks_of_another_release_wrote_loads",
    "CKC-VERS-005": "test_ranks_get_what_ranks_of_another_release_saved",
}


def unpack(archives: list[Path], folder: Path) -> Path:
    for path in archives:
        with tarfile.open(path) as tar:
            tar.extractall(folder / path.stem, filter="data")
    return folder


def judge(
    folder: Path, server: Server, *adapters: str, only: Mapping[str, str] = PLAIN
) -> dict[str, dict[str, CheckOutcome]]:
    """Return outcomes by adapter and invariant, of the check that is named for the invariant."""
    found: dict[str, dict[str, CheckOutcome]] = defaultdict(dict)
    options = SessionOptions(
        adapters,
        selection={f"test_versions::{check}": adapters for check in only.values()},
        written_by=(str(folder),),
        server=server.socket,
    )
    for outcome in run_session(options):
        found[outcome.adapter][outcome.invariant] = outcome
    return found


def by_pair(found: Mapping[str, Mapping[str, CheckOutcome]]) -> dict[tuple[str, str], Verdict]:
    """Return verdicts by adapter and invariant."""
    return {
        (name, invariant): outcome.verdict
        for name, outcomes in found.items()
        for invariant, outcome in outcomes.items()
    }


def rename(folder: Path, old: str, new: str) -> None:
    """Let one adapter's record say that another one wrote it."""
    for path in folder.rglob(written.RECORD):
        record = json.loads(path.read_text())
        if record["adapter"] == old:
            path.write_text(json.dumps(record | {"adapter": new}))


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(OTHERS, tmp_path_factory.mktemp("golden"))


def test_there_are_golden_files_of_other_releases_and_they_are_small() -> None:
    assert len(ARCHIVES) >= 4
    assert len(OTHERS) >= len(ARCHIVES) - 1
    everything = {path for path in GOLDEN.rglob("*") if path.is_file()}
    of_fsck = {path for path in everything if path.is_relative_to(GOLDEN / "fsck")}
    for some in (of_fsck, everything - of_fsck):
        assert sum(path.stat().st_size for path in some) < 1 << 20


def test_what_other_releases_wrote_loads_bit_for_bit(golden: Path, server: Server) -> None:
    adapters = sorted({one.record.adapter for one in written.find(golden)})
    assert len(adapters) == 5
    found = judge(golden, server, *adapters)
    verdicts = by_pair(found)
    assert len(verdicts) == len(adapters) * len(PLAIN)
    others = {key for key, verdict in verdicts.items() if verdict is not Verdict.PASS}
    assert others <= {REFUSED}, [(key, found[key[0]][key[1]].evidence) for key in others]
    if others:
        (name, invariant) = REFUSED
        assert any(why in found[name][invariant].evidence["child"] for why in WHY)
    read = " ".join(found["reference"]["CKC-VERS-003"].remarks.releases)
    for path in OTHERS:
        assert path.stem.removesuffix(".tar").replace("-", " ") in read


@pytest.mark.slow
def test_ranks_get_what_ranks_of_other_releases_saved(golden: Path, server: Server) -> None:
    adapters = ("reference", "reference-dcp", "dcp-per-step")
    found = judge(golden, server, *adapters, only=OF_RANKS)
    verdicts = by_pair(found)
    assert len(verdicts) == len(adapters) * len(OF_RANKS)
    others = {key for key, verdict in verdicts.items() if verdict is not Verdict.PASS}
    assert others <= {REFUSED}, others


@pytest.mark.parametrize(
    ("mutant", "violated"),
    [
        ("mutant:M10", "CKC-VERS-002"),
        ("mutant:M09", "CKC-VERS-003"),
        ("mutant:M07", "CKC-VERS-004"),
        pytest.param("mutant:M11", "CKC-VERS-005", marks=pytest.mark.slow),
    ],
)
def test_a_broken_manager_is_seen_on_real_files_too(
    mutant: str, violated: str, server: Server, tmp_path: Path
) -> None:
    folder = unpack(OTHERS[:1], tmp_path)
    rename(folder, "reference-dcp" if mutant == "mutant:M11" else "reference", mutant)
    only = {violated: OF_RANKS[violated]} if mutant == "mutant:M11" else PLAIN
    outcomes = judge(folder, server, mutant, only=only)[mutant]
    bad = {Verdict.VIOLATION, Verdict.NOT_MET}
    assert {name for name, outcome in outcomes.items() if outcome.verdict in bad} == {violated}


def test_a_refusal_is_no_wrong_state(server: Server, tmp_path: Path) -> None:
    """What is refused in words breaks no promise but the one that it loads."""
    folder = unpack(OTHERS[:1], tmp_path)
    rename(folder, "reference", "mutant:M07")
    outcomes = judge(folder, server, "mutant:M07")["mutant:M07"]
    assert outcomes["CKC-VERS-002"].verdict is Verdict.PASS
    assert outcomes["CKC-VERS-003"].verdict is Verdict.PASS
    assert "it is refused" in outcomes["CKC-VERS-004"].reason


def test_the_same_release_is_no_result(server: Server, tmp_path: Path) -> None:
    folder = unpack(OTHERS[:1], tmp_path)
    for path in folder.rglob(written.RECORD):
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {"torch": written.installed()}))
    outcomes = judge(folder, server, "reference")["reference"]
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.NOT_APPLICABLE}
    assert "which is installed here" in outcomes["CKC-VERS-003"].reason


def test_without_a_folder_nothing_is_claimed(server: Server) -> None:
    options = SessionOptions(("reference",), only=tuple(PLAIN), server=server.socket)
    found = {outcome.check.partition("::")[2]: outcome for outcome in run_session(options)}
    own = found.pop("test_a_checkpoint_that_names_another_release_is_not_passed_over")
    assert own.verdict is Verdict.PASS
    assert {one.verdict for one in found.values()} == {Verdict.NOT_APPLICABLE}
    assert {one.reason for one in found.values()} == {
        "no checkpoint of another release of torch was given: certify with --written-by DIR"
    }


def test_files_that_changed_on_the_way_are_no_violation(server: Server, tmp_path: Path) -> None:
    folder = unpack(OTHERS[:1], tmp_path)
    victim = next(folder.rglob("reference/mixed/*.pt"))
    victim.write_bytes(victim.read_bytes()[:-1])
    outcomes = judge(folder, server, "reference")["reference"]
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.UNKNOWN}
    assert f"{victim.name} is not what was written" in outcomes["CKC-VERS-003"].reason


def keep(folder: Path, *, of_ranks: bool) -> None:
    """Leave in each record only the runs of ranks, or only those of one process."""
    for path in folder.rglob(written.RECORD):
        record = json.loads(path.read_text())
        runs = [run for run in record["runs"] if bool(run.get("layout")) is of_ranks]
        path.write_text(json.dumps(record | {"runs": runs}))


def test_where_nothing_of_one_process_was_written_nothing_is_claimed(
    server: Server, tmp_path: Path
) -> None:
    folder = unpack(OTHERS[:1], tmp_path)
    keep(folder, of_ranks=True)
    outcomes = judge(folder, server, "reference")["reference"]
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.NOT_APPLICABLE}
    assert "was written by one process" in outcomes["CKC-VERS-003"].reason


def test_where_nothing_comes_back_under_the_installed_release_nothing_is_claimed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that does not come back at all says nothing about releases: a failed control."""
    folder = unpack(OTHERS[:1], tmp_path)
    keep(folder, of_ranks=False)
    monkeypatch.setattr(releases, "comes_back", lambda *_: False)
    outcomes = judge(folder, server, "reference")["reference"]
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.UNKNOWN}
