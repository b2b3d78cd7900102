"""How much of a whole checkpoint was verified is a part of what is said of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import fsck_corpus
import jsonschema
import pytest
import torch
from fsck_runs import Finished

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.judge import stored
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Protection, Report
from ckpt_conformance.report.fsck_lines import percent

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import ReportJson


def newest(path: Path, options: Options | None = None) -> Report:
    return judge(path, options).reports[0]


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        ("reference", Protection.VERIFIED),
        ("reference-dcp", Protection.VERIFIED),
        ("torch", Protection.VERIFIED),
        ("dcp", Protection.PARTLY),  # nothing protects `.metadata`
        ("safetensors", Protection.STRUCTURE),
        ("hf-index", Protection.STRUCTURE),
    ],
)
def test_the_word_says_what_protects_a_layout(
    layout: str, word: Protection, tmp_path: Path
) -> None:
    report = newest(fsck_corpus.write(layout, tmp_path / "run"))
    assert report.protection is word
    assert (report.coverage == 1) is (word is Protection.VERIFIED)
    assert (report.coverage == 0) is (word is Protection.STRUCTURE)
    done = Finished("fsck", tmp_path / "run")
    assert f"✓ whole ({word}" in done.out
    assert f"newest whole ({word}" in done.out


def test_a_file_without_crcs_is_structure_only(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(1000)}, tmp_path / "checkpoint-5.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    report = newest(tmp_path)
    assert (report.protection, report.coverage) == (Protection.STRUCTURE, 0.0)


@pytest.mark.parametrize("layout", ["torch", "dcp"])
def test_less_is_said_where_less_was_read(layout: str, tmp_path: Path) -> None:
    root = fsck_corpus.write(layout, tmp_path / "run")
    full = newest(root)
    some = newest(root, Options(sample=0.01))
    none = newest(root, Options(metadata_only=True))
    assert none.protection is Protection.STRUCTURE
    assert none.coverage == 0
    if some.unread:
        assert some.protection is Protection.PARTLY
        assert some.coverage < full.coverage


def test_a_sample_of_several_files_is_partly_verified(tmp_path: Path) -> None:
    (tmp_path / "step_5").mkdir()
    for part in range(20):
        torch.save({"w": torch.ones(1000)}, tmp_path / "step_5" / f"part_{part}.pt")
    some = newest(tmp_path, Options(sample=0.05))
    assert some.unread > 0
    assert some.protection is Protection.PARTLY
    assert 0 < some.coverage < 0.2


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.0, "100 %"), (0.99999, "99.99 %"), (0.62281, "62.28 %"), (0.0, "0 %"), (0.95, "95 %")],
)
def test_a_share_is_rounded_down(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A run whose newest step has no CRC, and whose older one has."""
    root = tmp_path / "mixed"
    for step, is_summed in ((1, True), (2, False)):
        (root / f"step_{step}").mkdir(parents=True)
        torch.serialization.set_crc32_options(is_summed)
        try:
            torch.save({"w": torch.ones(1000)}, root / f"step_{step}" / "model.pt")
        finally:
            torch.serialization.set_crc32_options(True)
    return root


def test_a_gate_refuses_what_nothing_protects(mixed: Path) -> None:
    assert Finished("fsck", mixed).status == 0
    done = Finished("fsck", mixed, "--require-coverage", "95%")
    assert done.status == 1
    assert "0 % verified by a digest or a CRC, and 95 % is required" in done.out
    assert f"newest whole (verified): {mixed / 'step_1'}" in done.out
    assert Finished("fsck", mixed / "step_1", "--require-coverage", "95%").status == 0
    assert Finished("fsck", mixed / "step_1", "--require-coverage", "100%").status == 0


def test_the_newest_whole_passes_over_what_nothing_protects(mixed: Path) -> None:
    done = Finished("fsck", mixed, "--newest-whole", "--require-coverage", "0.95")
    assert (done.status, done.out) == (0, f"{mixed / 'step_1'}\n")
    assert "step_2: whole (structure only): 0 % verified" in done.err
    none = Finished("fsck", mixed / "step_2", "--newest-whole", "--require-coverage", "0.95")
    assert (none.status, none.out) == (1, "")


@pytest.mark.parametrize("value", ["95", "0", "0%", "-1%", "101%", "much", "", "nan", "inf"])
def test_a_bad_share_is_a_usage_error(value: str, mixed: Path) -> None:
    done = Finished("fsck", mixed, f"--require-coverage={value}")
    assert done.status == 2
    assert f"{value!r} is no share" in done.err


def test_metadata_alone_verifies_nothing(mixed: Path) -> None:
    with pytest.raises(RequestError, match="--require-coverage"):
        Finished("fsck", mixed, "--metadata-only", "--require-coverage", "5%")


def test_json_has_the_word_and_old_results_are_read(mixed: Path, repository: Path) -> None:
    done = Finished("fsck", mixed, "--json", "--require-coverage", "95%")
    schema = repository / "ckpt_conformance" / "report" / "schemas" / "fsck.schema.json"
    said = json.loads(done.out)
    jsonschema.validate(said, json.loads(schema.read_text(encoding="utf-8")))
    words = [one["protection"] for one in said["checkpoints"]]
    assert words == ["structure only", "verified"]
    assert said["newest_whole"] == str(mixed / "step_1")
    old: ReportJson = said["checkpoints"][1]
    del old["protection"], old["coverage"]
    assert stored.report_of(old).protection is Protection.VERIFIED


def test_shards_are_held_against_the_share(mixed: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in (1, 2)]
    for number, file in enumerate(files, 1):
        words = ("--shard", f"{number}/2", "--results", file, "--require-coverage", "95%")
        assert Finished("fsck", mixed, *words).status == 0
    done = Finished("combine", *files)
    assert done.status == 1
    assert "95 % is required" in done.out
