"""The audit of a trace: each rule on a trace that breaks it, and on its twin that does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_conformance.crash.explore.audit import RULES, Finding, audit
from ckpt_conformance.trace.operations import ROOT, Entry, Kind, Operation, Recording

ACK = (Kind.MARK, {"mark": "acknowledged", "step": 4})
OLD = Entry(object=9, path="latest.pt", kind="file", size=8192)


def trace(*given: tuple[Kind, dict[str, Any]], initial: tuple[Entry, ...] = ()) -> Recording:
    operations = [
        Operation(index, kind, **{"parent": ROOT, "source": f"saving.py:{index}", **fields})
        for index, (kind, fields) in enumerate(given)
    ]
    return Recording("/root", Path("/none"), list(initial), operations)


def create(one: int, path: str) -> tuple[Kind, dict[str, Any]]:
    return Kind.CREATE, {"object": one, "path": path}


def write(one: int, path: str, at: int = 0) -> tuple[Kind, dict[str, Any]]:
    return Kind.WRITE, {"object": one, "path": path, "offset": at, "size": 4096, "data": 0}


def sync(one: int, path: str, **fields: int) -> tuple[Kind, dict[str, Any]]:
    return Kind.FSYNC, {"object": one, "path": path, **fields}


def rename(one: int, path: str, target: str, replaced: int = 0) -> tuple[Kind, dict[str, Any]]:
    fields = {"object": one, "path": path, "target": target, "replaced": replaced}
    return Kind.RENAME, {**fields, "new_parent": ROOT}


FOLDER_SYNC = sync(ROOT, "")
SAVE = [
    create(2, "4.pt.tmp"),
    write(2, "4.pt.tmp"),
    sync(2, "4.pt.tmp"),
    rename(2, "4.pt.tmp", "4.pt"),
    FOLDER_SYNC,
    ACK,
]


def rules(recording: Recording) -> list[str]:
    return [finding.rule for finding in audit(recording)]


def without(at: int) -> list[tuple[Kind, dict[str, Any]]]:
    return [each for index, each in enumerate(SAVE) if index != at]


def test_a_save_that_syncs_everything_has_no_finding() -> None:
    assert rules(trace(*SAVE)) == []


def test_three_missing_calls_are_told_apart() -> None:
    """No fsync of the file, none of the directory, none of the manifest."""
    manifest = [
        create(3, "4.json.tmp"),
        write(3, "4.json.tmp"),
        sync(3, "4.json.tmp"),
        rename(3, "4.json.tmp", "4.json"),
    ]
    whole = [*SAVE[:4], *manifest, FOLDER_SYNC, ACK]
    assert rules(trace(*whole)) == []

    def findings(missing: int) -> list[tuple[str, str]]:
        found = audit(trace(*[each for at, each in enumerate(whole) if at != missing]))
        return [(finding.rule, finding.path) for finding in found]

    assert findings(2) == [("renamed-unsynced", "4.pt")]
    assert findings(6) == [("renamed-unsynced", "4.json")]
    assert findings(8) == [("directory-not-synced", "4.pt"), ("directory-not-synced", "4.json")]


def test_a_sync_before_the_flush_is_named_with_both_lines() -> None:
    (found,) = audit(
        trace(
            create(2, "data"),
            sync(2, "data"),
            write(2, "data"),
            FOLDER_SYNC,
            ACK,
        )
    )
    assert (found.rule, found.source, found.other_source) == (
        "fsync-before-flush",
        "saving.py:1",
        "saving.py:2",
    )


def test_never_synced_in_place() -> None:
    assert rules(trace(create(2, "4.pt"), write(2, "4.pt"), FOLDER_SYNC, ACK)) == ["never-synced"]


def test_a_write_through_o_sync_is_safe() -> None:
    kind, fields = write(2, "4.pt")
    synced = (kind, {**fields, "sync": True})
    assert rules(trace(create(2, "4.pt"), synced, FOLDER_SYNC, ACK)) == []


def test_sync_of_everything_is_enough() -> None:
    assert rules(trace(*without(2)[:3], (Kind.SYNC, {}), ACK)) == ["renamed-unsynced"]
    assert rules(trace(create(2, "a"), write(2, "a"), (Kind.SYNC, {}), ACK)) == []


def test_the_file_instead_of_the_directory() -> None:
    again = (Kind.FDATASYNC, {"object": 2, "path": "4.pt"})
    assert rules(trace(*SAVE[:4], again, ACK)) == ["file-synced-for-directory"]


def test_the_wrong_directory() -> None:
    folder = (Kind.MKDIR, {"object": 5, "path": "logs"})
    begin = [folder, FOLDER_SYNC]
    assert rules(trace(*begin, *SAVE[:4], sync(5, "logs"), ACK)) == ["wrong-directory"]


def test_a_committed_file_written_in_place() -> None:
    assert rules(trace(write(9, "latest.pt"), sync(9, "latest.pt"), ACK, initial=(OLD,))) == [
        "overwritten-in-place"
    ]
    appended = write(9, "latest.pt", at=8192)
    assert rules(trace(appended, sync(9, "latest.pt"), ACK, initial=(OLD,))) == []


@pytest.mark.parametrize("how", [Kind.UNLINK, Kind.TRUNCATE])
def test_the_old_goes_before_the_new_is_there(how: Kind) -> None:
    gone = (how, {"object": 9, "path": "latest.pt"})
    save = [create(2, "t"), write(2, "t"), sync(2, "t")]
    moved = [rename(2, "t", "latest.pt"), FOLDER_SYNC, ACK]
    assert rules(trace(*save, gone, *moved, initial=(OLD,)))[0] == "removed-before-replaced"
    assert rules(trace(*save, *moved, initial=(OLD,))) == []


def test_rotation_is_no_early_removal() -> None:
    gone = (Kind.UNLINK, {"object": 9, "path": "latest.pt"})
    assert rules(trace(*SAVE[:5], gone, FOLDER_SYNC, ACK, initial=(OLD,))) == []


def test_a_removal_that_is_not_synced() -> None:
    """Whenever it comes: what rotation removes after the acknowledgement may come back, too."""
    gone = (Kind.UNLINK, {"object": 9, "path": "latest.pt"})
    assert rules(trace(*SAVE[:5], gone, ACK, initial=(OLD,))) == ["removal-not-synced"]
    assert rules(trace(*SAVE, gone, initial=(OLD,))) == ["removal-not-synced"]
    assert rules(trace(*SAVE, gone, (Kind.SYNC, {}), initial=(OLD,))) == []
    folder = Entry(object=5, path="2", kind="dir", size=0)
    inside = Entry(object=6, path="2/data", kind="file", size=9)
    tree = [
        (Kind.UNLINK, {"object": 6, "path": "2/data"}),
        (Kind.RMDIR, {"object": 5, "path": "2"}),
    ]
    (found,) = audit(trace(*SAVE, *tree, initial=(folder, inside)))
    assert (found.rule, found.path) == ("removal-not-synced", "2")


def test_a_temporary_file_that_stays() -> None:
    stays = [create(7, "x.tmp"), FOLDER_SYNC]
    assert rules(trace(*stays, *SAVE)) == ["left-behind"]


def test_a_failed_fsync_is_not_tried_again() -> None:
    failed = sync(2, "4.pt.tmp", error=5)
    assert rules(trace(*SAVE[:2], failed, *SAVE[2:])) == ["retried-fsync"]
    assert rules(trace(*SAVE[:2], failed, write(2, "4.pt.tmp"), *SAVE[2:])) == []


def test_a_directory_that_is_renamed_takes_its_files_along() -> None:
    staged = [
        (Kind.MKDIR, {"object": 5, "path": "tmp-4"}),
        (Kind.CREATE, {"object": 6, "path": "tmp-4/data", "parent": 5}),
        write(6, "tmp-4/data"),
        sync(6, "tmp-4/data"),
        sync(5, "tmp-4"),
        rename(5, "tmp-4", "4"),
        FOLDER_SYNC,
        ACK,
    ]
    assert rules(trace(*staged)) == []

    def findings(missing: int) -> list[tuple[str, str]]:
        found = audit(trace(*[each for at, each in enumerate(staged) if at != missing]))
        return [(finding.rule, finding.path) for finding in found]

    assert findings(3) == [("renamed-unsynced", "4/data")]
    assert findings(4) == [("directory-not-synced", "4/data")]
    assert findings(6) == [("directory-not-synced", "4")]


def test_each_finding_can_be_told() -> None:
    for rule in RULES:
        finding = Finding(rule, 3, "4.pt", "saving.py:3")
        assert rule in finding.summary
        assert "saving.py:3" in finding.summary
        assert replace(finding, other_source="a.py:1").summary.endswith("a.py:1")
